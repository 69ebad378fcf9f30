"""Frozen routed experts (with constant LoRA) that work under `torch.func.vmap(grad)`.

The experts of a sparse layer are applied to (token, expert) pairs grouped by expert, one matrix product an expert.
Data-dependent grouping has no batching rule, so the layer is an `autograd.Function` with a `vmap` rule of its own:
the vmapped dimension is folded into the records dimension and one grouped call serves all of them.

Shapes: R records, T tokens, K experts a token (top-k), H hidden, P first projection's outputs (2F with a gated
activation), F the activation's outputs, E experts, r LoRA rank. An index of E means "no expert" (a dropped token).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["ExpertStack", "OwnerAdapters", "StackedLora", "routed_experts"]


class StackedLora(torch.nn.Module):
    """LoRA of one projection for all E experts of a layer: `lora_A` (E, r, in) and `lora_B` (E, out, r), fp32.

    `A` starts Kaiming-uniform as in PEFT and `B` at zero, so that fresh adapters change nothing.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, rank: int, scaling: float):
        super().__init__()
        self.scaling = scaling
        self.lora_A = torch.nn.Parameter(torch.empty(num_experts, rank, in_features))
        self.lora_B = torch.nn.Parameter(torch.zeros(num_experts, out_features, rank))
        for expert in range(num_experts):
            torch.nn.init.kaiming_uniform_(self.lora_A.data[expert], a=5**0.5)


@dataclass(frozen=True)
class ExpertStack:
    """The constants of one sparse layer's experts, as the kernel reads them.

    Attributes:
        first: E weights (P, H). second: E weights (H, F). activation: (.., P) -> (.., F).
        adapters: `((A1, B1), (A2, B2))` stacked over experts as in `StackedLora`, or None.
        scaling: LoRA's alpha / r.
    """

    first: tuple[torch.Tensor, ...]
    second: tuple[torch.Tensor, ...]
    activation: Callable[[torch.Tensor], torch.Tensor]
    adapters: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    scaling: float = 1.0

    @property
    def num_experts(self) -> int:
        return len(self.first)

    def project(self, which: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x (N, in) -> W_e x + s B_e A_e x (N, out)."""
        weight = (self.first, self.second)[which][expert]
        out = F.linear(x, weight)
        if self.adapters is not None:
            a, b = (t[expert] for t in self.adapters[which])
            out = out + self.scaling * F.linear(F.linear(x.to(a.dtype), a), b).to(out.dtype)
        return out

    def project_transposed(self, which: int, expert: int, g: torch.Tensor) -> torch.Tensor:
        """g (N, out) -> g (W_e + s B_e A_e) (N, in): the gradient through `project`."""
        weight = (self.first, self.second)[which][expert]
        out = g @ weight
        if self.adapters is not None:
            a, b = (t[expert] for t in self.adapters[which])
            out = out + self.scaling * ((g.to(b.dtype) @ b) @ a).to(out.dtype)
        return out


@dataclass(frozen=True)
class OwnerAdapters:
    """What the expert stream differentiates: per record, its owner's adapters (the values of the stack's slices).

    Attributes: owner (R,) int64; first, second: `(A (R, r, in), B (R, out, r))`.
    """

    owner: torch.Tensor
    first: tuple[torch.Tensor, torch.Tensor]
    second: tuple[torch.Tensor, torch.Tensor]


def _groups(index: torch.Tensor, num_experts: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield `(expert, flat pair positions)` for every expert that some pair of `index` (R, T, K) reaches."""
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1).tolist()
    start = 0
    for expert, count in enumerate(counts[:num_experts]):
        if count:
            yield expert, order[start : start + count]
        start += count


def _no_autocast(function: Callable) -> Callable:
    """Run the kernel in its inputs' own types: its buffers have them, and its backward pass has no autocast rules."""

    @functools.wraps(function)
    def plain(x, *args):
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args)

    return plain


