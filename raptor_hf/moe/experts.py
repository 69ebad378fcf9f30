"""Frozen routed experts (with constant LoRA) that work under `torch.func.vmap(grad)`.

The experts of a sparse layer are applied to (token, expert) pairs grouped by expert, one matrix product an expert.
Data-dependent grouping has no batching rule, so the layer is an `autograd.Function` with a `vmap` rule of its own:
the vmapped dimension is folded into the records dimension and one grouped call serves all of them.

Shapes: R records, T tokens, K experts a token (top-k), H hidden, P first projection's outputs (2F with a gated
activation), F the activation's outputs, E experts, r LoRA rank. An index of E means "no expert" (a dropped token).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from raptor_hf.moe.pairs import RecordGroups, Spans, by_expert, each, spans_of

__all__ = [
    "AllAdapters",
    "ExpertStack",
    "OwnerAdapters",
    "PairParts",
    "StackedLora",
    "fold",
    "no_autocast",
    "routed_experts",
    "unfold",
]


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
        biases: (E, P) and (E, H), or None.
        adapters: `((A1, B1), (A2, B2))` stacked over experts as in `StackedLora`, or None.
        scaling: LoRA's alpha / r.
    """

    first: tuple[torch.Tensor, ...]
    second: tuple[torch.Tensor, ...]
    activation: Callable[[torch.Tensor], torch.Tensor]
    adapters: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    scaling: float = 1.0
    biases: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_experts(self) -> int:
        return len(self.first)

    def project(self, which: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x (N, in) -> W_e x + b_e + s B_e A_e x (N, out)."""
        weight = (self.first, self.second)[which][expert]
        out = F.linear(x, weight, None if self.biases is None else self.biases[which][expert])
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


PairParts = tuple[torch.Tensor, torch.Tensor]
"""left (U, p) and right (U, q): of every pair, the factors of its part left^T right of an adapter's gradient."""


@dataclass(frozen=True)
class AllAdapters:
    """What a stream without owners differentiates: per record, the adapters of every expert it activates.

    Attributes:
        first, second: `(A (E, r, in), B (E, out, r))`, the values of the stack.
        note: None: a gradient comes back for every record, exactly zero for an expert that the record did not reach.
            Else no gradient comes back; the backward pass calls `note(parts, spans, of, rows)` with the factors
            of A1, B1, A2, B2, the pairs' `spans`, their records `of` (U,) and the number of records R.
    """

    first: tuple[torch.Tensor, torch.Tensor]
    second: tuple[torch.Tensor, torch.Tensor]
    note: Callable[[list[PairParts], Spans, torch.Tensor, int], None] | None = None


def _add(total: torch.Tensor, rows: torch.Tensor, value: torch.Tensor, unique: bool) -> None:
    """Add `value` (N, H) to rows of `total`, which are zero yet if no row comes twice."""
    value = value.to(total.dtype)
    total.index_copy_(0, rows, value) if unique else total.index_add_(0, rows, value)


def no_autocast(function: Callable) -> Callable:
    """Run the kernel in its inputs' own types: its buffers have them, and its backward pass has no autocast rules."""

    @functools.wraps(function)
    def plain(x, *args):
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args)

    return plain


