"""The `functorch` engine: `torch.func.vmap` of the loss over the records of a micro-batch, then one backward pass.

Every record has its own row of every parameter: of a view (b, *shape) that repeats the values and copies nothing, or of
its owner's adapters. vmap computes a record's loss from its own row, so that the derivative of all losses' sum by a row
is the gradient of that record's loss. In this order (not vmap of `torch.func.grad`) the backward pass is autograd's
own: it adds in place, and pays no dispatch of `torch.func`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from raptor_hf.grad_sample.attention import vmappable_attention
from raptor_hf.grad_sample.losses import LossFn
from raptor_hf.grad_sample.owners import adapted_blocks, frozen, protected_block
from raptor_hf.grad_sample.record_lora import lora_by_record
from raptor_hf.moe.block import kernel_mode
from raptor_hf.moe.experts import AllAdapters, OwnerAdapters

__all__ = ["functorch_gradients"]

_NO_HOOKS = "The functorch engine cannot recompute activations: a second forward pass would run outside of its vmap."


_OUT_OF_PLACE = {torch.Tensor.scatter_: torch.scatter, torch.Tensor.clamp_: torch.clamp}


def _single(record: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.unsqueeze(0) for key, value in record.items()}


class _BatchedOperators(TorchFunctionMode):
    """Operators whose batching rule is missing or wrong.

    * `x.scatter_(dim, index, number)`, in routers with groups, and `x.clamp_(..)`, in attention (`clip_qkv`): they have
      a rule out of place only. (Of a copy: what the backward pass keeps must not change.)
    * An embedding with `padding_idx` whose table is differentiated: the rule looks it up in one table of all records'
      rows, where that index is the first record's alone, so that a record's gradient would depend on its place.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _OUT_OF_PLACE:
            return args[0].copy_(_OUT_OF_PLACE[func](args[0].clone(), *args[1:], **kwargs))
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        return func(*args, **kwargs)


def _embedding(
    input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`F.embedding`, with the rule of `padding_idx`, no gradient from there, written out."""
    found = F.embedding(input, weight, None, *args, **kwargs)
    if padding_idx is None:
        return found
    padding = padding_idx if padding_idx >= 0 else weight.shape[0] + padding_idx
    return torch.where((input == padding).unsqueeze(-1), found.detach(), found)


def functorch_gradients(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    loss_fn: LossFn,
    owner: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """See `per_sample_gradients`. Expert stream: the gradients of each record's owner, (b, *shape[1:])."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Per-sample gradients were asked for in `torch.inference_mode()`. Nothing is recorded there, so that every "
            "gradient would be zero and training would add noise alone. Leave it; `torch.no_grad()` does no harm."
        )
    records = dict(batch)
    with (
        torch.enable_grad(), frozen(model), disable_saved_tensors_hooks(_NO_HOOKS), vmappable_attention(model),
        _BatchedOperators(),
    ):  # fmt: skip
        if owner is None:
            size = next(iter(records.values())).shape[0]
            rows = {name: p.detach().expand(size, *p.shape).requires_grad_() for name, p in parameters.items()}
            blocks = adapted_blocks(model, parameters)
            of_experts = {name for values in blocks.values() for name in values}

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

            with lora_by_record(model, parameters):
                losses = vmap(shared_loss, randomness="different")(rows, records)
        else:
            path, names = protected_block(model, parameters)
            rows = {name: parameters[name].detach().index_select(0, owner).requires_grad_() for name in names}

            def expert_loss(values, record, record_owner):
                a1, b1, a2, b2 = (values[name].unsqueeze(0) for name in names)
                owners = {path: OwnerAdapters(record_owner.unsqueeze(0), (a1, b1), (a2, b2))}
                with kernel_mode(model, owners):
                    return loss_fn(model, _single(record))

            losses = vmap(expert_loss, randomness="different")(rows, records, owner)
        return _gradients(losses, rows)


def _gradients(losses: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of every record's loss (b,) to its own row of every tensor (b, *shape); zero where it does not reach."""
    if losses.dim() != 1:
        raise ValueError(f"The loss of a record has {losses.dim() - 1} dimensions. Return a scalar, one loss a record.")
    if not losses.requires_grad:
        return {name: torch.zeros_like(value) for name, value in rows.items()}
    grads = torch.autograd.grad(losses, list(rows.values()), torch.ones_like(losses), allow_unused=True)
    return {
        name: value.new_zeros(value.shape) if g is None else g
        for (name, value), g in zip(rows.items(), grads, strict=True)
    }
