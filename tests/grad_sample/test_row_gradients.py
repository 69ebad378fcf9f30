"""Gradients held as their rows that may not be zero, against dense ones and against a loop written here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raptor_hf.grad_sample import engine_gradients, per_sample_gradients
from raptor_hf.grad_sample.row_gradients import RowGradients, untouched
from raptor_hf.moe.weights import train_weights
from raptor_hf.privacy.clipping import clip_and_sum
from raptor_hf.privacy.mechanism import ClippedSum
from tests.helpers import collate, tiny_model, tiny_records

# rows of a table of 6 rows that three records look up: one twice, one alone, none
LOOKED_UP = ([4, 1, 4, 0], [5], [])
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def sparse(rows: list[int], values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.long), values, (6, *values.shape[1:]), check_invariants=True
    )


def example(dtype=torch.float64, shape=(3,)):
    """The object and the same gradients (3, 6, *shape), added up row by row in float64."""
    generator = torch.Generator().manual_seed(3)
    # quarters, which every type adds without rounding
    values = [torch.randint(-8, 9, (len(r), *shape), generator=generator).to(dtype) / 4 for r in LOOKED_UP]
    dense = torch.zeros(3, 6, *shape, dtype=torch.float64)
    for i, rows in enumerate(LOOKED_UP):
        for row, value in zip(rows, values[i], strict=True):
            dense[i, row] += value.double()
    return RowGradients([sparse(r, v) for r, v in zip(LOOKED_UP, values, strict=True)]), dense


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_they_are_the_dense_gradients(dtype, shape):
    found, dense = example(dtype, shape)
    assert found.shape == dense.shape
    assert found.dense().dtype == dtype and torch.equal(found.dense().double(), dense)
    norms = [math.sqrt(math.fsum(x * x for x in row.flatten().tolist())) for row in dense]
    assert norms[2] == 0 and found.norms().dtype == torch.float64
    assert found.norms().tolist() == pytest.approx(norms, rel=1e-15)
    assert all(norms[:2]), "entries of a row that was looked up twice must count as one"
    factors = torch.tensor([0.3, 1 / 7, 0.9], dtype=torch.float64)
    added = torch.zeros(6, *shape, dtype=torch.float64).add_(found.weighted_sum(factors))
    assert (added - torch.einsum("b,b...->...", factors, dense)).abs().max() <= 1e-15


@pytest.mark.parametrize("bound", [0.4, 50.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_norm_runs_over_them_and_dense_tensors(dtype, bound):
    found, dense = example(dtype)
    other = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = {"rows": torch.zeros(6, 3, dtype=torch.float64), "other": torch.zeros(5, dtype=torch.float64)}
    for i in range(3):
        norm = math.sqrt(math.fsum(x * x for g in (dense[i], other[i]) for x in g.flatten().tolist()))
        factor = 1.0 if norm <= bound else bound * (1 - 1e-6) / norm
        expected["rows"] += factor * dense[i]
        expected["other"] += factor * other[i].double()
    total = ClippedSum({"rows": torch.Size([6, 3]), "other": torch.Size([5])}, bound)
    total.add({"rows": found, "other": other})
    for sums in (total.sums, clip_and_sum({"rows": found, "other": other}, bound)[0]):
        for name, value in expected.items():
            assert not sums[name].is_sparse and sums[name].dtype == torch.float64
            assert (sums[name] - value).abs().max() <= 1e-14, name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_record_that_is_not_finite_is_silenced_in_its_rows_and_beside_them(value):
    bad = RowGradients([sparse([2, 3], torch.tensor([[value], [1.0]])), sparse([2], torch.tensor([[0.5]]))])
    other = torch.tensor([[1.0], [0.25]])
    sums, norms = clip_and_sum({"rows": bad, "other": other}, 1.0)
    assert sums["rows"].flatten().tolist() == [0, 0, 0.5, 0, 0, 0] and sums["other"].tolist() == [0.25]
    # and the other way round: the rows of a record whose other gradients are not finite
    good = RowGradients([sparse([2], torch.tensor([[3.0]])), sparse([2], torch.tensor([[0.5]]))])
    sums, _ = clip_and_sum({"rows": good, "other": torch.tensor([[value], [0.25]])}, 1.0)
    assert sums["rows"].flatten().tolist() == [0, 0, 0.5, 0, 0, 0]


@pytest.mark.parametrize("shape", [(6, 3), (6,), (), (0, 3)])
def test_an_untouched_parameter_is_zero_and_adds_nothing(shape):
    parameter = torch.randn(shape)
    found = untouched(parameter)
    assert found.shape == parameter.shape and not found.to_dense().any()
    grads = RowGradients([found, found]) if shape else torch.stack([found, found])
    sums, norms = clip_and_sum({"w": grads, "v": torch.tensor([[3.0], [4.0]])}, 9.0)
    assert norms.tolist() == [3.0, 4.0]
    assert sums["w"].shape == shape and not sums["w"].any() and sums["v"].tolist() == [7.0]


# ---- In the reference engine ----


def by_hand(model: nn.Module, records: list[dict]) -> list[dict[str, torch.Tensor]]:
    """Every record's dense `.grad`, zero where `backward` leaves none."""
    found = []
    for record in records:
        model.zero_grad(set_to_none=True)
        model(**collate([record])).loss.backward()
        found.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        )
    model.zero_grad(set_to_none=True)
    return found


