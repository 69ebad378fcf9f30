"""Clip every record's gradient and add the clipped gradients up. Sums, never means."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from raptor_hf.validate import positive

__all__ = ["clip_and_sum", "clip_and_sum_by_owner", "clip_factors"]

# Room for the rounding of the factor, its product with the gradient and the sum (each about 6e-8 in float32).
_SLACK = 1e-6


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value if value.dtype == torch.float64 else value.float()


def clip_factors(grads: Mapping[str, torch.Tensor], max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor min(1, C / ||g_i||) and norm ||g_i||_2 of every record, over all tensors together.

    Args:
        grads: name -> (b, *shape). max_norm: C > 0.

    Returns:
        factors (b,) float64, zero for a record with a non-finite entry; norms (b,) float64 (non-finite there).
    """
    max_norm = positive("max_norm", max_norm)
    squared = None
    for value in grads.values():
        flat = _wide(value).flatten(1)
        one = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square()
        squared = one if squared is None else squared + one
    if squared is None:
        raise ValueError("No gradients were given, so there is nothing to clip. Pass at least one tensor.")
    norms = squared.sqrt()
    shrink = (max_norm * (1 - _SLACK)) / norms.clamp_min(torch.finfo(torch.float64).tiny)
    factors = torch.where(norms <= max_norm, torch.ones_like(norms), shrink)
    return torch.where(norms.isfinite(), factors, torch.zeros_like(norms)), norms


def _weighted_sums(value: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """weights (k, b) times rows of (b, *shape) -> (k, *shape); a row of weight zero is zero, even if not finite."""
    flat = _wide(value).flatten(1)
    unused = (weights == 0).all(0)
    if unused.any():  # 0 * nan is nan
        flat = torch.where(unused.unsqueeze(1), torch.zeros_like(flat), flat)
    return (weights.to(flat.dtype) @ flat).view(-1, *value.shape[1:])


def clip_and_sum(grads: Mapping[str, torch.Tensor], max_norm: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """sum_i clip(g_i, C) with clip(g, C) = g min(1, C / ||g||_2), one norm over all tensors of a record (Eq. 7).

    Args:
        grads: name -> per-sample gradients (b, *shape), any float dtype. max_norm: C.

    Returns:
        name -> sum (*shape), float32 or wider, and the norms (b,) float64 (private).

    Formal guarantees:
        Adding or removing one record changes the sum by at most C in L2 norm. A record with a non-finite gradient
        contributes exactly zero.
    """
    factors, norms = clip_factors(grads, max_norm)
    return {name: _weighted_sums(g, factors.unsqueeze(0))[0] for name, g in grads.items()}, norms


def clip_and_sum_by_owner(
    grads: Mapping[str, torch.Tensor], owner: torch.Tensor, num_owners: int, max_norm: float
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """For every owner e: sum over the records of e of clip(g_i, C) (the sum of Eqs. 8 and 9).

    Args:
        grads: name -> gradients of each record's owner (b, *shape). owner: (b,) int64 in [0, num_owners).

    Returns:
        name -> sums (num_owners, *shape), zero for an owner without a record, and the norms (b,) float64 (private).

    Formal guarantees:
        Adding or removing one record changes exactly one owner's sum, by at most C in L2 norm: the owners' sums
        are functions of disjoint sets of records and compose in parallel.
    """
    factors, norms = clip_factors(grads, max_norm)
    mine = owner.unsqueeze(0) == torch.arange(num_owners, device=owner.device).unsqueeze(1)
    return {name: _weighted_sums(g, mine * factors) for name, g in grads.items()}, norms
