"""Layer selection: the statistics against their formulas and the paper's table, the choice, the overlap check."""

from __future__ import annotations

import csv
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from scipy import stats

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.moe import attach_adapters, check_disjoint, routing_table, select_layer
from raptor_hf.moe.selection import distribution_statistics
from tests.helpers import EXPERTS, SPARSE, brute_owner, collate, stock_dispatch, tiny_model, tiny_records

TABLE = Path(__file__).parent.parent / "oracles" / "table7_routing_entropy.csv"
with TABLE.open() as file:
    ROWS = [
        {k: v if k in ("task", "calibration_corpus") else float(v) for k, v in r.items()} for r in csv.DictReader(file)
    ]

counts = st.lists(st.integers(0, 1000), min_size=2, max_size=12).filter(any)


@given(counts)
def test_statistics_equal_their_formulas(values):
    found = distribution_statistics(values)
    q = np.array(values) / sum(values)
    experts = len(q)
    entropy = stats.entropy(q)
    assert found["entropy"] == pytest.approx(entropy, abs=1e-12)
    assert found["normalised_entropy"] == pytest.approx(entropy / math.log(experts), abs=1e-12)
    assert found["deficit"] == pytest.approx(stats.entropy(q, np.full(experts, 1 / experts)), abs=1e-12)
    assert found["chi2"] == pytest.approx(experts * sum((x - 1 / experts) ** 2 for x in q), abs=1e-12)
    assert found["cv"] == pytest.approx(np.std(q) / np.mean(q), abs=1e-12)


@given(counts)
def test_relations_between_the_statistics(values):
    found = distribution_statistics(values)
    assert found["cv"] ** 2 == pytest.approx(found["chi2"], abs=1e-9)
    assert found["deficit"] <= math.log1p(found["chi2"]) + 1e-9  # Jensen
    assert found["chi2"] <= 2 * len(values) * found["deficit"] + 1e-9  # Eq. 17


def test_statistics_of_the_two_extremes():
    even, one = distribution_statistics([5] * 8), distribution_statistics([0, 0, 7, 0])
    assert even["normalised_entropy"] == pytest.approx(1) and even["chi2"] == pytest.approx(0, abs=1e-15)
    assert one["entropy"] == 0 and one["chi2"] == pytest.approx(3) and one["deficit"] == pytest.approx(math.log(4))


def dominated(deficit: float, experts: int = 8) -> dict[str, float]:
    """Statistics of the law with one large expert and equal others that has this deficit: of all it has most chi2."""
    low, high = 1 / experts, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        q = [middle] + [(1 - middle) / (experts - 1)] * (experts - 1)
        low, high = (middle, high) if distribution_statistics(q)["deficit"] < deficit else (low, middle)
    return distribution_statistics(q)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['task']}-{r['encoder_block']:.0f}")
def test_the_papers_table_obeys_the_same_definitions(row):
    """Its three columns are functions of one law on 8 experts, which pins the units (nats, log 8, E times)."""
    half = 0.0005001
    assert row["entropy_deficit_nats"] == pytest.approx((1 - row["normalised_entropy"]) * math.log(8), abs=half * 3.1)
    assert row["chi2"] <= dominated(row["entropy_deficit_nats"] + half)["chi2"] + half
    assert math.log1p(row["chi2"] + half) >= row["entropy_deficit_nats"] - half


def brute_counts(records, block, **changes) -> list[int]:
    model, found = tiny_model(**changes), [0] * EXPERTS
    for record in records:
        found[brute_owner(stock_dispatch(model, record)[block].sum(0).tolist())] += 1
    return found


@pytest.mark.parametrize("rule", ["gate", "vote"])
@pytest.mark.parametrize("capacity", [64, 2])
def test_routing_table_equals_brute_force(capacity, rule):
    records = tiny_records(80)
    model = tiny_model(expert_capacity=capacity)
    table = routing_table(model, records, rule=rule, data_collator=collate, batch_size=13)
    assert [row["block"] for row in table] == list(SPARSE)
    for row in table:
        expected = brute_counts(records, row["block"], expert_capacity=capacity)
        assert row["counts"] == expected
        for name, value in distribution_statistics(expected).items():
            assert row[name] == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 4, 6])
def test_the_layer_of_largest_entropy_is_selected(seed):
    records = tiny_records(120)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = select_layer(tiny_model(seed=seed), records, data_collator=collate)
    entropies = {row["block"]: stats.entropy(row["counts"]) for row in found.table}
    assert found.layer == max(entropies, key=lambda block: entropies[block])
    assert found.margin == pytest.approx(max(entropies.values()) - min(entropies.values()), abs=1e-12)
    assert found.records == 120


def test_both_layers_get_selected():
    """Guards the test above: the answer is not always the first or the last layer."""
    best = set()
    for seed in (0, 1, 4, 6):
        table = routing_table(tiny_model(seed=seed), tiny_records(120), data_collator=collate)
        best.add(max(table, key=lambda row: row["entropy"])["block"])
    assert best == set(SPARSE)


def test_a_small_margin_on_few_records_warns(monkeypatch):
    rows = [
        {"block": 1, "entropy": 1.00, "counts": [50, 50]},
        {"block": 3, "entropy": 1.04, "counts": [50, 50]},
    ]
    monkeypatch.setattr("raptor_hf.moe.selection.routing_table", lambda *_a, **_k: rows)
    with pytest.warns(UserWarning, match=r"0\.040 nats on 100"):
        assert select_layer(None, []).layer == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows[0]["entropy"] = 0.98
        assert select_layer(None, []).layer == 3
        rows[0]["entropy"] = 1.03
        rows[0]["counts"] = rows[1]["counts"] = [500, 500]
        assert select_layer(None, []).records == 1000


