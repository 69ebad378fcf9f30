"""The `reference` engine: ordinary autograd, one record at a time. Slow, simple, and the oracle of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raptor_hf.grad_sample.losses import LossFn
from raptor_hf.grad_sample.row_gradients import RowGradients, untouched

__all__ = ["reference_gradients"]


@contextmanager
def _by_rows(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Autograd gives the gradient of a trained embedding as the rows that were looked up, not as all rows."""
    trained = {id(parameter) for parameter in parameters.values()}
    tables = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and id(module.weight) in trained
        and not (module.sparse or module.scale_grad_by_freq)  # autograd has no rows for the latter
    ]
    for table in tables:
        table.sparse = True
    try:
        yield
    finally:
        for table in tables:
            table.sparse = False


def _of_all(gradients: list[torch.Tensor]) -> Any:
    """Gradients of single records -> (b, *shape): a tensor, or `RowGradients` where all are sparse."""
    if all(g.is_sparse for g in gradients):
        return RowGradients(gradients)
    dense = [g.to_dense() if g.is_sparse else g for g in gradients]
    return dense[0].unsqueeze(0) if len(dense) == 1 else torch.stack(dense)


def reference_gradients(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    loss_fn: LossFn,
    owner: torch.Tensor | None,
) -> dict[str, Any]:
    """See `per_sample_gradients`. Expert stream: the gradients of each record's owner, (b, *shape[1:]).

    Without owners, `RowGradients` of what no record reaches, or reaches in a few rows only (embeddings).
    """
    size = next(iter(batch.values())).shape[0]
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
    values = list(parameters.values())
    with _by_rows(model, parameters):
        for i in range(size):
            record = {key: value[i : i + 1] for key, value in batch.items()}
            loss = loss_fn(model, record)
            grads = torch.autograd.grad(loss, values, allow_unused=True) if loss.requires_grad else [None] * len(values)
            for (name, parameter), g in zip(parameters.items(), grads, strict=True):
                g = untouched(parameter) if g is None else g
                rows[name].append(g if owner is None else (g.to_dense() if g.is_sparse else g)[int(owner[i])])
    return {name: _of_all(value) for name, value in rows.items()}
