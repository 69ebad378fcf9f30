"""ROC of a membership attack. A higher score means "member"; records of equal score are told apart by nobody.

Every statistic here treats the records as independent draws. Records of one trained model are not quite that, and the
K attacks of leave-one-out LiRA see each record K times: read the intervals as the sampling error of the *records*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.validate import integer, probability

__all__ = [
    "AttackSummary",
    "OperatingPoint",
    "Roc",
    "auc",
    "auc_interval",
    "checked_scores",
    "clopper_pearson",
    "roc_curve",
    "summarise_attack",
    "tpr_at_fpr",
]


def checked_scores(scores: np.ndarray, member: np.ndarray, *, both: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Flat float64 scores and bool membership: of one size, no NaN, `both` kinds present; else refused."""
    values, labels = np.asarray(scores, dtype=np.float64).ravel(), np.asarray(member).ravel()
    if labels.dtype != bool or values.shape != labels.shape:
        raise PrivacyConfigError(
            f"{values.size} scores and membership of {labels.size} values of type {labels.dtype} were given",
            "Each score belongs to one record, which is a member or is not",
            "Give a bool array of the scores' shape",
        )
    if np.isnan(values).any():
        raise PrivacyConfigError(
            f"{int(np.isnan(values).sum())} scores are NaN",
            "A NaN is neither above nor below a threshold, so every rate would be wrong",
            "Find out why the attack gave none; do not drop the records, which are the ones that stand out",
        )
    if both and (labels.all() or not labels.any()):
        raise PrivacyConfigError(
            f"{int(labels.sum())} members and {int((~labels).sum())} non-members were given",
            "Both error rates of an attack are needed",
            "Score records of both kinds",
        )
    return values, labels


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact two-sided interval of a binomial proportion: each side errs with probability (1 - confidence) / 2 at most.

    Either end alone is therefore a one-sided bound at 1 - (1 - confidence) / 2.
    """
    integer("trials", trials, minimum=1)
    integer("successes", successes)
    probability("confidence", confidence, one=False)
    if successes > trials:
        raise PrivacyConfigError(
            f"{successes} successes in {trials} trials were given", "There cannot be more", "Check the counts"
        )
    tail = (1 - confidence) / 2
    lower = 0.0 if successes == 0 else float(stats.beta.ppf(tail, successes, trials - successes + 1))
    upper = 1.0 if successes == trials else float(stats.beta.isf(tail, successes + 1, trials - successes))
    return lower, upper


@dataclass(frozen=True)
class Roc:
    """All points that some threshold reaches: "member" is said where score >= threshold.

    Attributes:
        thresholds: (G + 1,) float64, falling: +inf (NaN where a score is +inf), then each of the G distinct scores.
        tp, fp: (G + 1,) int64, members and non-members at or above each threshold; (0, 0) first, all last.
    """

    thresholds: np.ndarray = field(repr=False)
    tp: np.ndarray = field(repr=False)
    fp: np.ndarray = field(repr=False)

    @property
    def members(self) -> int:
        return int(self.tp[-1])

    @property
    def non_members(self) -> int:
        return int(self.fp[-1])

    @property
    def tpr(self) -> np.ndarray:
        return self.tp / self.members

    @property
    def fpr(self) -> np.ndarray:
        return self.fp / self.non_members


def roc_curve(scores: np.ndarray, member: np.ndarray) -> Roc:
    """Counts at every distinct score; a group of equal scores is one step, never taken apart.

    Args:
        scores: any shape, float; +-inf allowed. member: the same shape, bool.

    Raises:
        PrivacyConfigError: NaN scores, one class only, or shapes that differ.
    """
    values, labels = checked_scores(scores, member)
    distinct, group = np.unique(values, return_inverse=True)
    tp = np.bincount(group, weights=labels, minlength=len(distinct)).astype(np.int64)[::-1]
    fp = np.bincount(group, weights=~labels, minlength=len(distinct)).astype(np.int64)[::-1]
    # The first point says "member" of nobody. So does +inf, unless a score is +inf itself; nothing is >= NaN.
    first = np.nan if distinct[-1] == np.inf else np.inf
    start = np.zeros(1, dtype=np.int64)
    return Roc(
        np.concatenate([[first], distinct[::-1]]),
        np.concatenate([start, np.cumsum(tp)]),
        np.concatenate([start, np.cumsum(fp)]),
    )


def auc(scores: np.ndarray, member: np.ndarray) -> float:
    """P(member's score > non-member's) + P(equal) / 2, over all pairs (Mann-Whitney)."""
    roc = roc_curve(scores, member)
    # Twice the area in units of pairs is a whole number: trapezoids, in integers as long as they fit.
    twice = int(np.dot(np.diff(roc.fp), roc.tp[1:] + roc.tp[:-1]))
    return twice / (2 * roc.members * roc.non_members)


def auc_interval(scores: np.ndarray, member: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the AUC by DeLong, DeLong and Clarke-Pearson 1988: normal, asymptotic, clipped to [0, 1].

    Where the estimated variance is zero (members and non-members apart, or fewer than two of a kind), which says
    nothing, the variance is bounded by AUC (1 - AUC) / min(members, non-members) for any two distributions (Birnbaum
    and Klose 1957), as for the proportion of that many trials, and Wilson's interval for it is given.
    """
    probability("confidence", confidence, one=False)
    values, labels = checked_scores(scores, member)
    z = float(stats.norm.isf((1 - confidence) / 2))
    inside, outside = values[labels], values[~labels]
    few = min(len(inside), len(outside))
    area = auc(values, labels)
    variance = 0.0
    if few > 1:
        # Each record's placement among the other kind: the share below it, and half the share at it.
        among_out = _placement(inside, outside)
        among_in = 1 - _placement(outside, inside)
        variance = float(among_out.var(ddof=1) / len(inside) + among_in.var(ddof=1) / len(outside))
    if variance > 0:
        half = z * math.sqrt(variance)
        return max(0.0, area - half), min(1.0, area + half)
    centre = (area + z * z / (2 * few)) / (1 + z * z / few)
    half = z / (1 + z * z / few) * math.sqrt(area * (1 - area) / few + z * z / (4 * few * few))
    return max(0.0, centre - half), min(1.0, centre + half)


