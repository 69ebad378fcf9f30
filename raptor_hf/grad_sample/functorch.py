"""The `functorch` engine: vmap(grad) over the records of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode

from raptor_hf.grad_sample.attention import vmappable_attention
from raptor_hf.grad_sample.losses import LossFn
from raptor_hf.grad_sample.owners import adapted_blocks, protected_block
from raptor_hf.moe.block import kernel_mode
from raptor_hf.moe.experts import AllAdapters, OwnerAdapters

__all__ = ["functorch_gradients"]


def _single(record: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.unsqueeze(0) for key, value in record.items()}


class _BatchedScatter(TorchFunctionMode):
    """`x.scatter_(dim, index, number)` out of place: only that has a batching rule (routers with groups use it)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.scatter_:
            return args[0].copy_(torch.scatter(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


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
    with torch.no_grad(), vmappable_attention(model), _BatchedScatter():
        if owner is None:
            blocks = adapted_blocks(model, parameters)
            of_experts = {name for values in blocks.values() for name in values}
            primals = {name: p.detach() for name, p in parameters.items()}

            def shared_loss(values, record):
                # the blocks keep their own adapters, as constants; what is differentiated goes to the kernel
                shared = {name: value for name, value in values.items() if name not in of_experts}
                wanted = {}
                for path, adapters in blocks.items():
                    a1, b1, a2, b2 = (values.get(name, value) for name, value in adapters.items())
                    wanted[path] = AllAdapters((a1, b1), (a2, b2))

                def forward(**inputs):
                    return functional_call(model, shared, (), inputs)

                with kernel_mode(model, wanted):
                    return loss_fn(forward, _single(record))

            return vmap(grad(shared_loss), in_dims=(None, 0), randomness="different")(primals, records)

        path, names = protected_block(model, parameters)
        owned = {name: parameters[name].detach().index_select(0, owner) for name in names}

        def expert_loss(values, record, record_owner):
            a1, b1, a2, b2 = (values[name].unsqueeze(0) for name in names)
            owners = {path: OwnerAdapters(record_owner.unsqueeze(0), (a1, b1), (a2, b2))}
            with kernel_mode(model, owners):
                return loss_fn(model, _single(record))

        return vmap(grad(expert_loss), in_dims=(0, 0, 0), randomness="different")(owned, records, owner)
