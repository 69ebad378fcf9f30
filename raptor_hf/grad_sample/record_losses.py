"""Every record's own loss from one batched forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from raptor_hf.errors import UnsupportedModelError
from raptor_hf.grad_sample.losses import LossFn, model_loss

__all__ = ["record_losses"]

_LABELS = "labels"


def record_losses(model: nn.Module, batch: Mapping[str, torch.Tensor], loss_fn: LossFn) -> torch.Tensor:
    """Every record's loss (b,), from one batched forward pass.

    The loss is the model's own `loss_function` on one record's logits at a time. That this is what the model computes
    from `labels` is checked once for every model, on a record alone.
    """
    inputs = {key: value for key, value in batch.items() if key != _LABELS}
    logits = model(**inputs).logits

    def one(record_logits: torch.Tensor, record: dict[str, torch.Tensor]) -> torch.Tensor:
        forward = partial(_from_logits, model, record_logits.unsqueeze(0))
        return loss_fn(forward, {key: value.unsqueeze(0) for key, value in record.items()})

    losses = torch.func.vmap(one, randomness="different")(logits, dict(batch))
    if not getattr(model, "_raptor_loss_checked", False):
        _check_loss(model, batch)
        model._raptor_loss_checked = True  # type: ignore[assignment]
    return losses


def _from_logits(model: nn.Module, logits: torch.Tensor, **record: Any) -> ModelOutput:
    """What the model would return for one record, from its logits."""
    # fp32 as in the models' own losses: the logits may come from autocast
    logits = logits if logits.dtype == torch.float64 else logits.float()
    labels = record.get(_LABELS)
    if labels is None:
        return ModelOutput(loss=None, logits=logits)
    size = getattr(model.config, "vocab_size", None)
    loss = model.loss_function(labels=labels, logits=logits, pooled_logits=logits, config=model.config, vocab_size=size)
    return ModelOutput(loss=loss, logits=logits)


@torch.no_grad()
def _check_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    record = {key: value[:1] for key, value in batch.items()}
    training = model.training
    model.eval()
    try:
        alone = model(**{key: value for key, value in record.items() if key != _LABELS}).logits
        wanted = model_loss(model, record)
        found = model_loss(partial(_from_logits, model, alone), record)
    finally:
        model.train(training)
    if not torch.allclose(found.double(), wanted.double(), rtol=1e-3, atol=1e-5, equal_nan=True):
        raise UnsupportedModelError(
            f"`{type(model).__name__}` computes another loss from `labels` than its `loss_function` does from logits",
            "The hooks engine takes each record's loss from the logits, and would differentiate something else",
            'Use `grad_sample_mode="functorch"`',
        )
