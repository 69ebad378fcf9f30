"""ROC, AUC and intervals against scikit-learn, loops over all pairs and thresholds, and the binomial itself."""

from __future__ import annotations

import csv
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from raptor_hf.audit import auc, auc_interval, clopper_pearson, roc_curve, summarise_attack, tpr_at_fpr
from raptor_hf.errors import PrivacyConfigError

ORACLE = Path(__file__).parent.parent / "oracles" / "audit_bounds.csv"
ROWS = {row["formula"]: float(row["value"]) for row in csv.DictReader(ORACLE.read_text().splitlines())}


@st.composite
def populations(draw, most=30):
    """Scores with many ties, infinities at times, and at least one record of each kind."""
    values = st.sampled_from([-math.inf, -1.5, 0.0, 0.25, 1.0, 1.0 + 2**-52, 7.0, math.inf])
    pairs = draw(st.lists(st.tuples(values, st.booleans()), min_size=0, max_size=most))
    pairs += [(draw(values), True), (draw(values), False)]
    scores, member = zip(*pairs, strict=True)
    return np.array(scores), np.array(member)


@given(populations())
def test_auc_is_the_share_of_pairs(population):
    scores, member = population
    wins = sum(Fraction(int(a > b) * 2 + int(a == b), 2) for a in scores[member] for b in scores[~member])
    assert auc(scores, member) == pytest.approx(float(wins / (member.sum() * (~member).sum())), abs=1e-15)


@given(populations())
def test_curve_holds_each_threshold_once(population):
    scores, member = population
    roc = roc_curve(scores, member)
    assert len(roc.thresholds) == len(set(scores.tolist())) + 1
    for threshold, tp, fp in zip(roc.thresholds, roc.tp, roc.fp, strict=True):
        assert tp == (scores[member] >= threshold).sum()
        assert fp == (scores[~member] >= threshold).sum()
    assert (roc.tp[0], roc.fp[0]) == (0, 0)
    assert (roc.tp[-1], roc.fp[-1]) == (member.sum(), (~member).sum())


@given(populations(), st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.29, 1 / 3, 0.5, 1.0]))
def test_best_point_below_a_false_positive_rate(population, max_fpr):
    """The best of all thresholds, by a loop in exact arithmetic on the decimal that was asked for."""
    scores, member = population
    allowed = Fraction(1, 3) if max_fpr == 1 / 3 else Fraction(str(max_fpr))
    best = Fraction(0)
    for threshold in [*scores, None]:
        said = np.zeros(len(scores), bool) if threshold is None else scores >= threshold
        if Fraction(int((said & ~member).sum()), int((~member).sum())) <= allowed:
            best = max(best, Fraction(int((said & member).sum()), int(member.sum())))
    point = tpr_at_fpr(roc_curve(scores, member), max_fpr)
    assert point.tpr == float(best)
    assert point.tp == ((scores >= point.threshold) & member).sum()


def test_false_positives_that_floats_would_miscount():
    """0.29 * 100 is 28.999...96 in floats; 29 false positives of 100 are allowed all the same."""
    scores = np.concatenate([np.arange(100.0), [70.5]])
    member = np.arange(101) == 100
    assert tpr_at_fpr(roc_curve(scores, member), 0.29).fp == 29


def test_scikit_learn_agrees():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    member = rng.random(5000) < 0.3
    scores = np.round(rng.normal(size=5000) + 0.7 * member, 1)
    fpr, tpr, thresholds = metrics.roc_curve(member, scores, drop_intermediate=False)
    roc = roc_curve(scores, member)
    np.testing.assert_array_equal(roc.thresholds, thresholds)
    np.testing.assert_allclose(roc.fpr, fpr, rtol=1e-15)
    np.testing.assert_allclose(roc.tpr, tpr, rtol=1e-15)
    assert auc(scores, member) == pytest.approx(metrics.roc_auc_score(member, scores), abs=1e-13)


def test_ties_are_not_taken_apart():
    """A curve through sorted but tied scores would reach (FPR 0, TPR 1/2) here; no threshold does."""
    scores, member = np.array([1.0, 1.0, 1.0, 0.0]), np.array([True, True, False, False])
    assert tpr_at_fpr(roc_curve(scores, member), 0.4).tpr == 0
    assert auc(scores, member) == 0.75


@pytest.mark.parametrize("shape", [(200,), (10, 20)])
def test_null_scores_give_half(shape):
    member = np.random.default_rng(0).random(shape) < 0.5
    assert auc(np.zeros(shape), member) == 0.5
    assert summarise_attack(np.zeros(shape), member).points[0].tp == 0


