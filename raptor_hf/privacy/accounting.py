"""From noise multipliers to epsilon: what a run costs, as a certified upper bound.

Formal guarantee
----------------
A mechanism (sigma, p, T) is T releases of sum + N(0, sigma^2 C^2 I) in which each record enters independently with
probability p and moves the sum by at most C in L2 norm. `compute_epsilon` returns numbers with: the adaptive
composition of all the mechanisms is (upper, delta)-differentially private, unit one record, adjacency add or remove
one record. This is the composition of Eq. 10 of the paper with epsilon(delta) read as the hockey-stick divergence
(the tail bound printed there is looser). The E experts of a layer are ONE mechanism: a record moves one of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy._estimate import estimate_epsilon
from raptor_hf.privacy._pld import pld_epsilon
from raptor_hf.privacy._prv import prv_bounds, prv_eps_error
from raptor_hf.validate import finite, integer, one_of, positive, probability

__all__ = [
    "ACCOUNTANTS",
    "EpsilonBounds",
    "EpsilonRangeError",
    "Mechanism",
    "compute_epsilon",
    "default_delta",
    "max_cycles",
]

ACCOUNTANTS = ("prv", "pld")
MAX_EPSILON = 20.0
MIN_DELTA = 1e-10
MIN_NOISE, MAX_NOISE = 0.25, 1e6
# Delta that floating point may misplace per step: a T-th power in Fourier space has a relative error of T * 2e-16
# (seen: 1.5e-11 over 100,000 steps, which at delta = 1e-10 put the "upper bound" .03 below the truth).
_ROUNDING = 1e-15

Groups = list[tuple[float, float, int]]


class Mechanism(NamedTuple):
    """`steps` releases of a Poisson-subsampled Gaussian sum.

    Args:
        noise_multiplier: sigma; the noise has standard deviation sigma times the clip norm. In [0.25, 1e6].
        sample_rate: p, the probability with which each record enters a release. In (0, 1].
        steps: number of releases, >= 0.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int


class EpsilonBounds(NamedTuple):
    """Bounds on epsilon: `lower <= epsilon <= upper`. Publish `upper`, never `estimate`."""

    lower: float
    estimate: float
    upper: float


def default_delta(n: int) -> float:
    """The paper's delta, n ** -1.1, for a data set of n records.

    n * delta is then n ** -0.1 (.33 at n = 67,349), not a small number: report epsilon at 1e-6 and 1e-8 beside it.

    Raises:
        PrivacyConfigError: unless n is a whole number >= 2.
    """
    return float(integer("n", n, minimum=2)) ** -1.1


def check_delta(name: str, value: float) -> float:
    """Return `value` as a float; raise `PrivacyConfigError` outside [1e-10, 1)."""
    if not MIN_DELTA <= finite(name, value) < 1:
        raise PrivacyConfigError(
            f"`{name}={value!r}` was given",
            f"The accountants are accurate for {MIN_DELTA:g} <= {name} < 1 only",
            f"Set `{name}` inside that range, below 1/n",
        )
    return float(value)


def check_noise_multiplier(name: str, value: float) -> float:
    """Return `value` as a float; raise `PrivacyConfigError` outside [0.25, 1e6]."""
    if not MIN_NOISE <= positive(name, value) <= MAX_NOISE:
        raise PrivacyConfigError(
            f"`{name}={value!r}` was given",
            f"The accountants are accurate for {MIN_NOISE:g} <= {name} <= {MAX_NOISE:g} only",
            f"Set `{name}` inside that range",
        )
    return float(value)


