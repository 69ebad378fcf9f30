"""The split of the budget: against accountants, closed forms, and a search over the certified calibration."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from raptor_hf.analysis.budget import NoiseCosts, gdp_delta, gdp_mu, mu_of, noise_of_mu, optimal_split
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy import calibrate_noise_multipliers

with (Path(__file__).parent.parent / "oracles" / "calibration.csv").open() as file:
    ROWS = list(csv.DictReader(file))


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['rule']} {r['eps']} {r['rho']} {r['B']} {r['T']}")
def test_the_streams_mu_add_in_squares_as_in_the_table(row):
    p, steps = float(row["p"]), int(row["T"])
    parts = [gdp_mu(float(row[name]), p, steps) for name in ("sigma_s", "sigma_e")]
    assert math.hypot(*parts) == pytest.approx(float(row["mu_gdp"]), rel=1e-4)


@given(st.floats(0.05, 12), st.floats(0.05, 4))
def test_delta_is_the_hockey_stick_of_two_normals(epsilon, mu):
    """sup over events of P(A) - exp(eps) Q(A), with P = N(mu, 1) and Q = N(0, 1), by quadrature."""
    cut = epsilon / mu + mu / 2  # where P(x) = exp(eps) Q(x)
    value, _ = integrate.quad(
        lambda x: stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x), cut, cut + 12, epsabs=1e-14
    )
    assert gdp_delta(epsilon, mu) == pytest.approx(value, rel=1e-6, abs=1e-12)


@given(st.floats(0.01, 15), st.floats(1e-10, 1e-2))
def test_mu_of_inverts_delta(epsilon, delta):
    assert gdp_delta(epsilon, mu_of(epsilon, delta)) == pytest.approx(delta, rel=1e-6)


@given(st.floats(0.3, 50), st.floats(1e-3, 1), st.integers(1, 5000))
def test_noise_of_mu_inverts_mu(sigma, p, steps):
    assert noise_of_mu(gdp_mu(sigma, p, steps), p, steps) == pytest.approx(sigma, rel=1e-6)


SETTING = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.01, "steps": 2000}


@given(st.floats(-6, 6))
def test_no_other_split_of_the_budget_is_cheaper(log_ratio):
    costs = NoiseCosts(2.0, 2.0 * math.exp(log_ratio))
    found = optimal_split(costs, **SETTING)
    p, steps = SETTING["sample_rate"], SETTING["steps"]
    mu = mu_of(SETTING["target_epsilon"], SETTING["target_delta"])
    spent = math.hypot(gdp_mu(found.shared_noise, p, steps), gdp_mu(found.expert_noise, p, steps))
    assert spent == pytest.approx(mu, rel=1e-6)
    best = costs.shared * found.shared_noise**2 + costs.expert * found.expert_noise**2
    for share in np.linspace(0.005, 0.995, 199):
        other = [noise_of_mu(mu * math.sqrt(m), p, steps) for m in (share, 1 - share)]
        assert best <= (costs.shared * other[0] ** 2 + costs.expert * other[1] ** 2) * (1 + 1e-9)


def test_the_closed_form_where_noise_is_large():
    setting = {**SETTING, "target_epsilon": 0.05, "sample_rate": 0.2}  # mu^2 / (p^2 T) is tiny
    for ratio in (1e-3, 0.1, 1.0, 25.0):
        found = optimal_split(NoiseCosts(1.0, ratio), **setting)
        assert found.shared_share == pytest.approx(1 / (1 + math.sqrt(ratio)), rel=2e-3)


def test_without_sampling_the_closed_form_is_exact():
    found = optimal_split(NoiseCosts(1.0, 9.0), **{**SETTING, "sample_rate": 1.0, "steps": 40})
    assert found.shared_share == pytest.approx(0.25, abs=1e-6)


def test_equal_costs_split_evenly_and_the_dearer_stream_gets_more():
    even = optimal_split(NoiseCosts(3.0, 3.0), **SETTING)
    assert even.shared_share == pytest.approx(0.5, abs=1e-6) and even.budget_split == pytest.approx(0.5, abs=1e-5)
    splits = [optimal_split(NoiseCosts(1.0, cost), **SETTING).budget_split for cost in (1e-4, 1e-2, 1.0, 1e2, 1e4)]
    assert splits == sorted(splits, reverse=True) and splits[0] > 0.9 and splits[-1] < 0.1


@pytest.mark.parametrize(("epsilon", "ratio"), [(1.0, 0.02), (8.0, 0.02), (8.0, 3.0)])
def test_the_split_is_near_the_best_of_the_certified_calibration(epsilon, ratio):
    """The central limit is an approximation; the calibration is exact. The cost it misses must be small."""
    setting = {"target_epsilon": epsilon, "target_delta": 5e-5, "sample_rate": 0.1, "steps": 60}

    def cost(rho: float) -> float:
        found = calibrate_noise_multipliers(**setting, budget_split=rho)
        return found.shared**2 + ratio * found.expert**2

    rho = optimal_split(NoiseCosts(1.0, ratio), **setting).budget_split
    mine = cost(rho)
    others = [cost(other) for other in (rho / 3, rho / 1.5, 1 - (1 - rho) / 1.5, 1 - (1 - rho) / 3)]
    assert mine <= min(others) * 1.002
    assert max(others) > mine * 1.02  # the cost does depend on the split


@pytest.mark.parametrize("costs", [NoiseCosts(0.0, 1.0), NoiseCosts(1.0, -1.0), NoiseCosts(math.nan, 1.0)])
def test_costs_that_are_not_positive_are_refused(costs):
    with pytest.raises(PrivacyConfigError, match="costs"):
        optimal_split(costs, **SETTING)
