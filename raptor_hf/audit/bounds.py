"""Lower bounds on epsilon from an attack's error rates over *independent* trials of a mechanism.

If a mechanism is (eps, delta)-DP, every test between its outputs on two neighbouring datasets obeys

    TPR <= e^eps FPR + delta        and        TNR <= e^eps FNR + delta        (Kairouz, Oh and Viswanath 2015).

So rates that are certain enough refute every smaller epsilon. **The trials must be independent runs of the mechanism**,
on the dataset with and without one canary. Records of *one* trained model are no such trials: use `one_run` for those;
bounds computed here from the records of one model, or from LiRA's, are an illustration without a stated confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special, stats
from scipy.optimize import brentq

from raptor_hf.audit.roc import clopper_pearson, roc_curve
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.validate import finite, integer, one_of, probability

__all__ = [
    "EpsilonBound",
    "epsilon_from_mu",
    "epsilon_lower_bound",
    "mu_lower_bound",
    "split_epsilon_bound",
]


def _from_rates(tpr: float, fpr: float, delta: float) -> float:
    """max over both directions of log((TPR - delta) / FPR) and log((TNR - delta) / FNR), at least 0."""
    best = 0.0
    for power, error in ((tpr, fpr), (1 - fpr, 1 - tpr)):
        if power > delta:
            best = max(best, math.inf if error <= 0 else math.log(power - delta) - math.log(error))
    return best


def _certain_rates(tp: int, members: int, fp: int, non_members: int, confidence: float) -> tuple[float, float]:
    """(TPR at least, FPR at most); both hold together with `confidence`: each errs with half of the rest (Bonferroni).

    One end of a two-sided interval at `confidence` errs with (1 - confidence) / 2.
    """
    return clopper_pearson(tp, members, confidence)[0], clopper_pearson(fp, non_members, confidence)[1]


def epsilon_lower_bound(
    tp: int, members: int, fp: int, non_members: int, *, delta: float, confidence: float = 0.95
) -> float:
    """With probability >= `confidence`, a mechanism that gave these counts is not (eps', delta)-DP for any eps' below.

    Both directions of the inequality rest on the same two Clopper-Pearson bounds, so looking at both costs nothing.
    The threshold must have been fixed without these trials (`split_epsilon_bound` does it).

    Args:
        tp: trials with the canary that were called "member", of `members`. fp: the same without it, of `non_members`.
        delta: in [0, 1). confidence: in (0, 1).
    """
    probability("delta", delta, zero=True, one=False)
    return _from_rates(*_certain_rates(tp, members, fp, non_members, confidence), delta)


def mu_lower_bound(tp: int, members: int, fp: int, non_members: int, *, confidence: float = 0.95) -> float:
    """Lower bound on mu of Gaussian DP: Phi^-1(TPR) - Phi^-1(FPR) <= mu (Dong, Roth and Su 2022; Nasr et al. 2023).

    Valid for a mechanism that *is* mu-GDP for some mu. One that is not, such as a few steps of a subsampled Gaussian,
    may have a trade-off curve that no one mu describes: then the number depends on the threshold, and its epsilon
    is an estimate.
    """
    tpr, fpr = _certain_rates(tp, members, fp, non_members, confidence)
    if tpr <= fpr:
        return 0.0
    return float(special.ndtri(tpr) - special.ndtri(fpr))


def epsilon_from_mu(mu: float, delta: float) -> float:
    """The exact epsilon of mu-GDP at delta: delta = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2).

    Args:
        mu: >= 0, `inf` allowed. delta: in (0, 1).
    """
    probability("delta", delta, one=False)
    if mu == math.inf:
        return math.inf
    if finite("mu", mu) < 0:
        raise PrivacyConfigError(f"`mu={mu}` was given", "It is a distance", "Set `mu` to a number >= 0")

    def excess(epsilon: float) -> float:
        # The difference is formed in logarithms: e^eps overflows long before the product does.
        first = float(special.log_ndtr(-epsilon / mu + mu / 2))
        second = epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2))
        return math.exp(first) * -math.expm1(min(0.0, second - first)) - delta

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    # At eps = mu^2/2 + mu z with Phi(-z) = delta the first term alone is delta already.
    high = mu * mu / 2 + mu * max(0.0, float(stats.norm.isf(delta))) + 1e-9
    return float(brentq(excess, 0.0, high, xtol=1e-12))


@dataclass(frozen=True)
class EpsilonBound:
    """A bound, and all that it was computed from: counts of the *evaluation* half alone. **Private**."""

    epsilon: float
    mu: float
    mu_epsilon: float
    delta: float
    confidence: float
    threshold: float
    tp: int
    members: int
    fp: int
    non_members: int


def _best_threshold(scores: np.ndarray, member: np.ndarray, delta: float, confidence: float, choose: str) -> float:
    """The threshold with the highest bound on these trials: of mu where asked, or where every epsilon is zero."""
    roc = roc_curve(scores, member)
    tail = (1 - confidence) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        tpr = np.where(roc.tp == 0, 0.0, stats.beta.ppf(tail, roc.tp, roc.members - roc.tp + 1))
        fpr = np.where(
            roc.fp == roc.non_members, 1.0, stats.beta.isf(tail, roc.fp + 1, np.maximum(roc.non_members - roc.fp, 0))
        )
        forward = np.where(tpr > delta, np.log(tpr - delta) - np.log(fpr), -np.inf)
        backward = np.where(1 - fpr > delta, np.log(1 - fpr - delta) - np.log1p(-tpr), -np.inf)
        mu = special.ndtri(tpr) - special.ndtri(fpr)
    epsilon = np.maximum(forward, backward)[1:]  # the first point calls nobody a member
    if choose == "epsilon" and epsilon.max() > 0:
        return float(roc.thresholds[1:][int(np.argmax(epsilon))])
    return float(roc.thresholds[1:][int(np.argmax(np.nan_to_num(mu[1:], nan=-np.inf, neginf=-np.inf)))])


def split_epsilon_bound(
    scores: np.ndarray,
    member: np.ndarray,
    *,
    delta: float,
    confidence: float = 0.95,
    choose: str = "epsilon",
    seed: int = 0,
) -> EpsilonBound:
    """Choose the threshold on one random half of the trials, bound epsilon on the other half.

    Args:
        scores: (n,) of n independent trials; higher says "with the canary". member: (n,) bool. delta: in (0, 1).
        choose: whether the threshold is to suit "epsilon" or "mu" (less extreme).
        seed: of the split, which looks at no score. Fix it beforehand: the best of several seeds has no confidence.

    Returns:
        `epsilon` holds with `confidence` for any mechanism; `mu` does for Gaussian DP, and `mu_epsilon` is its epsilon.
        Both together, or the larger of the two, rest on the same event and need no correction.

    Raises:
        PrivacyConfigError: fewer than two trials of a kind, NaN scores, or shapes that differ.
    """
    probability("delta", delta, one=False)
    probability("confidence", confidence, one=False)
    one_of("choose", choose, ("epsilon", "mu"))
    integer("seed", seed)
    values, labels = np.asarray(scores, dtype=np.float64), np.asarray(member)
    roc_curve(values, labels)  # refuses what cannot be audited
    generator = np.random.default_rng(seed)
    choosing = np.zeros(values.shape, dtype=bool)
    for kind in (labels, ~labels):
        places = generator.permutation(np.flatnonzero(kind))
        if len(places) < 2:
            raise PrivacyConfigError(
                f"{len(places)} trial of one kind was given",
                "The threshold is chosen on one half of the trials and judged on the other",
                "Run at least two with the canary and two without it; a useful bound needs hundreds",
            )
        choosing[places[: len(places) // 2]] = True
    threshold = _best_threshold(values[choosing], labels[choosing], delta, confidence, choose)
    said = values[~choosing] >= threshold
    truth = labels[~choosing]
    counts = (int((said & truth).sum()), int(truth.sum()), int((said & ~truth).sum()), int((~truth).sum()))
    mu = mu_lower_bound(*counts, confidence=confidence)
    return EpsilonBound(
        epsilon=epsilon_lower_bound(*counts, delta=delta, confidence=confidence),
        mu=mu,
        mu_epsilon=epsilon_from_mu(mu, delta),
        delta=delta,
        confidence=confidence,
        threshold=threshold,
        tp=counts[0],
        members=counts[1],
        fp=counts[2],
        non_members=counts[3],
    )
