"""The records of a micro-batch: how many, and how many at a time."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping

import torch

from raptor_hf.errors import PrivacyConfigError

__all__ = ["cut", "free_memory", "one_row_a_record", "records_at_once"]

# Inputs that a model may be given once for all records: they say nothing about any of them.
_COMMON = ("position_ids",)
# Share of the free memory that per-sample gradients may take; the rest is for activations and temporaries.
_SHARE = 0.25


def one_row_a_record(batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """The batch with a row of every tensor for every record, and the number of records.

    Raises:
        PrivacyConfigError: tensors of different numbers of rows. `position_ids` of one row are those of all records.
    """
    rows = {name: value.shape[0] if value.dim() else None for name, value in batch.items()}
    own = {name: count for name, count in rows.items() if name not in _COMMON} or rows
    first, size = next(iter(own.items()))
    wrong = [name for name, n in rows.items() if n != size and not (name in _COMMON and n == 1)]
    if size is None or wrong:
        # without the numbers: a realised batch size is private
        raise PrivacyConfigError(
            f"A batch was given in which `{(wrong or [first])[0]}` has another number of rows than `{first}` or none",
            "Which record a row belongs to cannot be told, and a gradient of several records would be clipped as one",
            "Give every tensor one row for each record",
        )
    return {
        name: value if value.shape[0] == size else value.expand(size, *value.shape[1:]) for name, value in batch.items()
    }, size


def free_memory(device: torch.device) -> int:
    """Bytes that the device has free for tensors; for a CPU, the machine."""
    if device.type == "cuda":
        # what torch keeps of the device and no tensor uses counts as used there
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def records_at_once(
    parameters: Mapping[str, torch.Tensor], *, owned: Collection[str] = (), budget: int | None = None
) -> int:
    """How many records' gradients, all formed, fit into `budget` bytes: one at least.

    Args:
        owned: names of the tensors of which only the owner's slice is differentiated. budget: default: a quarter of
            what is free.
    """
    if budget is None:
        budget = int(_SHARE * free_memory(next(iter(parameters.values())).device))
    each = sum(
        max(4, p.element_size()) * (p[0].numel() if name in owned else p.numel()) for name, p in parameters.items()
    )
    return max(1, budget // max(1, each))


def cut(
    batch: Mapping[str, torch.Tensor], owner: torch.Tensor | None, most: int
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor | None]]:
    """The batch and its owners in parts of `most` records at most, in order."""
    batch, size = one_row_a_record(batch)
    for start in range(0, max(size, 1), most):
        part = slice(start, start + most)
        yield {name: value[part] for name, value in batch.items()}, None if owner is None else owner[part]
