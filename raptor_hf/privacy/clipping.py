"""Clip every record's gradient and add the clipped gradients up. Sums, never means."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch

from raptor_hf.validate import positive

__all__ = ["RecordGradients", "clip_and_sum", "clip_and_sum_by_owner", "clip_and_sum_jointly", "clip_factors"]

# Room for the rounding of the factor, its product with the gradient and the sum, where they are float32 (each 6e-8).
_SLACK = 1e-6
# Elements widened to float64 at a time: what a core's cache holds, or what keeps a GPU busy.
_CHUNK, _GPU_CHUNK = 2**16, 2**22


class RecordGradients(Protocol):
    """Per-sample gradients of one tensor that are not held as such, e.g. as sums of outer products.

    Attributes: shape: (b, *shape), as the tensor of all of them would have.
    """

    @property
    def shape(self) -> torch.Size: ...

    def norms(self) -> torch.Tensor:
        """(b,) float64: an upper bound of the L2 norm of what `weighted_sum` adds for a record of factor 1."""
        ...

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """Sum (*shape) of the records' gradients times `factors` (b,), float32 or wider, dense or sparse; a factor of
        zero silences.
        """
        ...


def _chunks(value: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """(b, *shape) -> slices of the d columns of (b, d), and a copy of those columns in float64, which may be written to
    until the next.
    """
    flat = value.flatten(1) if value.dim() > 1 else value.unsqueeze(1)
    columns = flat.shape[1]
    step = max(1, (_CHUNK if value.device.type == "cpu" else _GPU_CHUNK) // max(1, len(flat)))
    if columns <= step:
        yield slice(0, columns), flat.to(torch.float64, copy=True)
        return
    buffer = torch.empty(len(flat), step, dtype=torch.float64, device=value.device)
    for start in range(0, columns, step):
        at = slice(start, min(start + step, columns))
        yield at, buffer[:, : at.stop - at.start].copy_(flat[:, at])


def _norms(value: torch.Tensor | RecordGradients) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        squares = torch.zeros(len(value), dtype=torch.float64, device=value.device)
        for _, part in _chunks(value):
            squares += torch.linalg.vector_norm(part, dim=1).square()
        return squares.sqrt()
    return value.norms()


def clip_factors(
    grads: Mapping[str, torch.Tensor] | Mapping[str, RecordGradients], max_norm: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor min(1, C / ||g_i||) and norm ||g_i||_2 of every record, over all tensors together.

    Args:
        grads: name -> (b, *shape). max_norm: C > 0.

    Returns:
        factors (b,) float64, zero for a record with a non-finite entry; norms (b,) float64 (non-finite there).
    """
    max_norm = positive("max_norm", max_norm)
    if not grads:
        raise ValueError("No gradients were given, so there is nothing to clip. Pass at least one tensor.")
    if len({value.shape[0] for value in grads.values()}) > 1:
        raise ValueError(
            "Gradients of different numbers of records were given together. One norm runs over all tensors of a "
            "record. Pass one row for every record in every tensor."
        )
    squares = [_norms(value).square() for value in grads.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    shrink = (max_norm * (1 - _SLACK)) / norms.clamp_min(torch.finfo(torch.float64).tiny)
    factors = torch.where(norms <= max_norm, torch.ones_like(norms), shrink)
    # a subnormal float32 has too few digits to be a factor: its rounding would exceed C
    usable = norms.isfinite() & (factors >= torch.finfo(torch.float32).tiny)
    return torch.where(usable, factors, torch.zeros_like(norms)), norms


def _totals(
    grads: Mapping[str, torch.Tensor] | Mapping[str, RecordGradients],
    into: Mapping[str, torch.Tensor] | None,
    device: torch.device,
    num_owners: int = 1,
    owned: Collection[str] = (),
) -> Mapping[str, torch.Tensor]:
    """What the sums are added to: zeros, or `into` where it is float64, contiguous and of exactly their shapes."""
    shapes = {n: (*((num_owners,) if n in owned else ()), *value.shape[1:]) for n, value in grads.items()}
    if into is None:
        return {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        total = into.get(name)
        if total is None or total.dtype != torch.float64 or total.shape != shape or not total.is_contiguous():
            found = "missing" if total is None else f"{total.dtype} of shape {tuple(total.shape)}"
            raise ValueError(
                f"The total of `{name}`, to which sums of shape {shape} are to be added, is {found}. Where it is "
                "rounded, or they are repeated to fit, a record moves it by more than its clipping norm. Pass "
                "contiguous float64 totals of the sums' shapes."
            )
    return into


def _add_up(
    grads: Mapping[str, torch.Tensor] | Mapping[str, RecordGradients],
    factors: torch.Tensor,
    totals: Mapping[str, torch.Tensor],
    owner: torch.Tensor | None = None,
    owned: Collection[str] = (),
) -> None:
    """Add the records' gradients times `factors` (b,) to the totals; those in `owned` to their owners' rows of them.

    A factor of zero silences any row. Products and sums are float64: one record more must not change how the others'
    contributions are rounded.
    """
    factors = factors.double()
    silent = (factors == 0).unsqueeze(1)
    any_silent = bool(silent.any())
    for name, value in grads.items():
        total = totals[name]
        if not isinstance(value, torch.Tensor):
            total.add_(value.weighted_sum(factors))
            continue
        rows = total.view(len(total), -1) if name in owned and total.numel() else total.view(1, -1)
        for at, part in _chunks(value):
            if any_silent:
                part.masked_fill_(silent, 0)  # 0 * nan is nan
            if name in owned:
                rows[:, at].index_add_(0, owner, part.mul_(factors.unsqueeze(1)))
            else:
                rows[0, at].addmv_(part.T, factors)


def clip_and_sum(
    grads: Mapping[str, torch.Tensor] | Mapping[str, RecordGradients],
    max_norm: float,
    *,
    into: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """sum_i clip(g_i, C) with clip(g, C) = g min(1, C / ||g||_2), one norm over all tensors of a record (Eq. 7).

    Args:
        grads: name -> per-sample gradients (b, *shape), any float dtype, or `RecordGradients`. max_norm: C.
        into: name -> float64 total (*shape) of what was summed before, which is added to in place.

    Returns:
        name -> sum (*shape), float64 (`into` where it was given), and the norms (b,) float64 (private).

    Formal guarantees:
        Adding or removing one record changes the sum by at most C in L2 norm. A record with a non-finite gradient
        contributes exactly zero, and so does one whose norm exceeds 8e37 C.
    """
    factors, norms = clip_factors(grads, max_norm)
    totals = _totals(grads, into, factors.device)
    _add_up(grads, factors, totals)
    return totals, norms


def clip_and_sum_jointly(
    grads: Mapping[str, torch.Tensor] | Mapping[str, RecordGradients],
    owner: torch.Tensor,
    num_owners: int,
    max_norm: float,
    owned: Collection[str],
    *,
    into: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """One norm over all tensors of a record; those in `owned` add up by owner, the others over all records.

    Args:
        grads: name -> (b, *shape). owner: (b,) int64 in [0, num_owners). owned: names of plain tensors.
        into: as in `clip_and_sum`; (num_owners, *shape) for the owned.

    Returns:
        name -> sums, (num_owners, *shape) for the owned and (*shape) for the others, and the norms (b,) (private).

    Formal guarantees:
        Adding or removing one record changes one owner's sums and the others' sums, all together by at most C in L2
        norm: a record's contribution is its clipped gradient, moved to its owner's place.
    """
    factors, norms = clip_factors(grads, max_norm)
    if owner.shape != factors.shape or bool(((owner < 0) | (owner >= num_owners)).any()):
        raise ValueError(
            "`owner` does not name one of the owners for every record. A record without one would be lost, or counted "
            f"for others. Pass an index in [0, {num_owners}) for each."
        )
    if unformed := [n for n, g in grads.items() if n in owned and not isinstance(g, torch.Tensor)]:
        raise TypeError(f"`{unformed[0]}` is not formed, and cannot be added up by owner. This is a bug.")
    totals = _totals(grads, into, factors.device, num_owners, owned)
    _add_up(grads, factors, totals, owner, owned)
    return totals, norms


def clip_and_sum_by_owner(
    grads: Mapping[str, torch.Tensor], owner: torch.Tensor, num_owners: int, max_norm: float
) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """For every owner e: sum over the records of e of clip(g_i, C) (the sum of Eqs. 8 and 9).

    Args:
        grads: name -> gradients of each record's owner (b, *shape). owner: (b,) int64 in [0, num_owners).

    Returns:
        name -> sums (num_owners, *shape), zero for an owner without a record, and the norms (b,) float64 (private).

    Formal guarantees:
        Adding or removing one record changes exactly one owner's sum, by at most C in L2 norm: the owners' sums
        are functions of disjoint sets of records and compose in parallel.
    """
    return clip_and_sum_jointly(grads, owner, num_owners, max_norm, owned=set(grads))
