"""The one-run audit: exact arithmetic, reference values, and validity by simulation of mechanisms of known epsilon."""

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

from raptor_hf.audit import epsilon_from_mu, guess_membership, one_run, one_run_audit, one_run_epsilon, one_run_p_value
from raptor_hf.errors import PrivacyConfigError

ORACLE = Path(__file__).parent.parent / "oracles" / "audit_bounds.csv"
ROWS = {row["formula"]: float(row["value"]) for row in csv.DictReader(ORACLE.read_text().splitlines())}


def failures_allowed(runs: int, level: float) -> int:
    """A count that a bound failing with probability `level` exceeds once in 10,000 test runs."""
    return int(stats.binom.ppf(1 - 1e-4, runs, level))


def exact_p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> Fraction:
    """The theorem in rational arithmetic, by its definition: two tails for each i up to m."""
    q = Fraction(1 / (1 + math.exp(-epsilon)))
    mass = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    tail = [sum(mass[max(k, 0) :], Fraction(0)) for k in range(-m, r + 2)]

    def at_least(k: int) -> Fraction:
        return tail[k + m]

    alpha = max((at_least(v - i) - at_least(v)) / i for i in range(1, m + 1))
    return min(Fraction(1), at_least(v) + 2 * m * Fraction(delta) * alpha)


