"""Expert adapters differentiated without owners: every expert a record activates, in one or all sparse layers.

The oracle is the stock model with W_e + s B_e A_e written out, one record at a time, under ordinary autograd.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from peft import LoraConfig

from raptor_hf.errors import UnsupportedModelError
from raptor_hf.grad_sample import ENGINES, engine_gradients, model_loss, per_sample_gradients
from raptor_hf.grad_sample.expert_outer import ExpertOuterProducts
from raptor_hf.moe import attach_adapters
from raptor_hf.moe.block import sparse_blocks
from raptor_hf.moe.pairs import RecordGroups
from raptor_hf.privacy.mechanism import ClippedSum
from tests import families, helpers

RANK, ALPHA = 2, 3.0
MODES = sorted(ENGINES)
FAST = [mode for mode in MODES if mode != "reference"]
FLOAT64 = torch.float64
PROJECTIONS = {"first": "wi", "second": "wo"}


@pytest.fixture
def float64(float64, exact_norms):
    """Switch's norms too."""


class StockSwitch(families.StockLora):
    """The same oracle for Switch, whose experts are modules of their own."""

    def weights(self) -> dict[str, torch.Tensor]:
        base, found = dict(self.stock.named_parameters()), {}
        for name, a in self.values.items():
            if not name.endswith("lora_A"):
                continue
            update = self.scaling * (self.values[name.removesuffix("A") + "B"] @ a)
            block, experts, projection = name.removesuffix(".lora_A").partition(".expert_adapters.")
            if not experts:
                found[block + ".weight"] = base[block + ".weight"].detach() + update
                continue
            for e in range(len(a)):
                target = f"{block}.experts.expert_{e}.{PROJECTIONS[projection]}.weight"
                found[target] = base[target].detach() + update[e]
        found.update({name: value for name, value in self.values.items() if "lora_" not in name})
        return found


def adapted(family: str, dtype=FLOAT64, **changes):
    """A model with LoRA on attention and on the experts of *all* sparse layers, and its oracle."""

    def stock():
        return helpers.tiny_model(dtype, **changes) if family == "switch" else families.build(family, dtype, **changes)

    model = attach_adapters(stock(), LoraConfig(r=RANK, lora_alpha=ALPHA), "last")
    for block in sparse_blocks(model).values():
        if block.expert_adapters is None:
            block.add_expert_adapters(RANK, ALPHA)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trainable.items():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    families.shake(model)
    oracle = (StockSwitch if family == "switch" else families.StockLora)(stock(), trainable, ALPHA / RANK)
    return model, trainable, oracle


def items_of(family: str, count: int = 6):
    if family == "switch":
        return helpers.tiny_records(count, seed=3), helpers.collate
    return families.records(count, seed=3), families.collate


def of_layer(names, path) -> set[str]:
    return {name for name in names if name.startswith(path + ".expert_adapters.")}


def scope(model, trainable, which: str):
    """The parameters of a baseline: shared ones with the experts of one layer or of all, or fewer."""
    experts = {name for name in trainable if ".expert_adapters." in name}
    paths = list(sparse_blocks(model))
    chosen = {
        "matched": set(trainable) - experts | of_layer(experts, paths[-1]),
        "monolithic": set(trainable),
        "lowest layer": of_layer(experts, paths[0]),
        "one tensor": {f"{paths[0]}.expert_adapters.second.lora_A"},
    }[which]
    return {name: p for name, p in trainable.items() if name in chosen}


def assert_close(found, expected, tolerance=1e-12):
    assert set(found) == set(expected)
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        scale = max(1.0, float(expected[name].abs().max()))
        assert float((value - expected[name]).abs().max()) <= tolerance * scale, name
    assert max(float(value.abs().max()) for value in found.values()) > 1e-3


CASES = [
    *(("switch", which, {}) for which in ("matched", "monolithic", "lowest layer", "one tensor")),
    ("switch", "monolithic", {"expert_capacity": 2}),
    *(("olmoe", which, {}) for which in ("matched", "monolithic", "lowest layer")),
    *((family, "monolithic", {}) for family in ("deepseek_v3", "granitemoe", "qwen2_moe")),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "which", "changes"), CASES)
def test_every_activated_expert_gets_its_gradient(mode, family, which, changes, float64):
    model, trainable, oracle = adapted(family, **changes)
    items, collate = items_of(family)
    parameters = scope(model, trainable, which)
    found = per_sample_gradients(model, collate(items), parameters, mode=mode)
    assert_close(found, oracle.gradients(items, list(parameters)))


