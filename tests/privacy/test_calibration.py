"""Noise multipliers: never above the target, close below it, equal to reference values, monotone in the split."""

from __future__ import annotations

import csv
import time
import warnings
from pathlib import Path

import pytest

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy import NoiseMultipliers, calibrate_noise_multipliers, compute_epsilon
from raptor_hf.privacy._estimate import estimate_epsilon

ORACLES = Path(__file__).parent.parent / "oracles"
RULES = {"joint": "joint", "paper_half": "basic"}
ROWS = list(csv.DictReader((ORACLES / "calibration.csv").read_text().splitlines()))
TARGETS = list(csv.DictReader((ORACLES / "two_stream_epsilon.csv").read_text().splitlines()))
RATE, STEPS, DELTA = 0.02, 300, 1e-5


def _certified(found: NoiseMultipliers, rate: float, steps: int, delta: float) -> float:
    sigmas = [sigma for sigma in (found.shared, found.expert) if sigma is not None]
    return compute_epsilon([(sigma, rate, steps) for sigma in sigmas], delta).upper


def _check_row(row: dict[str, str]) -> None:
    target, delta, rate, steps = float(row["eps"]), float(row["delta"]), float(row["p"]), int(row["T"])
    start = time.process_time()
    found = calibrate_noise_multipliers(
        target, delta, rate, steps, budget_split=float(row["rho"]), rule=RULES[row["rule"]]
    )
    assert time.process_time() - start < 5.0
    assert found.shared == pytest.approx(float(row["sigma_s"]), rel=5e-3)
    assert found.expert == pytest.approx(float(row["sigma_e"]), rel=5e-3)
    assert found.epsilon_upper == _certified(found, rate, steps, delta) <= target
    if row["rule"] == "joint":
        assert found.epsilon_upper >= 0.99 * target


@pytest.mark.parametrize("index", range(0, len(ROWS), 2))
def test_matches_the_reference_multipliers(index: int) -> None:
    _check_row(ROWS[index])


@pytest.mark.slow
def test_matches_all_reference_multipliers() -> None:
    for row in ROWS:
        _check_row(row)


def _check_target(row: dict[str, str]) -> None:
    target, delta, rate, steps = (float(row["eps_target"]), float(row["delta"]), float(row["p"]), int(row["T"]))
    start = time.process_time()
    found = calibrate_noise_multipliers(target, delta, rate, steps)
    assert time.process_time() - start < 5.0
    assert (0.99 if target >= 0.5 else 0.965) * target <= found.epsilon_upper <= target
    # The independent estimate of what these multipliers spend confirms it.
    assert estimate_epsilon([(found.shared, rate, steps), (found.expert, rate, steps)], delta) <= target


@pytest.mark.parametrize("index", [0, 10, 13, 29, 40, 44])
def test_lands_just_below_the_target(index: int) -> None:
    _check_target(TARGETS[index])


@pytest.mark.slow
def test_lands_just_below_every_target() -> None:
    for row in TARGETS:
        _check_target(row)


@pytest.mark.parametrize("rule", ["joint", "basic"])
def test_monotone_in_the_split(rule: str) -> None:
    found = [
        calibrate_noise_multipliers(2.0, DELTA, RATE, STEPS, budget_split=rho, rule=rule)
        for rho in (0.1, 0.5, 0.7, 0.9, 0.95)
    ]
    shared, expert = [one.shared for one in found], [one.expert for one in found]
    assert shared == sorted(shared, reverse=True) and len(set(shared)) == len(shared)
    assert expert == sorted(expert) and len(set(expert)) == len(expert)


def test_moving_the_split_buys_experts_much_for_little() -> None:
    wide, narrow = (
        calibrate_noise_multipliers(1.0, 67349**-1.1, 1000 / 67349, 1347, budget_split=rho) for rho in (0.7, 0.9)
    )
    assert wide.shared / narrow.shared == pytest.approx(1.076, abs=0.003)
    assert narrow.expert / wide.expert == pytest.approx(3.1, abs=0.1)


def test_one_stream_gets_the_whole_budget() -> None:
    shared = calibrate_noise_multipliers(2.0, DELTA, RATE, STEPS, budget_split=1)
    expert = calibrate_noise_multipliers(2.0, DELTA, RATE, STEPS, budget_split=0)
    assert shared.expert is None and expert.shared is None
    assert shared.shared == expert.expert
    assert 1.98 <= shared.epsilon_upper == _certified(shared, RATE, STEPS, DELTA) <= 2.0


def test_streams_of_different_lengths() -> None:
    found = calibrate_noise_multipliers(2.0, DELTA, RATE, (STEPS, 30))
    upper = compute_epsilon([(found.shared, RATE, STEPS), (found.expert, RATE, 30)], DELTA).upper
    assert 1.98 <= found.epsilon_upper == upper <= 2.0
    equal = calibrate_noise_multipliers(2.0, DELTA, RATE, STEPS)
    assert found.expert < equal.expert


def test_without_subsampling_it_meets_the_target_exactly() -> None:
    found = calibrate_noise_multipliers(1.0, DELTA, 1.0, 20)
    assert 0.999 <= found.epsilon_upper == _certified(found, 1.0, 20, DELTA) <= 1.0


@pytest.mark.parametrize("sigma", [0.8, 1.5, 6.0])
def test_inverse_to_accounting(sigma: float) -> None:
    target = compute_epsilon([(sigma, RATE, STEPS)], DELTA).upper
    assert calibrate_noise_multipliers(target, DELTA, RATE, STEPS, budget_split=1).shared == pytest.approx(
        sigma, rel=2e-3
    )


def test_pld_as_the_certificate() -> None:
    pytest.importorskip("dp_accounting")
    found = calibrate_noise_multipliers(2.0, DELTA, RATE, STEPS, accountant="pld")
    upper = compute_epsilon([(found.shared, RATE, STEPS), (found.expert, RATE, STEPS)], DELTA, accountant="pld").upper
    assert 1.99 <= found.epsilon_upper == upper <= 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_epsilon": 0}, "greater than zero"),
        ({"target_epsilon": 21.0}, "up to 20"),
        ({"target_epsilon": 20.0, "steps": 1, "sample_rate": 1e-4}, r"below 0\.25"),
        ({"target_epsilon": 2e-3, "steps": 100_000, "sample_rate": 0.001}, "numerical error"),
        ({"target_delta": 1e-11}, "1e-10 <= target_delta"),
        ({"sample_rate": 0.0}, r"\(0, 1\]"),
        ({"steps": 0}, "whole number >= 1"),
        ({"steps": (10, 2.5)}, "whole number >= 1"),
        ({"budget_split": 1.5}, r"\[0, 1\]"),
        ({"rule": "advanced"}, "'joint', 'basic'"),
        ({"accountant": "rdp"}, "'prv', 'pld'"),
    ],
)
def test_what_cannot_be_calibrated_is_an_error(changes: dict, message: str) -> None:
    arguments = {"target_epsilon": 1.0, "target_delta": DELTA, "sample_rate": RATE, "steps": STEPS, **changes}
    with pytest.raises(PrivacyConfigError, match=message):
        calibrate_noise_multipliers(**arguments)


def test_no_subsampling_without_a_warning() -> None:
    """p = 1: the loss is the Gaussian's own, whose far left tail must not be the logarithm of 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = estimate_epsilon([(2.0, 1.0, 10)], 1e-5)
        calibrate_noise_multipliers(1.0, 1e-5, 1.0, 10)
    assert found == pytest.approx(compute_epsilon([(2.0, 1.0, 10)], 1e-5).estimate, rel=1e-6)
