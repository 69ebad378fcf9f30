"""Per-sample gradients of stacked expert adapters as sums of outer products: (b, E, p, q) is never formed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from raptor_hf.grad_sample.outer import OuterProducts
from raptor_hf.moe.pair_gradients import PairParts
from raptor_hf.moe.pairs import PairRecords, RecordGroups

__all__ = ["ExpertOuterProducts", "NotedPairs"]

NotedPairs = tuple[PairParts, PairRecords]
"""What one call of a block noted for one adapter: factors (U, p) and (U, q), and the pairs' experts and records."""


class ExpertOuterProducts:
    """Gradients G_{i,e} = sum over the pairs of record i with expert e of left right^T, for b records and E experts.

    One norm and one factor a record, over all its experts (`RecordGradients`).

    Args:
        records: b. shape: of the stacked adapter, (E, p, q). noted: one entry for every call of the block; none: the
            batch did not reach it, the gradient is exactly zero.
    """

    def __init__(
        self,
        records: int,
        shape: torch.Size,
        noted: Sequence[NotedPairs],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.shape = torch.Size([records, *shape])
        self._like = torch.zeros((), device=device, dtype=dtype)
        self._pairs: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        self._groups: dict[int, Callable[[], RecordGroups]] = {}
        for (left, right), call in noted:
            for expert, start, end in call.spans:
                pairs = (call.of[start:end], left[start:end], right[start:end])
                self._pairs.setdefault(expert, []).append(pairs)
                self._groups[expert] = partial(call.groups, expert, start, end)

    def _experts(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """expert, records (N,), left (N, p), right (N, q) of its pairs, for every expert that has one."""
        for expert, calls in self._pairs.items():
            of, left, right = calls[0] if len(calls) == 1 else (torch.cat(parts) for parts in zip(*calls, strict=True))
            yield expert, of, left, right

    def _padded(
        self, expert: int, of: torch.Tensor, left: torch.Tensor, right: torch.Tensor
    ) -> tuple[torch.Tensor, OuterProducts]:
        """The records (G,) that have a pair with one expert, and their gradients to it."""
        groups = self._groups[expert]() if len(self._pairs[expert]) == 1 else RecordGroups(of)
        parts = [(groups.pad(left), groups.pad(right))]
        return groups.records, OuterProducts(len(groups.records), self.shape[2:], parts, device=left.device)

    def norms(self) -> torch.Tensor:
        """See `RecordGradients`; the rounding of every expert's sum is bounded as in `OuterProducts`."""
        squares = torch.zeros(self.shape[0], dtype=torch.float64, device=self._like.device)
        for pairs in self._experts():
            records, gradients = self._padded(*pairs)
            squares.index_add_(0, records, gradients.norms().square())
        return squares.sqrt()

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """See `RecordGradients`: one matrix product an expert, over the pairs of all records."""
        out = torch.zeros(self.shape[1:], dtype=torch.float64, device=self._like.device)
        for expert, of, left, right in self._experts():
            single = OuterProducts(len(of), self.shape[2:], [(left[:, None], right[:, None])], device=left.device)
            out[expert] = single.weighted_sum(factors[of])
        return out

    def dense(self) -> torch.Tensor:
        """All gradients, formed: (b, E, p, q)."""
        out = self._like.new_zeros(self.shape)
        for expert, *pairs in self._experts():
            records, gradients = self._padded(expert, *pairs)
            out[records, expert] = gradients.dense().to(out.dtype)
        return out
