"""Time and peak memory of one micro-batch of each stream against the same passes without privacy, and against peers.

    python benchmarks/step.py --output out          # all models, peers too
    python benchmarks/step.py --jobs bundled-switch --repeats 9

How time and memory are measured: `meter.py`. All variants of a model run interleaved in one process; times are medians
over the repeats, ratios medians of the repeats' ratios. Rows:

* stream "shared", "expert": one micro-batch; "cycle": one of each, which is a cycle of RAPTOR whose batch fits one.
* "noise + step": what a cycle adds, whatever its batch: noise on both streams' sums and their AdamW steps.
* stream "monolithic": `monolithic_lora`, all experts of all sparse layers as one block, without owners.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import meter
from jobs import JOBS, Job, Records, attach
from peers import peers
from variants import SAME, noise_and_step, passes

from raptor_hf.grad_sample import ENGINES

STEP = "cycle/noise + step"


def runs_of(
    job: Job, engines: list[str], with_peers: bool, device
) -> tuple[dict[str, Callable[[], object]], list[str]]:
    """ "stream/variant" -> what to measure; and why some peers are missing."""
    base = job.make().to(device)
    records = Records.draw(base, job.records, job.tokens, device)
    model, streams = attach(base, job.rank)
    runs = {**passes(model, streams, records, engines), STEP: noise_and_step(streams)}
    monolithic, both = attach(base, job.monolithic_rank, monolithic=True)
    joint = {"monolithic": {**both["shared"], **both["expert"]}}
    runs |= passes(monolithic, joint, records, engines, owners=False)
    if not with_peers:
        return runs, []
    found, absent = peers(base, records, job.rank)
    return {**runs, **{f"shared/{name}": run for name, run in found.items()}}, absent


def rows_of(job: Job, samples: meter.Samples, engines: list[str]) -> list[dict[str, Any]]:
    rows = []

    def add(stream: str, variant: str, seconds: list[float], base: list[float], peak: float, base_peak: float) -> None:
        rows.append(
            {
                "model": job.label,
                "stream": stream,
                "variant": variant,
                "ms": round(1000 * median(seconds), 1),
                "time ratio": round(meter.median_ratio(seconds, base), 2),
                "peak MB": round(peak),
                "memory ratio": round(peak / base_peak, 2) if base_peak > 0 else float("nan"),
            }
        )

    order = {"shared": 0, "expert": 1, "cycle": 2, "monolithic": 3}
    totals = {}
    for variant in (SAME, *engines):
        pair = (f"shared/{variant}", f"expert/{variant}")
        seconds = [a + b for a, b in zip(*(samples[key]["seconds"] for key in pair), strict=True)]
        totals[variant] = seconds, meter.peak(samples, *pair)
        add("cycle", variant, seconds, totals[SAME][0], totals[variant][1], totals[SAME][1])
    for key, found in samples.items():
        stream, _, variant = key.partition("/")
        base = totals[SAME] if key == STEP else (samples[f"{stream}/{SAME}"]["seconds"], 0)
        base_peak = totals[SAME][1] if key == STEP else meter.peak(samples, f"{stream}/{SAME}")
        add(stream, variant, found["seconds"], base[0], meter.peak(samples, key), base_peak)
    return sorted(rows, key=lambda row: order[row["stream"]])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    meter.common_arguments(parser)
    default = [name for name in JOBS if not name.startswith("smoke")]
    parser.add_argument("--jobs", nargs="+", default=default, choices=list(JOBS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--work", action="store_true", help="also print the floating-point operations of each variant")
    args = parser.parse_args(arguments)
    if args.measure:  # in a child process
        device = meter.prepare(args.device)
        (job,) = (JOBS[name] for name in args.jobs)
        runs, absent = runs_of(job, args.engines, not args.no_peers, device)
        repeats = min(args.repeats if args.measure == "time" else 1, job.repeats)
        samples = meter.interleaved(runs, repeats, device, memory=args.measure == "memory")
        work = meter.work(runs) if args.work else {}
        args.raw.write_text(json.dumps({"samples": samples, "absent": absent, "work": work}))
        return
    rows = []
    for name in args.jobs:
        options = ["--jobs", name, "--engines", *args.engines, "--repeats", str(args.repeats)]
        options += ["--no-peers"] * args.no_peers + ["--work"] * args.work
        found = meter.in_children(str(Path(__file__)), options, args.device)
        rows += (new := rows_of(JOBS[name], found["samples"], args.engines))
        meter.show(new, JOBS[name].label)
        if args.work:
            meter.show([{"variant": key, "Gflop": round(n, 3)} for key, n in found["work"].items()], "Matrix products")
        print("\n".join(f"not run: {line}" for line in found["absent"]))
        if args.output:  # after every model: the large ones take long
            meter.write(rows, args.output / "step.csv")
            plot(rows, args.output / "step.png")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of a cycle's and of the shared stream's ratios to the same passes, a row of panels a model."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(12, 3.2 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    for line, model in zip(panels, models, strict=True):
        shown = [r for r in rows if r["model"] == model and not r["variant"].startswith("noise")]
        for axis, ratio in zip(line, ("time ratio", "memory ratio"), strict=True):
            labels = [f"{r['stream']}: {r['variant']}" for r in shown]
            axis.barh(labels, [r[ratio] for r in shown], color=["0.6" if r["variant"] == SAME else "C0" for r in shown])
            axis.axvline(1.0, color="k", lw=0.8)
            axis.set_xscale("log")
            axis.invert_yaxis()
            axis.set(xlabel=f"{ratio} to the same passes without privacy", title=model)
            axis.title.set_fontsize(9)
            axis.tick_params(axis="y", labelsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
