"""LiRA, the likelihood-ratio attack with shadow models (Carlini et al. 2022). A higher score means "member".

Shapes: K shadow models, n records. `scores` (K, n) holds the logit-scaled confidence of every record under every shadow
model, `in_mask` (K, n) which of them trained on it; half of them, by design. LiRA shows how much a strong attack finds
out about typical records. It illustrates: it does not validate a claimed epsilon, nor does its failure prove one.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.validate import one_of

__all__ = ["lira_leave_one_out", "lira_offline", "lira_online"]

# Below about 64 models one variance for all records does better than n noisy ones, as the paper found; of 64
# models, 63 are shadows when each is attacked in turn.
_SHADOWS_FOR_OWN_VARIANCE = 63


def _checked(scores: np.ndarray, in_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, mask = np.asarray(scores, dtype=np.float64), np.asarray(in_mask)
    if values.ndim != 2 or values.shape != mask.shape or mask.dtype != bool:
        raise PrivacyConfigError(
            f"Scores of shape {values.shape} and `in_mask` of shape {mask.shape}, {mask.dtype}, were given",
            "Each score is that of one record under one shadow model, which trained on it or did not",
            "Give two arrays (K, n), `in_mask` bool",
        )
    if not np.isfinite(values).all():
        raise PrivacyConfigError(
            f"{int((~np.isfinite(values)).sum())} shadow scores are not finite",
            "A normal distribution cannot be fitted to them",
            "Use `record_scores(...).confidence`, which is finite wherever the model evaluates",
        )
    return values, mask


def _target(target: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The attacked model's scores; NaN would pass through every comparison unnoticed."""
    checked = np.asarray(target, dtype=np.float64)
    if checked.shape != values.shape[1:] or not np.isfinite(checked).all():
        raise PrivacyConfigError(
            f"`target` of shape {checked.shape} with {int((~np.isfinite(checked)).sum())} values that are not finite "
            f"was given for {values.shape[1]} records",
            "The attack compares the model's score of each record with the shadow models'",
            "Give the finite scores (n,) of the same records in the same order",
        )
    return checked


def _fit(values: np.ndarray, chosen: np.ndarray, own_variance: bool, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (n,) of each record's scores over the models marked in `chosen` (K, n)."""
    count = chosen.sum(0)
    least = 2 if own_variance else 1
    if (count >= least).all() and count.sum() <= count.size and not own_variance:
        raise PrivacyConfigError(
            f"{values.shape[0]} shadow models were given, of which one for each record is {kind} it",
            "One score a record has no spread, and the common variance is the spread within records",
            "Train more shadow models: with halves, six at least",
        )
    if (count < least).any():
        raise PrivacyConfigError(
            f"{int((count < least).sum())} of {count.size} records have fewer than {least} shadow models {kind} them, "
            f"of {values.shape[0]} in all",
            "The distribution of their scores cannot be estimated",
            "Train more shadow models, each record in half of them, or leave these records out of the attack",
        )
    mean = np.where(chosen, values, 0.0).sum(0) / count
    squares = (np.where(chosen, values - mean, 0.0) ** 2).sum(0)
    if own_variance:
        variance = squares / (count - 1)
    else:  # within records: the spread *between* records says nothing about one record's score
        variance = np.full(count.size, squares.sum() / (count.sum() - count.size))
    # Shadow models that agree to the last bit must not divide by zero; far below what any real spread is.
    floor = 1e-12 * max(1.0, float(np.abs(values).max(initial=0.0)))
    return mean, np.maximum(np.sqrt(variance), floor)


def _own_variance(variance: str, models: int) -> bool:
    one_of("variance", variance, ("auto", "record", "pooled"))
    return variance == "record" or (variance == "auto" and models >= _SHADOWS_FOR_OWN_VARIANCE)


def lira_online(target: np.ndarray, scores: np.ndarray, in_mask: np.ndarray, *, variance: str = "auto") -> np.ndarray:
    """log N(target; in) - log N(target; out), each record's own normal fits (Algorithm 1).

    Args:
        target: (n,) scores under the model attacked. scores: (K, n) under the shadow models, without the one attacked.
        in_mask: (K, n) bool. variance: "record" gives each record its own, "pooled" one (within records) for all;
            "auto" is "record" from 63 shadow models on.

    Returns:
        (n,) float64 log-likelihood ratios.

    Raises:
        PrivacyConfigError: shapes, values that are not finite, or records with too few shadow models on either side.
    """
    values, mask = _checked(scores, in_mask)
    point = _target(target, values)
    own = _own_variance(variance, len(values))
    mean_in, std_in = _fit(values, mask, own, "trained on")
    mean_out, std_out = _fit(values, ~mask, own, "not trained on")
    return stats.norm.logpdf(point, mean_in, std_in) - stats.norm.logpdf(point, mean_out, std_out)


def lira_offline(target: np.ndarray, scores: np.ndarray, in_mask: np.ndarray, *, variance: str = "auto") -> np.ndarray:
    """-log P(N(out) > target): how surprising the score is for a record not trained on.

    Only the shadow models that did not train on the record are read. Arguments, errors and shapes as `lira_online`.
    """
    values, mask = _checked(scores, in_mask)
    point = _target(target, values)
    mean, std = _fit(values, ~mask, _own_variance(variance, len(values)), "not trained on")
    return -stats.norm.logsf(point, mean, std)


def lira_leave_one_out(
    scores: np.ndarray, in_mask: np.ndarray, *, attack: str = "online", variance: str = "auto"
) -> np.ndarray:
    """Each of the K models in turn is attacked with the other K - 1 as its shadows.

    The models' subsets must be drawn independently. Where they come in complementary halves (each record in exactly
    half of the models), the partner of the model attacked is among its shadows: a member is in K/2 - 1 of them, a
    non-member in K/2. The mean of fewer scores is further from the target, so that the AUC is biased below 0.5 (0.476
    for K = 8 where there is nothing to find), and a leak looks smaller than it is. Use `lira_online` without the
    partner then.

    Args:
        scores, in_mask: (K, n). attack: "online" or "offline". variance: as in `lira_online`.

    Returns:
        (K, n) float64; the truth for entry (k, i) is `in_mask[k, i]`. The K attacks share records and shadows: n
        records are n independent pieces of evidence at most, not K n.
    """
    one_of("attack", attack, ("online", "offline"))
    run = lira_online if attack == "online" else lira_offline
    values, mask = _checked(scores, in_mask)
    found = np.empty_like(values)
    for k in range(len(values)):
        others = np.arange(len(values)) != k
        found[k] = run(values[k], values[others], mask[others], variance=variance)
    return found
