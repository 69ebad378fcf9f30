"""Per-sample gradients that are exactly zero outside a few rows: of an embedding, the rows a record looked up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["RowGradients", "untouched"]


def untouched(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter that a record does not reach: zero, and without a row where it has rows."""
    if not parameter.dim():
        return torch.zeros_like(parameter)
    rows = torch.empty(1, 0, dtype=torch.long, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(rows, values, parameter.shape, is_coalesced=True, check_invariants=False)


class RowGradients:
    """Gradients of one parameter (v, *shape) for b records (`RecordGradients`), held as the rows that may not be zero.

    Args:
        gradients: a sparse tensor (v, *shape) for every record, with one sparse dimension. Entries of one row (of a
            token that occurs twice) are added up here, before any norm is taken.
    """

    def __init__(self, gradients: Sequence[torch.Tensor]):
        added = [gradient.coalesce() for gradient in gradients]
        self.shape = torch.Size([len(added), *added[0].shape])
        self._rows = torch.cat([gradient.indices()[0] for gradient in added])
        self._values = torch.cat([gradient.values() for gradient in added])
        counts = torch.tensor([len(gradient.values()) for gradient in added], device=self._rows.device)
        self._record = torch.arange(len(added), device=self._rows.device).repeat_interleave(counts)

    def norms(self) -> torch.Tensor:
        """See `RecordGradients`."""
        squares = self._values.double().square().view(len(self._values), math.prod(self.shape[2:])).sum(1)
        return squares.new_zeros(self.shape[0]).index_add_(0, self._record, squares).sqrt()

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """See `RecordGradients`: a sparse float64 tensor (v, *shape), in which a row may have several entries."""
        scale = factors.double()[self._record].view(-1, *[1] * len(self.shape[2:]))
        values = (self._values.double() * scale).masked_fill_(scale == 0, 0)  # 0 * nan is nan
        return torch.sparse_coo_tensor(self._rows.unsqueeze(0), values, self.shape[1:], check_invariants=False)

    def dense(self) -> torch.Tensor:
        """All gradients, formed: (b, v, *shape)."""
        out = self._values.new_zeros(self.shape)
        out[self._record, self._rows] = self._values
        return out
