"""(token, expert) pairs in the order of their experts, and within an expert by record.

Shapes: R records, T tokens, K experts a token, U pairs that have an expert, N pairs of one expert.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from raptor_hf.moe.grouped import Group, Spans

__all__ = ["PairRecords", "Piece", "RecordGroups", "SortedPairs", "Spans", "each"]


@dataclass(frozen=True)
class Piece:
    """Some pairs that are computed together, of one expert or of several.

    Attributes:
        rows: their places among the sorted pairs. group: which of these rows are whose.
        kept: (n, 1), False for a pair without an expert; None: all have one.
    """

    rows: slice
    group: Spans | Group
    kept: torch.Tensor | None = None

    def clean(self, value: torch.Tensor) -> torch.Tensor:
        """`value` (n, d), zero for pairs without an expert. In place."""
        return value if self.kept is None else value.masked_fill_(~self.kept, 0)


class SortedPairs:
    """The pairs of `index` (R, T, K) in the order of their experts; within an expert, in the order of the records.

    Args:
        index: in [0, E], E for none. grouped: do not ask the device how many pairs each expert has: then those without
            an expert are not left out but come last.

    Attributes:
        order: (U,) int64, flat positions of the pairs. experts: (U,) int64.
    """

    def __init__(self, index: torch.Tensor, num_experts: int, grouped: bool):
        flat = index.reshape(-1)
        self.num_experts, self.grouped = num_experts, grouped
        self.order = torch.argsort(flat, stable=True)
        self._spans: Spans | None = None
        if not grouped:
            counts = torch.bincount(flat, minlength=num_experts + 1).tolist()[:num_experts]
            self._spans = spans_of(counts)
            self.order = self.order[: sum(counts)]
        self.experts = flat[self.order]

    def __len__(self) -> int:
        return len(self.order)

    @property
    def spans(self) -> Spans:
        """(expert, start, end); where pairs are grouped, the device is asked."""
        if self._spans is None:
            counts = torch.bincount(self.experts, minlength=self.num_experts + 1).tolist()
            self._spans = spans_of(counts[: self.num_experts])
        return self._spans

    def only(self, wanted: torch.Tensor, most: int) -> tuple[SortedPairs, torch.Tensor]:
        """The pairs for which `wanted` (U,) holds, `most` at most, and their places (V,) among these."""
        chosen = copy.copy(self)
        if self.grouped:
            # the others come last, and count as pairs without an expert
            places = torch.argsort(~wanted, stable=True)[:most]
            chosen.experts = torch.where(wanted, self.experts, self.num_experts)[places]
            chosen._spans = None
        else:
            places = wanted.nonzero().squeeze(-1)
            chosen.experts = self.experts[places]
            chosen._spans = spans_of(torch.bincount(chosen.experts, minlength=self.num_experts).tolist())
        chosen.order = self.order[places]
        return chosen, places

    def pieces(self, most: int) -> Iterator[Piece]:
        """The pairs in pieces of `most` rows at most."""
        if not self.grouped:
            for part in _packed(self.spans, most):
                start, end = part[0][1], part[-1][2]
                yield Piece(slice(start, end), [(expert, s - start, e - start) for expert, s, e in part])
            return
        ends = torch.searchsorted(self.experts, torch.arange(self.num_experts, device=self.experts.device), right=True)
        for rows in _split(0, len(self), most):
            count = rows.stop - rows.start
            experts = self.experts[rows]
            group = Group((ends - rows.start).clamp(0, count).int(), experts.clamp(max=self.num_experts - 1))
            yield Piece(rows, group, (experts < self.num_experts).unsqueeze(-1))


def _packed(spans: Spans, most: int) -> Iterator[Spans]:
    """Spans together while they have `most` rows at most; one that has more alone, in parts of equal size."""
    part: Spans = []
    for expert, start, end in spans:
        if part and end - part[0][1] > most:
            yield part
            part = []
        if end - start > most:
            yield from ([(expert, rows.start, rows.stop)] for rows in _split(start, end, most))
        else:
            part.append((expert, start, end))
    if part:
        yield part


def _split(start: int, end: int, most: int) -> Iterator[slice]:
    """Parts of equal size, `most` at most."""
    parts = -(-(end - start) // most)
    for i in range(parts):
        yield slice(start + (end - start) * i // parts, start + (end - start) * (i + 1) // parts)


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
