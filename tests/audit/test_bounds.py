"""Epsilon lower bounds: reference values, monotonicity, and validity by simulation of mechanisms of known epsilon."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from raptor_hf.audit import (
    bounds,
    clopper_pearson,
    epsilon_from_mu,
    epsilon_lower_bound,
    mu_lower_bound,
    roc_curve,
    split_epsilon_bound,
)
from raptor_hf.errors import PrivacyConfigError

ROOT = Path(__file__).parent.parent
ROWS = {
    row["formula"]: float(row["value"])
    for row in csv.DictReader((ROOT / "oracles" / "audit_bounds.csv").read_text().splitlines())
}


def failures_allowed(runs: int, level: float) -> int:
    """A count that a bound failing with probability `level` exceeds once in 10,000 test runs."""
    return int(stats.binom.ppf(1 - 1e-4, runs, level))


def test_reference_value():
    assert epsilon_lower_bound(600, 1000, 5, 1000, delta=1e-5) == pytest.approx(
        ROWS["epsilon_lower_bound_cp"], abs=5e-5
    )


def test_what_the_papers_table_supports():
    """0.58 % TPR at 10 false positives of 10,000: .87, at a claimed epsilon of 8."""
    assert epsilon_lower_bound(58, 10_000, 10, 10_000, delta=0) == pytest.approx(0.87, abs=0.005)


def test_both_directions():
    """Swapping (TP, FP) with (TN, FN) swaps the two inequalities, so the bound is the same."""
    forward = epsilon_lower_bound(300, 1000, 2, 800, delta=1e-3)
    assert epsilon_lower_bound(798, 800, 700, 1000, delta=1e-3) == pytest.approx(forward)
    assert forward > 3


def test_both_rates_err_by_half_of_the_rest():
    tpr, fpr = clopper_pearson(300, 1000, 0.9)[0], clopper_pearson(7, 800, 0.9)[1]
    assert epsilon_lower_bound(300, 1000, 7, 800, delta=0.01, confidence=0.9) == pytest.approx(
        math.log((tpr - 0.01) / fpr)
    )


@given(st.integers(1, 400), st.integers(0, 400), st.integers(0, 400), st.floats(0, 0.5), st.floats(0.5, 0.999))
def test_monotone(n, tp, fp, delta, confidence):
    tp, fp = min(tp, n), min(fp, n)
    bound = epsilon_lower_bound(tp, n, fp, n, delta=delta, confidence=confidence)
    assert 0 <= bound < math.inf
    if tp < n:
        assert epsilon_lower_bound(tp + 1, n, fp, n, delta=delta, confidence=confidence) >= bound
    if fp < n:
        assert epsilon_lower_bound(tp, n, fp + 1, n, delta=delta, confidence=confidence) <= bound
    assert epsilon_lower_bound(tp, n, fp, n, delta=delta / 2, confidence=confidence) >= bound
    assert epsilon_lower_bound(tp, n, fp, n, delta=delta, confidence=confidence / 2) >= bound


def test_delta_explains_what_it_can():
    assert epsilon_lower_bound(50, 1000, 0, 1000, delta=0.04) == 0
    assert epsilon_lower_bound(50, 1000, 0, 1000, delta=0.0) > 2


# --- Gaussian differential privacy ---


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_epsilon_of_mu_is_the_hockey_stick(mu, delta):
    """delta(eps) integrated over the densities of N(mu, 1) and N(0, 1)."""
    epsilon = epsilon_from_mu(mu, delta)
    if epsilon == 0:  # even total variation is below delta
        assert 2 * stats.norm.cdf(mu / 2) - 1 <= delta
        return
    start = epsilon / mu + mu / 2

    def excess(x):
        return stats.norm.pdf(x - mu) * -math.expm1(epsilon + stats.norm.logpdf(x) - stats.norm.logpdf(x - mu))

    found = integrate.quad(excess, start, start + 12, epsabs=0, epsrel=1e-9, points=[start + 0.5, start + 2])[0]
    assert found == pytest.approx(delta, rel=1e-6)


def test_epsilon_of_mu_agrees_with_dp_accounting():
    accounting = pytest.importorskip("dp_accounting")
    for epsilon, delta in [(0.5, 1e-6), (1.0, 1e-5), (8.0, 1e-3)]:
        sigma = accounting.get_sigma_gaussian(epsilon, delta)
        assert epsilon_from_mu(1 / sigma, delta) == pytest.approx(epsilon, rel=1e-5)


def test_epsilon_of_mu_at_its_ends():
    assert epsilon_from_mu(0.0, 1e-5) == 0
    assert epsilon_from_mu(1e-9, 1e-5) == 0
    assert epsilon_from_mu(math.inf, 1e-5) == math.inf
    assert epsilon_from_mu(50.0, 1e-5) == pytest.approx(50**2 / 2 + 50 * stats.norm.isf(1e-5), rel=1e-3)
    with pytest.raises(PrivacyConfigError, match="mu=-1"):
        epsilon_from_mu(-1.0, 1e-5)


def test_mu_bound_is_the_distance_of_the_quantiles():
    tpr, fpr = clopper_pearson(300, 1000)[0], clopper_pearson(7, 800)[1]
    mu = mu_lower_bound(300, 1000, 7, 800)
    # a test at threshold t between N(0, 1) and N(mu, 1) has these very rates
    t = stats.norm.isf(fpr)
    assert stats.norm.sf(t - mu) == pytest.approx(tpr)
    assert mu_lower_bound(10, 100, 10, 100) == 0


# --- Validity by simulation ---


def trials(mu: float, each: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of a Gaussian mechanism with distance mu: independent runs without (0) and with (mu) the canary."""
    member = np.arange(2 * each) < each
    return np.random.default_rng(seed).normal(size=2 * each) + mu * member, member