def group_mechanisms(mechanisms: Iterable[tuple[float, float, int]]) -> Groups:
    """Checked mechanisms with equal (sigma, p) merged and zero steps dropped; those of p = 1 merged into one.

    100,000 alternating steps become two groups. Without subsampling the squares 1 / sigma^2 add exactly.
    """
    totals: dict[tuple[float, float], int] = {}
    for mechanism in mechanisms:
        try:
            noise_multiplier, sample_rate, steps = mechanism
        except (TypeError, ValueError):
            raise PrivacyConfigError(
                f"`mechanisms` holds {mechanism!r}",
                "A mechanism is a triple (noise_multiplier, sample_rate, steps)",
                "Pass a list of `Mechanism(noise_multiplier, sample_rate, steps)`",
            ) from None
        key = (noise_multiplier, sample_rate)
        totals[key] = totals.get(key, 0) + integer("steps", steps)
    groups: Groups = []
    squares = 0.0
    for (noise_multiplier, sample_rate), steps in totals.items():
        sigma = check_noise_multiplier("noise_multiplier", noise_multiplier)
        p = probability("sample_rate", sample_rate)
        if steps and p == 1.0:
            squares += steps / sigma**2
        elif steps:
            groups.append((sigma, p, steps))
    if squares:
        groups.append((1 / math.sqrt(squares), 1.0, 1))
    return sorted(groups)


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon of Gaussian noise with sensitivity / deviation = mu (Balle and Wang 2018)."""

    def excess(epsilon: float) -> float:
        first = float(ndtr(mu / 2 - epsilon / mu))
        return first - math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))) - delta

    if excess(0.0) <= 0:
        return 0.0
    high = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # the tail bound on the loss: always enough
    return float(brentq(excess, 0.0, high, xtol=1e-12, rtol=1e-12))


class EpsilonRangeError(PrivacyConfigError):
    """The mechanisms spend more than the largest epsilon that is certified (20)."""

    def __init__(self, delta: float):
        super().__init__(
            f"The mechanisms spend an epsilon above {MAX_EPSILON:g} at delta = {delta:g}",
            "That is outside the range in which the accountants are used, and protects nobody",
            "Raise the noise multipliers or delta, or take fewer steps or a smaller sample rate",
        )


def _prv_with_retry(
    groups: Sequence[tuple[float, float, int]], delta: float, eps_error: float, *, both_directions: bool = True
) -> tuple[float, float, float]:
    """`prv_bounds`, on a coarser mesh where the library's integration of the mean cannot follow a fine one."""
    for factor in (1, 10):
        with contextlib.suppress(RuntimeError):
            return prv_bounds(groups, delta, factor * eps_error, both_directions=both_directions)
    return prv_bounds(groups, delta, 100 * eps_error, both_directions=both_directions)


def rough_epsilon(groups: Sequence[tuple[float, float, int]], delta: float) -> float:
    """An uncertified epsilon: the saddle-point integral, or a coarse composition where that converges too slowly."""
    rough = estimate_epsilon(groups, delta)
    return _coarse_epsilon(groups, delta) if rough is None else rough


def _coarse_epsilon(groups: Sequence[tuple[float, float, int]], delta: float) -> float:
    coarse = max(0.02, 8 * prv_eps_error(groups, delta, 1e-9))
    return max(0.0, _prv_with_retry(groups, delta, coarse, both_directions=False)[1])


@functools.lru_cache(maxsize=1024)
def _certify(groups: tuple[tuple[float, float, int], ...], delta: float, accountant: str) -> EpsilonBounds:
    """The bounds for checked groups. Cached: a run asks again at every log line, checkpoint and statement."""
    if all(p == 1.0 for _, p, _ in groups):
        epsilon = _gaussian_epsilon(1 / groups[0][0], delta)
        # Exact to 1e-12; the margin is as wide as the pessimism of numerical accountants, so that they agree.
        bounds = EpsilonBounds(epsilon * (1 - 1e-4), epsilon, epsilon * (1 + 1e-4))
    else:
        rounding = _ROUNDING * sum(steps for *_, steps in groups)
        if delta < 10 * rounding:
            raise PrivacyConfigError(
                f"`delta={delta:g}` was given",
                f"The rounding error of the accountants over that many steps is about {rounding:.1g}",
                f"Use delta >= {10 * rounding:.1g}, or fewer steps",
            )
        bounds = _composed(groups, delta, delta - rounding, accountant)
    if not math.isfinite(bounds.upper) or bounds.upper > MAX_EPSILON:
        raise EpsilonRangeError(delta)
    return bounds


def _composed(
    groups: Sequence[tuple[float, float, int]], delta: float, safe_delta: float, accountant: str
) -> EpsilonBounds:
    independent = estimate_epsilon(groups, delta)
    rough = _coarse_epsilon(groups, delta) if independent is None else independent
    if rough > MAX_EPSILON:
        raise EpsilonRangeError(delta)
    if accountant == "pld":
        upper = pld_epsilon(groups, safe_delta)
        bounds = EpsilonBounds(0.0, upper, upper)
    else:
        # The floor is far below any published epsilon, and keeps the mesh sane when next to nothing is spent.
        eps_error = prv_eps_error(groups, delta, max(rough, 0.01))
        bounds = EpsilonBounds(*(max(0.0, value) for value in _prv_with_retry(groups, safe_delta, eps_error)))
    # An independent method, without a mesh or a Fourier transform: no certificate, but it must not exceed one.
    if independent is not None and independent > bounds.upper + 1e-6:
        raise RuntimeError(f"two methods disagree: {independent:.6g} and at most {bounds.upper:.6g}")
    return bounds


