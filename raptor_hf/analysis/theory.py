"""The paper's formulas about the utility of the expert stream (Secs. 7, B.6, G, H), as pure functions.

Symbols: E experts; n records, of which expert e owns n_e = q_e n; B expected batch size, p = B / n; h_i the clipped
gradient of record i in its owner's adapter, of d parameters; mu_e and Sigma_e mean and covariance (divided by n_e) of
h_i over the records of e. Every q, n_e, mu_e and Sigma_e of private records is private; nothing here adds noise.

All arguments are floats or arrays that broadcast against each other; entropies are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.moe.selection import distribution_statistics

__all__ = [
    "ExpertError",
    "average_squared_bias",
    "average_squared_bias_bound",
    "balanced_error_bound",
    "bounds_cross_at",
    "budget_surrogate",
    "chi2_bound",
    "chi2_bound_sharp",
    "distribution_statistics",
    "dp_variance",
    "entropy_bias_bound",
    "expert_error",
    "expert_snr",
    "expert_snr_summary",
    "lambda_plus",
    "optimal_budget_split",
    "role_mismatch",
    "sampling_variance",
    "sensitivity_ratio_bound",
    "squared_bias",
    "weighted_squared_bias",
    "weighted_squared_bias_bound",
    "weighted_squared_bias_bound_32",
]

Array: TypeAlias = "np.ndarray | float"


@dataclass(frozen=True)
class ExpertError:
    """The three parts of E||gbar_e - mu_e||^2 (Theorem 1), each a float or an array (E,).

    Attributes: squared_bias: Eq. 11. sampling_variance: Eq. 12. dp_variance: Eq. 13.
    """

    squared_bias: Array
    sampling_variance: Array
    dp_variance: Array

    @property
    def total(self) -> Array:
        """The mean squared error of the estimator."""
        return self.squared_bias + self.sampling_variance + self.dp_variance


def squared_bias(q: Array, mu_squared: Array, num_experts: int) -> Array:
    """beta_e^2 = (E q_e - 1)^2 ||mu_e||^2 (Eq. 11): zero exactly at the load that the denominator B / E assumes."""
    return (num_experts * np.asarray(q) - 1) ** 2 * np.asarray(mu_squared)


def sampling_variance(
    owned: Array, mu_squared: Array, trace_sigma: Array, *, num_experts: int, batch_size: float, dataset_size: int
) -> Array:
    """V_samp = E^2 p n_e (1 - p) / B^2 (||mu_e||^2 + tr Sigma_e) (Eq. 12).

    Args:
        owned: n_e. mu_squared: ||mu_e||^2. trace_sigma: tr Sigma_e. batch_size: B. dataset_size: n.
    """
    rate = batch_size / dataset_size
    moment = np.asarray(mu_squared) + np.asarray(trace_sigma)
    return num_experts**2 * rate * np.asarray(owned) * (1 - rate) / batch_size**2 * moment


def dp_variance(
    noise_multiplier: float, max_norm: float, dimension: int, *, num_experts: int, batch_size: float
) -> float:
    """V_DP = E^2 sigma_e^2 C_e^2 d / B^2 (Eq. 13), with d the parameters of *one* expert's adapter."""
    return (num_experts * noise_multiplier * max_norm / batch_size) ** 2 * dimension


def expert_error(
    owned: Array,
    mu_squared: Array,
    trace_sigma: Array,
    *,
    num_experts: int,
    batch_size: float,
    dataset_size: int,
    noise_multiplier: float,
    max_norm: float,
    dimension: int,
) -> ExpertError:
    """E||gbar_e - mu_e||^2 = beta_e^2 + V_samp + V_DP for the released expert gradient of one cycle (Theorem 1).

    Exact, for any fixed h_i: the expectation is over the Poisson sample and the noise. Arguments as in the parts.
    """
    return ExpertError(
        squared_bias(np.asarray(owned) / dataset_size, mu_squared, num_experts),
        sampling_variance(
            owned, mu_squared, trace_sigma, num_experts=num_experts, batch_size=batch_size, dataset_size=dataset_size
        ),
        dp_variance(noise_multiplier, max_norm, dimension, num_experts=num_experts, batch_size=batch_size),
    )


