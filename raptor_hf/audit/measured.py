"""Noise and sensitivity of a stream, measured along the canaries' directions, against the stated constants.

These tests assume that the mechanism is the Gaussian one that the statement describes, and are therefore far sharper
than a bound that assumes nothing: one run shows noise of nine tenths of what is due.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

__all__ = ["ALARM", "Measured", "measure", "repetition"]

# A correct trainer gives a smaller tail probability than this once in a million such tests.
ALARM = 1e-6


@dataclass(frozen=True)
class Measured:
    """What was measured in one stream, on some of its canaries.

    Attributes:
        noise: standard deviation of the releases over the stated sigma, along canaries that are out.
        noise_tail: probability of so little under the stated noise. What other records add can only raise it.
        shift: how far a drawn canary moves the release, in units of the clipping norm: 1 for any canary longer than
            it; NaN where all coins fell alike. shift_tail: probability of so much if 1 is true (normal approximation).
    """

    noise: float
    noise_tail: float
    shift: float
    shift_tail: float

    @property
    def alarming(self) -> bool:
        """Too little noise, or a record that counts for more than the clipping norm."""
        return self.noise_tail < ALARM or self.shift_tail < ALARM


def measure(seen: np.ndarray, included: np.ndarray, noise_multiplier: float, sample_rate: float) -> Measured:
    """Compare observations with the stated noise multiplier, and a record's contribution with the clipping norm.

    Args:
        seen: (T, m), see `Observer.seen`. included: (m,) bool.
    """
    out, there = seen[:, ~included], seen[:, included]
    noise, noise_tail = math.nan, 1.0
    if out.size:
        square = float((out**2).sum())
        noise = math.sqrt(square / out.size) / noise_multiplier
        noise_tail = float(stats.chi2(out.size).cdf(square / noise_multiplier**2))
    shift, shift_tail = math.nan, 1.0
    if min(out.shape[1], there.shape[1]) >= 2:
        # one figure a canary: what the other records add along its direction is the same in every cycle, nearly
        away, mine = out.mean(0), there.mean(0)
        shift = float(mine.mean() - away.mean()) / sample_rate
        error = math.sqrt(mine.var(ddof=1) / len(mine) + away.var(ddof=1) / len(away)) / sample_rate
        freedom = min(len(mine), len(away)) - 1
        shift_tail = float(stats.t.sf((shift - 1) / max(error, 1e-300), freedom))
    return Measured(noise, noise_tail, shift, shift_tail)


def repetition(one: np.ndarray, two: np.ndarray) -> float:
    """Probability that independent standard normal noise correlates as much as `one` and `two` do.

    Args:
        one, two: (T, m) noise over its stated standard deviation, in the same directions; as many rows as both have
            are compared. Columns of zeros count for nothing.
    """
    rows = min(len(one), len(two))
    products = one[:rows] * two[:rows]
    used = int(np.count_nonzero(products))
    return float(2 * stats.norm.sf(abs(products.sum()) / math.sqrt(used))) if used else 1.0
