"""The `functorch` engine: vmap(grad) over the records of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from raptor_hf.grad_sample.losses import LossFn
from raptor_hf.moe.block import kernel_mode, sparse_blocks
from raptor_hf.moe.experts import OwnerAdapters

__all__ = ["functorch_gradients"]


def _single(record: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.unsqueeze(0) for key, value in record.items()}


def _protected(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> tuple[str, list[str]]:
    """The path of the block whose expert adapters `parameters` are, and their names in kernel order."""
    for path, block in sparse_blocks(model).items():
        names = [f"{path}.{name}" for name in block.owner_parameters()]
        if names and set(names) == set(parameters):
            return path, names
    raise ValueError(
        f"`owner` was given with parameters {sorted(parameters)[:2]}. They are not the adapters of one layer's "
        'experts. Pass `stream_parameters(model)["expert"]`, or leave `owner` out.'
    )


def _refuse_experts(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """The kernel treats expert adapters as constants: without an owner their gradient would be a silent zero."""
    for path, block in sparse_blocks(model).items():
        for name in block.owner_parameters():
            if f"{path}.{name}" in parameters:
                raise ValueError(
                    f"Gradients of the expert adapter `{path}.{name}` were asked for without owners. This engine "
                    'differentiates the owner\'s adapters only. Pass `owner`, or use `mode="reference"`.'
                )


def functorch_gradients(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    loss_fn: LossFn,
    owner: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """See `per_sample_gradients`. Expert stream: the gradients of each record's owner, (b, *shape[1:])."""
    records = dict(batch)
    # An outer graph would be recorded for every parameter that requires grad; `grad` works at its own level.
    with torch.no_grad():
        if owner is None:
            _refuse_experts(model, parameters)
            primals = {name: p.detach() for name, p in parameters.items()}

            def shared_loss(values, record):
                def forward(**inputs):
                    return functional_call(model, values, (), inputs)

                with kernel_mode(model):
                    return loss_fn(forward, _single(record))

            return vmap(grad(shared_loss), in_dims=(None, 0), randomness="different")(primals, records)

        path, names = _protected(model, parameters)
        owned = {name: parameters[name].detach().index_select(0, owner) for name in names}

        def expert_loss(values, record, record_owner):
            a1, b1, a2, b2 = (values[name].unsqueeze(0) for name in names)
            owners = {path: OwnerAdapters(record_owner.unsqueeze(0), (a1, b1), (a2, b2))}
            with kernel_mode(model, owners):
                return loss_fn(model, _single(record))

        return vmap(grad(expert_loss), in_dims=(0, 0, 0), randomness="different")(owned, records, owner)
