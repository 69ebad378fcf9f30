"""The paper's formulas against an independent table, against enumeration, and against the mechanism itself."""

from __future__ import annotations

import csv
import itertools
import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from raptor_hf.analysis import theory
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy.clipping import clip_and_sum_by_owner
from raptor_hf.privacy.mechanism import ClippedSum, release
from raptor_hf.privacy.noise import EntropySource, NoiseSource

with (Path(__file__).parent.parent / "oracles" / "formulas.csv").open() as file:
    ROWS = list(csv.DictReader(file))
# Rows about attacks on trained models.
AUDIT = {"clopper_pearson_upper", "clopper_pearson_lower", "epsilon_lower_bound_cp", "one_run_epsilon"}
Q, MU2 = [0.4, 0.3, 0.2, 0.1], [1.0, 0.5, 0.25, 2.0]


def numbers(text: str) -> dict[str, list[float]]:
    """`a=1 b=2 3; c=1/4` -> {"a": [1], "b": [2, 3], "c": [0.25]}; `x=y=1` sets both."""
    found: dict[str, list[float]] = {}
    for names, values in re.findall(r"([A-Za-z_/0-9]+(?:=[A-Za-z_]+)*)=((?:[\d.e+-]+(?:/\d+)?[ ;]*)+)", text):
        parsed = [float(Fraction(v)) if "/" in v else float(v) for v in values.replace(";", " ").split()]
        found.update(dict.fromkeys(names.split("="), parsed))
    return found


def evaluate(formula: str, text: str) -> float:
    given = {name: v if len(v) > 1 else v[0] for name, v in numbers(text).items()}
    q, mu2 = (given.get("q", Q), given.get("mu2", MU2))
    largest = float(np.max(mu2))
    experts = int(given.get("E", 0))
    match formula:
        case "theorem1_bias2":
            return theory.squared_bias(given["n_e"] / given["n"], mu2, experts)
        case "theorem1_v_samp":
            return theory.sampling_variance(
                given["n_e"],
                mu2,
                given["trace_sigma"],
                num_experts=experts,
                batch_size=given["B"],
                dataset_size=given["n"],
            )
        case "theorem1_v_dp":
            return theory.dp_variance(
                given["sigma"], given["C"], given["d"], num_experts=experts, batch_size=given["B"]
            )
        case "eq14_rhs":
            return theory.balanced_error_bound(
                given["C"],
                num_experts=experts,
                batch_size=given["B"],
                noise_multiplier=given["sigma"],
                dimension=given["d"],
            )
        case "chi2":
            return theory.distribution_statistics(q)["chi2"]
        case "entropy_nats":
            return theory.distribution_statistics(q)["entropy"]
        case "entropy_deficit":
            return theory.distribution_statistics(q)["deficit"]
        case "eq17_rhs":
            return theory.chi2_bound(q)
        case "eq15_lhs":
            return theory.average_squared_bias(q, mu2)
        case "eq15_rhs":
            return theory.average_squared_bias_bound(q, largest)
        case "eq16_lhs":
            return theory.weighted_squared_bias(q, mu2)
        case "eq16_rhs":
            return theory.weighted_squared_bias_bound(q, largest)
        case "eq18_rhs":
            return theory.entropy_bias_bound(q, largest)
        case "eq32_rhs":
            return theory.weighted_squared_bias_bound_32(q, largest)
        case "eq37_role_mismatch":
            return theory.role_mismatch(given["norms"], given["params"])
        case "eq39_rho_star":
            return theory.optimal_budget_split(
                given["lambda_e/lambda_s"],
                num_experts=experts,
                shared_max_norm=given["Cs"],
                expert_max_norm=given["Ce"],
            )
        case "eq40_lambda_plus":
            return theory.lambda_plus(given["dL"], given["sigma"], given["params"])
    raise AssertionError(formula)


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r["formula"] not in AUDIT], ids=lambda r: f"{r['formula']} {r['input'][-12:]}"
)
def test_values_of_the_table(row):
    assert evaluate(row["formula"], row["input"]) == pytest.approx(float(row["value"]), rel=1e-6)