# One token each, and two records that repeat theirs: experts and most of the vocabulary stay untouched.
RECORDS = [*tiny_records(3, seed=5, longest=1), *tiny_records(2, seed=6, shortest=4)]
RECORDS[3] = {**RECORDS[3], "input_ids": [7] * len(RECORDS[3]["input_ids"])}


@pytest.mark.parametrize("size", [1, len(RECORDS)])
def test_all_weights_against_a_loop_of_backward_passes(size):
    model = train_weights(tiny_model(), "full", "last")
    parameters = dict(model.named_parameters())
    rows, bound = by_hand(model, RECORDS), 0.9
    total = ClippedSum({n: p.shape for n, p in parameters.items()}, bound)
    kinds = set()
    # a batch of all has padding, which the loop has not
    for start in range(0, len(RECORDS), size):
        grads = engine_gradients(model, collate(RECORDS[start : start + size]), parameters, mode="reference")
        kinds |= {name for name, g in grads.items() if isinstance(g, RowGradients)}
        total.add(grads)
    assert "shared.weight" in kinds
    assert size > 1 or any("experts.expert_" in name for name in kinds), "no expert stayed untouched"
    expected = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in parameters.items()}
    clipped = 0
    for row in rows:
        norm = math.sqrt(math.fsum(float(g.double().square().sum()) for g in row.values()))
        clipped += norm > bound
        for name, g in row.items():
            expected[name] += min(1.0, bound / norm) * g.double()
    assert clipped >= 3
    for name, value in expected.items():
        assert (total.sums[name] - value).abs().max() <= 1e-5 * max(1.0, float(value.abs().max())), name
    # what no record reaches is exactly zero
    seen = {token for record in RECORDS for token in record["input_ids"]}
    unseen = [token for token in range(1, model.config.vocab_size) if token not in seen]
    assert unseen and not total.sums["shared.weight"][unseen].any()


def test_formed_gradients_are_those_of_backward():
    model = train_weights(tiny_model(), "full", "last")
    parameters = dict(model.named_parameters())
    found = per_sample_gradients(model, collate(RECORDS[3:4]), parameters, mode="reference")
    (row,) = by_hand(model, RECORDS[3:4])
    assert set(found) == set(row)
    for name, value in row.items():
        assert found[name].shape == (1, *value.shape) and not found[name].is_sparse
        assert torch.allclose(found[name][0], value, rtol=1e-5, atol=1e-6), name


class _Tied(nn.Module):
    """A table that is looked up and multiplied with, as a language model's with tied weights; and one that is not."""

    def __init__(self, **changes):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.second = nn.Embedding(6, 3, **changes), nn.Embedding(6, 3, padding_idx=0)
        self.idle = nn.Embedding(4, 2)

    def forward(self, ids, tied):
        hidden = self.table(ids) + self.second(ids)
        return (hidden @ self.table.weight.T if tied else hidden).square().sum()


@pytest.mark.parametrize("changes", [{}, {"scale_grad_by_freq": True}, {"sparse": True}, {"padding_idx": 2}])
@pytest.mark.parametrize("tied", [False, True])
def test_tables_of_every_kind(tied, changes):
    model = _Tied(**changes)
    before = [m.sparse for m in model.modules() if isinstance(m, nn.Embedding)]
    ids = torch.tensor([[4, 2, 2, 0], [1, 1, 0, 5]])

    def loss(model, record):
        return model(record["ids"], tied)

    parameters = dict(model.named_parameters())
    found = per_sample_gradients(model, {"ids": ids}, parameters, mode="reference", loss_fn=loss)
    assert [m.sparse for m in model.modules() if isinstance(m, nn.Embedding)] == before
    for i in range(2):
        model.zero_grad()
        model(ids[i : i + 1], tied).backward()
        for name, p in parameters.items():
            expected = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            assert torch.allclose(found[name][i], expected, rtol=1e-5, atol=1e-6), name
    assert not found["idle.weight"].any() and found["idle.weight"].shape == (2, 4, 2)


def test_tables_are_as_before_after_an_error():
    model = _Tied()

    def loss(model, record):
        assert model.table.sparse
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        engine_gradients(
            model, {"ids": torch.ones(1, 2, dtype=torch.long)}, dict(model.named_parameters()), mode="reference",
            loss_fn=loss,
        )  # fmt: skip
    assert not model.table.sparse and not model.second.sparse


def test_a_table_that_is_not_trained_stays_as_it_is():
    model, seen = _Tied(), []

    def loss(model, record):
        seen.append((model.table.sparse, model.second.sparse))
        return model(record["ids"], False)

    engine_gradients(
        model, {"ids": torch.ones(2, 2, dtype=torch.long)}, {"second.weight": model.second.weight}, mode="reference",
        loss_fn=loss,
    )  # fmt: skip
    assert seen == [(False, True)] * 2
