"""Directions of the gradient canaries in the parameters of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.streams import Stream
from raptor_hf.validate import one_of

__all__ = ["Directions"]


@lru_cache(maxsize=4)
def _orthonormal(dimensions: int, count: int, seed: int) -> torch.Tensor:
    """(count, dimensions) float32 orthonormal rows; kept for the next run of the same audit."""
    normal = torch.randn(dimensions, count, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(normal)[0].T.contiguous()


class Directions:
    """m orthonormal directions in the tensors of a stream, as a record's gradient has them.

    A record's gradient has one slice of a tensor that belongs to owners (its owner's), and all of every other tensor.

    Args:
        stream: whose parameters. count: m.
        kind: "random" (orthonormal vectors spread over all tensors; m x d float32) or "dirac" (one coordinate each,
            all different; needs no memory, but lies in a single tensor).
        seed: the directions are public; the same seed gives the same.

    Raises:
        PrivacyConfigError: there are fewer dimensions than directions.
    """

    def __init__(self, stream: Stream, count: int, *, kind: str = "random", seed: int = 0):
        one_of("kind", kind, ("random", "dirac"))
        self.owned = stream.owned
        self.shapes = {name: p.shape[1:] if name in stream.owned else p.shape for name, p in stream.parameters.items()}
        # owned tensors last: canaries of different owners share all others, and must be orthogonal in those alone
        self.shapes = dict(sorted(self.shapes.items(), key=lambda item: item[0] in stream.owned))
        self.sizes = [int(shape.numel()) for shape in self.shapes.values()]
        owned = sum(size for size, name in zip(self.sizes, self.shapes, strict=True) if name in stream.owned)
        dimensions = sum(self.sizes)
        self.rows: torch.Tensor | None = None
        blocks = [size for size in (dimensions - owned, owned) if size]
        room = dimensions if kind == "dirac" else min(blocks)
        if count > room:
            raise PrivacyConfigError(
                f"{count} canaries were asked for",
                f"A record's gradient in the {stream.name} stream has room for {room} {kind} directions that do not "
                "disturb each other",
                f"Ask for {room} or fewer, or raise `lora_rank`",
            )
        if kind == "dirac":
            self.places = torch.randperm(dimensions, generator=torch.Generator().manual_seed(seed))[:count]
        else:
            self.rows = torch.cat(
                [_orthonormal(size, count, seed + i) * (size / dimensions) ** 0.5 for i, size in enumerate(blocks)], 1
            )

    def parts(self, index: int, length: float) -> dict[str, torch.Tensor]:
        """Direction `index` as a gradient of L2 norm `length`: name -> tensor of a record's shape."""
        if self.rows is None:
            flat = torch.zeros(sum(self.sizes))
            flat[self.places[index]] = length
        else:
            flat = self.rows[index] * length
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), flat.split(self.sizes), strict=True)
        }

    def project(self, values: Mapping[str, torch.Tensor], owners: np.ndarray) -> np.ndarray:
        """(m,) inner products of the directions with tensors of the stream's shapes; in `owners`' slices."""
        found = np.zeros(len(owners))
        for owner in np.unique(owners) if self.owned else [0]:
            flat = torch.cat(
                [(values[name][int(owner)] if name in self.owned else values[name]).flatten() for name in self.shapes]
            )
            mine = np.flatnonzero(owners == owner) if self.owned else np.arange(len(owners))
            if self.rows is None:
                found[mine] = flat[self.places[mine]].numpy()
            else:
                found[mine] = (self.rows[mine].to(flat.dtype) @ flat).numpy()
        return found