def test_the_table_is_whole():
    assert len(ROWS) == 23 and {row["formula"] for row in ROWS} > AUDIT


# --- Theorem 1 ---------------------------------------------------------------------------------------------------

EXPERTS, BATCH, NORM, SIGMA = 3, 4.0, 1.3, 0.7


def population(seed: int = 0, records: int = 10, width: int = 2):
    """Gradients of two tensors for each record, some above the clipping norm, and unequal owners."""
    generator = torch.Generator().manual_seed(seed)
    grads = {
        "a": torch.randn(records, width, generator=generator, dtype=torch.float64),
        "b": torch.randn(records, 1, 2, generator=generator, dtype=torch.float64) + 0.5,
    }
    owner = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 1][:records])
    return grads, owner


def clipped(grads) -> np.ndarray:
    """(n, d), by a loop."""
    rows = []
    for a, b in zip(grads["a"], grads["b"], strict=True):
        g = np.concatenate([a.numpy().ravel(), b.numpy().ravel()])
        rows.append(g * min(1.0, NORM / math.sqrt(float(g @ g))))
    return np.array(rows)


def moments(h: np.ndarray) -> tuple[float, float]:
    mu = h.mean(0)
    return float(mu @ mu), float(((h - mu) ** 2).sum() / len(h))


def formula(h: np.ndarray, owner: torch.Tensor, expert: int) -> theory.ExpertError:
    mine = h[owner.numpy() == expert]
    mu2, trace = moments(mine)
    return theory.expert_error(
        len(mine),
        mu2,
        trace,
        num_experts=EXPERTS,
        batch_size=BATCH,
        dataset_size=len(h),
        noise_multiplier=SIGMA,
        max_norm=NORM,
        dimension=h.shape[1],
    )


@pytest.mark.parametrize("expert", range(EXPERTS))
def test_theorem_1_equals_the_expectation_over_every_possible_sample(expert):
    """All 2^n samples with their probabilities; the noise enters by its variance a coordinate."""
    grads, owner = population()
    h = clipped(grads)
    n, mine = len(h), owner.numpy() == expert
    mu, p = h[mine].mean(0), BATCH / len(h)
    mean, error = np.zeros(h.shape[1]), 0.0
    for sample in itertools.product([0, 1], repeat=n):
        chance = math.prod(p if bit else 1 - p for bit in sample)
        estimate = (h * (np.array(sample) * mine)[:, None]).sum(0) * EXPERTS / BATCH
        mean += chance * estimate
        error += chance * float((estimate - mu) @ (estimate - mu))
    noise = h.shape[1] * (SIGMA * NORM * EXPERTS / BATCH) ** 2
    found = formula(h, owner, expert)
    assert found.squared_bias == pytest.approx(float((mean - mu) @ (mean - mu)), rel=1e-9, abs=1e-15)
    assert found.squared_bias + found.sampling_variance == pytest.approx(error, rel=1e-9)
    assert found.dp_variance == pytest.approx(noise, rel=1e-12)
    assert found.total == pytest.approx(error + noise, rel=1e-9)


def test_theorem_1_equals_the_error_of_the_mechanism_itself():
    """Poisson samples through the package's own clipping, noise and denominator; six standard errors."""
    grads, owner = population(seed=3)
    h = clipped(grads)
    noise = NoiseSource(EntropySource(insecure_seed=1))
    rng = np.random.default_rng(2)
    shapes = {name: torch.Size([EXPERTS, *value.shape[1:]]) for name, value in grads.items()}
    errors = []
    for _ in range(3_000):
        chosen = torch.from_numpy(rng.random(len(h)) < BATCH / len(h))
        total = ClippedSum(shapes, NORM, num_owners=EXPERTS)
        total.add({name: value[chosen] for name, value in grads.items()}, owner[chosen])
        out = release(total, SIGMA, BATCH / EXPERTS, noise)
        flat = torch.cat([out[name].flatten(1).double() for name in ("a", "b")], dim=1).numpy()
        errors.append([((flat[e] - h[owner.numpy() == e].mean(0)) ** 2).sum() for e in range(EXPERTS)])
    means, spread = np.mean(errors, axis=0), np.std(errors, axis=0) / math.sqrt(len(errors))
    for expert in range(EXPERTS):
        expected = formula(h, owner, expert).total
        assert abs(means[expert] - expected) < 6 * spread[expert]
        assert 6 * spread[expert] < 0.15 * expected  # the test would see an error of that size


