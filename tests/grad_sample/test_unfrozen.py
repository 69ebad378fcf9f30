"""Base weights that somebody has unfrozen: embeddings (with a padding index), norms, position biases, projections.

The functorch engine gives every record a row of every parameter, so it depends on the batching rules of operators for
*weights*; each is compared with one ordinary backward pass a record.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raptor_hf.grad_sample import functorch, per_sample_gradients
from raptor_hf.grad_sample.losses import model_loss
from raptor_hf.moe import attach_adapters
from tests import families, helpers
from tests.helpers import assert_close, record_by_record

FLOAT64 = torch.float64
BATCH = 4


def switch():
    from peft import LoraConfig

    model = attach_adapters(helpers.tiny_model(FLOAT64), LoraConfig(r=2, lora_alpha=3), "last")
    helpers.float64_routers(model)
    items = helpers.tiny_records(BATCH, seed=2, shortest=3)
    return model, items, helpers.collate


def of(family: str, head: str = "score", **changes):
    def make():
        model = families.adapt(families.build(family, FLOAT64, head=head, experts_implementation="eager", **changes))
        return model, families.records(BATCH, seed=3, causal=head == "lm"), families.collate

    return make


MODELS = {
    "switch": switch,
    "olmoe": of("olmoe"),
    "mixtral": of("mixtral"),
    "clamped in place": of("olmoe", clip_qkv=0.4),
    "tied language model": of("olmoe", "lm", tie_word_embeddings=True),
}


def unfreeze(model: nn.Module) -> dict[str, nn.Parameter]:
    """All that is neither an expert's nor a router's."""
    found = {}
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("expert", "router", "gate", "mlp")):
            parameter.data = parameter.data.to(FLOAT64)
            found[name] = parameter.requires_grad_(True)
    return found


def setting(make):
    """Model, what is trained, and records of which all but the last hold the padding token among their text."""
    torch.manual_seed(0)
    model, items, collate = make()
    padding = model.get_input_embeddings().padding_idx
    if padding is None:
        padding = model.get_input_embeddings().padding_idx = 0
    for item in items[:-1]:
        item["input_ids"][0] = padding
    model.eval()
    return model, unfreeze(model), collate(items), padding


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_unfrozen_weight_has_the_gradients_of_one_record_at_a_time(make):
    model, trained, batch, _ = setting(make)
    found = per_sample_gradients(model, batch, trained, mode="functorch")
    one = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(BATCH)]
    expected = record_by_record(BATCH, list(trained), lambda i: model_loss(model, one[i]), lambda n, _: trained[n])
    assert len(trained) > 15 and any("embed" in name or "shared" in name for name in trained)
    assert_close(found, expected, 1e-12)
    for name, value in expected.items():
        assert name.endswith("lora_A") or float(value.abs().max()) > 0, name


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_records_row_does_not_depend_on_its_place(make):
    model, trained, batch, padding = setting(make)
    order = torch.tensor([2, 3, 0, 1])
    rows = per_sample_gradients(model, batch, trained, mode="functorch")
    moved = per_sample_gradients(model, {k: v[order] for k, v in batch.items()}, trained, mode="functorch")
    assert_close(moved, {name: value[order] for name, value in rows.items()}, 1e-12)
    table = next(name for name, p in trained.items() if p is model.get_input_embeddings().weight)
    if not getattr(model.config, "tie_word_embeddings", False):
        assert not rows[table][:, padding].any()
    assert rows[table].abs().sum(dim=(1, 2)).min() > 0


@pytest.mark.parametrize("padding", [None, 0, 2, -1])
def test_an_embedding_under_vmap_follows_its_padding_index(padding):
    ids = torch.tensor([[0, 2, 4], [4, 4, 1], [2, 0, 0]])
    weight = torch.randn(5, 3, dtype=FLOAT64)
    rows = weight.expand(3, 5, 3).clone().requires_grad_()
    scale = torch.randn(3, 3, dtype=FLOAT64)
    with functorch._BatchedOperators():
        found = torch.func.vmap(lambda w, i: nn.functional.embedding(i, w, padding).mul(scale).sum())(rows, ids)
    (grads,) = torch.autograd.grad(found.sum(), rows)
    for i in range(3):
        one = weight.clone().requires_grad_()
        value = nn.functional.embedding(ids[i], one, padding).mul(scale).sum()
        assert torch.equal(value, found[i])
        assert torch.allclose(grads[i], torch.autograd.grad(value, one)[0], atol=1e-14)


def test_inference_mode_is_refused_and_no_grad_is_not():
    model, trained, batch, _ = setting(switch)
    with torch.no_grad():
        assert any(g.any() for g in per_sample_gradients(model, batch, trained, mode="functorch").values())
    with torch.inference_mode(), pytest.raises(RuntimeError, match="every gradient would be zero"):
        per_sample_gradients(model, batch, trained, mode="functorch")
