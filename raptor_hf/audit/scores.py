"""What a model says about each record: the raw material of every membership attack.

Shapes: B records of a batch, C classes, T tokens, V vocabulary, S supervised tokens of a batch, n records in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.validate import integer

__all__ = ["RecordScores", "record_scores"]

_IGNORED = -100


@dataclass(frozen=True)
class RecordScores:
    """Scores of n records under one model, in the order of the dataset. **Private**: exact functions of the records.

    Attributes:
        loss: (n,) float64. Classification: -log p_y. Causal language model: the mean of -log p_y over the record's own
            supervised tokens (zero where it has none).
        confidence: (n,) float64, log(p_y / (1 - p_y)), the score of LiRA (Carlini et al. 2022): close to normal
            over models, where p_y itself is not. Causal language model: the *mean* over the record's own supervised
            tokens (zero where it has none); times `tokens` it is the sum.
        tokens: (n,) int64, supervised tokens of each record; 1 for classification.
    """

    loss: np.ndarray = field(repr=False)
    confidence: np.ndarray = field(repr=False)
    tokens: np.ndarray = field(repr=False)


def _terms(logits_NC: torch.Tensor, labels_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(-log p_y, log(p_y / (1 - p_y))) of N predictions, in float64.

    log(p_y / (1 - p_y)) = z_y - logsumexp of the other logits: no probability is formed, so nothing rounds to 0 or 1.
    """
    logits = logits_NC.double()
    index = labels_N.unsqueeze(-1)
    picked = logits.gather(-1, index).squeeze(-1)
    others = logits.scatter(-1, index, -torch.inf).logsumexp(-1)
    confidence = picked - others
    return nn.functional.softplus(-confidence, threshold=700), confidence


def _refuse(what: str, instead: str) -> PrivacyConfigError:
    return PrivacyConfigError(what, "The score of a record cannot be told from it, so an audit would mislead", instead)


def _score_batch(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, confidence, tokens), each (B,)."""
    if labels.is_floating_point() or logits.dim() != labels.dim() + 1 or logits.shape[: labels.dim()] != labels.shape:
        raise _refuse(
            f"Logits {tuple(logits.shape)} and labels {tuple(labels.shape)} of type {labels.dtype} were given",
            "Use a classifier (B, C) with class labels (B,), or a causal language model (B, T, V) with labels (B, T)",
        )
    if logits.shape[-1] < 2:
        raise _refuse("A model with one output was given", "Use a classifier with two classes or more")
    if labels.dim() == 1:
        keep, targets = torch.ones_like(labels, dtype=torch.bool), labels
    else:  # token t + 1 is predicted at token t
        logits, targets = logits[:, :-1], labels[:, 1:]
        keep = targets != _IGNORED
    chosen = targets[keep]
    if ((chosen < 0) | (chosen >= logits.shape[-1])).any():
        raise _refuse(
            f"A label outside 0 .. {logits.shape[-1] - 1} was found",
            "Give every record a label that the model predicts",
        )
    picked = logits[keep]
    if not torch.isfinite(picked).all():
        raise _refuse("The model gave logits that are not finite", "Audit a model that evaluates; check its precision")
    loss_S, confidence_S = _terms(picked, chosen)
    if labels.dim() == 1:
        return loss_S, confidence_S, keep.long()
    row = torch.arange(keep.shape[0], device=keep.device).unsqueeze(-1).expand_as(keep)[keep]
    tokens = keep.sum(-1)
    zero = torch.zeros(keep.shape[0], dtype=torch.float64, device=keep.device)
    share = tokens.clamp_min(1)
    return zero.index_add(0, row, loss_S) / share, zero.index_add(0, row, confidence_S) / share, tokens


def record_scores(
    model: nn.Module,
    dataset: Sequence[Any],
    collator: Callable[[list[Any]], Mapping[str, Any]],
    batch_size: int = 32,
) -> RecordScores:
    """Loss and logit-scaled confidence of every record: evaluation mode, no gradient, one pass.

    A record's scores do not depend on the records beside it, up to the rounding of the model's own forward pass
    (padding changes the shapes of its products). The softmax and everything after it is float64. Each module's
    training flag is put back afterwards.

    Args:
        model: returns `.logits`: (B, C) for a classifier, (B, T, V) for a causal language model.
        dataset: n records, by index.
        collator: list of records -> batch with `labels`. Its tensors are moved to the model's device.
        batch_size: records a forward pass; no score depends on it.

    Raises:
        PrivacyConfigError: no labels, labels that the logits do not match, or logits that are not finite.
    """
    integer("batch_size", batch_size, minimum=1)
    device = next(model.parameters()).device
    found: list[tuple[torch.Tensor, ...]] = []
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode():
            for start in range(0, len(dataset), batch_size):
                records = [dataset[i] for i in range(start, min(start + batch_size, len(dataset)))]
                batch = {
                    key: value.to(device) if torch.is_tensor(value) else value
                    for key, value in collator(records).items()
                }
                labels = batch.pop("labels", None)
                if labels is None or labels.shape[0] != len(records):
                    raise _refuse(
                        f"{len(records)} records gave "
                        + ("a batch without labels" if labels is None else f"{labels.shape[0]} rows of labels"),
                        "Use a collator that gives `labels` with one row a record",
                    )
                found.append(tuple(part.cpu() for part in _score_batch(model(**batch).logits, labels)))
    finally:
        for module, flag in flags.items():
            module.training = flag
    if not found:
        return RecordScores(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))
    loss, confidence, tokens = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
    return RecordScores(loss, confidence, tokens)