def test_the_snr_is_mean_signal_power_over_noise_power():
    grads, owner = population(seed=5)
    h = clipped(grads)
    sums, _ = clip_and_sum_by_owner(grads, owner, EXPERTS, NORM)
    p, d = BATCH / len(h), h.shape[1]
    snr = []
    for expert in range(EXPERTS):
        mine = h[owner.numpy() == expert]
        signal = p * EXPERTS / BATCH * torch.cat([sums[name][expert].flatten() for name in ("a", "b")])
        power = float(signal.square().sum()) / (d * (SIGMA * NORM * EXPERTS / BATCH) ** 2)
        found = theory.expert_snr(
            len(mine), moments(mine)[0], sample_rate=p, noise_multiplier=SIGMA, max_norm=NORM, dimension=d
        )
        assert found == pytest.approx(power, rel=1e-5)  # clipping keeps 1e-6 below C
        snr.append(found)
    mean, cv = theory.expert_snr_summary(snr)
    assert mean == pytest.approx(sum(snr) / 3) and cv == pytest.approx(np.std(snr) / np.mean(snr)) and cv > 0
    assert math.isnan(theory.expert_snr_summary([0.0, 0.0])[1])


@given(st.integers(1, 40), st.integers(1, 6), st.floats(0.1, 3), st.integers(0, 10_000))
def test_corollary_1_bounds_the_error_of_balanced_routing(each, experts, sigma, seed):
    """Eq. 14 at q_e = 1 / E, for clipped gradients of any direction."""
    rng = np.random.default_rng(seed)
    n, batch = each * experts, max(1.0, each * experts / 3)
    h = rng.normal(size=(each, 3))
    h *= np.minimum(1, NORM / np.linalg.norm(h, axis=1))[:, None]
    mu2, trace = moments(h)
    error = theory.expert_error(
        each,
        mu2,
        trace,
        num_experts=experts,
        batch_size=batch,
        dataset_size=n,
        noise_multiplier=sigma,
        max_norm=NORM,
        dimension=3,
    )
    assert error.squared_bias == pytest.approx(0, abs=1e-20)
    bound = theory.balanced_error_bound(
        NORM, num_experts=experts, batch_size=batch, noise_multiplier=sigma, dimension=3
    )
    assert math.sqrt(error.total) <= bound * (1 + 1e-12)


# --- Bounds by imbalance -------------------------------------------------------------------------------------------

laws = st.lists(st.floats(0, 1), min_size=2, max_size=16).filter(lambda v: sum(v) > 1e-3)


def law(values) -> list[float]:
    return (np.array(values) / sum(values)).tolist()


@given(laws, st.integers(0, 10_000))
def test_the_bounds_hold(values, seed):
    q = law(values)
    mu2 = np.random.default_rng(seed).exponential(size=len(q))
    largest = float(mu2.max())
    slack = 1 + 1e-9
    average, weighted = theory.average_squared_bias(q, mu2), theory.weighted_squared_bias(q, mu2)
    assert average <= theory.average_squared_bias_bound(q, largest) * slack + 1e-12
    for bound in (
        theory.weighted_squared_bias_bound,
        theory.weighted_squared_bias_bound_32,
        theory.entropy_bias_bound,
    ):
        assert weighted <= bound(q, largest) * slack + 1e-12
    chi2 = theory.distribution_statistics(q)["chi2"]
    assert chi2 <= theory.chi2_bound_sharp(q) * slack + 1e-12 <= theory.chi2_bound(q) * slack + 2e-12


