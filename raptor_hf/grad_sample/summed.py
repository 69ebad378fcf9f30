"""The sum of the records' gradients by one ordinary backward pass: for methods that clip nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raptor_hf.grad_sample.losses import model_loss
from raptor_hf.grad_sample.record_losses import record_losses

__all__ = ["summed_gradients"]


def summed_gradients(
    model: nn.Module, batch: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """sum_i grad loss_i over the records of a micro-batch. Not clipped: no bound, and no privacy.

    Args:
        batch: tensors with a leading records dimension, perhaps empty. parameters: name -> what is differentiated.

    Returns:
        name -> (*shape), zero where the batch does not reach.
    """
    if next(iter(batch.values())).shape[0] == 0:
        return {name: torch.zeros_like(p) for name, p in parameters.items()}
    with torch.enable_grad():
        total = record_losses(model, batch, model_loss).sum()
        grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), grads, strict=True)}