@pytest.mark.parametrize("mode", FAST)
@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_the_clipped_sum_has_one_norm_over_all_tensors(mode, family, float64):
    model, trainable, oracle = adapted(family)
    items, collate = items_of(family)
    expected = oracle.gradients(items, list(trainable))
    norms = sum(value.flatten(1).square().sum(1) for value in expected.values()).sqrt()
    bound = 1.01 * float(norms.median())
    assert float(norms.min()) < bound < float(norms.max())
    total = ClippedSum({name: p.shape for name, p in trainable.items()}, bound)
    for micro in (items[:1], items[1:4], items[4:]):
        total.add(engine_gradients(model, collate(micro), trainable, mode=mode))
    for name, value in expected.items():
        # the library shrinks a record that it clips to C (1 - 1e-6)
        factors = torch.where(norms <= bound, torch.ones_like(norms), bound * (1 - 1e-6) / norms)
        by_hand = torch.einsum("i,i...->...", factors, value)
        assert float((total.sums[name] - by_hand).abs().max()) <= 1e-12 * max(1.0, float(by_hand.abs().max())), name


@pytest.mark.parametrize("mode", MODES)
def test_an_expert_that_a_record_did_not_reach_has_exactly_zero(mode, float64):
    model, trainable, _ = adapted("switch")
    records = helpers.tiny_records(8, seed=3)
    found = per_sample_gradients(model, helpers.collate(records, width=20), trainable, mode=mode)
    path = list(sparse_blocks(model))[-1]
    silent = 0
    for i, record in enumerate(records):
        # adapters of lower layers move tokens: the stock router is asked about what this model's layer sees
        seen = []
        handle = model.get_submodule(path).register_forward_pre_hook(lambda _m, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            model(**helpers.collate([record]))
        handle.remove()
        probabilities = seen[0][0] @ model.get_submodule(path).router.classifier.weight.mT
        used = set(probabilities.argmax(-1).tolist())
        for expert in range(helpers.EXPERTS):
            size = max(float(found[n][i, expert].abs().max()) for n in of_layer(found, path))
            assert (size > 0) if expert in used else (size == 0.0)
            silent += expert not in used
    assert silent >= 3


@pytest.mark.parametrize("mode", FAST)
def test_a_batch_whose_tokens_are_all_dropped(mode, float64):
    model, trainable, _ = adapted("switch", expert_capacity=0)
    batch = helpers.collate(helpers.tiny_records(3, seed=3))
    gradients = engine_gradients(model, batch, trainable, mode=mode)
    found = per_sample_gradients(model, batch, trainable, mode=mode)
    total = ClippedSum({name: p.shape for name, p in trainable.items()}, 1.0)
    total.add(gradients)
    for name, value in found.items():
        if ".expert_adapters." in name:
            assert value.shape == (3, *trainable[name].shape)
            assert not value.any() and not total.sums[name].any()
        else:
            assert value.any()


@pytest.mark.parametrize("mode", FAST)
def test_a_nan_record_poisons_no_other_and_counts_for_nothing(mode, float64):
    model, trainable, _ = adapted("switch")
    records = helpers.tiny_records(5, seed=3)
    batch = {**helpers.collate(records), "poison": torch.tensor([0.0, 0.0, float("nan"), 0.0, 0.0], dtype=FLOAT64)}

    def loss_fn(forward, record):
        record = dict(record)
        return model_loss(forward, {k: v for k, v in record.items() if k != "poison"}) * (1 + record["poison"][0])

    def summed(batch, loss_fn=None):
        total = ClippedSum({name: p.shape for name, p in trainable.items()}, 0.1)
        total.add(engine_gradients(model, batch, trainable, mode=mode, loss_fn=loss_fn))
        return total.sums

    poisoned = summed(batch, loss_fn)
    clean = summed(helpers.collate([*records[:2], *records[3:]], width=batch["input_ids"].shape[1]))
    for name, value in poisoned.items():
        assert float((value - clean[name]).abs().max()) < 1e-14


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_engines_agree_in_single_precision_with_what_is_summed(family):
    """What is clipped (norms, weighted sums) is what is returned as gradients."""
    model, trainable, _ = adapted(family, torch.float32)
    items, collate = items_of(family)
    reference = per_sample_gradients(model, collate(items), trainable, mode="reference")
    factors = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25, 1.0], dtype=FLOAT64)
    found = engine_gradients(model, collate(items), trainable, mode="hooks")
    assert {name for name in found if ".expert_adapters." in name} == {
        name for name, value in found.items() if isinstance(value, ExpertOuterProducts)
    }
    for name, value in found.items():
        exact = reference[name].double()
        scale = max(1e-3, float(exact.abs().max()))
        if isinstance(value, torch.Tensor):
            assert float((value.double() - exact).abs().max()) <= 2e-5 * scale, name
            continue
        assert float((value.dense().double() - exact).abs().max()) <= 2e-5 * scale, name
        assert torch.allclose(value.norms(), exact.flatten(1).norm(dim=1), rtol=1e-3, atol=1e-6)
        assert bool((value.norms() >= value.dense().double().flatten(1).norm(dim=1)).all())
        by_hand = torch.einsum("i,i...->...", factors, exact)
        assert float((value.weighted_sum(factors) - by_hand).abs().max()) <= 1e-4 * scale, name


