"""How time and peak memory grow with the batch, the micro-batch, the sequence, the rank, the experts and the layers.

    python benchmarks/growth.py --output out

A Switch of width 128 (4 blocks, 2 of them sparse, E = 8; b = 8 records of T = 64 tokens, r = 16) of which one number at
a time is changed. `batch` is the logical batch of whole cycles (micro-batches of b, clipped sums, noise, AdamW); the
other axes are one micro-batch of each stream, with Opacus's two ways on the shared stream beside it (`peers.py`).
Slopes are those of log time and log memory against the log of the number: 1 is proportional, 0 does not grow. How it is
measured: `meter.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import meter
import numpy as np
import torch
from jobs import Records, attach, switch
from peers import peers
from variants import SAME, cycle, passes

DEFAULT = {"batch": 0, "micro-batch": 8, "tokens": 64, "rank": 16, "experts": 8, "layers": 4}
AXES: dict[str, list[int]] = {
    "batch": [8, 16, 32, 64, 128],
    "micro-batch": [4, 8, 16, 32],
    "tokens": [32, 64, 128, 256],
    "rank": [4, 8, 16, 32, 64],
    "experts": [4, 8, 16, 32],
    "layers": [2, 4, 8, 16],
}
ENGINES = ("functorch", "hooks", "reference")
DRAWN = ("functorch", "hooks")


def runs_of(
    axis: str, value: int, width: int, device: torch.device, *, with_peers: bool
) -> dict[str, Callable[[], object]]:
    """ "stream/variant" -> what to measure with `axis` at `value`."""
    torch.manual_seed(0)
    at = {**DEFAULT, axis: value}
    # a capacity of all tokens: none is dropped, so the work for the experts' tokens does not depend on E
    base = switch(width, blocks=at["layers"], experts=at["experts"], capacity=at["tokens"]).to(device)
    model, streams = attach(base, at["rank"])
    records = Records.draw(base, at["batch"] or at["micro-batch"], at["tokens"], device)
    if axis != "batch":
        table: dict[str, Callable[[], object]] = {**passes(model, streams, records, ENGINES)}
        if with_peers:
            found, _ = peers(base, records, at["rank"])
            table |= {f"shared/{name}": run for name, run in found.items()}
        return table
    engines = {SAME: None, **{engine: engine for engine in ENGINES}}
    return {
        f"cycle/{name}": cycle(model, streams, records, at["micro-batch"], engine) for name, engine in engines.items()
    }


def rows_of(axis: str, value: int, samples: meter.Samples) -> list[dict[str, Any]]:
    merged = {key: (found["seconds"], median(found["peak"])) for key, found in samples.items()}
    if axis != "batch":
        for variant in (SAME, *ENGINES):
            pair = (f"shared/{variant}", f"expert/{variant}")
            seconds = [a + b for a, b in zip(*(samples[key]["seconds"] for key in pair), strict=True)]
            merged[f"cycle/{variant}"] = seconds, meter.peak(samples, *pair)
    return [
        {
            "axis": axis, "value": value, "stream": key.partition("/")[0], "variant": key.partition("/")[2],
            "ms": round(1000 * median(seconds), 2), "peak MB": round(peak, 2),
            "time ratio": round(meter.median_ratio(seconds, merged[f"{key.partition('/')[0]}/{SAME}"][0]), 2),
        }
        for key, (seconds, peak) in merged.items()
    ]  # fmt: skip


def slope(values: list[int], found: list[float]) -> float:
    """Least-squares slope of log `found` on log `values`; NaN where something was too small to be seen."""
    if min(found) <= 0:
        return float("nan")
    return round(float(np.polyfit(np.log(values), np.log(found), 1)[0]), 2)


def slopes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every axis, stream and variant: slope over all values, and between the two largest."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["axis"], row["stream"], row["variant"]), []).append(row)
    table = []
    for (axis, stream, variant), members in groups.items():
        values = [row["value"] for row in members]
        line: dict[str, Any] = {
            "axis": axis, "stream": stream, "variant": variant, "from": values[0], "to": values[-1],
        }  # fmt: skip
        for name, column in (("time", "ms"), ("memory", "peak MB")):
            found = [row[column] for row in members]
            line[f"{name} slope"] = slope(values, found)
            line[f"{name} slope at the end"] = slope(values[-2:], found[-2:])
        table.append(line)
    return table


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel an axis: time above, memory below, both logarithmic; cycles, and the expert stream on `experts`."""
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(row["axis"] for row in rows))
    figure = Figure(figsize=(3.2 * len(axes), 6), layout="constrained")
    panels = figure.subplots(2, len(axes), squeeze=False)
    for column, axis in enumerate(axes):
        for stream, style in (("cycle", "-o"), ("expert", ":s")) if axis == "experts" else (("cycle", "-o"),):
            for index, variant in enumerate((SAME, *DRAWN)):
                mine = [r for r in rows if (r["axis"], r["stream"], r["variant"]) == (axis, stream, variant)]
                for panel, name in zip(panels[:, column], ("ms", "peak MB"), strict=True):
                    label = variant if stream == "cycle" else f"{variant}, expert stream"
                    x, y = [r["value"] for r in mine], [r[name] for r in mine]
                    panel.plot(x, y, style, color=("0.5", "C0", "C1")[index], label=label, ms=4)
                    panel.set(xscale="log", yscale="log", xlabel=axis, ylabel=name, xticks=x, xticklabels=x)
                    panel.minorticks_off()
                    panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    meter.common_arguments(parser)
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--points", type=int, default=99, help="the smallest values of each axis only")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args(arguments)
    values = {axis: AXES[axis][: args.points] for axis in args.axes}
    if args.measure:  # in a child process
        device = meter.prepare(args.device)
        memory = args.measure == "memory"

        def found_at(axis: str, value: int) -> meter.Samples:
            runs = runs_of(axis, value, args.width, device, with_peers=not args.no_peers)
            return meter.interleaved(runs, 1 if memory else args.repeats, device, memory=memory)

        found = {axis: {value: found_at(axis, value) for value in values[axis]} for axis in values}
        args.raw.write_text(json.dumps(found))
        return
    rows = []
    for axis in values:
        options = ["--axes", axis, "--points", str(args.points), "--width", str(args.width)]
        options += ["--no-peers"] * args.no_peers
        found = meter.in_children(__file__, [*options, "--repeats", str(args.repeats)], args.device)[axis]
        rows += [row for value, samples in found.items() for row in rows_of(axis, int(value), samples)]
        if args.output:
            meter.write(rows, args.output / "growth.csv")
    meter.show(slopes(rows), "Growth: slope of log time and of log memory")
    if args.output:
        meter.write(slopes(rows), args.output / "growth_slopes.csv")
        plot(rows, args.output / "growth.png")


if __name__ == "__main__":
    main()
