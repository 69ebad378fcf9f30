"""Clipped sums of every engine, model, stream and dtype against a loop: one record at a time, clipped by hand."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from raptor_hf.grad_sample import ENGINES, engine_gradients
from raptor_hf.moe import attach_adapters, stream_parameters
from raptor_hf.privacy.mechanism import ClippedSum
from tests import families, helpers

MODES = sorted(ENGINES)
MODELS = ["switch", "olmoe", "deepseek_v2", "deepseek_v3"]  # the last two with shared experts
# Of the largest of 1 and the largest value; in bfloat16 of the norm of the whole sum.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05}
EXPERTS = 4


def build(name: str, dtype: torch.dtype):
    """(model with adapters far from zero, records, collator)."""
    if name == "switch":
        model = attach_adapters(helpers.tiny_model(dtype), LoraConfig(r=2, lora_alpha=3), "last")
        items, collate = helpers.tiny_records(6, seed=3), helpers.collate
    else:
        model = attach_adapters(families.build(name, dtype), LoraConfig(r=2, lora_alpha=3), "last")
        items, collate = families.records(6, seed=3), families.collate
    if dtype == torch.float64:
        for parameter in families.every_parameter(model).values():
            parameter.data = parameter.data.double()
    families.shake(model)
    return model, items, collate


def record_gradients(model, items, collate, parameters, *, by_owner: bool):
    """(owners or None, a record's gradients) by ordinary autograd of the model's own loss, one record at a time.

    A record's owner is the expert that it moves most, but for the last one's, which it moves least (or not at all).
    """
    owners: list[int] = []
    rows = []
    for item in items:
        found = torch.autograd.grad(model(**collate([item])).loss, list(parameters.values()), allow_unused=True)
        row = {
            name: (torch.zeros_like(p) if g is None else g).double()
            for (name, p), g in zip(parameters.items(), found, strict=True)
        }
        if by_owner:
            sizes = [length({n: g[e] for n, g in row.items()}) for e in range(EXPERTS)]
            owners.append(sizes.index(min(sizes) if item is items[-1] else max(sizes)))
            row = {n: g[owners[-1]] for n, g in row.items()}
        rows.append(row)
    return owners if by_owner else None, rows


def length(row: dict[str, torch.Tensor]) -> float:
    return sum(float(g.square().sum()) for g in row.values()) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_clipped_sums_are_those_by_hand(mode, name, stream, dtype, request):
    if dtype == torch.float64:
        for fixture in ("float64", "exact_norms"):
            request.getfixturevalue(fixture)
    model, items, collate = build(name, dtype)
    parameters = stream_parameters(model)[stream]
    owners, rows = record_gradients(model, items, collate, parameters, by_owner=stream == "expert")
    lengths = sorted(length(row) for row in rows)
    bound = (lengths[2] + lengths[3]) / 2
    assert lengths[0] < bound < lengths[-1]
    expected = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in parameters.items()}
    for i, row in enumerate(rows):
        # a record that is clipped is shrunk to C (1 - 1e-6)
        factor = 1.0 if length(row) <= bound else bound * (1 - 1e-6) / length(row)
        for n, g in row.items():
            (expected[n] if owners is None else expected[n][owners[i]]).add_(factor * g)

    def summed(picked: list[int]) -> dict[str, torch.Tensor]:
        shapes = {n: p.shape for n, p in parameters.items()}
        total = ClippedSum(shapes, bound, num_owners=None if owners is None else EXPERTS)
        owner = None if owners is None else torch.tensor([owners[i] for i in picked])
        batch = collate([items[i] for i in picked])
        total.add(engine_gradients(model, batch, parameters, mode=mode, owner=owner), owner)
        return total.sums

    parts = [summed([0, 1, 2, 3]), summed([4, 5])]
    found = {n: sum(part[n] for part in parts) for n in expected}
    if dtype == torch.bfloat16:
        gap = sum(float((found[n] - value).square().sum()) for n, value in expected.items()) ** 0.5
        assert gap <= TOLERANCE[dtype] * length(expected)
    else:
        helpers.assert_close(found, expected, TOLERANCE[dtype])
    alone = [length(summed([i])) for i in range(len(items))]
    assert max(alone) <= bound and max(alone) > 0.99 * bound
