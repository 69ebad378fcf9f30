"""From a target epsilon to the noise multipliers of the two streams.

Formal guarantee
----------------
The multipliers returned satisfy: the composition of the shared stream (sigma_s, p, T_s) and of the expert stream
(sigma_e, p, T_e) is (target_epsilon, target_delta)-DP, unit one record, adjacency add or remove one record. The proof
is the accountant's upper bound at these very numbers, returned as `epsilon_upper`; how they were found does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from scipy.optimize import brentq

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy._prv import prv_eps_error
from raptor_hf.privacy.accounting import (
    ACCOUNTANTS,
    MAX_EPSILON,
    MAX_NOISE,
    MIN_NOISE,
    Mechanism,
    check_delta,
    compute_epsilon,
    group_mechanisms,
    rough_epsilon,
)
from raptor_hf.validate import integer, one_of, positive, probability

__all__ = ["RULES", "NoiseMultipliers", "calibrate_noise_multipliers"]

RULES = ("joint", "basic")
_SLACK = 0.002  # of the target: an upper bound this close below it is accepted


class NoiseMultipliers(NamedTuple):
    """sigma_s, sigma_e (None for a stream that is not trained) and the certified epsilon of the two together."""

    shared: float | None
    expert: float | None
    epsilon_upper: float


def _solve(epsilon_of_log: Callable[[float], float], aim: float, start: float, lowest: float) -> float:
    """The log noise >= about `lowest` at which a decreasing `epsilon_of_log` meets `aim`, searched from `start`."""

    def gap(log_noise: float) -> float:
        return math.log(max(epsilon_of_log(log_noise), 1e-30)) - math.log(aim)

    low = high = max(start, lowest)
    step = 0.25
    while gap(high) > 0:
        low, high, step = high, high + step, 2 * step
        if high > math.log(MAX_NOISE):
            raise _out_of_range(aim, "above", MAX_NOISE)
    step = 0.25
    while low == high or gap(low) <= 0:
        if low <= lowest:
            raise _out_of_range(aim, "below", MIN_NOISE)
        low, high, step = max(low - step, lowest), low if low != high else high, 2 * step
    return float(brentq(gap, low, high, xtol=1e-7))


def _out_of_range(aim: float, side: str, bound: float) -> PrivacyConfigError:
    return PrivacyConfigError(
        f"An epsilon of {aim:.4g} was asked for",
        f"A noise multiplier {side} {bound:g} would do, outside the range in which the accountants are accurate",
        "Ask for a smaller epsilon" if side == "below" else "Ask for a larger epsilon, or fewer steps",
    )


def _alone(target: float, delta: float, sample_rate: float, steps: int) -> float:
    """The noise multiplier at which one stream alone spends `target` (uncertified)."""

    def rough(log_noise: float) -> float:
        return rough_epsilon([(math.exp(log_noise), sample_rate, steps)], delta)

    return math.exp(_solve(rough, target, 0.0, math.log(MIN_NOISE)))


def _certified_scale(base: list[Mechanism], target: float, delta: float, accountant: str) -> tuple[float, float]:
    """The factor on the noise multipliers of `base` whose upper bound lands just below `target`, and that bound."""

    def scaled(log_factor: float) -> list[Mechanism]:
        return [Mechanism(m.noise_multiplier * math.exp(log_factor), m.sample_rate, m.steps) for m in base]

    def rough(log_factor: float) -> float:
        return rough_epsilon(scaled(log_factor), delta)

    exact = all(m.sample_rate == 1.0 for m in base)
    error = 0.0 if exact or accountant == "pld" else prv_eps_error(group_mechanisms(base), delta, target)
    aim = (1 - _SLACK / 2) * target - error
    log_factor, best = 0.0, None
    lowest = math.log(MIN_NOISE / min(m.noise_multiplier for m in base))
    for _ in range(6):
        if aim <= 0.01 * target:
            raise PrivacyConfigError(
                f"`target_epsilon={target:g}` over {max(m.steps for m in base)} steps was given",
                "It is below the numerical error of the accountant for that many steps",
                'Raise it, take fewer steps (a larger batch), or use `accountant="pld"`',
            )
        log_factor = _solve(rough, aim, log_factor, lowest)
        if max(m.noise_multiplier for m in scaled(log_factor)) > MAX_NOISE:
            raise _out_of_range(target, "above", MAX_NOISE)
        upper = compute_epsilon(scaled(log_factor), delta, accountant=accountant).upper
        if upper <= target and (best is None or upper > best[1]):
            best = (math.exp(log_factor), upper)
            if upper >= (1 - _SLACK) * target:
                break
        aim += (1 - _SLACK / 2) * target - upper
    if best is None:
        raise PrivacyConfigError(
            f"`target_epsilon={target:g}` was given",
            "No noise multipliers were found whose upper bound meets it",
            "Change the target slightly, or use the other accountant",
        )
    return best


def calibrate_noise_multipliers(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int | tuple[int, int],
    *,
    budget_split: float = 0.9,
    rule: str = "joint",
    accountant: str = "prv",
) -> NoiseMultipliers:
    """Noise multipliers of the shared and the expert stream that together spend at most `target_epsilon`.

    Args:
        target_epsilon: in (0, 20].
        target_delta: in [1e-10, 1).
        sample_rate: p = B / n of both streams.
        steps: number of releases, of both streams or (shared, expert).
        budget_split: rho in [0, 1]. The ratio sigma_e / sigma_s is that of two streams that alone would spend rho and
            1 - rho of the target. 1 and 0 train one stream only, with the whole budget; the other multiplier is None.
        rule: "joint" scales both at that ratio until the accountant's bound for the two *together* meets the target.
            "basic" lets the two budgets add, half of delta each: simple, and at epsilon 1 to 8 it wastes 9 to 26 %.
        accountant: whose upper bound is the certificate, "prv" or "pld".

    Returns:
        (shared, expert, epsilon_upper), `epsilon_upper <= target_epsilon` being the certified joint epsilon.

    Raises:
        PrivacyConfigError: for arguments out of range, or a target that needs noise outside [0.25, 1e6].

    Formal guarantee: see the module. Under "joint", sigma_s falls and sigma_e grows as rho grows.
    """
    target = positive("target_epsilon", target_epsilon)
    if target > MAX_EPSILON:
        raise PrivacyConfigError(
            f"`target_epsilon={target:g}` was given",
            f"The accountants are used up to {MAX_EPSILON:g}; more protects nobody",
            f"Set it to {MAX_EPSILON:g} or less",
        )
    delta = check_delta("target_delta", target_delta)
    p = probability("sample_rate", sample_rate)
    rho = probability("budget_split", budget_split, zero=True)
    one_of("rule", rule, RULES)
    one_of("accountant", accountant, ACCOUNTANTS)
    pair = steps if isinstance(steps, tuple | list) else (steps, steps)
    shared_steps, expert_steps = (integer("steps", count, minimum=1) for count in pair)

    if rho in (0.0, 1.0):
        count = shared_steps if rho else expert_steps
        base = [Mechanism(_alone(target, delta, p, count), p, count)]
        factor, upper = _certified_scale(base, target, delta, accountant)
        sigma = base[0].noise_multiplier * factor
        return NoiseMultipliers(sigma, None, upper) if rho else NoiseMultipliers(None, sigma, upper)

    share = delta if rule == "joint" else delta / 2
    shared = _alone(rho * target, share, p, shared_steps)
    expert = _alone((1 - rho) * target, share, p, expert_steps)
    base = [Mechanism(shared, p, shared_steps), Mechanism(expert, p, expert_steps)]
    if rule == "basic":
        upper = compute_epsilon(base, delta, accountant=accountant).upper
        if upper <= target:
            return NoiseMultipliers(shared, expert, upper)
    factor, upper = _certified_scale(base, target, delta, accountant)
    return NoiseMultipliers(shared * factor, expert * factor, upper)
