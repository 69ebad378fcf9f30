"""(token, expert) pairs in the order of their experts, and within an expert by record.

Shapes: R records, T tokens, K experts a token, U pairs that have an expert, N pairs of one expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["PairRecords", "RecordGroups", "Spans", "by_expert", "each", "spans_of"]

Spans = list[tuple[int, int, int]]
"""(expert, start, end) of every expert that has a pair, in the order of the pairs."""


def by_expert(index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, Spans]:
    """The pairs of `index` (R, T, K) in the order of their experts; within an expert, in the order of the records.

    Returns: `order` (U,), flat positions of the U pairs that have an expert; `spans`, (expert, start, end) in `order`.
    """
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1).tolist()[:num_experts]
    return order[: sum(counts)], spans_of(counts)


def spans_of(counts: list[int]) -> Spans:
    spans, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, start, start + count))
        start += count
    return spans


def each(spans: Spans, x: torch.Tensor, project: Callable, width: int) -> torch.Tensor:
    """`project(expert, rows)` for every expert's rows of x (U, in) -> (U, width)."""
    out = x.new_empty(x.shape[0], width)
    for expert, start, end in spans:
        out[start:end] = project(expert, x[start:end])
    return out


class RecordGroups:
    """One expert's pairs by record: G records have one, W at most.

    Args:
        of: (N,) int64, the record of every pair, in any order.

    Attributes:
        records: (G,) int64, ascending.
    """

    def __init__(self, of: torch.Tensor):
        self.records, group, counts = torch.unique(of, return_inverse=True, return_counts=True)
        order = torch.argsort(group, stable=True)
        slot = torch.empty_like(order)
        slot[order] = torch.arange(len(of), device=of.device) - (counts.cumsum(0) - counts)[group[order]]
        self._width = int(counts.max())
        self._place = group * self._width + slot

    def pad(self, value: torch.Tensor) -> torch.Tensor:
        """(N, d) -> (G, W, d), zero where a record has fewer than W pairs."""
        out = value.new_zeros(len(self.records) * self._width, value.shape[-1])
        return out.index_copy_(0, self._place, value).view(len(self.records), self._width, -1)


class PairRecords:
    """The records of a call's pairs: `of` (U,) and the experts' `spans`, with each expert's groups made once."""

    def __init__(self, spans: Spans, of: torch.Tensor):
        self.spans, self.of = spans, of
        self._groups: dict[int, RecordGroups] = {}

    def groups(self, expert: int, start: int, end: int) -> RecordGroups:
        """Of the pairs `start` to `end`, those of an expert."""
        if expert not in self._groups:
            self._groups[expert] = RecordGroups(self.of[start:end])
        return self._groups[expert]