def _activation_gradient(activation: Callable, pre: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        leaf = pre.detach().requires_grad_()
        (out,) = torch.autograd.grad(activation(leaf), leaf, grad)
    return out


def _fold(value: Any, dim: int | None, size: int) -> Any:
    """(R, ..) with a vmapped dimension of `size` at `dim` -> (size * R, ..); unbatched values are repeated."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
    return value.reshape(size * value.shape[1], *value.shape[2:])


def _unfold(value: torch.Tensor | None, size: int) -> torch.Tensor | None:
    return None if value is None else value.reshape(size, value.shape[0] // size, *value.shape[1:])


class _Forward(torch.autograd.Function):
    @staticmethod
    @_no_autocast
    def forward(x, index, gate, owner, a1, b1, a2, b2, stack: ExpertStack):
        records, tokens, top_k = index.shape
        flat = x.reshape(-1, x.shape[-1])
        gates = gate.reshape(-1)
        y = torch.zeros_like(flat)
        pre = x.new_zeros(records * tokens * top_k, stack.first[0].shape[0])
        out = x.new_zeros(records * tokens * top_k, x.shape[-1])
        for expert, pairs in _groups(index, stack.num_experts):
            rows = pairs // top_k
            pre_e = stack.project(0, expert, flat[rows])
            out_e = stack.project(1, expert, stack.activation(pre_e))
            pre[pairs], out[pairs] = pre_e, out_e
            y.index_add_(0, rows, (out_e * gates[pairs].unsqueeze(-1)).to(y.dtype))
        shape = (records, tokens, top_k, -1)
        return y.view_as(x), pre.view(shape), out.view(shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.stack = inputs
        _, pre, out = output
        ctx.mark_non_differentiable(pre, out)
        ctx.save_for_backward(*tensors, pre, out)

    @staticmethod
    def backward(ctx, grad_y, _pre, _out):
        x, index, gate, owner, a1, b1, a2, b2, pre, out = ctx.saved_tensors
        wants = (ctx.needs_input_grad[0], ctx.needs_input_grad[2], any(ctx.needs_input_grad[4:8]))
        grads = _Backward.apply(grad_y, x, index, gate, owner, a1, b1, a2, b2, pre, out, wants, ctx.stack)
        grad_x, grad_gate, *owned = (g if g.numel() else None for g in grads)
        return grad_x, None, grad_gate, None, *owned, None

    @staticmethod
    def vmap(info, in_dims, *args):
        size = info.batch_size
        folded = [_fold(value, dim, size) for value, dim in zip(args, in_dims, strict=True)]
        return tuple(_unfold(value, size) for value in _Forward.apply(*folded)), (0, 0, 0)


class _Backward(torch.autograd.Function):
    """Gradients to x, the gates and the owner's adapters. Those not wanted come back empty (records, 0)."""

    @staticmethod
    @_no_autocast
    def forward(grad_y, x, index, gate, owner, a1, b1, a2, b2, pre, out, wants, stack: ExpertStack):
        want_x, want_gate, want_owner = wants
        records, tokens, top_k = index.shape
        empty = x.new_zeros(records, 0)
        grad_x = grad_gate = empty
        owned = [empty] * 4
        if want_gate:
            grad_gate = (grad_y.unsqueeze(2) * out).sum(-1).to(gate.dtype)
        if want_x or want_owner:
            # the expert stream alone needs the owner's pairs only: the other pairs get the skip index
            wanted = index if want_x else torch.where(index == owner[:, None, None], index, stack.num_experts)
            flat_y, gates = grad_y.reshape(-1, grad_y.shape[-1]), gate.reshape(-1)
            flat_pre = pre.reshape(-1, pre.shape[-1])
            grad_pre = torch.zeros_like(flat_pre)
            if want_x:
                grad_x = torch.zeros_like(x).reshape(-1, x.shape[-1])
            for expert, pairs in _groups(wanted, stack.num_experts):
                rows = pairs // top_k
                grad_out = flat_y[rows] * gates[pairs].unsqueeze(-1).to(flat_y.dtype)
                grad_act = stack.project_transposed(1, expert, grad_out)
                grad_pre_e = _activation_gradient(stack.activation, flat_pre[pairs], grad_act)
                if want_owner:
                    grad_pre[pairs] = grad_pre_e
                if want_x:
                    grad_x.index_add_(0, rows, stack.project_transposed(0, expert, grad_pre_e).to(grad_x.dtype))
            grad_x = grad_x.view_as(x) if want_x else empty
            if want_owner:
                owned = _owner_gradients(
                    grad_y, x, index, gate, owner, (a1, b1, a2, b2), pre, grad_pre.view_as(pre), stack
                )
        return grad_x, grad_gate, *owned

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("The frozen-experts kernel is differentiable once; second derivatives are not defined.")

    @staticmethod
    def vmap(info, in_dims, *args):
        size = info.batch_size
        folded = [_fold(value, dim, size) for value, dim in zip(args, in_dims, strict=True)]
        return tuple(_unfold(value, size) for value in _Backward.apply(*folded)), (0,) * 6


def _owner_gradients(grad_y, x, index, gate, owner, adapters, pre, grad_pre, stack) -> list[torch.Tensor]:
    """Gradients of the owner's (A1, B1, A2, B2), each (R, *shape): sums over the record's own (token, owner) pairs.

    A token reaches its owner at most once, so the K pairs of a token collapse to one masked row.
    """
    a1, b1, a2, b2 = adapters
    mine = index == owner[:, None, None]  # (R, T, K)
    weight = (gate * mine).sum(-1, keepdim=True)  # (R, T, 1), zero where the owner was not used
    keep = mine.unsqueeze(-1).to(pre.dtype)
    pre_owner, grad_pre_owner = (pre * keep).sum(2), (grad_pre * keep).sum(2)  # (R, T, P)
    used = mine.any(-1, keepdim=True).to(a2.dtype)
    act = stack.activation(pre_owner).to(a2.dtype) * used  # (R, T, F)
    grad_out = (grad_y * weight.to(grad_y.dtype)).to(a2.dtype)  # (R, T, H)
    grad_pre_owner, x = grad_pre_owner.to(a1.dtype), x.to(a1.dtype)
    s = stack.scaling
    grad_b2 = s * grad_out.transpose(1, 2) @ (act @ a2.transpose(1, 2))
    grad_a2 = s * (grad_out @ b2).transpose(1, 2) @ act
    grad_b1 = s * grad_pre_owner.transpose(1, 2) @ (x @ a1.transpose(1, 2))
    grad_a1 = s * (grad_pre_owner @ b1).transpose(1, 2) @ x
    return [grad_a1, grad_b1, grad_a2, grad_b2]


def routed_experts(
    x: torch.Tensor, index: torch.Tensor, gate: torch.Tensor, stack: ExpertStack, owner: OwnerAdapters | None = None
) -> torch.Tensor:
    """sum_k gate_k * expert_{index_k}(x), differentiable in x, the gates and (when given) the owner's adapters.

    Args:
        x: (R, T, H). index: (R, T, K) int64 in [0, E], E meaning no expert. gate: (R, T, K).
        stack: the experts' constants. Their adapters are constants too: no gradient reaches them.
        owner: differentiate each record's owner's adapters (Eq. 8). Their values must be the stack's slices.

    Returns:
        (R, T, H), zero for a token without an expert.
    """
    owned = (None,) * 5 if owner is None else (owner.owner, *owner.first, *owner.second)
    dtype = stack.first[0].dtype
    return _Forward.apply(x.to(dtype), index, gate.to(dtype), *owned, stack)[0].to(x.dtype)
