"""A sum does not depend on the order of records, on the cut into micro-batches, or on padding."""

from __future__ import annotations

import itertools

import pytest
import torch
from peft import LoraConfig

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.grad_sample import ENGINES, engine_gradients, per_sample_gradients
from raptor_hf.grad_sample.batches import cut, free_memory, one_row_a_record, records_at_once
from raptor_hf.moe import attach_adapters, stream_parameters
from raptor_hf.moe.ownership import current_owner_map
from raptor_hf.privacy.mechanism import ClippedSum
from raptor_hf.streams import Stream, sum_gradients
from tests import families
from tests.helpers import EXPERTS, collate, tiny_model, tiny_records

MODES = sorted(ENGINES)
FAST = [mode for mode in MODES if mode != "reference"]
RECORDS = tiny_records(9, seed=8)
OWNERS = [0, 1, 2, 3, 0, 1, 2, 3, 0]
BOUND = {"shared": 5.0, "expert": 0.05}


def adapted(dtype=torch.float64, **changes):
    model = attach_adapters(tiny_model(dtype, **changes), LoraConfig(r=3, lora_alpha=5), 3)
    if dtype == torch.float64:
        for stream in stream_parameters(model).values():
            for parameter in stream.values():
                parameter.data = parameter.data.double()
    families.shake(model)
    return model


def empty_sum(parameters, stream, bound=None):
    shapes = {name: p.shape for name, p in parameters.items()}
    return ClippedSum(shapes, bound or BOUND[stream], num_owners=EXPERTS if stream == "expert" else None)


def clipped(model, stream, parts, mode):
    """Sum over micro-batches given as lists of record numbers."""
    parameters = stream_parameters(model)[stream]
    total = empty_sum(parameters, stream)
    for part in parts:
        owner = torch.tensor([OWNERS[i] for i in part]) if stream == "expert" else None
        batch = collate([RECORDS[i] for i in part])  # padded to its own longest record
        total.add(engine_gradients(model, batch, parameters, mode=mode, owner=owner), owner)
    return total.sums


def length(i: int) -> int:
    return len(RECORDS[i]["input_ids"])


CUTS = {
    "one by one": [[i] for i in range(9)],
    "backwards": [list(reversed(range(9)))],
    "by length": [sorted(range(9), key=length)[:4], sorted(range(9), key=length)[4:]],
    "long with short": [sorted(range(9), key=length)[::2], sorted(range(9), key=length)[1::2]],
}


@pytest.mark.parametrize("way", CUTS)
@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", FAST)
def test_sums_depend_on_neither_order_nor_cut_nor_padding(mode, stream, way, exact_norms):
    model = adapted(expert_capacity=3)
    whole = clipped(model, stream, [list(range(9))], mode)
    other = clipped(model, stream, CUTS[way], mode)
    size = max(float(value.abs().max()) for value in whole.values())
    assert size > 1e-3
    for name, value in whole.items():
        assert float((other[name] - value).abs().max()) <= 1e-12 * max(1.0, size), name


def test_the_bound_is_met_by_some_records_and_not_by_others(exact_norms):
    """The case at hand clips, and does not clip."""
    model = adapted(expert_capacity=3)
    for stream, parameters in stream_parameters(model).items():
        owner = torch.tensor(OWNERS) if stream == "expert" else None
        grads = per_sample_gradients(model, collate(RECORDS), parameters, mode="reference", owner=owner)
        norms = sum(value.flatten(1).square().sum(1) for value in grads.values()).sqrt()
        assert float(norms.min()) < BOUND[stream] < float(norms.max())


@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", FAST)
def test_a_record_never_exceeds_the_bound_in_half_precision(mode, stream):
    """bf16 base under bf16 autocast: what is summed for one record alone has norm C at most."""
    model = attach_adapters(tiny_model(torch.bfloat16), LoraConfig(r=3, lora_alpha=5), 3)
    families.shake(model)
    parameters = stream_parameters(model)[stream]
    for record, bound in itertools.product(RECORDS[:4], (1e-3, 0.1)):
        total = empty_sum(parameters, stream, bound)
        # an expert that the record's tokens reach: another one's gradient is zero, and so is any sum of it
        owners = current_owner_map(model, [collate([record])], 3) if stream == "expert" else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            grads = engine_gradients(model, collate([record]), parameters, mode=mode, owner=owners)
            total.add(grads, owners)
        size = sum(float(value.square().sum()) for value in total.sums.values()) ** 0.5
        assert 0 < size <= bound
        assert bound == 0.1 or size > 0.99 * bound, "not clipped at 1e-3: a blind test"


