"""Epsilon by an accountant that the package does not use."""

from __future__ import annotations

from collections.abc import Iterable

from dp_accounting.pld import privacy_loss_distribution


def pld_epsilon(mechanisms: Iterable[tuple[float, float, int]], delta: float) -> float:
    """The composition by dp-accounting's privacy loss distributions."""
    total = None
    for sigma, rate, steps in mechanisms:
        one = privacy_loss_distribution.from_gaussian_mechanism(
            sigma, sampling_prob=rate, value_discretization_interval=1e-3
        ).self_compose(steps)
        total = one if total is None else total.compose(one)
    return total.get_epsilon_for_delta(delta)
