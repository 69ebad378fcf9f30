"""Epsilon against reference values, known formulas, an independent accountant, and its own monotonicity."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy import EpsilonBounds, Mechanism, compute_epsilon, default_delta, max_cycles
from raptor_hf.privacy._estimate import estimate_epsilon
from raptor_hf.privacy._pld import pld_installed
from raptor_hf.privacy._prv import AddOneRecord, RemoveOneRecord, prv_bounds, prv_eps_error
from raptor_hf.privacy.accounting import EpsilonRangeError

ORACLE = Path(__file__).parent.parent / "oracles" / "two_stream_epsilon.csv"
ROWS = list(csv.DictReader(ORACLE.read_text().splitlines()))
SST2 = dict(rate=1000 / 67349, steps=1347, delta=67349**-1.1)


def _groups(row: dict[str, str]) -> list[Mechanism]:
    return [Mechanism(float(row[name]), float(row["p"]), int(row["T"])) for name in ("sigma_s", "sigma_e")]


def _tolerance(epsilon: float) -> float:
    return 1e-3 * epsilon + 0.002


def _check_row(row: dict[str, str]) -> None:
    groups, delta, pld = _groups(row), float(row["delta"]), float(row["pld_adapt"])
    bounds = compute_epsilon(groups, delta)
    error = prv_eps_error(groups, delta, pld)
    assert bounds.lower <= bounds.estimate <= bounds.upper
    assert bounds.estimate == pytest.approx(float(row["prv_est"]), abs=_tolerance(pld))
    assert abs(bounds.upper - pld) <= _tolerance(pld) + error
    assert abs(bounds.lower - pld) <= _tolerance(pld) + error
    assert bounds.lower <= pld <= bounds.upper


@pytest.mark.parametrize("index", range(0, len(ROWS), 5))
def test_matches_the_reference_values(index: int) -> None:
    _check_row(ROWS[index])


@pytest.mark.slow
def test_matches_all_reference_values() -> None:
    for row in ROWS:
        _check_row(row)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['n']}-{row['B']}-{row['T']}-{row['eps_target']}")
def test_the_estimate_matches_every_reference_value(row: dict[str, str]) -> None:
    pld = float(row["pld_adapt"])
    estimate = estimate_epsilon(_groups(row), float(row["delta"]))
    assert estimate is not None
    assert estimate <= pld * (1 + 1e-6)  # PLD is pessimistic
    assert estimate == pytest.approx(pld, rel=3e-4)


@pytest.mark.parametrize("index", [1, 7, 27, 34, 53])
def test_pld_matches_the_reference_values(index: int) -> None:
    pytest.importorskip("dp_accounting")
    row = ROWS[index]
    bounds = compute_epsilon(_groups(row), float(row["delta"]), accountant="pld")
    assert bounds.upper == pytest.approx(float(row["pld_adapt"]), abs=_tolerance(float(row["pld_adapt"])))
    assert bounds.lower == 0.0


@pytest.mark.slow
def test_prv_brackets_pld_on_all_rows() -> None:
    pytest.importorskip("dp_accounting")
    for row in ROWS:
        groups, delta = _groups(row), float(row["delta"])
        prv, pld = compute_epsilon(groups, delta), compute_epsilon(groups, delta, accountant="pld")
        assert prv.lower <= pld.upper <= prv.upper
        assert pld.upper == pytest.approx(float(row["pld_adapt"]), abs=_tolerance(float(row["pld_adapt"])))


@pytest.mark.skipif(pld_installed(), reason="dp-accounting is installed")
def test_pld_without_its_package_says_what_to_install() -> None:
    with pytest.raises(PrivacyConfigError, match=r"pip install 'raptor-hf\[pld\]'"):
        compute_epsilon([(1.0, 0.1, 3)], 1e-5, accountant="pld")


# Edges


@pytest.mark.parametrize("mechanisms", [[], [(1.0, 0.1, 0)], [(1.0, 0.1, 0), (2.0, 1.0, 0)]])
def test_no_step_costs_nothing(mechanisms: list) -> None:
    assert compute_epsilon(mechanisms, 1e-5) == EpsilonBounds(0.0, 0.0, 0.0)


def test_unequal_steps_and_one_stream() -> None:
    shared, expert = Mechanism(1.2, 0.02, 200), Mechanism(3.0, 0.02, 199)
    both = compute_epsilon([shared, expert], 1e-5)
    alone = compute_epsilon([shared], 1e-5)
    assert alone.upper < both.upper < compute_epsilon([shared, expert._replace(steps=200)], 1e-5).upper
    assert compute_epsilon([shared, expert._replace(steps=0)], 1e-5) == alone


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 2.5])
@pytest.mark.parametrize("delta", [1e-10, 1e-6, 1e-3])
def test_without_subsampling_it_is_the_analytic_gaussian(mu: float, delta: float) -> None:
    bounds = compute_epsilon([Mechanism(2 / mu, 1.0, 3), (2 / mu, 1.0, 1)], delta)
    epsilon = bounds.estimate
    excess = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
    if epsilon > 0:
        assert excess == pytest.approx(delta, rel=1e-4)
    else:
        assert excess <= delta
    assert bounds.lower <= bounds.estimate <= bounds.upper


def test_subsampled_and_full_releases_compose() -> None:
    full, sampled = Mechanism(4.0, 1.0, 2), Mechanism(1.0, 0.02, 50)
    both = compute_epsilon([full, sampled], 1e-5)
    assert both.upper > max(compute_epsilon([one], 1e-5).upper for one in (full, sampled))
    expected = estimate_epsilon([full, sampled], 1e-5)
    assert both.estimate == pytest.approx(expected, rel=1e-4)


def test_a_delta_that_covers_everything_costs_nothing() -> None:
    assert compute_epsilon([(100.0, 0.01, 1)], 0.1) == EpsilonBounds(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("mechanism", "delta", "message"),
    [
        ((0.2, 0.1, 1), 1e-5, r"0\.25 <= noise_multiplier"),
        ((0.0, 0.1, 1), 1e-5, "greater than zero"),
        ((-1.0, 0.1, 1), 1e-5, "greater than zero"),
        ((math.nan, 0.1, 1), 1e-5, "finite"),
        ((math.inf, 0.1, 1), 1e-5, "finite"),
        ((1.0, 0.0, 1), 1e-5, r"\(0, 1\]"),
        ((1.0, 1.1, 1), 1e-5, r"\(0, 1\]"),
        ((1.0, 0.1, 1.5), 1e-5, "whole number"),
        ((1.0, 0.1, -1), 1e-5, "whole number"),
        ((1.0, 0.1, 1), 1e-11, r"1e-10 <= delta"),
        ((1.0, 0.1, 1), 0.0, r"1e-10 <= delta"),
        ((1.0, 0.1, 1), 1.0, r"1e-10 <= delta"),
        ((1.0, 0.1), 1e-5, "triple"),
        ((0.5, 1e-4, 100_000), 1e-10, "rounding error"),
    ],
)
def test_outside_the_guarded_ranges_is_an_error_that_names_them(mechanism: tuple, delta: float, message: str) -> None:
    with pytest.raises(PrivacyConfigError, match=message):
        compute_epsilon([mechanism], delta)


@pytest.mark.parametrize("mechanism", [(0.25, 1.0, 100), (0.5, 0.5, 1000), (1.0, 0.3, 1000), (0.3, 0.3, 100_000)])
def test_an_epsilon_above_the_range_is_an_error_never_capped(mechanism: tuple) -> None:
    with pytest.raises(EpsilonRangeError, match="above 20"):
        compute_epsilon([mechanism], 1e-5)


def test_an_unknown_accountant_is_an_error() -> None:
    with pytest.raises(PrivacyConfigError, match="'prv', 'pld'"):
        compute_epsilon([(1.0, 0.1, 1)], 1e-5, accountant="rdp")


def test_rounding_of_many_steps_is_part_of_the_upper_bound() -> None:
    # At this delta the transform's rounding error alone used to move epsilon below the truth.
    mechanism = (0.5, 1e-4, 100_000)
    assert compute_epsilon([mechanism], 1.01e-9).upper > estimate_epsilon([mechanism], 1.01e-9)


# Properties


def test_monotone_in_noise_steps_rate_and_delta() -> None:
    def upper(sigma: float = 1.0, p: float = 0.02, steps: int = 200, delta: float = 1e-5) -> float:
        return compute_epsilon([(sigma, p, steps)], delta).upper

    for name, values, growing in [
        ("sigma", [0.5, 0.7, 1.0, 1.5, 4.0, 20.0], False),
        ("p", [0.001, 0.01, 0.02, 0.05], True),
        ("steps", [1, 10, 100, 200, 1000], True),
        ("delta", [1e-9, 1e-7, 1e-5, 1e-3], False),
    ]:
        epsilons = [upper(**{name: value}) for value in values]
        assert epsilons == sorted(epsilons, reverse=not growing), name
        assert len(set(epsilons)) == len(epsilons), name


def test_alternating_steps_cost_one_grouped_query() -> None:
    grouped = [Mechanism(2.3, 0.0015, 50_000), Mechanism(16.5, 0.0015, 50_000)]
    alternating = [grouped[0]._replace(steps=1), grouped[1]._replace(steps=1)] * 50_000
    expected = compute_epsilon(grouped, 1e-6)
    start = time.process_time()
    assert compute_epsilon(alternating, 1e-6) == expected
    assert time.process_time() - start < 5.0


def test_removing_costs_at_least_adding_and_the_larger_is_reported() -> None:
    groups, delta = [(0.7, 0.05, 100)], 1e-5
    one = prv_bounds(groups, delta, 0.01, both_directions=False)
    both = prv_bounds(groups, delta, 0.01)
    assert both[2] >= one[2]


@pytest.mark.parametrize(("sigma", "p"), [(0.5, 0.01), (2.0, 0.3), (16.0, 0.001)])
def test_privacy_losses_have_the_distribution_that_sampling_gives(sigma: float, p: float) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(scale=sigma, size=400_000)
    for mechanism, x, sign in [
        (RemoveOneRecord, noise + (rng.random(noise.size) < p), 1.0),
        (AddOneRecord, noise, -1.0),
    ]:
        loss = sign * np.log1p(p * np.expm1((2 * x - 1) / (2 * sigma**2)))
        edges = np.quantile(loss, [0.01, 0.1, 0.5, 0.9, 0.99])
        exact = mechanism(p, sigma)
        np.testing.assert_allclose(exact.cdf(edges), [0.01, 0.1, 0.5, 0.9, 0.99], atol=4e-3)
        np.testing.assert_allclose(exact.probability(edges[:-1], edges[1:]), [0.09, 0.4, 0.4, 0.09], atol=4e-3)


def test_default_delta() -> None:
    assert default_delta(67349) == pytest.approx(4.8846756719704545e-06, rel=1e-12)
    with pytest.raises(PrivacyConfigError, match="whole number"):
        default_delta(1)


# Stopping


def test_max_cycles_is_the_last_that_fits() -> None:
    noise, rate, delta = (1.2, 5.0), 0.02, 1e-5
    cycles = max_cycles(1.5, delta, noise, rate)

    def upper(count: int) -> float:
        return compute_epsilon([(sigma, rate, count) for sigma in noise], delta).upper

    assert upper(cycles) <= 1.5 < upper(cycles + 1)
    assert max_cycles(1.5, delta, noise, rate, spent=(100, 100)) == cycles - 100
    assert max_cycles(1.5, delta, noise, rate, spent=(100, 100), limit=50) == 50
    assert max_cycles(1.5, delta, noise, rate, spent=(cycles + 1, cycles)) == 0
    assert max_cycles(1.5, delta, noise, rate, spent=(10 * cycles, cycles)) == 0


def test_max_cycles_of_one_stream_and_of_none() -> None:
    assert max_cycles(2.0, 1e-5, (1.2, None), 0.02) > max_cycles(2.0, 1e-5, (1.2, 5.0), 0.02) > 0
    with pytest.raises(PrivacyConfigError, match="Both noise multipliers"):
        max_cycles(2.0, 1e-5, (None, None), 0.02)
