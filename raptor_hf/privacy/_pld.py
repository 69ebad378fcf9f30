"""The second opinion: privacy loss distributions by Google's `dp_accounting` (optional)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Sequence

import numpy as np
from prv_accountant.accountant import compute_safe_domain_size

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy._prv import RemoveOneRecord

__all__ = ["pld_epsilon", "pld_installed"]


def pld_installed() -> bool:
    """Whether `accountant="pld"` can be used."""
    return importlib.util.find_spec("dp_accounting") is not None


def _interval(groups: Sequence[tuple[float, float, int]], delta: float) -> float:
    """Width of the buckets.

    The library's default of 1e-4 is wider than the loss of one step at small sampling rates, and rounding every loss
    up then overstates epsilon by up to 20 %.
    """
    # Standard deviation of one step's loss, to first order in p: p * sqrt(exp(1 / sigma^2) - 1).
    deviation = min(p * math.sqrt(math.expm1(min(1 / sigma**2, 700.0))) for sigma, p, _ in groups)
    prvs = [RemoveOneRecord(p, sigma) for sigma, p, _ in groups]
    domain = compute_safe_domain_size(prvs, [steps for *_, steps in groups], eps_error=0.0, delta_error=delta / 1000)
    return float(np.clip(0.05 * deviation, min(2 * float(domain) / 3e6, 1e-4), 1e-4))


def pld_epsilon(groups: Sequence[tuple[float, float, int]], delta: float) -> float:
    """A pessimistic epsilon at `delta` over both directions of adjacency.

    Args:
        groups: (noise_multiplier, sample_rate, steps), distinct, steps > 0.
        delta: of the guarantee.

    Raises:
        PrivacyConfigError: when `dp_accounting` is not installed.
    """
    if not pld_installed():
        raise PrivacyConfigError(
            '`accountant="pld"` was given',
            "It needs the package dp-accounting, which is not installed",
            "Run `pip install 'raptor-hf[pld]'`, or use `accountant=\"prv\"`",
        )
    distributions = importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    interval = _interval(groups, delta)
    composed = [
        distributions.from_gaussian_mechanism(
            standard_deviation=sigma, sampling_prob=p, value_discretization_interval=interval, use_connect_dots=True
        ).self_compose(steps)
        for sigma, p, steps in groups
    ]
    total = functools.reduce(lambda one, other: one.compose(other), composed)
    return float(total.get_epsilon_for_delta(delta))
