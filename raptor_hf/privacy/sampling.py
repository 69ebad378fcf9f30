"""Poisson subsampling: every record enters each stream of each cycle by a secret coin of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy.noise import EntropySource
from raptor_hf.validate import integer, probability

__all__ = ["Cycle", "CycleLoader", "PoissonSampler"]


@dataclass(frozen=True)
class Cycle:
    """The records of one cycle: two independent Poisson draws (mechanism section 4). Private: never log it.

    Attributes: shared, expert: ascending record indices (int64), possibly empty.
    """

    shared: np.ndarray = field(repr=False)
    expert: np.ndarray = field(repr=False)


class PoissonSampler:
    """Draws cycles; each record enters each of the two draws with probability `sample_rate`, independently.

    Args:
        dataset_size: the public n. sample_rate: p = B / n.
        rank, world_size: this process flips the coins of records rank, rank + world_size, ... only, so that in a
            distributed run every record still has exactly one secret coin a draw.

    Formal guarantees:
        The indicator of every (record, stream, cycle) is Bernoulli(p), independent of all others, up to 2**-53.
        Nothing is dropped, padded or repeated, whatever the size of a draw; an empty draw is a draw.
    """

    def __init__(
        self,
        dataset_size: int,
        sample_rate: float,
        *,
        rank: int = 0,
        world_size: int = 1,
        entropy: EntropySource | None = None,
    ):
        self.dataset_size = integer("dataset_size", dataset_size, minimum=1)
        self.sample_rate = probability("sample_rate", sample_rate)
        integer("world_size", world_size, minimum=1)
        if integer("rank", rank) >= world_size:
            raise PrivacyConfigError(
                f"`rank={rank}` of `world_size={world_size}` was given",
                "Its records would have a second coin, or leave others without one",
                "Number the processes from 0 to world_size - 1",
            )
        self._records = np.arange(rank, dataset_size, world_size)
        self._entropy = entropy or EntropySource()

    def _draw(self) -> np.ndarray:
        return self._records[self._entropy.coins(len(self._records)) < self.sample_rate]

    def draw(self) -> Cycle:
        """A fresh cycle."""
        return Cycle(shared=self._draw(), expert=self._draw())


class CycleLoader:
    """What the training loop iterates over: `cycles_per_epoch` fresh cycles an epoch.

    The length is a public constant. Iterating again, or after a resume, draws fresh coins.
    """

    def __init__(self, sampler: PoissonSampler, cycles_per_epoch: int):
        self.sampler = sampler
        self.cycles_per_epoch = integer("cycles_per_epoch", cycles_per_epoch, minimum=1)
        self.dataset = range(sampler.dataset_size)

    def __len__(self) -> int:
        return self.cycles_per_epoch

    def __iter__(self) -> Iterator[Cycle]:
        for _ in range(self.cycles_per_epoch):
            yield self.sampler.draw()