@pytest.mark.parametrize("mode", FAST)
def test_half_precision_base(mode):
    model, trainable, _ = adapted("switch", torch.bfloat16)
    for parameter in trainable.values():
        parameter.data = parameter.data.float()
    batch = helpers.collate(helpers.tiny_records(6, seed=3))
    one, other = (per_sample_gradients(model, batch, trainable, mode=m) for m in (mode, "reference"))
    for i in range(6):
        a, b = (torch.cat([v[i].flatten() for v in g.values()]).double() for g in (one, other))
        assert a.isfinite().all() and float((a - b).norm()) <= 0.3 * float(b.norm()) + 1e-6
    assert all(value.dtype == torch.float32 for value in one.values())


@pytest.mark.parametrize("mode", FAST)
def test_the_engines_leave_nothing_behind(mode, float64):
    model, trainable, _ = adapted("switch")
    per_sample_gradients(model, helpers.collate(helpers.tiny_records(3)), trainable, mode=mode)
    assert all(not block._kernel and block._owner is None for block in sparse_blocks(model).values())
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in trainable.values())


def test_rows_that_are_not_records_are_refused_by_hooks(float64):
    """A block that is called with twice as many rows as there are records could not tell whose they are."""
    model, trainable, _ = adapted("switch")
    layer = model.encoder.block[1].layer[1]
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(torch.cat([x, x]))[: len(x)]
    path = next(iter(sparse_blocks(model)))
    experts = {name: trainable[name] for name in of_layer(trainable, path)}
    with pytest.raises(UnsupportedModelError, match="rows") as refused:
        per_sample_gradients(model, helpers.collate(helpers.tiny_records(3)), experts, mode="hooks")
    assert " 3 " not in str(refused.value) and " 6 " not in str(refused.value), "a realised batch size is private"


@pytest.mark.parametrize("mode", MODES)
def test_a_block_that_is_called_twice(mode, float64):
    """Both calls' pairs count, in one norm."""
    items = helpers.tiny_records(4, seed=3)
    model, trainable, _ = adapted("switch", num_layers=4)
    layers = model.encoder.block
    layers[3].layer[1].mlp = layers[1].layer[1].mlp
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = per_sample_gradients(model, helpers.collate(items), trainable, mode=mode)
    names = of_layer(trainable, next(iter(sparse_blocks(model))))
    assert len(names) == 4
    for i, item in enumerate(items):
        loss = model(**helpers.collate([item])).loss
        expected = torch.autograd.grad(loss, [trainable[n] for n in sorted(names)])
        for name, value in zip(sorted(names), expected, strict=True):
            assert float((found[name][i] - value).abs().max()) <= 1e-12


def test_record_groups_by_a_loop():
    of = torch.tensor([5, 2, 2, 9, 5, 2])
    value = torch.arange(12.0).view(6, 2) + 1
    groups = RecordGroups(of)
    assert groups.records.tolist() == [2, 5, 9]
    padded = groups.pad(value)
    assert padded.shape == (3, 3, 2)
    for row, record in enumerate([2, 5, 9]):
        rows = [value[i].tolist() for i in range(6) if of[i] == record]
        assert padded[row].tolist() == rows + [[0.0, 0.0]] * (3 - len(rows))
    assert all(a < b for a, b in pairwise(groups.records.tolist()))