def compute_epsilon(
    mechanisms: Iterable[tuple[float, float, int]], delta: float, *, accountant: str = "prv"
) -> EpsilonBounds:
    """Epsilon of the adaptive composition of `mechanisms` at `delta`.

    Args:
        mechanisms: (noise_multiplier, sample_rate, steps) triples or `Mechanism`s, in any order and number; equal
            (noise_multiplier, sample_rate) are merged, so the cost does not depend on the number of steps.
        delta: of the guarantee, in [1e-10, 1), and at least 1e-14 times the steps.
        accountant: "prv" (up to 2 s of CPU; numerical error half a percent of epsilon, more beyond about 10,000
            steps at small epsilon) or "pld" (needs dp-accounting; its lower bound is the trivial 0). Both cover adding
            and removing a record. Without subsampling (p = 1 throughout) either is the exact Gaussian formula.

    Returns:
        (lower, estimate, upper); zeros when no step was taken.

    Raises:
        PrivacyConfigError: outside the guarded ranges (the message names the range), or for an epsilon above 20.

    Formal guarantee: the composition is (upper, delta)-DP under adding or removing one record (Eq. 10).
    """
    delta = check_delta("delta", delta)
    one_of("accountant", accountant, ACCOUNTANTS)
    groups = group_mechanisms(mechanisms)
    if not groups:
        return EpsilonBounds(0.0, 0.0, 0.0)
    try:
        return _certify(tuple(groups), delta, accountant)
    except PrivacyConfigError:
        raise
    except (ArithmeticError, AssertionError, MemoryError, RuntimeError, ValueError) as error:
        raise PrivacyConfigError(
            f"The accountant could not bound epsilon at `delta={delta:g}` for {groups}",
            f"Floating point does not support the claim ({error})",
            "Raise delta or the noise multipliers, or use the other accountant",
        ) from error


def max_cycles(
    target_epsilon: float,
    target_delta: float,
    noise_multipliers: tuple[float | None, float | None],
    sample_rate: float,
    *,
    spent: tuple[int, int] = (0, 0),
    limit: int = 10_000_000,
    accountant: str = "prv",
) -> int:
    """The largest number of further cycles whose upper bound stays at or below `target_epsilon`.

    Both streams advance by one release a cycle from their spent counters. Bisection on the certified upper bound; a
    `limit` that already fits costs one query.

    Args:
        noise_multipliers: (shared, expert); None for a stream that is not trained.
        sample_rate: p of both streams.
        spent: releases already taken by (shared, expert), which need not be equal.
        limit: never return more than this.

    Raises:
        PrivacyConfigError: for arguments out of range. A run that already spent more than the target gets 0.
    """
    target = positive("target_epsilon", target_epsilon)
    delta = check_delta("target_delta", target_delta)
    one_of("accountant", accountant, ACCOUNTANTS)
    limit = integer("limit", limit)
    counters = tuple(integer("spent", count) for count in spent)
    streams = [(sigma, count) for sigma, count in zip(noise_multipliers, counters, strict=True) if sigma is not None]
    if not streams:
        raise PrivacyConfigError("Both noise multipliers are None", "Nothing is private", "Set at least one of them")

    def mechanisms(cycles: int) -> list[Mechanism]:
        return [Mechanism(sigma, sample_rate, count + cycles) for sigma, count in streams]

    def roughly_fits(cycles: int, aim: float) -> bool:
        groups = group_mechanisms(mechanisms(cycles))
        return not groups or rough_epsilon(groups, delta) <= aim

    def upper(cycles: int) -> float:
        try:
            return compute_epsilon(mechanisms(cycles), delta, accountant=accountant).upper
        except EpsilonRangeError:
            return math.inf

    def fits(cycles: int) -> bool:
        return roughly_fits(cycles, 1.02 * target) and upper(cycles) <= target

    # Aim with the estimate, lowered by what the certificate adds to it; then certify on both sides of the crossing.
    aim = _last_true(lambda cycles: roughly_fits(cycles, target), limit)
    certificate = upper(aim)
    if aim == limit and certificate <= target:
        return limit
    if aim and math.isfinite(certificate):
        addition = certificate - rough_epsilon(group_mechanisms(mechanisms(aim)), delta)
        aim = _last_true(lambda cycles: roughly_fits(cycles, target - addition), aim)
    low, high, width = aim, min(limit, aim + 1), 1
    while low > 0 and not fits(low):
        low, high, width = max(0, low - width), low, 2 * width
    while high < limit and fits(high):
        low, high, width = high, min(limit, high + width), 2 * width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high if high > low and fits(high) else low


def _last_true(condition: Callable[[int], bool], limit: int) -> int:
    """The largest k <= limit with condition(k), for a condition that holds up to some k; 0 when it never holds."""
    low, high = 0, 1
    while high < limit and condition(high):
        low, high = high, 2 * high
    high = min(high, limit)
    if high == limit and condition(limit):
        return limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if condition(middle) else (low, middle)
    return low
