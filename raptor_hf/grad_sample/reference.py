"""The `reference` engine: ordinary autograd, one record at a time. Slow, simple, and the oracle of the others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raptor_hf.grad_sample.losses import LossFn

__all__ = ["reference_gradients"]


def reference_gradients(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    loss_fn: LossFn,
    owner: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """See `per_sample_gradients`. Expert stream: the gradients of each record's owner, (b, *shape[1:])."""
    size = next(iter(batch.values())).shape[0]
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
    for i in range(size):
        record = {key: value[i : i + 1] for key, value in batch.items()}
        loss = loss_fn(model, record)
        values = list(parameters.values())
        grads = torch.autograd.grad(loss, values, allow_unused=True) if loss.requires_grad else [None] * len(values)
        for (name, parameter), g in zip(parameters.items(), grads, strict=True):
            g = torch.zeros_like(parameter) if g is None else g
            rows[name].append(g if owner is None else g[int(owner[i])])
    return {name: torch.stack(value) for name, value in rows.items()}