def _placement(values: np.ndarray, among: np.ndarray) -> np.ndarray:
    ordered = np.sort(among)
    below, upto = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (below + upto) / (2 * len(ordered))


@dataclass(frozen=True)
class OperatingPoint:
    """One threshold's counts, rates, and the rates' Clopper-Pearson intervals at `confidence`.

    The threshold was chosen with these very records, so the intervals do not account for the choice.
    """

    max_fpr: float
    threshold: float
    tp: int
    fp: int
    members: int
    non_members: int
    confidence: float

    @property
    def tpr(self) -> float:
        return self.tp / self.members

    @property
    def fpr(self) -> float:
        return self.fp / self.non_members

    @property
    def tpr_interval(self) -> tuple[float, float]:
        return clopper_pearson(self.tp, self.members, self.confidence)

    @property
    def fpr_interval(self) -> tuple[float, float]:
        return clopper_pearson(self.fp, self.non_members, self.confidence)


def tpr_at_fpr(roc: Roc, max_fpr: float, confidence: float = 0.95) -> OperatingPoint:
    """The reachable point of highest TPR whose FPR is at most `max_fpr`. No interpolation: nothing between is reached.

    With fewer than 1 / max_fpr non-members it is the point without a false positive.
    """
    probability("max_fpr", max_fpr, zero=True)
    probability("confidence", confidence, one=False)
    # 0.29 * 100 is 28.999...: a count is whole, so a slack far below one does no harm.
    index = int(np.searchsorted(roc.fp, max_fpr * roc.non_members + 1e-9, side="right")) - 1
    return OperatingPoint(
        max_fpr=max_fpr,
        threshold=float(roc.thresholds[index]),
        tp=int(roc.tp[index]),
        fp=int(roc.fp[index]),
        members=roc.members,
        non_members=roc.non_members,
        confidence=confidence,
    )


@dataclass(frozen=True)
class AttackSummary:
    """What is told of an attack: AUC with its interval, and the TPR at each FPR asked for. **Private**."""

    auc: float
    auc_interval: tuple[float, float]
    points: tuple[OperatingPoint, ...]
    confidence: float


def summarise_attack(
    scores: np.ndarray, member: np.ndarray, max_fprs: Sequence[float] = (0.001, 0.01), confidence: float = 0.95
) -> AttackSummary:
    """AUC (DeLong interval) and the best reachable TPR at each of `max_fprs` (Clopper-Pearson intervals)."""
    roc = roc_curve(scores, member)
    return AttackSummary(
        auc=auc(scores, member),
        auc_interval=auc_interval(scores, member, confidence),
        points=tuple(tpr_at_fpr(roc, rate, confidence) for rate in max_fprs),
        confidence=confidence,
    )
