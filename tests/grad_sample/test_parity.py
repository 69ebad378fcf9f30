"""Per-sample gradients of both engines against stock transformers and stock PEFT, one record at a time.

The oracle is a stock classifier wrapped by `peft.PeftModel`, which reads the adapter that was saved; its loss, its
residual weight and its loop are written here.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel

from raptor_hf.grad_sample import ENGINES, model_loss, per_sample_gradients, residual_weighted
from raptor_hf.moe import attach_adapters, stream_parameters
from raptor_hf.moe.block import kernel_mode
from tests.helpers import (
    EXPERTS,
    assert_close,
    brute_owner,
    collate,
    float64_routers,
    record_by_record,
    stock_dispatch,
    tiny_model,
    tiny_records,
)

RANK, ALPHA, BLOCK = 3, 5.0, 3
MODES = sorted(ENGINES)
PROJECTIONS = {"first": "wi", "second": "wo"}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def _exact(exact_norms):
    """All of this file computes its norms in the dtype of the model."""


def adapted(dtype=torch.float64, block=BLOCK, **changes):
    """A model whose adapters are far from zero. Their values are float32 numbers, so that saving loses nothing."""
    model = attach_adapters(tiny_model(dtype, **changes), LoraConfig(r=RANK, lora_alpha=ALPHA), block)
    generator = torch.Generator().manual_seed(5)
    for stream in stream_parameters(model).values():
        for name, parameter in stream.items():
            if "lora_" in name:
                value = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.data = value.to(dtype)
    return model


class Oracle:
    """Stock model, stock PEFT, one record at a time."""

    def __init__(self, model, directory, dtype, block=BLOCK, **changes):
        self.block = block
        model.save_pretrained(directory)
        base = tiny_model(dtype, **changes)
        self.model = PeftModel.from_pretrained(base, directory, is_trainable=True).to(dtype).eval()
        if dtype == torch.float64:
            float64_routers(self.model)
        self.parameters = {
            name.removeprefix("base_model.model.").replace(".default", "").replace(".modules_to_save", ""): p
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def theirs(self, name: str, owner: int | None) -> torch.Tensor:
        """Their parameter for one of our names (of one expert's adapter, in the expert stream)."""
        if ".expert_adapters." in name:
            block, _, rest = name.partition(".expert_adapters.")
            projection, kind = rest.split(".")
            return self.parameters[f"{block}.experts.expert_{owner}.{PROJECTIONS[projection]}.{kind}.weight"]
        return self.parameters[name + ".weight" if "lora_" in name else name]

    def gradients(self, records, names, owners=None, weighted=False) -> dict[str, torch.Tensor]:
        def loss(i: int) -> torch.Tensor:
            probabilities = self.model(input_ids=torch.tensor([records[i]["input_ids"]])).logits[0].softmax(-1)
            likely = probabilities[records[i]["labels"]]
            return -likely.log() * ((1 - likely).detach() if weighted else 1)

        def theirs(name: str, i: int) -> torch.Tensor:
            return self.theirs(name, None if owners is None else owners[i])

        return record_by_record(len(records), names, loss, theirs)

    def dispatch(self, record) -> list[float]:
        """How many tokens of a record each expert of the protected layer gets, adapters on."""
        return stock_dispatch(self.model.base_model.model, record, [self.block])[self.block].sum(0).tolist()

    def owners(self, records) -> list[int]:
        """Owners as the records come, but the last ones belong to an expert that no token of theirs reaches."""
        used = [self.dispatch(record) for record in records]
        found = [brute_owner(counts) for counts in used]
        for i in (-1, -2) if len(records) > 2 else ():
            if 0 in used[i]:
                found[i] = used[i].index(0)
        return found


RECORDS = tiny_records(8, seed=3)
CASES = {
    "plain": ({}, RECORDS, 0),
    "a lower layer": ({"block": 1}, RECORDS, 0),
    "a lower layer, capacity 2": ({"block": 1, "expert_capacity": 2}, RECORDS, 0),
    "capacity 2": ({"expert_capacity": 2}, RECORDS, 0),
    "capacity 2, padded": ({"expert_capacity": 2}, RECORDS, 20),
    "everything dropped": ({"expert_capacity": 0}, RECORDS, 0),
    "batch of one": ({}, RECORDS[:1], 0),
    "one token": ({}, tiny_records(3, longest=1), 5),
    "router with bias": ({"router_bias": True}, RECORDS, 0),
    "gelu": ({"dense_act_fn": "gelu"}, RECORDS, 0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", MODES)
def test_engine_equals_the_oracle(mode, stream, case, dtype, tmp_path):
    changes, records, width = CASES[case]
    model = adapted(dtype, **changes)
    oracle = Oracle(model, tmp_path, dtype, **changes)
    parameters = stream_parameters(model)[stream]
    owners = oracle.owners(records) if stream == "expert" else None
    found = per_sample_gradients(
        model,
        collate(records, width),
        parameters,
        mode=mode,
        owner=None if owners is None else torch.tensor(owners),
    )
    expected = oracle.gradients(records, list(parameters), owners)
    assert_close(found, expected, TOLERANCE[dtype])
    largest = max(float(value.abs().max()) for value in found.values())
    if stream == "expert" and case == "everything dropped":
        assert largest == 0.0
    else:
        assert largest > 1e-3, "gradients of nothing would agree with anything"


@pytest.mark.parametrize("mode", MODES)
def test_shared_tensors_all_get_gradient(mode):
    model = adapted()
    parameters = stream_parameters(model)["shared"]
    found = per_sample_gradients(model, collate(RECORDS), parameters, mode=mode)
    assert all(float(value.abs().max()) > 0 for value in found.values())


@pytest.mark.parametrize("mode", MODES)
def test_an_owner_without_a_token_gets_exactly_zero(mode, tmp_path):
    model = adapted()
    oracle = Oracle(model, tmp_path, torch.float64)
    used = [oracle.dispatch(record) for record in RECORDS]
    idle = [counts.index(0) if 0 in counts else None for counts in used]
    assert sum(i is not None for i in idle) >= 3
    owner = torch.tensor([brute_owner(c) if i is None else i for i, c in zip(idle, used, strict=True)])
    found = per_sample_gradients(model, collate(RECORDS), stream_parameters(model)["expert"], mode=mode, owner=owner)
    for i, expert in enumerate(idle):
        norms = [float(value[i].abs().max()) for value in found.values()]
        assert (max(norms) == 0.0) if expert is not None else (min(norms) > 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", MODES)
def test_residual_weights_are_constants(mode, stream, dtype, tmp_path):
    model = adapted(dtype)
    oracle = Oracle(model, tmp_path, dtype)
    parameters = stream_parameters(model)[stream]
    owners = oracle.owners(RECORDS) if stream == "expert" else None
    found = per_sample_gradients(
        model,
        collate(RECORDS),
        parameters,
        mode=mode,
        loss_fn=residual_weighted(model_loss),
        owner=None if owners is None else torch.tensor(owners),
    )
    assert_close(found, oracle.gradients(RECORDS, list(parameters), owners, weighted=True), TOLERANCE[dtype])


@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", MODES)
def test_the_residual_weight_costs_no_forward_pass(mode, stream):
    model = adapted()
    passes: list[int] = []
    model.encoder.block[0].register_forward_hook(lambda *_: passes.append(1))
    owner = torch.arange(8) % EXPERTS if stream == "expert" else None
    counts = {}
    for name, loss_fn in (
        ("first use", model_loss),
        ("plain", model_loss),
        ("weighted", residual_weighted(model_loss)),
    ):
        passes.clear()
        parameters = stream_parameters(model)[stream]
        per_sample_gradients(model, collate(RECORDS), parameters, mode=mode, loss_fn=loss_fn, owner=owner)
        counts[name] = len(passes)
    assert counts["weighted"] == counts["plain"] == (len(RECORDS) if mode == "reference" else 1)


@pytest.mark.parametrize(("gamma", "loss"), [(0.0, 0.3), (0.5, 0.3), (1.0, 0.3), (2.0, 1.7), (1.0, 0.0), (1.0, 40.0)])
def test_residual_weight_formula(gamma, loss):
    value = torch.tensor(loss, dtype=torch.float64, requires_grad=True)
    weighted = residual_weighted(lambda *_: value * 1.0, gamma)(None, {})
    (gradient,) = torch.autograd.grad(weighted, value)
    expected = (1 - torch.exp(torch.tensor(-loss, dtype=torch.float64))) ** gamma
    assert float(weighted.detach()) == pytest.approx(float(expected) * loss, rel=1e-12, abs=1e-15)
    assert float(gradient) == pytest.approx(float(expected), rel=1e-12, abs=1e-15)


# ------------------------------------------------------------------ independence


@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", MODES)
def test_neighbours_padding_and_order_do_not_matter(mode, stream):
    model = adapted(expert_capacity=2)
    parameters = stream_parameters(model)[stream]
    owner = torch.arange(8) % EXPERTS if stream == "expert" else None

    def rows(records, owner, width=0, pad=0):
        return per_sample_gradients(model, collate(records, width, pad), parameters, mode=mode, owner=owner)

    whole = rows(RECORDS, owner)
    order = [5, 2, 7, 0]
    picked = rows([RECORDS[i] for i in order], None if owner is None else owner[order], width=31, pad=9)
    for position, i in enumerate(order):
        alone = rows([RECORDS[i]], None if owner is None else owner[[i]])
        for name, value in whole.items():
            assert float((value[i] - alone[name][0]).abs().max()) < 1e-12
            assert float((value[i] - picked[name][position]).abs().max()) < 1e-12


@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", MODES)
def test_a_record_with_a_nan_loss_poisons_no_other(mode, stream):
    model = adapted()
    parameters = stream_parameters(model)[stream]
    owner = torch.arange(8) % EXPERTS if stream == "expert" else None
    batch = {**collate(RECORDS), "poison": torch.tensor([0.0] * 3 + [float("nan")] + [0.0] * 4, dtype=torch.float64)}

    def loss_fn(forward, record):
        record = dict(record)
        return model_loss(forward, {k: v for k, v in record.items() if k != "poison"}) * (1 + record["poison"][0])

    found = per_sample_gradients(model, batch, parameters, mode=mode, loss_fn=loss_fn, owner=owner)
    clean = per_sample_gradients(model, collate(RECORDS), parameters, mode=mode, owner=owner)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert any(bool(value[3].isnan().any()) for value in found.values())
    for name, value in found.items():
        assert float((value[others] - clean[name][others]).abs().max()) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_dense_and_compact_forms_say_the_same(mode):
    model = adapted()
    parameters = stream_parameters(model)["expert"]
    owner = torch.tensor([0, 3, 1, 1, 2, 0, 3, 2])
    compact = per_sample_gradients(model, collate(RECORDS), parameters, mode=mode, owner=owner)
    dense = per_sample_gradients(model, collate(RECORDS), parameters, mode=mode, owner=owner, dense=True)
    for name, value in dense.items():
        assert value.shape == (8, *parameters[name].shape)
        for i in range(8):
            for expert in range(EXPERTS):
                expected = compact[name][i] if expert == owner[i] else torch.zeros_like(compact[name][i])
                assert torch.equal(value[i, expert], expected)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_itself_reaches_other_experts(mode, tmp_path):
    """That other experts have no gradient is the engine's doing: in the stock model they have one."""
    model = adapted()
    oracle = Oracle(model, tmp_path, torch.float64)
    names = list(stream_parameters(model)["expert"])
    record = max(RECORDS, key=lambda r: len(r["input_ids"]))
    used = [e for e, count in enumerate(oracle.dispatch(record)) if count]
    assert len(used) > 1
    for expert in used:
        theirs = oracle.gradients([record], names, [expert])
        ours = per_sample_gradients(
            model, collate([record]), stream_parameters(model)["expert"], mode=mode, owner=torch.tensor([expert])
        )
        assert float(theirs[names[0]].abs().max()) > 0
        assert_close(ours, theirs, 1e-12)


# ------------------------------------------------------------------ manners


@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", MODES)
def test_engines_leave_nothing_behind(mode, stream):
    model = adapted().train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    owner = torch.zeros(8, dtype=torch.long) if stream == "expert" else None
    found = per_sample_gradients(model, collate(RECORDS), stream_parameters(model)[stream], mode=mode, owner=owner)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(not value.requires_grad for value in found.values())
    assert all(not block._kernel and block._owner is None for block in model.modules() if hasattr(block, "_kernel"))
    batch = collate(RECORDS)
    logits = model(**batch).logits
    with kernel_mode(model):
        assert float((model(**batch).logits - logits).detach().abs().max()) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_has_no_rows(mode):
    model = adapted()
    streams = stream_parameters(model)
    batch = {name: value[:0] for name, value in collate(RECORDS).items()}
    none = torch.zeros(0, dtype=torch.long)
    shared = per_sample_gradients(model, batch, streams["shared"], mode=mode)
    expert = per_sample_gradients(model, batch, streams["expert"], mode=mode, owner=none)
    dense = per_sample_gradients(model, batch, streams["expert"], mode=mode, owner=none, dense=True)
    for name, p in streams["shared"].items():
        assert shared[name].shape == (0, *p.shape)
    for name, p in streams["expert"].items():
        assert expert[name].shape == (0, *p.shape[1:]) and dense[name].shape == (0, *p.shape)


@pytest.mark.parametrize("mode", MODES)
def test_every_record_draws_its_own_dropout(mode):
    torch.manual_seed(0)
    model = adapted(dropout_rate=0.3).train()
    batch = collate([RECORDS[0]] * 6)
    owner = torch.tensor([brute_owner(stock_dispatch(tiny_model(), RECORDS[0])[BLOCK].sum(0).tolist())] * 6)
    for stream, given in (("shared", None), ("expert", owner)):
        found = per_sample_gradients(model, batch, stream_parameters(model)[stream], mode=mode, owner=given)
        value = torch.cat([v.flatten(1) for v in found.values()], 1)
        assert value.isfinite().all()
        assert len({tuple(row.tolist()) for row in value}) == 6


@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "reference"])
def test_engines_agree_on_a_half_precision_base(mode, stream):
    model = attach_adapters(tiny_model(torch.bfloat16), LoraConfig(r=RANK), BLOCK)
    for name, parameter in {**stream_parameters(model)["shared"], **stream_parameters(model)["expert"]}.items():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    parameters = stream_parameters(model)[stream]
    owner = torch.arange(8) % EXPERTS if stream == "expert" else None
    one, other = (
        per_sample_gradients(model, collate(RECORDS), parameters, mode=m, owner=owner) for m in (mode, "reference")
    )
    for i in range(8):
        a, b = (torch.cat([v[i].flatten() for v in g.values()]).double() for g in (one, other))
        assert a.isfinite().all() and b.isfinite().all()
        assert float((a - b).norm()) <= 0.25 * float(b.norm()) + 1e-6
    assert all(value.dtype == torch.float32 for value in one.values())


@pytest.mark.parametrize("mode", MODES)
def test_every_expert_gets_its_gradient_without_owners(mode, tmp_path):
    model = adapted()
    oracle = Oracle(model, tmp_path, torch.float64)
    parameters = stream_parameters(model)["expert"]
    found = per_sample_gradients(model, collate(RECORDS), parameters, mode=mode)
    for expert in range(EXPERTS):
        theirs = oracle.gradients(RECORDS, list(parameters), [expert] * 8)
        assert_close({name: value[:, expert] for name, value in found.items()}, theirs, 1e-12)


def test_owners_with_shared_parameters_are_refused():
    model = adapted()
    with pytest.raises(ValueError, match="owner"):
        per_sample_gradients(
            model, collate(RECORDS), stream_parameters(model)["shared"], owner=torch.zeros(8, dtype=torch.long)
        )


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_labels_is_refused(mode):
    model = adapted()
    batch = collate(RECORDS)
    del batch["labels"]
    with pytest.raises(ValueError, match="labels"):
        per_sample_gradients(model, batch, stream_parameters(model)["shared"], mode=mode)


def test_an_unknown_engine_is_refused():
    model = adapted()
    with pytest.raises(ValueError, match="mode"):
        per_sample_gradients(model, collate(RECORDS), stream_parameters(model)["shared"], mode="magic")
