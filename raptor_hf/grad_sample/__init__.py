"""Per-sample gradients of one micro-batch: one signature for all engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from raptor_hf.grad_sample.batches import one_row_a_record
from raptor_hf.grad_sample.functorch import functorch_gradients
from raptor_hf.grad_sample.hooks import hooks_gradients
from raptor_hf.grad_sample.losses import LossFn, model_loss, residual_weighted
from raptor_hf.grad_sample.reference import reference_gradients
from raptor_hf.grad_sample.summed import summed_gradients
from raptor_hf.validate import one_of

__all__ = [
    "ENGINES", "LossFn", "engine_gradients", "model_loss", "per_sample_gradients",
    "residual_weighted", "summed_gradients",
]  # fmt: skip


class Engine(Protocol):
    """What every engine is: the gradients of a micro-batch of at least one record."""

    def __call__(
        self,
        model: nn.Module,
        batch: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        loss_fn: LossFn,
        owner: torch.Tensor | None,
    ) -> dict[str, Any]: ...


ENGINES: dict[str, Engine] = {
    "functorch": functorch_gradients,
    "hooks": hooks_gradients,
    "reference": reference_gradients,
}


def per_sample_gradients(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    *,
    mode: str = "functorch",
    loss_fn: LossFn | None = None,
    owner: torch.Tensor | None = None,
    dense: bool = False,
) -> dict[str, torch.Tensor]:
    """Gradient of every record's own loss.

    Args:
        model: a model that went through `attach_adapters`; its train/eval mode is used as it is.
        batch: tensors with a leading records dimension b, padded on the right. `position_ids` may have one row.
        parameters: one stream of `stream_parameters(model)`; or, without `owner`, any of the model's trainables:
            shared ones and stacked expert adapters of one or several layers together.
        mode: engine, `"functorch"`, `"hooks"` or `"reference"`.
        loss_fn: (forward, batch of one record) -> scalar; default: the model's own loss.
        owner: (b,) int64, for the expert stream: only the owner's adapters are differentiated (Eq. 8); all other
            experts' adapters are constants. Without it, an expert adapter in `parameters` has the gradients (b, E, ...)
            of all experts that the record activates.
        dense: with `owner`: return the full (b, E, ...) tensors, zero outside the owner's slice. The default is
            the compact form: the owner's slice alone, (b, ...). E times smaller, same information given `owner`.

    Returns:
        name -> (b, *shape), or (b, *shape[1:]) in the compact form. Exact zero for an adapter no token reached.

    Formal guarantees:
        Row i is a function of record i, the parameters and (with dropout) randomness of its own, and of nothing
        else in the batch.
    """
    grads = {
        name: value if isinstance(value, torch.Tensor) else value.dense()
        for name, value in engine_gradients(model, batch, parameters, mode=mode, loss_fn=loss_fn, owner=owner).items()
    }
    if owner is None or not dense:
        return grads
    full = {}
    for name, value in grads.items():
        full[name] = value.new_zeros(value.shape[0], *parameters[name].shape)
        full[name][torch.arange(value.shape[0], device=owner.device), owner] = value
    return full


def engine_gradients(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    *,
    mode: str = "functorch",
    loss_fn: LossFn | None = None,
    owner: torch.Tensor | None = None,
) -> dict[str, Any]:
    """What `ClippedSum.add` takes: as `per_sample_gradients` (compact), but perhaps not formed
    (`RecordGradients`).
    """
    one_of("mode", mode, tuple(ENGINES))
    batch, size = one_row_a_record(batch)
    if size == 0:
        return {n: p.new_zeros(0, *(p.shape if owner is None else p.shape[1:])) for n, p in parameters.items()}
    if hasattr(model, "frozen_inputs"):  # what depends on nothing trainable, record by record, before any vmap
        batch = model.frozen_inputs(batch)
    grads = ENGINES[mode](model, batch, parameters, loss_fn or model_loss, owner)
    for name, value in grads.items():
        if value.shape[0] != size:
            raise RuntimeError(f"`{name}` has not one gradient row for each record; this is a bug.")
    return grads
