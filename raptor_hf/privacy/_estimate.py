"""A fast estimate of epsilon: the hockey-stick integral along a vertical line in the complex plane.

For privacy loss Y with cumulant generating function K(z) = log E[exp(z Y)],

    delta(eps) = E[(1 - exp(eps - Y))+] = 1 / (2 pi i) * integral over Re z = z0 of exp(K(z) - z eps) / (z (z + 1)) dz

for any z0 > 0 (Alghamdi et al. 2023, the saddle-point accountant). K adds over mechanisms and multiplies by the steps,
so 100,000 steps cost what one costs, and nothing is put on a mesh. It carries no proof of its rounding error:
calibration uses it to aim, the PRV accountant certifies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq

__all__ = ["estimate_epsilon"]

_TAIL = 1e-9  # relative size at which the integrand is cut off
_MAX_NODES = 8192  # along the line; beyond it (few steps: the integrand decays like 1/s^2) the estimate is refused


def _losses(noise_multiplier: float, sample_rate: float, order: float) -> tuple[np.ndarray, np.ndarray]:
    """Trapezoid nodes under N(0, sigma^2): (loss, log weight), wide enough for moments up to `order`."""
    sigma, p = noise_multiplier, sample_rate
    step = min(sigma, sigma**2) / 12
    x = np.arange(-9 * sigma, order + 9 * sigma + step, step)
    shift = (2 * x - 1) / (2 * sigma**2)  # log density ratio of N(1, sigma^2) to N(0, sigma^2)
    if p == 1:
        loss = shift  # log1p(expm1(shift)), which far below 0 is log(0)
    else:
        loss = np.where(shift < 700, np.log1p(p * np.expm1(np.minimum(shift, 700.0))), math.log(p) + shift)
    return loss, -0.5 * (x / sigma) ** 2 + math.log(step / (sigma * math.sqrt(2 * math.pi)))


def _cumulants(loss: np.ndarray, log_weight: np.ndarray, z: np.ndarray) -> np.ndarray:
    """K(z) for an array of real or complex z: log sum exp(log_weight + (1 + z) loss)."""
    exponent = log_weight[None, :] + (1 + z[:, None]) * loss[None, :]
    top = exponent.real.max(axis=1)
    return top + np.log(np.exp(exponent - top[:, None]).sum(axis=1))


def estimate_epsilon(groups: Sequence[tuple[float, float, int]], delta: float) -> float | None:
    """Epsilon at `delta` of removing a record, to about six digits, or None where the integral converges too slowly.

    Args:
        groups: (noise_multiplier, sample_rate, steps), steps > 0.
        delta: of the guarantee, 0 < delta < 1.
    """
    orders = np.geomspace(0.01, 400.0, 80)
    if min(sigma for sigma, _, _ in groups) < 2:
        orders = orders[orders <= 80.0]  # where much is spent the saddle point is a low order; the tables stay small
    tables = [(_losses(sigma, p, orders[-1] + 2), steps) for sigma, p, steps in groups]

    def composed(z: np.ndarray) -> np.ndarray:
        return sum(steps * _cumulants(*table, z) for table, steps in tables)

    k_real = composed(orders)
    # The order at which exp(K - z eps) / (z (z + 1)) = delta gives the smallest epsilon is the saddle point. Any z0 > 0
    # gives the same integral; a little below it the rare large losses of a small p disturb the line less.
    z0 = 0.75 * float(orders[np.argmin((k_real - math.log(delta) - np.log(orders * (orders + 1))) / orders)])
    tables = [(_losses(sigma, p, 2 * z0 + 2), steps) for sigma, p, steps in groups]

    # Width of the integrand at the saddle point: the spread of the tilted loss and the poles at 0 and -1.
    near = np.array([z0 * 0.99, z0, z0 * 1.01])
    k_near = composed(near)
    curvature = (k_near[0] - 2 * k_near[1] + k_near[2]) / (0.01 * z0) ** 2 + 1 / z0**2 + 1 / (z0 + 1) ** 2
    # A sum at spacing h instead of the integral adds delta(eps + k 2 pi / h) exp(k z0 2 pi / h) for k = -1, 1, ...
    # The term below is at most exp(-2 pi z0 / h); the one above is bounded by Chernoff at any higher order.
    raised = z0 * np.geomspace(0.02, 1.0, 40)
    above = float(np.min((composed(z0 + raised) - k_near[1] + 20) / raised))
    below = -math.log(1e-9 * delta) / z0
    spacing = min(0.3 / math.sqrt(curvature), 2 * math.pi / max(above, below))
    nodes, values = [], []
    for start in range(0, _MAX_NODES, 64):
        z = z0 + 1j * spacing * np.arange(start, start + 64)
        nodes.append(z)
        values.append(composed(z) - np.log(z * (z + 1)))
        if values[-1][-8:].real.max() - values[0][0].real < math.log(_TAIL):
            break
    else:
        return None
    z, log_value = np.concatenate(nodes), np.concatenate(values)
    weight = np.where(np.arange(len(z)) == 0, 0.5, 1.0) * spacing / math.pi

    def log_ratio(epsilon: float) -> float:
        scaled = float((weight * np.exp(log_value - log_value[0].real - (z - z0) * epsilon).real).sum())
        if scaled <= 0:
            return -50.0
        return math.log(scaled) + log_value[0].real - z0 * epsilon - math.log(delta)

    # Far from the saddle point the sum is rounding error: start near it and walk to the crossing.
    low = high = max(0.0, float(log_value[0].real - math.log(delta)) / z0)
    while log_ratio(high) > 0:
        low, high = high, high + 1 / z0
    while low > 0 and log_ratio(low) <= 0:
        low, high = max(0.0, low - 1 / z0), low
    if log_ratio(low) <= 0:
        return 0.0
    return float(brentq(log_ratio, low, high, xtol=1e-12, rtol=1e-9))