def _through_activation(
    activation: Callable, pre: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation of `pre`, and the gradient to `pre`."""
    with torch.enable_grad():
        leaf = pre.detach().requires_grad_()
        out = activation(leaf)
        (grad_pre,) = torch.autograd.grad(out, leaf, grad)
    return out.detach(), grad_pre


def fold(value: Any, dim: int | None, size: int) -> Any:
    """(R, ..) with a vmapped dimension of `size` at `dim` -> (size * R, ..); unbatched values are repeated."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
    return value.reshape(size * value.shape[1], *value.shape[2:])


def unfold(value: torch.Tensor | None, size: int) -> torch.Tensor | None:
    return None if value is None else value.reshape(size, value.shape[0] // size, *value.shape[1:])


class _Forward(torch.autograd.Function):
    """Also returns the pre-activations (R, T, K, P) and outputs (R, T, K, H) of the pairs for the backward pass.

    They lie in the order of the experts, not of the records (their shape only says so): the backward pass sees the
    same records together, sorts the pairs in the same way, and nothing has to be put back in place.
    """

    @staticmethod
    @no_autocast
    def forward(x, index, gate, owner, a1, b1, a2, b2, stack: ExpertStack, note):
        # one expert at a time throughout: what is needed for its tokens only fits a cache, and is soon freed
        records, tokens, top_k = index.shape
        hidden = x.shape[-1]
        flat = x.reshape(-1, hidden)
        order, spans = by_expert(index, stack.num_experts)
        rows, gates = order // top_k, gate.reshape(-1)[order].unsqueeze(-1)
        y = torch.zeros_like(flat)
        pre = flat.new_empty(index.numel(), stack.first[0].shape[0])
        out = flat.new_empty(index.numel(), hidden)
        for value in (pre, out):
            value[len(order) :] = 0
        for expert, start, end in spans:
            own = slice(start, end)
            pre[own] = stack.project(0, expert, flat[rows[own]])
            out[own] = stack.project(1, expert, stack.activation(pre[own]))
            _add(y, rows[own], out[own] * gates[own], top_k == 1)
        shape = (records, tokens, top_k, -1)
        return y.view(x.shape), pre.view(shape), out.view(shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.stack, ctx.note = inputs
        _, pre, out = output
        ctx.mark_non_differentiable(pre, out)
        ctx.save_for_backward(*tensors, pre, out)

    @staticmethod
    def backward(ctx, grad_y, _pre, _out):
        x, index, gate, owner, a1, b1, a2, b2, pre, out = ctx.saved_tensors
        wants = (ctx.needs_input_grad[0], ctx.needs_input_grad[2], any(ctx.needs_input_grad[4:8]))
        grads = _Backward.apply(grad_y, x, index, gate, owner, a1, b1, a2, b2, pre, out, wants, ctx.stack, ctx.note)
        grad_x, grad_gate, *adapters = (g if g.numel() else None for g in grads)
        return grad_x, None, grad_gate, None, *adapters, None, None

    @staticmethod
    def vmap(info, in_dims, *args):
        size = info.batch_size
        folded = [fold(value, dim, size) for value, dim in zip(args, in_dims, strict=True)]
        return tuple(unfold(value, size) for value in _Forward.apply(*folded)), (0, 0, 0)


class _Backward(torch.autograd.Function):
    """Gradients to x, the gates and the adapters (the owner's, or without owners all). Those not wanted, and those
    that are noted, come back empty (records, 0)."""

    @staticmethod
    @no_autocast
    def forward(grad_y, x, index, gate, owner, a1, b1, a2, b2, pre, out, wants, stack: ExpertStack, note):
        want_x, want_gate, want_adapters = wants
        records, tokens, top_k = index.shape
        width, hidden = pre.shape[-1], x.shape[-1]
        order, spans = by_expert(index, stack.num_experts)
        pre, out = pre.reshape(-1, width)[: len(order)], out.reshape(-1, hidden)[: len(order)]
        if want_adapters and owner is not None and not (want_x or want_gate):
            # the expert stream needs the owner's pairs only
            mine = (index == owner[:, None, None]).reshape(-1)[order]
            experts = index.reshape(-1)[order][mine]
            order, pre, out = order[mine], pre[mine], out[mine]
            spans = spans_of(torch.bincount(experts, minlength=stack.num_experts).tolist())
        rows, gates = order // top_k, gate.reshape(-1)[order].unsqueeze(-1)
        by_y = grad_y.reshape(-1, hidden)
        empty = x.new_zeros(records, 0)
        grad_x = torch.zeros_like(x).reshape(-1, hidden) if want_x else empty
        grad_gate = torch.zeros_like(gate).reshape(-1) if want_gate else empty
        pairs = _Pairs(want_adapters, owner, x, stack, rows)
        for expert, start, end in spans:
            own = slice(start, end)
            grad_out = by_y[rows[own]]
            if want_gate:
                grad_gate[order[own]] = (grad_out * out[own]).sum(-1).to(gate.dtype)
            if not (want_x or want_adapters):
                continue
            grad_out = grad_out * gates[own].to(grad_out.dtype)
            grad_act = stack.project_transposed(1, expert, grad_out)
            act, grad_pre = _through_activation(stack.activation, pre[own], grad_act)
            if want_x:
                _add(grad_x, rows[own], stack.project_transposed(0, expert, grad_pre), top_k == 1)
            pairs.keep(expert, own, act, grad_pre, grad_out)
        adapters = pairs.gradients((a1, b1, a2, b2), spans, note) if want_adapters else [empty] * 4
        grad_x = grad_x.view(x.shape) if want_x else grad_x
        grad_gate = grad_gate.view(gate.shape) if want_gate else grad_gate
        return grad_x, grad_gate, *adapters

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("The frozen-experts kernel is differentiable once; second derivatives are not defined.")

    @staticmethod
    def vmap(info, in_dims, *args):
        size = info.batch_size
        folded = [fold(value, dim, size) for value, dim in zip(args, in_dims, strict=True)]
        return tuple(unfold(value, size) for value in _Backward.apply(*folded)), (0,) * 6


class _Pairs:
    """What the backward pass keeps of the pairs for the gradients of adapters.

    Of the owner's pairs: (R, T, ..), zero for a token that did not go there. Without owners: of all pairs, in order.
    """

    def __init__(
        self, wanted: bool, owner: torch.Tensor | None, x: torch.Tensor, stack: ExpertStack, rows: torch.Tensor
    ):
        self.wanted, self.owner, self.x, self.stack, self.rows = wanted, owner, x, stack, rows
        self.tokens = x.shape[-2]
        self.kept: list[tuple[torch.Tensor, ...]] = []
        if wanted and owner is not None:
            flat = x.reshape(-1, x.shape[-1])
            widths = (stack.second[0].shape[1], stack.first[0].shape[0], flat.shape[1])
            self.kept = [tuple(flat.new_zeros(len(flat), width) for width in widths)]

    def keep(self, expert: int, own: slice, *values: torch.Tensor) -> None:
        """act (N, F), grad_pre (N, P) and grad_out (N, H) of an expert's pairs."""
        if not self.wanted:
            return
        if self.owner is None:
            self.kept.append(values)
            return
        rows = self.rows[own]
        mine = self.owner[rows // self.tokens] == expert
        for buffer, value in zip(self.kept[0], values, strict=True):
            # a token reaches its owner at most once: no row twice
            buffer.index_copy_(0, rows[mine], value[mine].to(buffer.dtype))

    def gradients(self, adapters: tuple[torch.Tensor, ...], spans: Spans, note: Callable | None) -> list[torch.Tensor]:
        """Of A1, B1, A2 and B2, for every record; empty (R, 0) if noted."""
        records = self.x.shape[0]
        if self.owner is not None:
            act, grad_pre, grad_out = (value.view(records, self.tokens, -1) for value in self.kept[0])
            return _owner_gradients(self.x, adapters, act, grad_pre, grad_out, self.stack.scaling)
        if not spans:
            return [self.x.new_zeros(records, 0) if note else value.new_zeros(value.shape) for value in adapters]
        values = (torch.cat(parts) for parts in zip(*self.kept, strict=True))
        parts, of = _pair_parts(self.x, self.rows, spans, self.stack, *values), self.rows // self.tokens
        if note is None:
            return [_by_record(part, spans, of, records, self.stack.num_experts) for part in parts]
        note(parts, spans, of, records)
        return [self.x.new_zeros(records, 0)] * 4


def _owner_gradients(x, adapters, act, grad_pre, grad_out, scaling: float) -> list[torch.Tensor]:
    """Gradients of the owner's (A1, B1, A2, B2), each (R, *shape): sums over the record's own (token, owner) pairs.

    Args:
        x: (R, T, H). act (R, T, F), grad_pre (R, T, P), grad_out (R, T, H): of the pair of each token with the owner;
            zero for a token that did not go there.
    """
    a1, b1, a2, b2 = adapters
    act, grad_out = act.to(a2.dtype), grad_out.to(a2.dtype)
    grad_pre, x = grad_pre.to(a1.dtype), x.to(a1.dtype)
    grad_b2 = scaling * grad_out.mT @ (act @ a2.mT)
    grad_a2 = scaling * (grad_out @ b2).mT @ act
    grad_b1 = scaling * grad_pre.mT @ (x @ a1.mT)
    grad_a1 = scaling * (grad_pre @ b1).mT @ x
    return [grad_a1, grad_b1, grad_a2, grad_b2]


def _pair_parts(x, rows, spans: Spans, stack: ExpertStack, act, grad_pre, grad_out) -> list[PairParts]:
    """The factors of A1, B1, A2 and B2 for every pair, in the adapters' type."""
    assert stack.adapters is not None
    parts: list[PairParts] = []
    inputs = (x.reshape(-1, x.shape[-1])[rows], act)
    for (a, b), value, grad in zip(stack.adapters, inputs, (grad_pre, grad_out), strict=True):
        value, grad = value.to(a.dtype), stack.scaling * grad.to(b.dtype)
        inner = each(spans, value, lambda e, part, a=a: F.linear(part, a[e]), a.shape[1])
        back = each(spans, grad, lambda e, part, b=b: part @ b[e], b.shape[2])
        parts += [(back, value), (grad, inner)]
    return parts


def _by_record(part: PairParts, spans: Spans, of: torch.Tensor, records: int, num_experts: int) -> torch.Tensor:
    """(R, E, p, q): the sums of left^T right over each record's pairs with each expert."""
    left, right = part
    out = left.new_zeros(records, num_experts, left.shape[-1], right.shape[-1])
    for expert, start, end in spans:
        groups = RecordGroups(of[start:end])
        out[groups.records, expert] = groups.pad(left[start:end]).mT @ groups.pad(right[start:end])
    return out


def routed_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    gate: torch.Tensor,
    stack: ExpertStack,
    wanted: OwnerAdapters | AllAdapters | None = None,
) -> torch.Tensor:
    """sum_k gate_k * expert_{index_k}(x), differentiable in x, the gates and (when given) the wanted adapters.

    Args:
        x: (R, T, H). index: (R, T, K) int64 in [0, E], E meaning no expert. gate: (R, T, K).
        stack: the experts' constants. Their adapters are constants too: no gradient reaches them.
        wanted: differentiate each record's owner's adapters (Eq. 8), or those of all experts. The values must be
            the stack's.

    Returns:
        (R, T, H), zero for a token without an expert.
    """
    owner, note = None, None
    adapters: tuple[torch.Tensor | None, ...] = (None,) * 4
    if isinstance(wanted, OwnerAdapters):
        owner, adapters = wanted.owner, (*wanted.first, *wanted.second)
    elif wanted is not None:
        note, values = wanted.note, (*wanted.first, *wanted.second)
        # without `note`: views with a record dimension, and so gradients with one; nothing is copied
        adapters = values if note else tuple(value.expand(x.shape[0], *value.shape) for value in values)
    dtype = stack.first[0].dtype
    return _Forward.apply(x.to(dtype), index, gate.to(dtype), owner, *adapters, stack, note)[0].to(x.dtype)
