"""Plots of public quantities, as PNG files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_routing_table"]


def plot_routing_table(
    table: Sequence[Mapping[str, Any]], path: str | os.PathLike, *, chosen: int | None = None
) -> Path:
    """Owner entropy of every sparse layer and the share of records each expert owns.

    Args:
        table: rows of `raptor_hf.routing_table`, from a *public* corpus.
        path: PNG file to write. chosen: block index to mark as the protected layer.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    blocks = [row["block"] for row in table]
    experts = len(table[0]["counts"])
    figure = Figure(figsize=(9, 1.8 + 0.55 * len(table)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.6])
    places = range(len(blocks))
    colours = ["#d95f02" if block == chosen else "#7570b3" for block in blocks]
    left.barh(places, [row["normalised_entropy"] for row in table], color=colours)
    left.set_yticks(places, [f"block {b}" + (" (protected)" if b == chosen else "") for b in blocks])
    left.set_xlim(0, 1)
    left.invert_yaxis()
    left.set_xlabel("owner entropy / log E")
    shares = [[count / sum(row["counts"]) for count in row["counts"]] for row in table]
    image = right.imshow(shares, aspect="auto", cmap="viridis", vmin=0)
    right.set_yticks(places, [str(b) for b in blocks])
    right.set_xticks(range(experts) if experts <= 16 else range(0, experts, max(1, experts // 8)))
    right.set_xlabel("expert")
    figure.colorbar(image, ax=right, label="share of public records owned")
    records = sum(table[0]["counts"])
    figure.suptitle(f"Routing of the frozen base model on {records:,} public records")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    return target
