"""Per-record scores: by hand from one record's logits, whatever the batch around it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from raptor_hf.audit import record_scores
from raptor_hf.data import CompletionCollator
from raptor_hf.errors import PrivacyConfigError
from tests.families import build, records
from tests.helpers import collate, tiny_model, tiny_records

FLOAT64 = torch.float64
# no supervised token at all; only the first one, which nothing predicts; a single token
SILENT = [
    {"input_ids": [5, 6, 7], "attention_mask": [1] * 3, "labels": [-100] * 3},
    {"input_ids": [5, 6, 7], "attention_mask": [1] * 3, "labels": [5, -100, -100]},
    {"input_ids": [9], "attention_mask": [1], "labels": [9]},
]


class Table(nn.Module):
    """Gives each record the logits that it carries; `calls` are the sizes of the batches."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls: list[int] = []

    def forward(self, logits):
        self.calls.append(len(logits))
        assert not torch.is_grad_enabled() and not self.training
        return SimpleNamespace(logits=logits * self.weight)


def stack(rows):
    return {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}


def by_hand(logits: list[float], label: int) -> tuple[float, float]:
    """(loss, confidence) by the definition, from probabilities."""
    weights = [math.exp(z) for z in logits]
    p = weights[label] / sum(weights)
    return -math.log(p), math.log(p / (1 - p))


def test_classifier_scores_are_those_of_each_record_alone(exact_norms):
    model, rows = tiny_model(FLOAT64), tiny_records(7, seed=1)
    expected = []
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        expected.append(by_hand(logits.tolist(), row["labels"]))
    for batch_size in (1, 3, 7, 100):
        found = record_scores(model, rows, collate, batch_size)
        np.testing.assert_allclose(found.loss, [loss for loss, _ in expected], rtol=1e-10)
        np.testing.assert_allclose(found.confidence, [c for _, c in expected], rtol=1e-9, atol=1e-12)
    assert found.tokens.tolist() == [1] * 7
    assert found.loss.dtype == found.confidence.dtype == np.float64


def test_scores_do_not_depend_on_the_records_beside(exact_norms):
    model, rows = tiny_model(FLOAT64), tiny_records(6, seed=2)
    alone = record_scores(model, rows, collate, 6)
    others = record_scores(model, [*tiny_records(9, seed=3, longest=30), *rows[::-1]], collate, 15)
    np.testing.assert_allclose(others.loss[9:][::-1], alone.loss, rtol=1e-11)
    np.testing.assert_allclose(others.confidence[9:][::-1], alone.confidence, rtol=1e-9, atol=1e-12)


def test_language_model_scores_are_means_over_own_tokens():
    model = build("olmoe", head="lm")
    rows = [*records(5, seed=4, causal=True), *SILENT]
    found = record_scores(model, rows, CompletionCollator(), 3)
    for i, row in enumerate(rows):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].double()
        terms = [by_hand(logits[t].tolist(), label) for t, label in enumerate(row["labels"][1:]) if label != -100]
        assert found.tokens[i] == len(terms)
        if terms:
            assert found.loss[i] == pytest.approx(np.mean([loss for loss, _ in terms]), rel=1e-4)
            assert found.confidence[i] == pytest.approx(np.mean([c for _, c in terms]), rel=1e-4)
        else:
            assert (found.loss[i], found.confidence[i]) == (0, 0)
    assert found.tokens[:5].min() >= 1


@pytest.mark.parametrize(
    ("logits", "label", "loss", "confidence"),
    [
        ([0.0, 0.0], 0, math.log(2), 0.0),
        ([50.0, 0.0], 0, math.exp(-50), 50.0),  # p rounds to 1: log(p / (1 - p)) by the definition is infinite
        ([1000.0, 0.0], 1, 1000.0, -1000.0),  # p rounds to 0
        ([1000.0, 0.0], 0, 0.0, 1000.0),
        ([3.0, 3.0, 3.0, 3.0], 2, math.log(4), -math.log(3)),
        ([800.0, 795.0, -800.0], 0, math.log1p(math.exp(-5)), 5.0),
    ],
)
def test_extreme_logits_stay_exact(logits, label, loss, confidence):
    rows = [{"logits": torch.tensor(logits, dtype=FLOAT64), "labels": label}]
    found = record_scores(Table(), rows, stack)
    assert found.loss[0] == pytest.approx(loss, rel=1e-12, abs=0)
    assert found.confidence[0] == pytest.approx(confidence, rel=1e-12, abs=1e-15)


def test_float16_logits_are_scored_in_float64():
    rows = [{"logits": torch.tensor([12.0, 0.0], dtype=torch.float16), "labels": 0}]
    assert record_scores(Table().half(), rows, stack).loss[0] == pytest.approx(math.log1p(math.exp(-12)), rel=1e-12)


def test_the_model_is_left_as_it_was():
    model = tiny_model(dropout_rate=0.5)
    model.train()
    model.encoder.block[0].eval()
    flags = [module.training for module in model.modules()]
    rows, state = tiny_records(4), torch.get_rng_state()
    first = record_scores(model, rows, collate)
    np.testing.assert_array_equal(record_scores(model, rows, collate).loss, first.loss)  # no dropout
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(PrivacyConfigError):
        record_scores(model, [{**rows[0], "labels": 99}], collate)
    assert [module.training for module in model.modules()] == flags


def test_batches_cover_every_record_once():
    model = Table()
    rows = [{"logits": torch.tensor([float(i), 0.0]), "labels": 0} for i in range(7)]
    found = record_scores(model, rows, stack, batch_size=3)
    assert model.calls == [3, 3, 1]
    assert found.confidence.tolist() == list(range(7))
    empty = record_scores(model, [], stack)
    assert empty.loss.shape == empty.confidence.shape == empty.tokens.shape == (0,)


def test_scores_do_not_print_themselves():
    rows = [{"logits": torch.tensor([1.0, 0.0]), "labels": 0}]
    assert "0." not in repr(record_scores(Table(), rows, stack))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"logits": torch.zeros(2)}, "without labels"),
        ({"logits": torch.zeros(2), "labels": 2}, "outside 0 .. 1"),
        ({"logits": torch.zeros(2), "labels": -1}, "outside 0 .. 1"),
        ({"logits": torch.zeros(2), "labels": 0.5}, "float32"),
        ({"logits": torch.zeros(1), "labels": 0}, "one output"),
        ({"logits": torch.tensor([0.0, math.nan]), "labels": 0}, "not finite"),
        ({"logits": torch.zeros(4, 2), "labels": 0}, "labels"),
        ({"logits": torch.zeros(4, 2), "labels": torch.zeros(3, dtype=torch.long)}, "labels"),
    ],
)
def test_what_cannot_be_scored_is_refused(row, said):
    with pytest.raises(PrivacyConfigError, match=said):
        record_scores(Table(), [row], stack)


def test_a_batch_that_lost_a_record_is_refused():
    rows = [{"logits": torch.zeros(2), "labels": 0}] * 3
    with pytest.raises(PrivacyConfigError, match="3 records gave 2 rows"):
        record_scores(Table(), rows, lambda batch: stack(batch[:2]))
