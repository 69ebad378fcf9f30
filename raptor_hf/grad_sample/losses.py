"""The loss of one record, as the engines differentiate it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from raptor_hf.errors import PrivacyConfigError

__all__ = ["IGNORED", "Forward", "LossFn", "model_loss", "residual_weighted"]

Forward = Callable[..., Any]
"""Keyword inputs of a batch of one record -> the model's outputs."""

LossFn = Callable[[Forward, Mapping[str, torch.Tensor]], torch.Tensor]
"""(forward, batch of one record) -> that record's scalar loss."""


IGNORED = -100
"""The label of a token that is not supervised."""


def model_loss(forward: Forward, record: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss that the model itself computes from `labels`: for a batch of one, the record's own mean loss.

    Token labels (1, T) are those of a causal language model, which predicts token t + 1 at token t: the mean is over
    the record's own labels from the second token on that are not -100. A record without any, and one whose class
    label (1,) is -100, has loss zero and gradient zero.
    """
    labels = record.get("labels")
    if labels is None or labels.dim() not in (1, 2) or labels.is_floating_point():
        return _loss(forward, record)
    if labels.dim() == 2 and labels.shape[1] < 2:
        logits = forward(**{key: value for key, value in record.items() if key != "labels"}).logits
        # one token, which nothing predicts; or the class label of a classifier
        return (logits * 0.0).sum() if logits.dim() == 3 else model_loss(forward, {**record, "labels": labels[:, 0]})
    supervised = ((labels if labels.dim() == 1 else labels[:, 1:]) != IGNORED).any()
    # the mean over no token is NaN, and so is its gradient: such a record is given labels, and then the factor zero
    labels = torch.where(supervised, labels, torch.zeros_like(labels))
    loss = _loss(forward, {**record, "labels": labels})
    return loss * supervised


def _loss(forward: Forward, record: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss = forward(**record).get("loss")
    if loss is None:
        raise PrivacyConfigError(
            "A batch without labels was given",
            "The model returned no loss, so there is nothing to differentiate",
            "Add a `labels` column to the training set",
        )
    return loss


def residual_weighted(loss_fn: LossFn, gamma: float = 1.0) -> LossFn:
    """w_i^gamma * loss_i with w_i = 1 - exp(-loss_i), a constant for the gradient (Eq. 22).

    For cross entropy w_i = 1 - softmax(z_i)_{y_i}; the logits are those of the same forward pass.
    """

    def weighted(forward: Forward, record: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_fn(forward, record)
        weight = -torch.expm1(-loss.detach())
        return weight.clamp_min(0.0) ** gamma * loss

    return weighted