@given(st.data())
def test_p_value_is_the_theorem(data):
    m = data.draw(st.integers(1, 14))
    r = data.draw(st.integers(0, m))
    v = data.draw(st.integers(0, r))
    epsilon = data.draw(st.floats(0.0, 6.0))
    delta = data.draw(st.sampled_from([0.0, 1e-8, 1e-3, 0.2]))
    found = one_run_p_value(m, r, v, epsilon, delta)
    assert found == pytest.approx(float(exact_p_value(m, r, v, epsilon, delta)), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize(("v", "epsilon"), [(5400, 0.1), (7600, 1.0), (9900, 4.5)])
def test_p_value_of_ten_thousand_canaries(v, epsilon):
    """Against log-gamma sums in extended precision: numpy's longdouble, each term by itself."""
    m = r = 10_000
    q = np.longdouble(1) / (1 + np.exp(-np.longdouble(epsilon)))
    k = np.arange(r + 1)
    factorials = np.concatenate([[np.longdouble(0)], np.cumsum(np.log(np.arange(1, r + 1).astype(np.longdouble)))])
    mass = np.exp(factorials[r] - factorials - factorials[::-1] + k * np.log(q) + (r - k) * np.log1p(-q))
    beta = mass[v:].sum()
    below = np.cumsum(mass[:v][::-1])
    expected = float(beta + 2 * m * np.longdouble(1e-6) * (below / np.arange(1, v + 1)).max())
    assert one_run_p_value(m, r, v, epsilon, 1e-6) == pytest.approx(min(1.0, expected), rel=1e-8)


def test_reference_value():
    assert one_run_epsilon(1000, 100, 80, delta=1e-5) == pytest.approx(ROWS["one_run_epsilon"], abs=5e-5)


@pytest.mark.parametrize("r", [10, 1000, 10_000])
def test_all_right_without_delta_has_a_closed_form(r):
    """(e^eps / (1 + e^eps))^r = 1 - confidence."""
    expected = -math.log(0.05 ** (-1 / r) - 1)
    assert one_run_epsilon(r, r, r, delta=0.0) == pytest.approx(max(0.0, expected), abs=1e-8)


@given(st.data())
def test_bound_is_monotone(data):
    m = data.draw(st.integers(20, 400))
    r = data.draw(st.integers(10, m))
    v = data.draw(st.integers(r // 2, r))
    delta = data.draw(st.sampled_from([0.0, 1e-6, 1e-3]))
    bound = one_run_epsilon(m, r, v, delta=delta)
    slack = 1e-8
    if v < r:
        assert one_run_epsilon(m, r, v + 1, delta=delta) >= bound - slack
    assert one_run_epsilon(m, r, v, delta=delta, confidence=0.99) <= bound + slack
    assert one_run_epsilon(m, r, v, delta=2 * delta + 1e-6) <= bound + slack
    assert one_run_epsilon(m + 50, r, v, delta=delta) <= bound + slack


def test_bound_is_where_the_p_value_meets_the_level():
    bound = one_run_epsilon(2000, 600, 500, delta=1e-5, confidence=0.9)
    assert one_run_p_value(2000, 600, 500, bound, 1e-5) == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("counts", [(10, 11, 5), (10, 5, 6), (0, 0, 0), (10, 5, -1)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(PrivacyConfigError):
        one_run_p_value(*counts, 1.0, 1e-5)


# --- Guesses ---


def test_guesses_are_the_ends_of_the_order():
    guess = guess_membership(np.array([3.0, -1.0, 9.0, 0.0, 5.0]), 2, 1)
    assert guess.tolist() == [0, -1, 1, 0, 1]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=12), st.data())
def test_guesses_do_not_depend_on_the_order_of_the_canaries(scores, data):
    """Whatever the ties: the canaries may be sorted by their coins."""
    values = np.array(scores)
    most = data.draw(st.integers(0, len(values)))
    least = data.draw(st.integers(0, len(values) - most))
    order = np.array(data.draw(st.permutations(range(len(values)))))
    guess = guess_membership(values, most, least)
    assert (guess_membership(values[order], most, least) == guess[order]).all()
    assert (guess == 1).sum() <= most
    assert (guess == -1).sum() <= least


def test_tied_scores_sorted_by_coin_reveal_nothing():
    member = np.arange(400) < 200
    for selection in ("union", "split"):
        found = one_run_audit(np.zeros(400), member, delta=0.0, selection=selection)
        assert (found.epsilon, found.correct) == (0, 0)


# --- Validity by simulation ---


def gaussian_run(canaries: int, mu: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """One output of a Gaussian mechanism: each canary owns a coordinate, so one coin moves the mean by mu."""
    rng = np.random.default_rng(seed)
    coins = rng.random(canaries) < 0.5
    return rng.normal(size=canaries) + mu * coins, coins


def refuted_without_correction(scores, coins, level):
    """The mistake that the union bound avoids: is epsilon 0 refuted by the best of all numbers of guesses?"""
    order = coins[np.argsort(scores)]
    for size in range(4, scores.size // 2, 2):
        right = int(order[-size:].sum() + (~order[:size]).sum())
        if one_run_p_value(scores.size, 2 * size, right, 0.0, 0.0) < level:
            return True
    return False


@pytest.mark.parametrize("selection", ["union", "split"])
def test_null_scores_seldom_give_a_bound(selection):
    runs, above, naive = 300, 0, 0
    for seed in range(runs):
        scores, coins = gaussian_run(80, 0.0, seed)
        above += one_run_audit(scores, coins, delta=1e-5, confidence=0.8, selection=selection, seed=seed).epsilon > 0
        naive += refuted_without_correction(scores, coins, 0.2)
    assert above <= failures_allowed(runs, 0.2)
    assert naive > failures_allowed(runs, 0.2)  # so the simulation can tell a wrong procedure


@pytest.mark.parametrize("selection", ["union", "split", "fixed"])
def test_randomised_response_is_seldom_overstated(selection):
    """The mechanism that the theorem is tight for: each coin is told truly with probability e^eps / (1 + e^eps)."""
    epsilon, runs, over, positive = 1.0, 300, 0, 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        coins = rng.random(500) < 0.5
        told = coins == (rng.random(500) < 1 / (1 + math.exp(-epsilon)))
        scores = told + rng.random(500) / 2  # the fraction breaks ties, and says nothing
        guesses = (250, 250) if selection == "fixed" else None
        found = one_run_audit(
            scores, coins, delta=0.0, confidence=0.8, selection=selection, guesses=guesses, seed=seed
        ).epsilon
        over += found > epsilon
        positive += found > 0.3
    assert over <= failures_allowed(runs, 0.2)
    assert positive > runs * 0.9
    if selection == "fixed":  # tight, so a bound that is only conservative would be an error here
        assert over > runs * 0.1


@pytest.mark.parametrize("selection", ["union", "split"])
def test_a_gaussian_mechanism_is_never_overstated(selection):
    """Delta-approximate: its bound is loose, so no run in 200 exceeds the truth."""
    mu, delta = 1.0, 1e-3
    truth = epsilon_from_mu(mu, delta)
    for seed in range(200):
        scores, coins = gaussian_run(600, mu, seed)
        found = one_run_audit(scores, coins, delta=delta, selection=selection, seed=seed)
        assert 0 <= found.epsilon <= truth


def test_many_canaries_come_close_to_the_truth():
    rng = np.random.default_rng(5)
    coins = rng.random(10_000) < 0.5
    told = coins == (rng.random(10_000) < 1 / (1 + math.exp(-2.0)))
    scores = told + rng.random(10_000) / 2
    fixed = one_run_audit(scores, coins, delta=1e-8, selection="fixed", guesses=(5000, 5000))
    assert 1.9 < fixed.epsilon <= 2.0
    assert 1.85 < one_run_audit(scores, coins, delta=1e-8).epsilon <= 2.0
    assert 1.85 < one_run_audit(scores, coins, delta=1e-8, selection="split").epsilon <= 2.0


def test_no_privacy_gives_a_large_bound():
    scores, coins = gaussian_run(2000, 12.0, 0)
    assert one_run_audit(scores, coins, delta=1e-5).epsilon > 4


def test_the_audit_says_what_it_did():
    scores, coins = gaussian_run(301, 3.0, 1)
    union = one_run_audit(scores, coins, delta=1e-5)
    assert (union.canaries, union.selection) == (301, "union")
    assert union.tests > 4
    level = 1 - 0.05 / union.tests
    assert union.epsilon == one_run_epsilon(301, union.guesses, union.correct, delta=1e-5, confidence=level)
    split = one_run_audit(scores, coins, delta=1e-5, selection="split")
    assert (split.canaries, split.tests) == (151, 1)
    assert split.epsilon == one_run_epsilon(151, split.guesses, split.correct, delta=1e-5)
    guess = guess_membership(scores, 20, 10)
    fixed = one_run_audit(scores, coins, delta=1e-5, selection="fixed", guesses=(20, 10))
    assert fixed.correct == ((guess == 1) & coins).sum() + ((guess == -1) & ~coins).sum()
    assert (fixed.guesses, fixed.most, fixed.least) == (30, 20, 10)


def test_no_canary_both_chooses_and_judges(monkeypatch):
    scores, coins = gaussian_run(301, 2.0, 2)
    seen, bound = [], one_run._bound
    monkeypatch.setattr(one_run, "_bound", lambda s, *rest: seen.append(s) or bound(s, *rest))
    one_run_audit(scores, coins, delta=1e-5, selection="split")
    assert len(seen) > 3
    assert all(len(s) == 150 and not np.isin(s, seen[-1]).any() for s in seen[:-1])
    assert len(seen[-1]) == 151


@pytest.mark.parametrize("members", [10, 990])
def test_coins_that_were_not_fair_are_refused(members):
    with pytest.raises(PrivacyConfigError, match=f"{members} of 1000 canaries"):
        one_run_audit(np.arange(1000.0), np.arange(1000) < members, delta=1e-5)


def test_few_coins_may_all_fall_alike():
    for coins in (np.zeros(12, bool), np.ones(12, bool)):
        for selection in ("union", "split"):
            found = one_run_audit(np.arange(12.0), coins, delta=0.0, selection=selection)
            assert (found.epsilon, found.canaries) == (0, 12 if selection == "union" else 6)


@pytest.mark.parametrize("empty", [np.zeros(0), np.array([math.nan, 1.0])])
def test_scores_that_are_none_are_refused(empty):
    with pytest.raises(PrivacyConfigError):
        one_run_audit(empty, np.zeros(empty.size, bool), delta=1e-5)


def test_guesses_belong_to_the_fixed_selection():
    scores, coins = gaussian_run(50, 1.0, 0)
    with pytest.raises(PrivacyConfigError, match="fixed"):
        one_run_audit(scores, coins, delta=1e-5, selection="fixed")
    with pytest.raises(PrivacyConfigError, match="union"):
        one_run_audit(scores, coins, delta=1e-5, guesses=(5, 5))


@pytest.mark.parametrize("canaries", [2, 3, 17])
@pytest.mark.parametrize("selection", ["union", "split"])
def test_few_canaries_bound_little(canaries, selection):
    coins = np.arange(canaries) % 2 == 0
    found = one_run_audit(coins + np.arange(canaries) / 100, coins, delta=1e-5, selection=selection)
    assert 0 <= found.epsilon < 3