def expert_snr(
    owned: Array, mu_squared: Array, *, sample_rate: float, noise_multiplier: float, max_norm: float, dimension: int
) -> Array:
    """SNR_e = ||E gbar_e||^2 / V_DP = p^2 n_e^2 ||mu_e||^2 / (sigma_e^2 C_e^2 d); the denominator B / E cancels.

    The paper names the quantity (Tab. 8) and says that it grows like q_e^2 (App. B.11), which this does: a ratio of
    powers, signal being the mean of the released gradient and noise its privacy noise alone.
    """
    signal = sample_rate**2 * np.asarray(owned, dtype=float) ** 2 * np.asarray(mu_squared)
    return signal / ((noise_multiplier * max_norm) ** 2 * dimension)


def expert_snr_summary(snr: Sequence[float]) -> tuple[float, float]:
    """Mean of the experts' SNR and its coefficient of variation, std / mean (Tab. 8); the latter NaN at mean zero."""
    values = np.asarray(snr, dtype=float)
    mean = float(values.mean())
    return mean, float(values.std() / mean) if mean > 0 else math.nan


def balanced_error_bound(
    max_norm: float, *, num_experts: int, batch_size: float, noise_multiplier: float, dimension: int
) -> float:
    """C_e sqrt(E / B) + E sigma_e C_e sqrt(d) / B: bounds the root mean squared error at q_e = 1 / E (Eq. 14)."""
    sampling = max_norm * math.sqrt(num_experts / batch_size)
    return sampling + num_experts * noise_multiplier * max_norm * math.sqrt(dimension) / batch_size


def average_squared_bias(q: Sequence[float], mu_squared: Sequence[float]) -> float:
    """(1 / E) sum_e beta_e^2: the left side of Eq. 15."""
    return float(np.mean(squared_bias(_law(q), mu_squared, len(q))))


def average_squared_bias_bound(q: Sequence[float], largest_mu_squared: float) -> float:
    """G^2 chi2(q || u): the right side of Eq. 15, with G^2 = max_e ||mu_e||^2."""
    return largest_mu_squared * _chi2(q)


def weighted_squared_bias(q: Sequence[float], mu_squared: Sequence[float]) -> float:
    """sum_e q_e beta_e^2: the left side of Eqs. 16, 18 and 32."""
    return float(np.sum(_law(q) * squared_bias(_law(q), mu_squared, len(q))))


def weighted_squared_bias_bound(q: Sequence[float], largest_mu_squared: float) -> float:
    """G^2 E chi2(q || u): the right side of Eq. 16, which is that of Eq. 33 times G^2."""
    return largest_mu_squared * len(q) * _chi2(q)


def weighted_squared_bias_bound_32(q: Sequence[float], largest_mu_squared: float) -> float:
    """G^2 ((E - 2) chi2(q || u) + (E - 1)) (Eq. 32).

    Smaller than the bound of Eq. 16 where chi2 exceeds `bounds_cross_at`: for *unbalanced* routing. The paper says it
    is the tighter one for small chi2, where it is the looser: at q = u it is G^2 (E - 1), and Eq. 16 is zero.
    """
    return largest_mu_squared * ((len(q) - 2) * _chi2(q) + len(q) - 1)


def bounds_cross_at(num_experts: int) -> float:
    """The chi2 at which Eqs. 32 and 33 are equal: (E - 1) / 2."""
    return (num_experts - 1) / 2


def chi2_bound(q: Sequence[float]) -> float:
    """2 E (log E - H(q)), which chi2(q || u) does not exceed (Eq. 17, from Pinsker's inequality; nats)."""
    return 2 * len(q) * _statistics(q)["deficit"]


def chi2_bound_sharp(q: Sequence[float]) -> float:
    """E (log E - H(q)): half of Eq. 17, and still a bound.

    Of a vector v that sums to zero the positive and the negative part have sum ||v||_1 / 2 each, so
    ||v||_2^2 <= 2 (||v||_1 / 2)^2 = ||v||_1^2 / 2, where Eq. 17 uses ||v||_2^2 <= ||v||_1^2. At E = 2 it cannot be
    improved: it is met as q approaches (1/2, 1/2).
    """
    return chi2_bound(q) / 2


