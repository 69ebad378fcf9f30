"""Plots. Every function returns a `Figure` and, given a path, saves it there as well (PNG, or what the suffix says).

They keep no state between calls and change none of matplotlib's: no `pyplot`, no current figure, the Agg canvas. A
plot is as private as the numbers it shows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from raptor_hf.analysis.corpus_size import CorpusSizeStudy

__all__ = [
    "plot_accuracy_vs_epsilon",
    "plot_budget_sweep",
    "plot_entropy_vs_size",
    "plot_expert_snr",
    "plot_roc",
    "plot_routing_table",
    "plot_transfer",
]

_Path = str | os.PathLike | None
_COLOURS = ("#7570b3", "#d95f02", "#1b9e77", "#e7298a", "#66a61e", "#a6761d", "#666666", "#1f78b4")
_MARKERS = "osD^vPX*"


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure: Figure, path: _Path) -> Figure:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure


def _style(place: int) -> dict[str, Any]:
    return {"color": _COLOURS[place % len(_COLOURS)], "marker": _MARKERS[place % len(_MARKERS)]}


def plot_routing_table(table: Sequence[Mapping[str, Any]], path: _Path = None, *, chosen: int | None = None) -> Figure:
    """Owner entropy of every sparse layer and the share of records that each expert owns.

    Args:
        table: rows of `raptor_hf.routing_table`, from a *public* corpus. chosen: block to mark as the protected layer.
    """
    blocks = [row["block"] for row in table]
    experts = len(table[0]["counts"])
    figure = _figure(9, 1.8 + 0.55 * len(table))
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.6])
    places = range(len(blocks))
    colours = [_COLOURS[1] if block == chosen else _COLOURS[0] for block in blocks]
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
    return _saved(figure, path)


def plot_entropy_vs_size(study: CorpusSizeStudy, path: _Path = None) -> Figure:
    """Normalised owner entropy against the number of public records (Fig. 5), and how often the same layer is chosen.

    Lines are means over the random parts of the corpus, bands their 5 % to 95 % quantiles.
    """
    figure = _figure(10, 4)
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    for place, (block, values) in enumerate(sorted(study.entropies.items())):
        name = f"block {block}" + (" (chosen)" if block == study.full else "")
        left.plot(study.sizes, values.mean(axis=1), label=name, **_style(place))
        low, high = np.quantile(values, [0.05, 0.95], axis=1)
        left.fill_between(study.sizes, low, high, color=_COLOURS[place % len(_COLOURS)], alpha=0.2, linewidth=0)
    left.set_ylabel("owner entropy / log E")
    left.set_ylim(0, 1.02)
    left.legend(fontsize="small")
    right.plot(study.sizes, study.agreement(), **_style(2))
    right.set_ylabel(f"share of parts that choose block {study.full}")
    right.set_ylim(0, 1.02)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("public records")
        axes.grid(alpha=0.3)
    return _saved(figure, path)


def plot_transfer(
    public: Mapping[str, Sequence[Mapping[str, Any]]],
    other: Mapping[str, Sequence[Mapping[str, Any]]],
    path: _Path = None,
    *,
    other_name: str = "private records",
) -> Figure:
    """Owner entropy on the public corpus against that on other records, one point a layer, with the diagonal (Fig. 7).

    Args:
        public, other: task -> rows of `routing_table`. If `other` is private data, so is this figure.
    """
    figure = _figure(5.5, 5)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], linestyle="--", color="grey", linewidth=1, label="equal")
    for place, task in enumerate(public):
        mine = {row["block"]: row["normalised_entropy"] for row in public[task]}
        theirs = {row["block"]: row["normalised_entropy"] for row in other[task]}
        if mine.keys() != theirs.keys():
            raise ValueError(f"The tables of {task!r} have different blocks. Layers cannot be paired. Use one model.")
        axes.plot(list(mine.values()), [theirs[b] for b in mine], linestyle="none", label=task, **_style(place))
        for block, value in mine.items():
            axes.annotate(str(block), (value, theirs[block]), textcoords="offset points", xytext=(5, 3), fontsize=8)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), aspect="equal")
    axes.set_xlabel("owner entropy / log E, public corpus")
    axes.set_ylabel(f"owner entropy / log E, {other_name}")
    axes.legend(fontsize="small")
    return _saved(figure, path)


def _grouped(rows: Iterable[Mapping[str, Any]], keys: Sequence[str], value: str) -> dict[tuple, tuple[float, float]]:
    """Values of the keys -> mean and sample standard deviation (0 of a single run) over the rows that have them."""
    found: dict[tuple, list[float]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(float(row[value]))
    return {
        key: (float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0)
        for key, values in found.items()
    }


def plot_budget_sweep(rows: Iterable[Mapping[str, Any]], path: _Path = None, *, value: str = "accuracy") -> Figure:
    """A sweep of the budget split rho at several epsilons (Fig. 4): heat map of the means, and lines with error bars.

    Args:
        rows: mappings with `epsilon`, `rho` and `value`; several rows of one setting are repeated runs.
    """
    cells = _grouped(rows, ["epsilon", "rho"], value)
    epsilons, splits = (sorted({key[i] for key in cells}) for i in (0, 1))
    figure = _figure(11, 4)
    left, right = figure.subplots(1, 2)
    grid = np.array([[cells.get((e, r), (math.nan,))[0] for r in splits] for e in epsilons])
    image = left.imshow(grid, aspect="auto", cmap="viridis", origin="lower")
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2
    for i, row in enumerate(grid):
        for j, number in enumerate(row):
            if math.isfinite(number):
                left.text(j, i, f"{number:.4g}", ha="center", va="center", color="w" if number < middle else "k")
    left.set_xticks(range(len(splits)), [f"{r:g}" for r in splits])
    left.set_yticks(range(len(epsilons)), [f"{e:g}" for e in epsilons])
    left.set(xlabel="budget split rho", ylabel="epsilon")
    figure.colorbar(image, ax=left, label=value)
    for place, epsilon in enumerate(epsilons):
        mine = [(r, *cells[epsilon, r]) for r in splits if (epsilon, r) in cells]
        x, y, error = (np.array(column) for column in zip(*mine, strict=True))
        right.errorbar(x, y, yerr=error, capsize=3, label=f"epsilon = {epsilon:g}", **_style(place))
    right.set(xlabel="budget split rho", ylabel=value)
    right.grid(alpha=0.3)
    right.legend(fontsize="small")
    return _saved(figure, path)


def plot_expert_snr(snr: Mapping[str, Sequence[float]], path: _Path = None) -> Figure:
    """Signal-to-noise ratio of every expert, grouped bars on a log scale; the legend has mean and CV (Tab. 8).

    Args:
        snr: label -> SNR of the experts (`ExpertDiagnostics.snr`). An SNR of zero has no bar. Private as its records.
    """
    figure = _figure(8, 4)
    axes = figure.subplots()
    width = 0.8 / len(snr)
    for place, (label, numbers) in enumerate(snr.items()):
        values = np.asarray(numbers, dtype=float)
        mean = values.mean()
        cv = values.std() / mean if mean > 0 else math.nan
        centres = np.arange(len(values)) + (place - (len(snr) - 1) / 2) * width
        colour = _COLOURS[place % len(_COLOURS)]
        bars = axes.bar(centres, values, width, color=colour, label=f"{label}: mean {mean:.2e}, CV {cv:.2f}")
        axes.axhline(mean, color=bars.patches[0].get_facecolor(), linestyle=":", linewidth=1)
    axes.set_yscale("log", nonpositive="clip")
    axes.set(xlabel="expert", ylabel="SNR of the released gradient")
    axes.set_xticks(range(max(len(values) for values in snr.values())))
    axes.legend(fontsize="small")
    return _saved(figure, path)


def plot_accuracy_vs_epsilon(
    rows: Iterable[Mapping[str, Any]], path: _Path = None, *, value: str = "accuracy", chance: float | None = None
) -> Figure:
    """Utility against epsilon, one line a method, error bars one standard deviation of repeated runs.

    Args:
        rows: mappings with `method`, `epsilon` and `value`. A run without privacy (`epsilon` infinite) is a horizontal
            line. chance: of guessing, as a dotted line.
    """
    rows = list(rows)
    cells = _grouped(rows, ["method", "epsilon"], value)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure = _figure(7, 4.5)
    axes = figure.subplots()
    ticks = sorted({epsilon for _, epsilon in cells if math.isfinite(epsilon)})
    for place, method in enumerate(methods):
        style = _style(place)
        mine = sorted((e, *cells[name, e]) for name, e in cells if name == method and math.isfinite(e))
        if mine:
            x, y, error = (np.array(column) for column in zip(*mine, strict=True))
            axes.errorbar(x, y, yerr=error, capsize=3, label=method, **style)
        if (method, math.inf) in cells:
            mean, spread = cells[method, math.inf]
            axes.axhline(mean, color=style["color"], linestyle="--", label=f"{method} (not private)")
            axes.axhspan(mean - spread, mean + spread, color=style["color"], alpha=0.12, linewidth=0)
    if chance is not None:
        axes.axhline(chance, color="grey", linestyle=":", label="guessing")
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{e:g}" for e in ticks])
    axes.set(xlabel="epsilon", ylabel=value)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return _saved(figure, path)


def plot_roc(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: _Path = None, *, lowest: float = 1e-4
) -> Figure:
    """ROC curves of membership attacks on log-log axes that begin at `lowest`, with the diagonal of guessing.

    Args:
        curves: label -> (false-positive rates, true-positive rates), of one length. The legend has the TPR at a
            false-positive rate of 0.1 %: that of the last threshold that does not exceed it.
    """
    figure = _figure(5.5, 5)
    axes = figure.subplots()
    axes.plot([lowest, 1], [lowest, 1], linestyle="--", color="grey", linewidth=1, label="guessing")
    for place, (label, (fpr, tpr)) in enumerate(curves.items()):
        x, y = np.asarray(fpr, dtype=float), np.asarray(tpr, dtype=float)
        if x.shape != y.shape or x.ndim != 1:
            raise ValueError(
                f"The curve {label!r} has rates {x.shape} and {y.shape}. Pass two sequences of one length."
            )
        order = np.lexsort((y, x))
        x, y = x[order], y[order]
        below = x <= 1e-3
        at = y[below].max() if below.any() else 0.0
        # what lies below the axes is drawn on their edge, so that a curve begins where the plot does
        axes.plot(
            np.maximum(x, lowest), np.maximum(y, lowest), drawstyle="steps-post",
            color=_COLOURS[place % len(_COLOURS)], label=f"{label}: TPR {at:.2%} at 0.1 % FPR",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(lowest, 1), ylim=(lowest, 1), aspect="equal")
    axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", loc="lower right")
    return _saved(figure, path)