def test_entropy_decides_where_chi2_would_choose_otherwise(monkeypatch):
    laws = {1: [500, 500, 0, 0], 3: [700, 100, 100, 100]}
    rows = [{"block": b, **distribution_statistics(law), "counts": law} for b, law in laws.items()]
    assert rows[0]["entropy"] < rows[1]["entropy"] and rows[0]["chi2"] < rows[1]["chi2"]
    monkeypatch.setattr("raptor_hf.moe.selection.routing_table", lambda *_a, **_k: rows)
    assert select_layer(None, []).layer == 3


def test_equal_entropies_give_the_lower_block(monkeypatch):
    rows = [{"block": b, "entropy": 1.0, "counts": [600, 600]} for b in (5, 1, 3)]
    monkeypatch.setattr("raptor_hf.moe.selection.routing_table", lambda *_a, **_k: rows)
    found = select_layer(None, [])
    assert found.layer == 1 and found.margin == 0.0


def test_one_sparse_layer_needs_no_runner_up(monkeypatch):
    rows = [{"block": 1, "entropy": 1.0, "counts": [5, 5]}]
    monkeypatch.setattr("raptor_hf.moe.selection.routing_table", lambda *_a, **_k: rows)
    assert select_layer(None, []).margin == math.inf


def test_adapters_do_not_change_the_table():
    records = tiny_records(60)
    expected = routing_table(tiny_model(), records, data_collator=collate)
    model = attach_adapters(tiny_model(), LoraConfig(r=4, lora_alpha=64), 1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    assert routing_table(model, records, data_collator=collate) == expected


def test_an_empty_public_corpus_is_refused():
    with pytest.raises(PrivacyConfigError, match="no records"):
        routing_table(tiny_model(), [])


# ------------------------------------------------------------------ public and private must be disjoint


def text(*sentences, **columns):
    return [{"text": sentence, **columns} for sentence in sentences]


@pytest.mark.parametrize("same", ["a good  film", " a good film\n", "a\tgood\u00a0film", "a good film"])
def test_a_shared_text_is_found_whatever_its_white_space(same):
    with pytest.raises(PrivacyConfigError, match="shares at least one record"):
        check_disjoint(text("public", "a good film"), text("private", same))


@pytest.mark.parametrize("other", ["A good film", "a good film.", "a goodfilm", "agood film"])
def test_other_texts_are_not(other):
    assert "text" in check_disjoint(text("a good film"), text(other))


@pytest.mark.parametrize("columns", [{"label": 1}, {"label": "positive"}, {"label": "positive", "idx": "7"}])
def test_a_column_that_only_one_side_has_does_not_hide_a_shared_text(columns):
    with pytest.raises(PrivacyConfigError):
        check_disjoint(text("a good film"), text("a good film", **columns))
    with pytest.raises(PrivacyConfigError):
        check_disjoint(text("a good film", **columns), text("a good film"))


def test_a_pair_is_one_record():
    public = [{"premise": "p", "hypothesis": "h"}]
    assert check_disjoint(public, [{"premise": "p", "hypothesis": "other"}])
    with pytest.raises(PrivacyConfigError):
        check_disjoint(public, [{"hypothesis": " h", "premise": "p ", "label": 2}])


def test_texts_under_different_names_are_compared():
    with pytest.raises(PrivacyConfigError):
        check_disjoint([{"sentence": "a"}], [{"text": "a"}])


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_shared_token_ids_are_found_whatever_the_padding(kind):
    public = [{"input_ids": kind([5, 6, 7, 0, 0]), "attention_mask": kind([1, 1, 1, 0, 0])}]
    for same in (
        {"input_ids": [5, 6, 7], "labels": 1},
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]},
        {"input_ids": [9, 5, 6, 7], "attention_mask": [0, 1, 1, 1]},
    ):
        with pytest.raises(PrivacyConfigError):
            check_disjoint(public, [{"input_ids": [1]}, same])
    assert check_disjoint(public, [{"input_ids": [5, 6, 7, 0]}, {"input_ids": [5, 6]}]) == "exact match of token ids"


def test_either_kind_of_match_counts():
    public = [{"text": "a", "input_ids": [1, 2]}]
    assert check_disjoint(public, [{"text": "b", "input_ids": [3]}]).count("and") == 1
    for same in ({"text": "a", "input_ids": [3]}, {"text": "b", "input_ids": [1, 2]}):
        with pytest.raises(PrivacyConfigError):
            check_disjoint(public, [same])


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(PrivacyConfigError, match="in common"):
        check_disjoint(text("a"), [{"input_ids": [1]}])


def test_the_number_of_shared_records_is_not_told():
    messages = []
    for shared in (1, 3):
        with pytest.raises(PrivacyConfigError) as refusal:
            check_disjoint(text("a", "b", "c"), text(*"abc"[:shared], "z"))
        messages.append(str(refusal.value))
    assert messages[0] == messages[1]


def test_generators_are_read_once():
    with pytest.raises(PrivacyConfigError):
        check_disjoint((r for r in text("a", "b")), (r for r in text("b", label="x")))