def entropy_bias_bound(q: Sequence[float], largest_mu_squared: float) -> float:
    """2 G^2 E^2 (log E - H(q)): bounds sum_e q_e beta_e^2 by the entropy alone (Eq. 18)."""
    return largest_mu_squared * len(q) * chi2_bound(q)


def role_mismatch(norms: Sequence[float], parameters: Sequence[float]) -> float:
    """M_role = 1/2 sum_r |s_r^norm - s_r^param| (Eq. 37), in [0, 1].

    Args:
        norms: gradient norm of every role. parameters: number of its trainable parameters. Same order; the shares are
            formed here. A role that is not trained has zero of both.
    """
    norm, count = np.asarray(norms, dtype=float), np.asarray(parameters, dtype=float)
    if norm.shape != count.shape or norm.sum() <= 0 or count.sum() <= 0 or (norm < 0).any() or (count < 0).any():
        raise ValueError(
            f"Norms {norms!r} and parameter counts {parameters!r} were given. Shares cannot be formed of them. Pass "
            "two non-negative sequences of one length, neither of them all zero."
        )
    return float(np.abs(norm / norm.sum() - count / count.sum()).sum() / 2)


def budget_surrogate(
    rho: float, sensitivity_ratio: float, *, num_experts: int, shared_max_norm: float, expert_max_norm: float
) -> float:
    """L(rho) / lambda_s = C_s^2 / rho^2 + (lambda_e / lambda_s) E^2 C_e^2 / (1 - rho)^2 (Eq. 38)."""
    shared = (shared_max_norm / rho) ** 2
    return shared + sensitivity_ratio * (num_experts * expert_max_norm / (1 - rho)) ** 2


def optimal_budget_split(
    sensitivity_ratio: float, *, num_experts: int, shared_max_norm: float = 1.0, expert_max_norm: float = 1.0
) -> float:
    """rho* = 1 / (1 + (lambda_e E^2 C_e^2 / (lambda_s C_s^2))^(1/3)) (Eq. 39), the minimiser of Eq. 38.

    Args:
        sensitivity_ratio: lambda_e / lambda_s >= 0.
    """
    return 1 / (1 + (sensitivity_ratio * (num_experts * expert_max_norm / shared_max_norm) ** 2) ** (1 / 3))


def lambda_plus(loss_change: float, noise_std: float, parameters: int) -> float:
    """max(dL_val, 0) / E||xi||^2 with E||xi||^2 = noise_std^2 * parameters (Eq. 40)."""
    return max(loss_change, 0.0) / (noise_std**2 * parameters)


def sensitivity_ratio_bound(
    expert_loss_change: float,
    expert_noise_std: float,
    expert_parameters: int,
    shared_loss_change: float,
    shared_noise_std: float,
    shared_parameters: int,
) -> float:
    """|dL_e| / E||xi_e||^2 over dL_s / E||xi_s||^2: an upper estimate of lambda_e / lambda_s (Eq. 41, corrected).

    The paper divides the changes of the loss alone and gets 6.3e-3. The ratio of the lambdas also has the ratio of the
    squared noise norms: 7.5e-3 for its numbers (both roles with the same noise a coordinate).
    """
    if shared_loss_change <= 0:
        raise PrivacyConfigError(
            f"A loss change of {shared_loss_change} under noise on the shared stream was given",
            "Nothing can be divided by a sensitivity that was not measured above zero",
            "Measure it with more records or more noise",
        )
    expert = lambda_plus(abs(expert_loss_change), expert_noise_std, expert_parameters)
    return expert / lambda_plus(shared_loss_change, shared_noise_std, shared_parameters)


def _statistics(q: Sequence[float]) -> dict[str, float]:
    return distribution_statistics(_law(q).tolist())


def _chi2(q: Sequence[float]) -> float:
    return _statistics(q)["chi2"]


def _law(q: Sequence[float]) -> np.ndarray:
    values = np.asarray(q, dtype=float)
    if values.ndim != 1 or len(values) < 2 or (values < 0).any() or not math.isclose(values.sum(), 1.0, rel_tol=1e-6):
        raise ValueError(
            f"`q={q!r}` was given. It is no distribution over two experts or more. Pass non-negative shares that sum "
            "to 1."
        )
    return values
