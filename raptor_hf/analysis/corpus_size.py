"""How many public records does the choice of the protected layer need (App. F, Figs. 5 and 6)?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from raptor_hf.moe.layout import find_moe_layout
from raptor_hf.moe.ownership import owner_map
from raptor_hf.moe.selection import distribution_statistics
from raptor_hf.validate import integer

__all__ = ["CorpusSizeStudy", "corpus_size_study", "owners_by_layer"]


@dataclass(frozen=True)
class CorpusSizeStudy:
    """Owner entropy on random parts of a public corpus.

    Attributes:
        sizes: numbers of records. entropies: block -> (len(sizes), repeats) normalised entropy H / log E.
        chosen: (len(sizes), repeats) the block that each part would have chosen. full: block of the whole corpus.
    """

    sizes: tuple[int, ...]
    entropies: dict[int, np.ndarray] = field(repr=False)
    chosen: np.ndarray = field(repr=False)
    full: int

    def agreement(self) -> np.ndarray:
        """(len(sizes),): share of the parts of each size that choose the layer of the whole corpus."""
        return (self.chosen == self.full).mean(axis=1)


def owners_by_layer(
    model: nn.Module,
    public_dataset: Iterable,
    *,
    rule: str = "gate",
    data_collator: Callable[[list], Mapping[str, Any]] | None = None,
    batch_size: int = 32,
) -> dict[int, torch.Tensor]:
    """Block -> owners (n,) of public records at every sparse layer, by the base model."""
    layout = find_moe_layout(model)
    return {
        layer.index: owner_map(
            model,
            public_dataset,
            layer.index,
            rule=rule,
            data_collator=data_collator,
            batch_size=batch_size,
            layout=layout,
        )
        for layer in layout.sparse_layers
    }


def corpus_size_study(
    owners: Mapping[int, torch.Tensor],
    num_experts: int,
    sizes: Sequence[int],
    *,
    repeats: int = 50,
    seed: int = 0,
) -> CorpusSizeStudy:
    """Entropies and choice of layer on `repeats` random parts (without replacement) of each size.

    Args:
        owners: of `owners_by_layer`; the same records in every block.
        sizes: each at most n. A part of size n is the whole corpus.
    """
    integer("repeats", repeats, minimum=1)
    values = {block: owner.cpu().numpy() for block, owner in owners.items()}
    records = len(next(iter(values.values())))
    for size in sizes:
        if integer("sizes", size, minimum=1) > records:
            raise ValueError(f"A size of {size} was given for {records} records. No part is that large. Pass less.")
    rng = np.random.default_rng(seed)

    def entropy(block: int, rows: np.ndarray) -> float:
        counts = np.bincount(values[block][rows], minlength=num_experts)
        return distribution_statistics(counts.tolist())["normalised_entropy"]

    found = {block: np.empty((len(sizes), repeats)) for block in values}
    for i, size in enumerate(sizes):
        for j in range(repeats):
            rows = rng.choice(records, size, replace=False)
            for block in values:
                found[block][i, j] = entropy(block, rows)
    blocks = sorted(values)  # the first of equals, as in `select_layer`
    best = np.stack([found[block] for block in blocks]).argmax(axis=0)
    whole = int(np.argmax([entropy(block, np.arange(records)) for block in blocks]))
    return CorpusSizeStudy(tuple(sizes), found, np.asarray(blocks)[best], blocks[whole])
