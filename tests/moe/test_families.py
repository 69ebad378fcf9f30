"""Every supported family of stacked experts, on tiny random models, against the stock model with W + s B A."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from raptor_hf.checks import check_model
from raptor_hf.config import RaptorConfig
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.grad_sample import ENGINES, model_loss, per_sample_gradients, residual_weighted
from raptor_hf.moe import attach_adapters, find_moe_layout, load_adapter, owner_map, stream_parameters
from raptor_hf.moe.adapter_io import check_loaded
from raptor_hf.moe.families import FUSED, REFUSED
from raptor_hf.moe.fused import is_fused_experts
from raptor_hf.trainer import RaptorTrainer
from tests.families import (
    EXPERTS,
    FAMILIES,
    TOP_K,
    StockLora,
    adapt,
    brute_owners,
    build,
    collate,
    every_parameter,
    records,
    shake,
)
from tests.helpers import assert_close

RANK, ALPHA = 2, 3
ITEMS = records(6, seed=3)
FLOAT64 = torch.float64


def adapted(family, layer="last", dtype=torch.float32, **changes):
    return adapt(build(family, dtype, **changes), layer=layer, rank=RANK, alpha=ALPHA)


# ------------------------------------------------------------------ structure


@pytest.mark.parametrize("family", FAMILIES)
def test_roles(family):
    """Every parameter once: by what it is called in the shipped code."""
    model = build(family)
    layout = find_moe_layout(model)
    assert len(layout.sparse_layers) in (2, 3)
    for layer in layout.sparse_layers:
        assert (layer.num_experts, layer.top_k) == (EXPERTS, TOP_K)
        assert f".{layer.index}." in layer.name
    for adapters in (False, True):
        if adapters:
            attach_adapters(model, LoraConfig(r=RANK), "last")
        for name, _ in model.named_parameters():
            parts = name.split(".")
            if parts[0] == "score":
                expected = "head"
            elif {"experts", "expert_adapters"} & set(parts):
                expected = "expert"
            elif {"gate", "router"} & set(parts):
                expected = "router"
            else:
                expected = "shared"
            assert layout.role(name) == expected, name
    routers = [n for n, _ in model.named_parameters() if layout.role(n) == "router"]
    assert len(routers) >= len(layout.sparse_layers)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trainable == {n for n in trainable if "lora_" in n or n == "score.weight"}
    assert all(layout.layer(layout.sparse_layers[-1].index).name in n for n in trainable if "expert_adapters" in n)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "hunyuan_v1_moe", "ernie4_5_moe"])
def test_shared_experts_and_their_gate_are_shared(family):
    layout = find_moe_layout(build(family))
    name = layout.sparse_layers[-1].name
    shared = {"qwen2_moe": "shared_expert", "hunyuan_v1_moe": "shared_mlp"}.get(family, "shared_experts")
    assert layout.role(f"{name}.{shared}.gate_proj.weight") == "shared"
    assert layout.role(f"{name}.shared_expert_gate.weight") == "shared"
    assert len(layout.sparse_layers[-1].shared_experts) == 1


def test_every_listed_family_is_tested():
    assert set(FUSED) == set(FAMILIES) and not set(FUSED) & set(REFUSED)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrapping_keeps_names_and_copies_no_expert(family):
    model = build(family)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    attach_adapters(model, LoraConfig(r=RANK), "last")
    after = {name.replace(".base_layer", ""): p.data_ptr() for name, p in model.named_parameters()}
    assert {name: after[name] for name in before} == before
    block = model.get_submodule(model.raptor_adapters.protected.name)
    first, second = block.weights()
    transposed = block.experts.is_transposed
    assert first[1].shape == block.experts.gate_up_proj[1].shape[:: -1 if transposed else 1]
    assert first[1].data_ptr() == block.experts.gate_up_proj[1].data_ptr()
    assert second[1].data_ptr() == block.experts.down_proj[1].data_ptr()


# ------------------------------------------------------------------ computation


@pytest.mark.parametrize("mode", [None, *sorted(ENGINES)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_both_streams(family, mode, float64):
    """Logits, and both streams' per-record gradients by every engine, padded, in float64."""
    model = adapted(family, dtype=FLOAT64)
    oracle = StockLora(build(family, FLOAT64), every_parameter(model), ALPHA / RANK)
    batch = collate(ITEMS, 11)
    if mode is None:
        with torch.no_grad():
            found = model(**batch).logits
            expected = torch.cat([oracle.logits(collate([item])) for item in ITEMS])
            other = build(family, FLOAT64)(**batch).logits
        assert float((found - expected).abs().max()) < 1e-12
        assert float((other - expected).abs().max()) > 1e-2
        return
    for stream, parameters in stream_parameters(model).items():
        owner = None
        if stream == "expert":
            name = model.raptor_adapters.protected.name
            owner = brute_owners(build(family, FLOAT64), ITEMS, name, "gate")
            owner[0] = (owner[0] + 1) % EXPERTS
        found = per_sample_gradients(
            model, batch, parameters, mode=mode, owner=None if owner is None else torch.tensor(owner)
        )
        expected = oracle.gradients(ITEMS, list(parameters), owner)
        assert_close(found, expected, 1e-12)
        assert max(float(value[1:].abs().max()) for value in found.values()) > 1e-2


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_a_lower_layer_and_residual_weights(mode, float64):
    model = adapted("olmoe", "first", FLOAT64)
    oracle = StockLora(build("olmoe", FLOAT64), every_parameter(model), ALPHA / RANK)
    for stream, parameters in stream_parameters(model).items():
        owner = [0, 1, 2, 3, 0, 1] if stream == "expert" else None
        found = per_sample_gradients(
            model, collate(ITEMS), parameters, mode=mode, loss_fn=residual_weighted(model_loss),
            owner=None if owner is None else torch.tensor(owner),
        )  # fmt: skip
        assert_close(found, oracle.gradients(ITEMS, list(parameters), owner, weighted=True), 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_record_0_does_not_move_with_its_neighbours(family, float64):
    """Loss and gradients, train mode: others, no others, more padding."""
    model = adapted(family, dtype=FLOAT64).train()
    others = [{**ITEMS[1], "labels": 0}] * 4

    def values(items, width=0):
        batch, found = collate(items, width), []
        for stream, parameters in stream_parameters(model).items():
            owner = torch.zeros(len(items), dtype=torch.long) if stream == "expert" else None
            for mode in ("functorch", "hooks"):
                grads = per_sample_gradients(model, batch, parameters, mode=mode, owner=owner)
                found += [value[0] for value in grads.values()]
        return [model(**{k: v for k, v in batch.items() if k != "labels"}).logits[0], *found]

    base = values(ITEMS)
    for changed in (values([ITEMS[0], *others]), values(ITEMS[:1]), values(ITEMS[:2], 17)):
        assert max(float((a - b).detach().abs().max()) for a, b in zip(base, changed, strict=True)) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_owners_equal_brute_force(family):
    """Both rules, every sparse layer, any batch size, with adapters trained or without."""
    stock, model = build(family), adapted(family)
    items = records(14, seed=7)
    spread_out = set()
    for layer in find_moe_layout(stock).sparse_layers:
        for rule in ("gate", "vote"):
            expected = brute_owners(stock, items, layer.name, rule)
            for candidate, size in ((stock, 14), (model, 5)):
                found = owner_map(candidate, items, layer.index, rule=rule, data_collator=collate, batch_size=size)
                assert found.tolist() == expected
            spread_out |= set(expected)
    assert len(spread_out) >= 3


def test_a_choice_on_the_edge_is_computed_alone(monkeypatch):
    """Every token's first two experts differ by less than rounding: all records are computed again, one at a time."""
    model = build("deepseek_v3", n_group=1, topk_group=1)
    layer = find_moe_layout(model).sparse_layers[0]
    weight = model.get_submodule(layer.name).gate.weight
    weight.data[1:] = weight.data[:1]
    model.get_submodule(layer.name).gate.e_score_correction_bias.zero_()
    sizes = []
    model.model.embed_tokens.register_forward_hook(lambda _m, args, _o: sizes.append(len(args[0])))
    owner_map(model, ITEMS, layer.index, data_collator=collate, batch_size=6)
    assert sizes == [6, 1, 1, 1, 1, 1, 1]


# ------------------------------------------------------------------ training


@pytest.mark.parametrize("family", FAMILIES)
def test_one_cycle_moves_exactly_the_trainables(family, tmp_path):
    model = build(family)
    args = RaptorConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, shared_noise_multiplier=1.0,
        expert_noise_multiplier=1.0, lora_rank=RANK, learning_rate=1e-2, report_to="none", save_strategy="no",
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = RaptorTrainer(model, args, data_collator=collate, train_dataset=ITEMS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    streams = every_parameter(model)
    for name, value in model.state_dict().items():
        if name not in streams:
            assert torch.equal(value, before[name]), name
        elif "lora_A" in name and "expert_adapters" not in name:
            assert not torch.equal(value, before[name]), name
        elif "expert_adapters" in name:
            moved = [not torch.equal(value[e], before[name][e]) for e in range(EXPERTS)]
            assert all(moved), name
    assert not torch.equal(model.score.weight, before["score.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_preflight_passes(family):
    report = check_model(build(family), records=ITEMS[:3], collate=collate, raise_on_error=False)
    assert not report.errors


# ------------------------------------------------------------------ adapters


def logits(model):
    batch = collate(ITEMS)
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


@pytest.mark.parametrize("layer", ["first", "last"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_peft_reads_what_was_saved(family, layer, tmp_path):
    model = adapted(family, layer)
    model.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(build(family), tmp_path)
    check_loaded(stock, tmp_path)
    expected = logits(model)
    assert float((logits(build(family)) - expected).abs().max()) > 1e-2
    assert float((logits(stock) - expected).abs().max()) <= 1e-5
    assert float((logits(stock.merge_and_unload()) - expected).abs().max()) <= 1e-5
    assert torch.equal(logits(load_adapter(build(family), tmp_path)), expected)
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_parameters"]
    name = find_moe_layout(build(family)).sparse_layers[0 if layer == "first" else -1].name
    assert targets == [f"{name}.experts.down_proj", f"{name}.experts.gate_up_proj"]


def test_the_layout_of_saved_experts(tmp_path):
    """A_e = rows e r to (e + 1) r, B_e = columns e, e + E, ..."""
    model = adapted("olmoe")
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    name = model.raptor_adapters.protected.name
    for which, path in (("first", "experts.base_layer"), ("second", "experts")):
        ours = model.get_submodule(name).expert_adapters[which]
        a, b = (saved[f"base_model.model.{name}.{path}.lora_{kind}.weight"] for kind in "AB")
        for e in range(EXPERTS):
            assert torch.equal(a[e * RANK : (e + 1) * RANK], ours.lora_A[e])
            assert torch.equal(b[:, e::EXPERTS], ours.lora_B[e])


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen2_moe", "hunyuan_v1_moe", "glm4_moe", "granitemoeshared"])
def test_shared_experts_can_carry_adapters(family, tmp_path):
    """PEFT would put targets of these names on the routed experts of all layers."""
    names = {"granitemoeshared": ["shared_mlp.input_linear", "shared_mlp.output_linear"]}.get(family)
    block = {"qwen2_moe": "shared_expert", "hunyuan_v1_moe": "shared_mlp"}.get(family, "shared_experts")
    names = names or [f"{block}.{kind}_proj" for kind in ("gate", "up", "down")]
    attention = "kv_b_proj" if family == "deepseek_v2" else "q_proj"
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[attention, *names])
    model = attach_adapters(build(family), config, "last")
    shake(model)
    assert any(names[0] in path for path in model.raptor_adapters.shared_targets)
    model.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(build(family), tmp_path)
    check_loaded(stock, tmp_path)
    assert float((logits(stock) - logits(model)).abs().max()) <= 1e-5
    assert float((logits(stock.merge_and_unload()) - logits(model)).abs().max()) <= 1e-5
    assert torch.equal(logits(load_adapter(build(family), tmp_path)), logits(model))


def test_adapters_on_other_tensors_than_the_files_are_refused(tmp_path):
    """A target that also matches the experts of another layer: PEFT loads it with a warning."""
    adapted("deepseek_v2").save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    path.write_text(json.dumps(config))
    stock = PeftModel.from_pretrained(build("deepseek_v2"), tmp_path)
    with pytest.raises(PrivacyConfigError, match=r"layers\.1.* carries an adapter"):
        check_loaded(stock, tmp_path)


def test_adapters_with_other_values_than_the_files_are_refused(tmp_path):
    """As PEFT loads the experts of some families: the right names, and not what was saved."""
    adapted("olmoe").save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(build("olmoe"), tmp_path)
    check_loaded(stock, tmp_path)
    name = next(name for name, _ in stock.named_parameters() if "experts.base_layer.lora_B" in name)
    dict(stock.named_parameters())[name].data[0, 0] += 0.5
    with pytest.raises(PrivacyConfigError, match=r"experts\.base_layer\.lora_B\.weight` has other values"):
        check_loaded(stock, tmp_path)


def test_a_copy_computes_and_saves_by_itself(tmp_path):
    model = adapted("olmoe")
    expected = logits(model)
    other = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(logits(other), expected)
    other.save_pretrained(tmp_path)
    assert torch.equal(logits(load_adapter(build("olmoe"), tmp_path)), expected)


def test_base_in_half_precision():
    model = adapted("olmoe", dtype=torch.bfloat16)
    assert logits(model).isfinite().all() and model.score.weight.dtype == torch.float32
    for mode in ("functorch", "hooks"):
        found = per_sample_gradients(model, collate(ITEMS), stream_parameters(model)["shared"], mode=mode)
        assert all(value.isfinite().all() for value in found.values())


# ------------------------------------------------------------------ counts


def test_counts_of_olmoe_1b_7b_at_rank_128():
    from transformers import AutoModelForSequenceClassification, OlmoeConfig

    config = OlmoeConfig(
        vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, num_experts=64, num_experts_per_tok=8, num_labels=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
        base = sum(p.numel() for name, p in model.named_parameters() if name != "score.weight")
        attach_adapters(model, LoraConfig(r=128, lora_alpha=128), "last")
    assert base == 6_919_161_856 - 50304 * 2048, "the checkpoint's, but for the LM head"
    streams = {name: sum(p.numel() for p in ps.values()) for name, ps in stream_parameters(model).items()}
    assert streams == {"shared": 33_554_432 + 2 * 2048, "expert": 58_720_256}
    block = model.get_submodule(model.raptor_adapters.protected.name)
    assert is_fused_experts(block.experts) and model.raptor_adapters.layer == 15
    # gate and up apart would have an A each: 64 experts of 128 (3 * 2048 + 3 * 1024)
    assert 64 * 128 * 3 * (2048 + 1024) == 75_497_472
