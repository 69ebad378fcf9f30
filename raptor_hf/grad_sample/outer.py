"""Per-sample gradients of linear maps as sums of outer products: formed, or left as factors (`cheap_to_form`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raptor_hf.moe.precision import full_precision

__all__ = ["OuterProducts", "cheap_to_form", "outer_products"]

# A Gram matrix in float64 costs about three times as much a product as a formed gradient in float32.
_GRAM_COST = 3


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value if value.dtype == torch.float64 else value.float()


def cheap_to_form(tokens: int, p: int, q: int) -> bool:
    """Does forming (p, q) for a record cost less than Gram matrices over its tokens?

    It then takes at most `_GRAM_COST` times the memory of the factors, and less than they do for p q < T (p + q).
    """
    return p * q < _GRAM_COST * tokens * (p + q)


def outer_products(left: torch.Tensor, right: torch.Tensor | None) -> torch.Tensor:
    """sum_t left_t right_t^T of every record, formed: left (b, T, p), right (b, T, q) -> (b, p, q); (b, p) without."""
    left = _wide(left)
    if right is None:
        return left.sum(1)
    with full_precision(left.device):
        return left.mT @ _wide(right)


class OuterProducts:
    """Gradients G_i = sum_t left_{i,t} right_{i,t}^T of one weight for b records (`RecordGradients`).

    Args:
        shape: of the weight: (p, q), or (p,) for a bias, whose gradient is sum_t left_{i,t}.
        parts: pairs left (b, T, p), right (b, T, q) (None for a bias), one for every call of the module.
            No part: the batch did not reach the weight, the gradient is exactly zero.
    """

    def __init__(
        self,
        records: int,
        shape: torch.Size,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.shape = torch.Size([records, *shape])
        self._like = torch.zeros((), device=device, dtype=dtype)
        if not parts:
            self._left = self._right = None
        elif len(parts) == 1:
            self._left, self._right = parts[0]
        else:
            self._left = torch.cat([left for left, _ in parts], dim=1)
            self._right = None if parts[0][1] is None else torch.cat([r for _, r in parts if r is not None], dim=1)

    def norms(self) -> torch.Tensor:
        """See `RecordGradients`.

        `weighted_sum` adds the products in another order than the norm is taken, so each record's norm is raised by
        a bound of that rounding, u (T + 8) sum_t ||left_t|| ||right_t|| with u the unit roundoff.
        """
        if self._left is None:
            return torch.zeros(self.shape[0], dtype=torch.float64, device=self._like.device)
        left, right = _wide(self._left), self._right
        lengths = left.norm(dim=-1).double()
        with full_precision(left.device):
            if right is None:
                norm = left.sum(1).double().norm(dim=-1)
            else:
                right = _wide(right)
                lengths = lengths * right.norm(dim=-1).double()
                tokens, p, q = left.shape[1], left.shape[2], right.shape[2]
                if not cheap_to_form(tokens, p, q):
                    wide_left, wide_right = left.double(), right.double()
                    gram = (wide_left @ wide_left.mT) * (wide_right @ wide_right.mT)
                    norm = gram.sum((1, 2)).clamp_min(0).sqrt()
                else:
                    # rows in the products' own precision (a pass in float64 costs more than the product), raised by
                    # the bound of that rounding; the rows' norms add up in float64
                    rows = torch.linalg.vector_norm(left.mT @ right, dim=2).double()
                    norm = torch.linalg.vector_norm(rows, dim=1) * (1 + torch.finfo(left.dtype).eps / 2 * (q + 2))
        roundoff = torch.finfo(left.dtype).eps / 2
        return norm + roundoff * (left.shape[1] + 8) * lengths.sum(1)

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """See `RecordGradients`: one matrix product for all records."""
        if self._left is None:
            return self._like.new_zeros(self.shape[1:])
        left, right = _wide(self._left), self._right
        scale = factors.to(left.dtype)[:, None, None]
        left = (left * scale).double()
        if bool((silent := scale == 0).any()):  # 0 * nan is nan
            left = left.masked_fill(silent, 0)
            right = None if right is None else right.masked_fill(silent, 0)
        if right is None:
            return left.sum((0, 1))
        with full_precision(left.device):
            # float64: one record more must not change how the others' contributions are rounded
            return left.flatten(0, 1).mT @ right.double().flatten(0, 1)

    def dense(self) -> torch.Tensor:
        """All gradients, formed: (b, *shape)."""
        if self._left is None:
            return self._like.new_zeros(self.shape)
        return outer_products(self._left, self._right)
