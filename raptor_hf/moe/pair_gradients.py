"""Gradients of the experts' adapters from the (token, expert) pairs of a backward pass.

Shapes: R records, T tokens, U pairs, n pairs of one piece; H, P, F, E, r as in `moe.experts`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from raptor_hf.moe.pairs import RecordGroups, SortedPairs, Spans, each
from raptor_hf.moe.stack import ExpertStack

__all__ = ["PairGradients", "PairParts"]

PairParts = tuple[torch.Tensor, torch.Tensor]
"""left (U, p) and right (U, q): of every pair, the factors of its part left^T right of an adapter's gradient."""


class PairGradients:
    """What the backward pass keeps of the pairs for the gradients of adapters.

    Of the owner's pairs: (R, T, ..), zero for a token that did not go there. Without owners: of all pairs, in order.

    Args:
        x: (R, T, H). owner: (R,), or None. rows: (U,), the token of every pair of `pairs`.
    """

    def __init__(
        self, stack: ExpertStack, x: torch.Tensor, owner: torch.Tensor | None, pairs: SortedPairs, rows: torch.Tensor
    ):
        self.stack, self.x, self.owner, self.pairs, self.rows = stack, x, owner, pairs, rows
        self.records, self.tokens, hidden = x.shape
        widths = (stack.widths[1], stack.widths[0], hidden)
        if owner is None:
            self.kept = [x.new_empty(len(rows), width) for width in widths]
        else:
            # one row more, for the pairs that are not the owner's
            self.kept = [x.new_zeros(self.records * self.tokens + 1, width) for width in widths]
            mine = owner[rows // self.tokens] == pairs.experts
            self.places = torch.where(mine, rows, self.records * self.tokens)

    def keep(self, own: slice, *values: torch.Tensor) -> None:
        """act (n, F), grad_pre (n, P) and grad_out (n, H) of the pairs `own`."""
        for buffer, value in zip(self.kept, values, strict=True):
            if self.owner is None:
                buffer[own] = value
            else:
                # a token reaches its owner at most once: no row twice but the last
                buffer.index_copy_(0, self.places[own], value.to(buffer.dtype))

    def gradients(self, adapters: tuple[torch.Tensor, ...], note: Callable | None) -> list[torch.Tensor]:
        """Of A1, B1, A2 and B2, for every record; empty (R, 0) if noted."""
        if self.owner is not None:
            act, grad_pre, grad_out = (value[:-1].view(self.records, self.tokens, -1) for value in self.kept)
            return _owner_gradients(self.x, adapters, act, grad_pre, grad_out, self.stack.scaling)
        spans = self.pairs.spans
        if not spans:
            return [self.x.new_zeros(self.records, 0) if note else value.new_zeros(value.shape) for value in adapters]
        used = spans[-1][2]
        values, rows = [value[:used] for value in self.kept], self.rows[:used]
        parts, of = _pair_parts(self.x, rows, spans, self.stack, *values), rows // self.tokens
        if note is None:
            return [_by_record(part, spans, of, self.records, self.stack.num_experts) for part in parts]
        note(parts, spans, of, self.records)
        return [self.x.new_zeros(self.records, 0)] * 4


def _owner_gradients(
    x: torch.Tensor,
    adapters: tuple[torch.Tensor, ...],
    act: torch.Tensor,
    grad_pre: torch.Tensor,
    grad_out: torch.Tensor,
    scaling: float,
) -> list[torch.Tensor]:
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


def _pair_parts(
    x: torch.Tensor,
    rows: torch.Tensor,
    spans: Spans,
    stack: ExpertStack,
    act: torch.Tensor,
    grad_pre: torch.Tensor,
    grad_out: torch.Tensor,
) -> list[PairParts]:
    """The factors of A1, B1, A2 and B2 for every pair, in the adapters' type; the gradients may be overwritten."""
    assert stack.adapters is not None
    parts: list[PairParts] = []
    inputs = (x.reshape(-1, x.shape[-1])[rows], act)
    for (a, b), value, grad in zip(stack.adapters, inputs, (grad_pre, grad_out), strict=True):
        value, grad = value.to(a.dtype), grad.to(b.dtype).mul_(stack.scaling)
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
