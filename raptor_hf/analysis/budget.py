"""How to divide one privacy budget between the two streams so that their noise costs least.

The streams' privacy losses compose like Gaussians: T releases of noise multiplier sigma at sample rate p have
mu^2 = p^2 T (exp(1 / sigma^2) - 1) (the central limit theorem of Gaussian DP, Bu et al. 2020), and the mu^2 of streams
add. `docs/analysis.md` derives what follows from it.

Nothing here is a privacy claim. The central limit is an approximation, good enough to *choose* a split; whatever split
is chosen, the noise multipliers are calibrated and certified by `raptor_hf.privacy`. The choice itself must rest on
public numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm

from raptor_hf.validate import integer, positive, probability

__all__ = ["NoiseCosts", "OptimalSplit", "gdp_delta", "gdp_mu", "mu_of", "noise_of_mu", "optimal_split"]

_EDGE = 1e-9


@dataclass(frozen=True)
class NoiseCosts:
    """What noise costs: the loss rises by `shared` sigma_s^2 + `expert` sigma_e^2 (up to a common factor).

    Attributes:
        shared: lambda_s d_s C_s^2. expert: lambda_e d_e E^2 C_e^2, with lambda the rise of the loss for each unit of
            squared noise norm (Eq. 40), d the parameters of the stream (of all experts together), and E C_e / B and
            C_s / B the sensitivities of the released gradients (Eqs. 19, 20).
    """

    shared: float
    expert: float


@dataclass(frozen=True)
class OptimalSplit:
    """The cheapest division of a budget.

    Attributes:
        shared_noise, expert_noise: sigma_s, sigma_e (by the central limit; approximate). shared_share: mu_s^2 / mu^2.
        budget_split: the rho of `calibrate_noise_multipliers` whose ratio sigma_e / sigma_s this is.
    """

    shared_noise: float
    expert_noise: float
    shared_share: float
    budget_split: float


def gdp_mu(noise_multiplier: float, sample_rate: float, steps: int) -> float:
    """mu = p sqrt(T (exp(1 / sigma^2) - 1)): T Poisson-subsampled Gaussians, in the limit of many and small p.

    At p = 1, where nothing is sampled, mu = sqrt(T) / sigma, exactly.
    """
    if sample_rate == 1:
        return math.sqrt(steps) / noise_multiplier
    return sample_rate * math.sqrt(steps * math.expm1(noise_multiplier**-2))


def noise_of_mu(mu: float, sample_rate: float, steps: int) -> float:
    """The inverse of `gdp_mu` in sigma."""
    if sample_rate == 1:
        return math.sqrt(steps) / mu
    return 1 / math.sqrt(math.log1p(mu**2 / (sample_rate**2 * steps)))


def gdp_delta(epsilon: float, mu: float) -> float:
    """delta = Phi(-eps / mu + mu / 2) - exp(eps) Phi(-eps / mu - mu / 2): mu-GDP as (epsilon, delta)-DP."""
    low, high = norm.logcdf(-epsilon / mu + mu / 2), norm.logcdf(-epsilon / mu - mu / 2)
    return float(math.exp(low) * -math.expm1(min(0.0, epsilon + high - low)))


def mu_of(epsilon: float, delta: float) -> float:
    """The mu at which mu-GDP gives exactly (epsilon, delta)."""
    positive("epsilon", epsilon)
    probability("delta", delta, one=False)

    def gap(log_mu: float) -> float:
        return math.log(max(gdp_delta(epsilon, math.exp(log_mu)), 1e-300)) - math.log(delta)

    return math.exp(brentq(gap, math.log(1e-3 * min(1.0, epsilon)), math.log(10 + 4 * epsilon), xtol=1e-12))


def optimal_split(
    costs: NoiseCosts, *, target_epsilon: float, target_delta: float, sample_rate: float, steps: int
) -> OptimalSplit:
    """Minimise `costs.shared` sigma_s^2 + `costs.expert` sigma_e^2 over all splits of one (epsilon, delta) budget.

    With K = mu^2 / (p^2 T), the shared stream having the share m of it, sigma_s^2 = 1 / log(1 + m K) and
    sigma_e^2 = 1 / log(1 + (1 - m) K): both are convex in m (one over a positive concave function), so the minimum is
    unique. Where K is small (much noise), m tends to 1 / (1 + sqrt(expert / shared)).

    Args:
        costs: both > 0. sample_rate: p. steps: T, the same for both streams.
    """
    shared, expert = positive("costs.shared", costs.shared), positive("costs.expert", costs.expert)
    p, count = probability("sample_rate", sample_rate), integer("steps", steps, minimum=1)
    mu = mu_of(target_epsilon, target_delta)

    def cost(share: float) -> float:
        noises = (noise_of_mu(mu * math.sqrt(part), p, count) for part in (share, 1 - share))
        return sum(price * noise**2 for price, noise in zip((shared, expert), noises, strict=True))

    bounds = (_EDGE, 1 - _EDGE)
    share = float(minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x)
    noises = [noise_of_mu(mu * math.sqrt(part), p, count) for part in (share, 1 - share)]

    def ratio_gap(rho: float) -> float:
        alone = [noise_of_mu(mu_of(part * target_epsilon, target_delta), p, count) for part in (rho, 1 - rho)]
        return math.log(alone[1] / alone[0]) - math.log(noises[1] / noises[0])

    low, high = 1e-4, 1 - 1e-4
    if ratio_gap(low) >= 0:
        rho = low
    elif ratio_gap(high) <= 0:
        rho = high
    else:
        rho = float(brentq(ratio_gap, low, high, xtol=1e-8))
    return OptimalSplit(noises[0], noises[1], share, rho)