def test_the_sharp_bound_is_met_at_two_experts_and_not_below():
    q = [0.5 + 1e-3, 0.5 - 1e-3]
    chi2 = theory.distribution_statistics(q)["chi2"]
    assert chi2 == pytest.approx(theory.chi2_bound_sharp(q), rel=1e-5)
    assert chi2 > 0.49 * theory.chi2_bound(q)


@given(laws)
def test_eq_32_beats_eq_33_for_large_chi2_only(values):
    """The paper's App. B.6 says the opposite."""
    q = law(values)
    chi2, crossing = theory.distribution_statistics(q)["chi2"], theory.bounds_cross_at(len(q))
    first, second = theory.weighted_squared_bias_bound_32(q, 1.0), theory.weighted_squared_bias_bound(q, 1.0)
    if abs(chi2 - crossing) > 1e-9:
        assert (first < second) == (chi2 > crossing)


def test_both_sides_of_the_crossing_exist():
    even, one = [0.25] * 4, [1.0, 0.0, 0.0, 0.0]
    assert theory.weighted_squared_bias_bound(even, 1.0) == pytest.approx(0, abs=1e-12)
    assert theory.weighted_squared_bias_bound_32(even, 1.0) == pytest.approx(3)
    assert theory.weighted_squared_bias_bound_32(one, 1.0) == pytest.approx(9)
    assert theory.weighted_squared_bias_bound(one, 1.0) == pytest.approx(12)


# --- Roles and the budget --------------------------------------------------------------------------------------------


def test_role_mismatch_lies_between_none_and_all():
    assert theory.role_mismatch([1, 2, 3], [10, 20, 30]) == pytest.approx(0, abs=1e-15)
    assert theory.role_mismatch([1, 0], [0, 5]) == pytest.approx(1)
    for bad in (([0, 0], [1, 1]), ([1], [1, 2]), ([-1, 2], [1, 1])):
        with pytest.raises(ValueError, match="Shares"):
            theory.role_mismatch(*bad)


@given(st.floats(1e-6, 1e2), st.integers(2, 64), st.floats(0.1, 10), st.floats(0.1, 10))
def test_eq_39_minimises_eq_38(ratio, experts, shared, expert):
    options = {"num_experts": experts, "shared_max_norm": shared, "expert_max_norm": expert}
    found = theory.optimal_budget_split(ratio, **options)
    best = minimize_scalar(
        lambda rho: math.log(theory.budget_surrogate(rho, ratio, **options)),
        bounds=(1e-4, 1 - 1e-4),
        method="bounded",
        options={"xatol": 1e-9},
    )
    if 1e-3 < found < 1 - 1e-3:
        assert found == pytest.approx(best.x, abs=1e-5)


def test_the_two_numbers_of_eq_41():
    """Table 10: the paper divides losses (6.3e-3); lambdas differ by the ratio of the parameters too."""
    shared, experts = (2.175e-4, 9_438_722), (-1.361e-6, 7_864_320)
    std = 9.998563e-4
    found = theory.sensitivity_ratio_bound(experts[0], std, experts[1], shared[0], std, shared[1])
    assert found == pytest.approx(7.5e-3, rel=5e-3)
    assert abs(experts[0]) / shared[0] == pytest.approx(6.3e-3, rel=1e-2)
    with pytest.raises(PrivacyConfigError, match="above zero"):
        theory.sensitivity_ratio_bound(experts[0], std, experts[1], -1e-9, std, shared[1])


def test_lambda_plus_floors_at_zero():
    assert theory.lambda_plus(-1.0, 0.1, 10) == 0 and theory.lambda_plus(0.2, 0.1, 10) == pytest.approx(2.0)


@pytest.mark.parametrize("q", [[1.0], [0.5, 0.6], [-0.1, 1.1]])
def test_what_is_no_distribution_is_refused(q):
    with pytest.raises(ValueError, match="no distribution"):
        theory.chi2_bound(q)