def refuted_by_some_threshold(scores, member, confidence):
    """The mistake that the split avoids: does the best threshold, judged by the trials that chose it, refute 0?"""
    roc, tail = roc_curve(scores, member), (1 - confidence) / 2
    tp, fp = roc.tp[1:-1], roc.fp[1:-1]
    tpr = stats.beta.ppf(tail, np.maximum(tp, 1e-9), roc.members - tp + 1)
    fpr = stats.beta.isf(tail, fp + 1, np.maximum(roc.non_members - fp, 1e-9))
    return bool((tpr > fpr).any())


def test_null_scores_seldom_give_a_bound():
    runs, above, naive = 400, 0, 0
    for seed in range(runs):
        scores, member = trials(0.0, 300, seed)
        found = split_epsilon_bound(scores, member, delta=1e-5, confidence=0.8, choose="mu", seed=seed)
        above += found.epsilon > 0 or found.mu > 0
        naive += refuted_by_some_threshold(scores, member, 0.8)
    assert above <= failures_allowed(runs, 0.2)
    assert naive > failures_allowed(runs, 0.2)  # so the simulation can tell a wrong procedure


@pytest.mark.parametrize("choose", ["epsilon", "mu"])
def test_a_gaussian_mechanism_is_seldom_overstated(choose):
    """Confidence .8, so that a bound without the right correction shows in 300 runs."""
    mu, delta, runs = 1.0, 0.02, 300
    truth = epsilon_from_mu(mu, delta)
    over = over_mu = naive = 0
    for seed in range(runs):
        scores, member = trials(mu, 300, 1000 + seed)
        found = split_epsilon_bound(scores, member, delta=delta, confidence=0.8, choose=choose, seed=seed)
        over += found.epsilon > truth
        over_mu += found.mu > mu
        assert found.mu_epsilon == epsilon_from_mu(found.mu, delta)
        # no confidence at all: the ratio of the observed rates, at the best threshold with a false positive
        roc = roc_curve(scores, member)
        ratios = np.log(np.maximum(roc.tpr - delta, 1e-300)[roc.fp > 0] / roc.fpr[roc.fp > 0])
        naive += ratios.max() > truth
    assert over <= failures_allowed(runs, 0.2)
    assert over_mu <= failures_allowed(runs, 0.2)
    assert naive > failures_allowed(runs, 0.2)


def test_many_trials_come_close_to_the_truth():
    mu, delta = 1.0, 0.05
    scores, member = trials(mu, 400_000, 7)
    truth = epsilon_from_mu(mu, delta)
    found = split_epsilon_bound(scores, member, delta=delta)
    assert 0.95 * truth < found.epsilon <= truth
    found = split_epsilon_bound(scores, member, delta=delta, choose="mu")
    assert 0.97 * mu < found.mu <= mu
    assert 0.95 * truth < found.mu_epsilon <= truth


def test_the_split_judges_on_the_half_that_did_not_choose():
    scores, member = trials(2.0, 501, 3)
    found = split_epsilon_bound(scores, member, delta=1e-5)
    assert (found.members, found.non_members) == (251, 251)
    assert found.tp <= ((scores >= found.threshold) & member).sum()
    assert found.epsilon == epsilon_lower_bound(found.tp, 251, found.fp, 251, delta=1e-5)
    assert split_epsilon_bound(scores, member, delta=1e-5) == found
    assert split_epsilon_bound(scores, member, delta=1e-5, seed=1).tp != found.tp


def test_no_trial_both_chooses_and_judges(monkeypatch):
    scores, member = trials(1.5, 200, 4)
    seen, choose = [], bounds._best_threshold
    monkeypatch.setattr(bounds, "_best_threshold", lambda s, *rest: seen.append(s) or choose(s, *rest))
    found = split_epsilon_bound(scores, member, delta=1e-3)
    judging = ~np.isin(scores, seen[0])
    assert judging.sum() == 200
    assert found.tp == ((scores >= found.threshold) & member & judging).sum()
    assert found.fp == ((scores >= found.threshold) & ~member & judging).sum()


def test_order_of_the_trials_cannot_choose_the_threshold():
    """Constant scores in the order of membership: no threshold separates them."""
    member = np.arange(1000) < 500
    found = split_epsilon_bound(np.zeros(1000), member, delta=1e-5)
    assert (found.epsilon, found.mu) == (0, 0)


def test_one_trial_of_a_kind_is_refused():
    with pytest.raises(PrivacyConfigError, match="1 trial of one kind"):
        split_epsilon_bound(np.arange(5.0), np.arange(5) == 0, delta=1e-5)