def test_clopper_pearson_reference_values():
    lower, upper = clopper_pearson(10, 1000, 0.95)
    assert lower == pytest.approx(ROWS["clopper_pearson_lower"], abs=5e-8)
    assert upper == pytest.approx(ROWS["clopper_pearson_upper"], abs=5e-8)


@pytest.mark.parametrize("trials", [1, 7, 40])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_clopper_pearson_covers_every_proportion(trials, confidence):
    """Each side errs with at most half of the rest, summed over the binomial for a grid of true proportions."""
    ends = [clopper_pearson(k, trials, confidence) for k in range(trials + 1)]
    tail = (1 - confidence) / 2
    for p in np.linspace(0, 1, 201):
        mass = stats.binom.pmf(range(trials + 1), trials, p)
        assert sum(m for m, (low, _) in zip(mass, ends, strict=True) if low > p) <= tail + 1e-12
        assert sum(m for m, (_, high) in zip(mass, ends, strict=True) if high < p) <= tail + 1e-12


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 10), (10, 10), (58, 10_000)])
def test_clopper_pearson_ends_are_where_the_binomial_tail_is_half_the_rest(k, n):
    low, high = clopper_pearson(k, n, 0.95)
    assert low == 0 if k == 0 else stats.binom.sf(k - 1, n, low) == pytest.approx(0.025, rel=1e-9)
    assert high == 1 if k == n else stats.binom.cdf(k, n, high) == pytest.approx(0.025, rel=1e-9)


def test_delong_covers_the_true_area():
    """Scores N(0, 1) and N(1, 1), rounded to have ties: AUC by the same rounding of the two normals."""
    rng, grid = np.random.default_rng(1), np.arange(-20, 25) / 4
    cells = [stats.norm.cdf(grid + 0.125, mu) - stats.norm.cdf(grid - 0.125, mu) for mu in (0, 1)]
    truth = float((cells[1] * (np.cumsum(cells[0]) - cells[0] / 2)).sum())
    inside = 0
    member = np.arange(150) < 60
    for _ in range(600):
        scores = np.round((rng.normal(size=150) + member) * 4) / 4
        low, high = auc_interval(scores, member, 0.9)
        assert low < auc(scores, member) < high
        inside += low <= truth <= high
    # binomial(600, .9) has deviation 7.3; the interval is asymptotic, hence the room below
    assert 510 <= inside <= 565


def test_delong_variance_of_a_small_case_by_hand():
    """Members 3, 1; non-members 2, 0: placements 1, 1/2 and 1, 1/2, so each variance is 1/8 and the sum 1/8."""
    low, high = auc_interval(np.array([3.0, 1.0, 2.0, 0.0]), np.array([True, True, False, False]), 0.5)
    half = stats.norm.ppf(0.75) * math.sqrt(1 / 8)
    assert (low, high) == pytest.approx((0.75 - half, min(1, 0.75 + half)))


def test_interval_of_complete_separation_is_no_point():
    member = np.arange(50) < 20
    low, high = auc_interval(member.astype(float), member)
    assert high == 1
    z2 = stats.norm.ppf(0.975) ** 2
    assert low == pytest.approx(20 / (20 + z2))  # Wilson for 20 of 20


def test_summary_carries_counts_and_intervals():
    rng = np.random.default_rng(2)
    member = np.arange(4000) < 2000
    scores = rng.normal(size=4000) + 2 * member
    summary = summarise_attack(scores, member, max_fprs=(0.001, 0.01))
    assert [point.max_fpr for point in summary.points] == [0.001, 0.01]
    for point in summary.points:
        assert point.fpr <= point.max_fpr
        assert point.tpr_interval == clopper_pearson(point.tp, 2000, 0.95)
        assert point.fpr_interval == clopper_pearson(point.fp, 2000, 0.95)
    assert summary.auc_interval[0] < summary.auc < summary.auc_interval[1]


@pytest.mark.parametrize(
    ("scores", "member", "said"),
    [
        ([1.0, math.nan], [True, False], "NaN"),
        ([1.0, 2.0], [True, True], "2 members and 0"),
        ([1.0, 2.0], [False, False], "0 members and 2"),
        ([1.0, 2.0], [1, 0], "int64"),
        ([1.0], [True, False], "1 scores"),
    ],
)
def test_what_cannot_be_judged_is_refused(scores, member, said):
    with pytest.raises(PrivacyConfigError, match=said):
        roc_curve(np.array(scores), np.array(member))


def test_more_successes_than_trials_are_refused():
    with pytest.raises(PrivacyConfigError, match="11 successes in 10"):
        clopper_pearson(11, 10)