@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", ["hooks", "reference"])
def test_recomputed_activations_give_the_same_gradients(mode, stream, exact_norms):
    """Non-reentrant checkpointing runs each block's forward pass again within the backward pass."""
    model = adapted(expert_capacity=3).train()
    parameters = stream_parameters(model)[stream]
    owner = torch.tensor(OWNERS) if stream == "expert" else None
    kept = per_sample_gradients(model, collate(RECORDS), parameters, mode=mode, owner=owner)
    runs = []
    handle = model.encoder.block[0].layer[0].register_forward_hook(lambda *_: runs.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = per_sample_gradients(model, collate(RECORDS), parameters, mode=mode, owner=owner)
    handle.remove()
    if stream == "shared":
        assert len(runs) >= (2 if mode == "hooks" else 2 * len(RECORDS)), "nothing was recomputed: a blind test"
    for name, value in kept.items():
        assert value.any() or stream == "expert"
        assert float((found[name] - value).abs().max()) <= 1e-12


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize("mode", MODES)
def test_positions_may_be_given_once_for_all_records(mode):
    model = families.build("olmoe")
    attach_adapters(model, LoraConfig(r=2, lora_alpha=3), "last")
    families.shake(model)
    parameters = stream_parameters(model)["shared"]
    batch = families.collate(families.records(4, seed=4))
    shifted = torch.arange(batch["input_ids"].shape[1]).unsqueeze(0) * 3
    own = {**batch, "position_ids": shifted.repeat(4, 1)}
    common = {"position_ids": shifted, **batch}
    without, one, other = (per_sample_gradients(model, given, parameters, mode=mode) for given in (batch, own, common))
    assert any(float((one[n] - without[n]).abs().max()) > 1e-4 for n in parameters), "positions made no difference"
    assert all(torch.equal(one[name], other[name]) for name in parameters)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "change",
    [
        {"labels": torch.zeros(1, dtype=torch.long)},
        {"position_ids": torch.zeros(2, 12, dtype=torch.long)},
        {"number": torch.tensor(3.0)},
        {"attention_mask": torch.ones(8, 12, dtype=torch.long)},
    ],
    ids=["one label", "two positions", "no rows", "fewer masks"],
)
def test_rows_that_are_not_records_are_refused(mode, change):
    model = adapted(torch.float32)
    batch = {**collate(RECORDS, width=12), **change}
    with pytest.raises(PrivacyConfigError, match="rows") as refusal:
        per_sample_gradients(model, batch, stream_parameters(model)["shared"], mode=mode)
    assert "9" not in str(refusal.value), "a realised batch size is private"


def test_rows_are_views():
    batch, size = one_row_a_record({"position_ids": torch.zeros(1, 5), "input_ids": torch.zeros(3, 5)})
    assert size == 3 and batch["position_ids"].shape == (3, 5) and batch["position_ids"].stride(0) == 0


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", MODES)
def test_cutting_for_memory_changes_nothing(mode, stream, exact_norms, monkeypatch):
    model = adapted()
    parameters = stream_parameters(model)[stream]
    owner = torch.tensor(OWNERS) if stream == "expert" else None
    share = EXPERTS if stream == "expert" else 1
    each = sum(8 * p.numel() // share for p in parameters.values())
    sizes, sums = [], []
    owned = frozenset(parameters) if stream == "expert" else frozenset()
    constants = Stream(stream, parameters, 0.1, 1.0, 8.0, EXPERTS if owned else None, owned)

    def gradients(_stream, part, part_owner):
        grads = engine_gradients(model, part, parameters, mode=mode, owner=part_owner)
        sizes.append(next(iter(grads.values())).shape[0])
        return grads

    for budget in (None, 2 * each, 1):
        most = None if budget is None else records_at_once(parameters, owned=owned, budget=budget)
        sums.append(sum_gradients(model, constants, [(collate(RECORDS), owner)], gradients, most).sums)
    assert sizes == [9, 2, 2, 2, 2, 1] + [1] * 9
    for other in sums[1:]:
        assert all(float((other[n] - value).abs().max()) <= 1e-12 for n, value in sums[0].items())


def test_an_empty_micro_batch_is_one_empty_part():
    model = adapted(torch.float32)
    parameters = stream_parameters(model)["shared"]
    batch = {name: value[:0] for name, value in collate(RECORDS).items()}
    for mode in MODES:
        ((part, owner),) = cut(batch, None, 1)
        grads = engine_gradients(model, part, parameters, mode=mode)
        assert owner is None and all(value.shape == (0, *parameters[name].shape) for name, value in grads.items())


def test_how_many_records_fit():
    shapes = {"a": torch.zeros(4, 10), "b": torch.zeros(4, 5, dtype=torch.bfloat16)}
    assert records_at_once(shapes, budget=10 * 4 * 60) == 10
    assert records_at_once(shapes, owned={"a", "b"}, budget=10 * 4 * 15 - 1) == 9
    assert records_at_once(shapes, owned={"a"}, budget=4 * 120) == 4
    assert records_at_once(shapes, budget=3) == 1
    free = free_memory(torch.device("cpu"))
    assert 2**20 < free < 2**50
    assert records_at_once({"a": torch.zeros(2**18)}) == pytest.approx(free // 2**22, rel=0.5)


def test_memory_that_torch_keeps_for_itself_is_free(monkeypatch):
    """After a first cycle torch holds most of a GPU; counted as used, it would cut later batches to single records."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (3 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 70 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 20 * 2**30)
    assert free_memory(torch.device("cuda")) == 53 * 2**30


def test_cut_keeps_the_order():
    parts = list(cut({"x": torch.arange(5)}, torch.arange(5) * 10, 2))
    assert [part["x"].tolist() for part, _ in parts] == [[0, 1], [2, 3], [4]]
    assert [owner.tolist() for _, owner in parts] == [[0, 10], [20, 30], [40]]
