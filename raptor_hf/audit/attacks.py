"""Membership attacks that need no, or only cheap, shadow models. Arrays in, arrays out: a higher score means "member".

Shapes: n records under attack, K shadow models, m population records that no model was trained on.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import logsumexp

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.validate import positive, probability

__all__ = ["calibrated_loss_attack", "loss_attack", "rmia_attack"]


def _same_shape(**arrays: np.ndarray) -> None:
    shapes = {name: np.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise PrivacyConfigError(
            "Arrays of shapes " + ", ".join(f"`{name}` {shape}" for name, shape in shapes.items()) + " were given",
            "Their entries belong to the same records and models",
            "Give arrays of one shape",
        )


def loss_attack(loss: np.ndarray) -> np.ndarray:
    """Minus the loss: members tend to be fitted better (Yeom et al. 2018). Shape as given."""
    return -np.asarray(loss, dtype=np.float64)


def calibrated_loss_attack(loss: np.ndarray, base_loss: np.ndarray) -> np.ndarray:
    """How far fine-tuning lowered the loss: the frozen base model's loss minus the fine-tuned model's.

    The base model saw no private record, so its loss measures how hard the record is anyway (Watson et al. 2022).

    Args:
        loss, base_loss: the same shape, float; of the same records.
    """
    _same_shape(loss=loss, base_loss=base_loss)
    return np.asarray(base_loss, dtype=np.float64) - np.asarray(loss, dtype=np.float64)


def rmia_attack(
    target_loss: np.ndarray,
    shadow_loss: np.ndarray,
    in_mask: np.ndarray,
    population_loss: np.ndarray,
    population_shadow_loss: np.ndarray,
    *,
    gamma: float = 2.0,
    offline_a: float = 1.0,
) -> np.ndarray:
    """Robust membership inference (Zarifzadeh, Liu and Shokri 2024), offline: one shadow model is enough.

    With p = exp(-loss), the record x is compared with every population record z: the score is the share of z for which
    (p(x | target) / p(x)) / (p(z | target) / p(z)) >= gamma. p(x) is approximated from the shadow models that did not
    train on x as ((1 + a) p_out(x) + (1 - a)) / 2, where a p_out + (1 - a) stands for the models that did.

    Args:
        target_loss: (n,) under the model attacked. shadow_loss: (K, n). in_mask: (K, n) bool, who trained on what.
        population_loss: (m,) under the model attacked. population_shadow_loss: (K, m). No model trained on these m.
        gamma: > 0. offline_a: a, in [0, 1]; 1 takes p_out alone.

    Returns:
        (n,) float64 in [0, 1], in steps of 1 / m.

    Raises:
        PrivacyConfigError: shapes that do not belong together, or a record that every shadow model trained on.
    """
    positive("gamma", gamma)
    a = probability("offline_a", offline_a, zero=True)
    mask = np.asarray(in_mask)
    shadow, population = np.asarray(shadow_loss, np.float64), np.asarray(population_shadow_loss, np.float64)
    _same_shape(shadow_loss=shadow, in_mask=mask)
    if mask.dtype != bool or mask.ndim != 2 or np.shape(target_loss) != mask.shape[1:]:
        raise PrivacyConfigError(
            f"`in_mask` of shape {mask.shape} and type {mask.dtype} was given for {np.size(target_loss)} records",
            "It says which shadow model trained on which record",
            "Give a bool array (K, n)",
        )
    if population.shape != (mask.shape[0], np.size(population_loss)) or population.shape[1] == 0:
        raise PrivacyConfigError(
            f"`population_shadow_loss` of shape {population.shape} was given for {np.size(population_loss)} population "
            f"records and {mask.shape[0]} shadow models",
            "Each population record needs the loss of each shadow model",
            "Give an array (K, m), m at least 1",
        )
    if mask.all(0).any():
        raise PrivacyConfigError(
            f"{int(mask.all(0).sum())} records were trained on by every shadow model",
            "How likely they are without being trained on is then unknown",
            "Leave every record out of at least one shadow model",
        )
    record = -np.asarray(target_loss, np.float64) - _log_prior(shadow, ~mask, a)
    others = -np.asarray(population_loss, np.float64) - _log_prior(population, np.ones(population.shape, bool), a)
    # Ratio >= gamma for all z at or below the record's own log ratio minus log gamma: no (n, m) table is formed.
    return np.searchsorted(np.sort(others), record - math.log(gamma), side="right") / others.size


def _log_prior(loss: np.ndarray, out: np.ndarray, a: float) -> np.ndarray:
    """log(((1 + a) p_out + (1 - a)) / 2) with p_out the mean of exp(-loss) over the models marked in `out`."""
    log_out = logsumexp(np.where(out, -loss, -np.inf), axis=0) - np.log(out.sum(0))
    if a == 1:
        return log_out
    return np.logaddexp(math.log1p(a) + log_out, math.log1p(-a)) - math.log(2)
