"""Frozen routed experts (with constant LoRA) that work under `torch.func.vmap`.

The experts of a sparse layer are applied to (token, expert) pairs grouped by expert, one matrix product an expert.
Data-dependent grouping has no batching rule, so the layer is an `autograd.Function` with a `vmap` rule of its own:
the vmapped dimension is folded into the records dimension and one grouped call serves all of them.

Shapes: R records, T tokens, K experts a token (top-k), H hidden, P first projection's outputs (2F with a gated
activation), F the activation's outputs, E experts, r LoRA rank. An index of E means "no expert" (a dropped token).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raptor_hf.moe.folding import FoldedFunction, OnceDifferentiable, no_autocast
from raptor_hf.moe.grouped import Group
from raptor_hf.moe.pair_gradients import PairGradients, PairParts
from raptor_hf.moe.pairs import Piece, SortedPairs, Spans
from raptor_hf.moe.stack import ExpertStack

__all__ = ["AllAdapters", "OwnerAdapters", "routed_experts"]

# Bytes of the widest rows that are computed together. On a CPU: enough for a fast product, few enough that the
# temporaries are small beside a layer's activations, however many tokens one expert gets. A pass back needs more
# temporaries, at a time when all activations are held.
_PIECE = {"cpu": 2**22, "cuda": 2**28}
_PIECE_BACK = {"cpu": 2**21, "cuda": 2**28}
# And of those that pass through the activation together: what a core's cache holds.
_BLOCK = {"cpu": 2**17, "cuda": 2**28}


@dataclass(frozen=True)
class OwnerAdapters:
    """What the expert stream differentiates: per record, its owner's adapters (the values of the stack's slices).

    Attributes: owner (R,) int64; first, second: `(A (R, r, in), B (R, out, r))`.
    """

    owner: torch.Tensor
    first: tuple[torch.Tensor, torch.Tensor]
    second: tuple[torch.Tensor, torch.Tensor]


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


def _rows(limits: dict[str, int], row: torch.Tensor) -> int:
    """How many rows like `row` (d,) are taken at a time."""
    return max(1, limits["cpu" if row.device.type == "cpu" else "cuda"] // max(1, row.nbytes))


def _add(total: torch.Tensor, rows: torch.Tensor, value: torch.Tensor, unique: bool) -> None:
    """Add `value` (N, H) to rows of `total`, which are zero yet if no row comes twice."""
    value = value.to(total.dtype)
    total.index_copy_(0, rows, value) if unique else total.index_add_(0, rows, value)


class _Forward(FoldedFunction):
    """Also returns the pre-activations (R, T, K, P) of the pairs for the backward pass.

    They lie in the order of the experts, not of the records (their shape only says so): the backward pass sees the
    same records together, sorts the pairs in the same way, and nothing has to be put back in place. The pairs' outputs
    are not kept: the gate's gradient is taken from the activations (`_Backward`).
    """

    @staticmethod
    @no_autocast
    def forward(x, index, gate, owner, a1, b1, a2, b2, stack: ExpertStack, note):
        records, tokens, top_k = index.shape
        flat = x.reshape(-1, x.shape[-1])
        pairs = SortedPairs(index, stack.num_experts, stack.grouped)
        rows, gates = pairs.order // top_k, gate.reshape(-1)[pairs.order].unsqueeze(-1)
        y = torch.zeros_like(flat)
        pre = flat.new_empty(index.numel(), stack.widths[0])
        for piece in pairs.pieces(_rows(_PIECE, pre[:1])):
            own = piece.rows
            act = stack.activation(stack.project(0, piece.group, flat[rows[own]], pre[own]))
            value = stack.project(1, piece.group, act, flat.new_empty(len(act), flat.shape[1]))
            _add(y, rows[own], piece.clean(value.mul_(gates[own])), top_k == 1)
        return y.view(x.shape), pre.view(records, tokens, top_k, -1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, *tensors, ctx.stack, ctx.note = inputs
        _, pre = output
        ctx.mark_non_differentiable(pre)
        ctx.set_materialize_grads(False)  # or zeros would be made for `pre`
        # only the adapters' gradients need the inputs
        ctx.save_for_backward(None if tensors[3] is None else x, *tensors, pre)

    @staticmethod
    def backward(ctx, grad_y, _pre):
        x, index, gate, owner, a1, b1, a2, b2, pre = ctx.saved_tensors
        wants = (ctx.needs_input_grad[0], ctx.needs_input_grad[2], any(ctx.needs_input_grad[4:8]))
        grads = _Backward.apply(grad_y, x, index, gate, owner, a1, b1, a2, b2, pre, wants, ctx.stack, ctx.note)
        grad_x, grad_gate, *adapters = (g if g.numel() else None for g in grads)
        return grad_x, None, grad_gate, None, *adapters, None, None


class _Backward(OnceDifferentiable):
    """Gradients to x, the gates and the adapters (the owner's, or without owners all). Those not wanted, and those
    that are noted, come back empty (records, 0).

    A pair adds gate * out to y, with out = W act + b. Its gate's gradient <grad_y, out> is <grad_y W, act> +
    <grad_y, b>: grad_y W is needed in any case, and out need not have been kept.
    """

    @staticmethod
    @no_autocast
    def forward(grad_y, x, index, gate, owner, a1, b1, a2, b2, pre, wants, stack: ExpertStack, note):
        want_x, want_gate, want_adapters = wants
        records, tokens, top_k = index.shape
        pairs = SortedPairs(index, stack.num_experts, stack.grouped)
        pre = pre.reshape(-1, pre.shape[-1])
        if want_adapters and owner is not None and not (want_x or want_gate):
            # the expert stream needs the owner's pairs only, of which a token has one at most
            mine = owner[pairs.order // (tokens * top_k)] == pairs.experts
            pairs, places = pairs.only(mine, records * tokens)
            pre = pre[places]
        rows, gates = pairs.order // top_k, gate.reshape(-1)[pairs.order].unsqueeze(-1)
        by_y = grad_y.reshape(-1, grad_y.shape[-1])
        empty = pre.new_zeros(records, 0)
        grad_x = by_y.new_zeros(by_y.shape) if want_x else empty
        grad_gate = torch.zeros_like(gate).reshape(-1) if want_gate else empty
        kept = PairGradients(stack, x, owner, pairs, rows) if want_adapters else None
        for piece in pairs.pieces(_rows(_PIECE_BACK, pre[:1])):
            own = piece.rows
            grad_out = by_y[rows[own]].to(pre.dtype)
            grad_act = stack.project_transposed(1, piece.group, grad_out)
            act = None if kept is None else torch.empty_like(grad_act)
            grad_pre, by_gate = _through_activation(stack, pre[own], grad_act, gates[own], act, want_gate)
            if want_gate:
                if stack.biases is not None:
                    by_gate += (grad_out * _of(piece, stack.biases[1])).sum(-1, keepdim=True)
                grad_gate[pairs.order[own]] = piece.clean(by_gate).squeeze(-1).to(gate.dtype)
            if want_x:
                value = stack.project_transposed(0, piece.group, grad_pre)
                _add(grad_x, rows[own], piece.clean(value), top_k == 1)
            if kept is not None:
                kept.keep(own, act, grad_pre, grad_out.mul_(gates[own]))
        adapters = kept.gradients((a1, b1, a2, b2), note) if kept is not None else [empty] * 4
        grad_x = grad_x.view(grad_y.shape) if want_x else grad_x
        grad_gate = grad_gate.view(gate.shape) if want_gate else grad_gate
        return grad_x, grad_gate, *adapters


def _of(piece: Piece, biases: torch.Tensor) -> torch.Tensor:
    """(n, d): the biases (E, d) of every pair's expert."""
    if isinstance(piece.group, Group):
        return biases[piece.group.experts]
    return torch.cat([biases[expert].expand(end - start, -1) for expert, start, end in piece.group])


def _through_activation(
    stack: ExpertStack,
    pre: torch.Tensor,
    grad_act: torch.Tensor,
    gates: torch.Tensor,
    act: torch.Tensor | None,
    want_gate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Back through act = activation(pre), for pairs whose outputs are gated.

    Args:
        pre: (N, P). grad_act: (N, F), of the ungated activations; overwritten. gates: (N, 1).
        act: (N, F) to write the activations into.

    Returns:
        The gradient to `pre`, and (if wanted) <grad_act, act> (N, 1).
    """
    # where the activation keeps the width, in the place of what is no longer needed
    grad_pre = grad_act if pre.shape == grad_act.shape else torch.empty_like(pre)
    by_gate = pre.new_empty(len(pre), 1) if want_gate else pre.new_empty(0)
    step = _rows(_BLOCK, pre[:1])
    for start in range(0, len(pre), step):
        own = slice(start, start + step)
        with torch.enable_grad():
            leaf = pre[own].detach().requires_grad_()
            out = stack.activation(leaf)
        if want_gate:
            by_gate[own] = (grad_act[own] * out.detach()).sum(-1, keepdim=True)
        if act is not None:
            act[own] = out.detach()
        (grad_pre[own],) = torch.autograd.grad(out, leaf, grad_act[own].mul_(gates[own]))
    return grad_pre, by_gate


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
