"""Models that run fused attention (`sdpa`): under vmap it stays fused, and gradients are those of each record alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations import sdpa_attention

from raptor_hf.grad_sample import per_sample_gradients
from raptor_hf.grad_sample.attention import FOLDED, folded_attention, vmappable_attention
from raptor_hf.moe import attach_adapters, stream_parameters
from raptor_hf.moe.families import HOOKS_ONLY
from tests import families

FLOAT64 = torch.float64
ITEMS = families.records(5, seed=4)


def adapted(family: str, dtype=FLOAT64, implementation="sdpa", head="score", **changes):
    auto = AutoModelForSequenceClassification if head == "score" else AutoModelForCausalLM
    model = auto.from_config(families.config_of(family, **changes), attn_implementation=implementation)
    families.spread(model).to(dtype).eval()
    assert model.config._attn_implementation == implementation
    return families.adapt(model)


def alone(model, items, names):
    """One record at a time without padding, by ordinary autograd of the model as shipped."""
    parameters = dict(model.named_parameters())
    rows = {name: [] for name in names}
    for item in items:
        loss = model(**families.collate([item])).loss
        grads = torch.autograd.grad(loss, [parameters[name] for name in names])
        for name, value in zip(names, grads, strict=True):
            rows[name].append(value)
    return {name: torch.stack(value) for name, value in rows.items()}


class Count:
    """How often the fused kernel is called."""

    def __init__(self, monkeypatch):
        self.calls, kernel = 0, torch.nn.functional.scaled_dot_product_attention

        def counted(*args, **kwargs):
            self.calls += 1
            return kernel(*args, **kwargs)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)


@pytest.mark.parametrize("heads", [2, 1], ids=["heads", "grouped"])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v3", "mixtral"])
def test_fused_attention_gives_each_records_gradient(family, heads, float64, monkeypatch):
    changes = {} if family == "deepseek_v3" else {"num_key_value_heads": heads}
    model = adapted(family, **changes)
    parameters = stream_parameters(model)["shared"]
    expected = alone(model, ITEMS, list(parameters))
    kernel = Count(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = per_sample_gradients(model, families.collate(ITEMS, width=11), parameters, mode="functorch")
    assert kernel.calls == model.config.num_hidden_layers  # once for all records
    for name, value in found.items():
        scale = max(1.0, float(expected[name].abs().max()))
        assert float((value - expected[name]).abs().max()) <= 1e-12 * scale, name
    assert max(float(value.abs().max()) for value in found.values()) > 1e-3
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_a_record_without_tokens_harms_no_other(mode, float64):
    """Its attention has nothing to attend to."""
    model = adapted("olmoe")
    parameters = stream_parameters(model)["shared"]
    batch = families.collate(ITEMS)
    batch["attention_mask"][2] = 0
    found = per_sample_gradients(model, batch, parameters, mode=mode)
    others = [0, 1, 3, 4]
    expected = alone(model, [ITEMS[i] for i in others], list(parameters))
    for name, value in found.items():
        assert value[2].isfinite().all()
        assert float((value[others] - expected[name]).abs().max()) <= 1e-12 * max(
            1.0, float(expected[name].abs().max())
        )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_dropout_is_drawn_for_every_record(implementation):
    model = adapted("olmoe", torch.float32, implementation, attention_dropout=0.4).train()
    parameters = stream_parameters(model)["shared"]
    item = max(ITEMS, key=lambda record: len(record["input_ids"]))
    found = per_sample_gradients(model, families.collate([item] * 5), parameters, mode="functorch")
    rows = torch.cat([value.flatten(1) for value in found.values()], 1)
    assert rows.isfinite().all()
    assert len({tuple(row.tolist()) for row in rows}) == 5


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "dots1", "qwen2_moe"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_no_operation_falls_back_to_a_loop_over_records(family, implementation):
    """torch warns of it, once a process: the first use of each kind of model must be in this process."""
    model = adapted(family, torch.float32, implementation)
    streams = stream_parameters(model)
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        per_sample_gradients(model, families.collate(ITEMS), streams["shared"], mode="functorch")
        owner = torch.tensor([0, 1, 2, 3, 0])
        per_sample_gradients(model, families.collate(ITEMS), streams["expert"], mode="functorch", owner=owner)
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*families.FAMILIES, *families.TOLD} - set(HOOKS_ONLY)))
def test_every_family_as_users_load_it(family):
    """With `sdpa`, the default, for all that have it: no loop over records, and the gradients of each record alone."""
    model = families.told(family) if family in families.TOLD else families.build(family)
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        pytest.skip("its attention has eager code only")
    attach_adapters(model, LoraConfig(r=2, lora_alpha=3), "last")
    families.shake(model)
    parameters = stream_parameters(model)["shared"]
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        found = per_sample_gradients(model, families.collate(ITEMS, 11), parameters, mode="functorch")
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)
    expected = per_sample_gradients(model, families.collate(ITEMS, 11), parameters, mode="reference")
    for name, value in found.items():
        scale = max(1e-2, float(expected[name].abs().max()))
        assert float((value - expected[name]).abs().max()) <= 1e-4 * scale, name


def test_under_autocast():
    """Mixed precision: the kernel and its backward pass run in the type of the pass around them."""
    model = adapted("olmoe", torch.float32)
    parameters = stream_parameters(model)["shared"]
    exact = per_sample_gradients(model, families.collate(ITEMS), parameters, mode="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = per_sample_gradients(model, families.collate(ITEMS), parameters, mode="functorch")
    for i in range(len(ITEMS)):
        a, b = (torch.cat([v[i].flatten() for v in g.values()]).double() for g in (found, exact))
        assert 0 < float((a - b).norm()) <= 0.2 * float(b.norm())


def test_models_are_as_before_even_after_an_error():
    model = adapted("olmoe", torch.float32)
    with pytest.raises(KeyError), vmappable_attention(model):
        assert model.config._attn_implementation == FOLDED
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("mask", ["boolean", "additive", "per head"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_function_is_that_of_transformers(mask, bias):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 5, 4, generator=generator, dtype=FLOAT64) for _ in range(3))
    allowed = torch.ones(3, 2 if mask == "per head" else 1, 5, 5, dtype=torch.bool).tril()
    allowed[1, :, :, 3:] = False
    allowed[..., 0] = True
    given = allowed if mask == "boolean" else torch.zeros(allowed.shape, dtype=FLOAT64).masked_fill(~allowed, -1e9)
    extra = {"position_bias": torch.randn(1, 2, 5, 5, generator=generator, dtype=FLOAT64)} if bias else {}
    module = torch.nn.Module()
    ours, _ = folded_attention(module, q, k, v, given, scaling=0.7, **extra)
    theirs, _ = sdpa_attention.sdpa_attention_forward(module, q, k, v, given, scaling=0.7, **extra)
    assert float((ours - theirs).abs().max()) <= 1e-13


@pytest.mark.parametrize("causal", [True, False, None])
def test_without_a_mask(causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 4, generator=generator, dtype=FLOAT64) for _ in range(3))
    module = torch.nn.Module()
    module.is_causal = False
    ours, _ = folded_attention(module, q, k, v, None, is_causal=causal)
    theirs, _ = sdpa_attention.sdpa_attention_forward(module, q, k, v, None, is_causal=causal)
    assert float((ours - theirs).abs().max()) <= 1e-13
    other, _ = folded_attention(module, q, k, v, None, is_causal=not causal)
    assert float((ours - other).abs().max()) > 1e-3


def test_what_the_kernel_cannot_do_is_refused():
    q = torch.zeros(1, 1, 2, 2)
    with pytest.raises(RuntimeError, match="eager"):
        folded_attention(torch.nn.Module(), q, q, q, torch.ones(1, 1, 2, 2, dtype=torch.bool), softcap=30.0)
