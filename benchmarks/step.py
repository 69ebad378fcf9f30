"""Time and peak memory of one micro-batch of each stream against the same passes without privacy.

    python benchmarks/step.py                      # bundled tiny model, and a 4-block Switch of width 768/3072
    python benchmarks/step.py --models tiny --repeats 9

"same passes" is a batched forward and backward for the stream's own parameters: no per-sample gradients, no clipping,
no noise. All variants run interleaved in one process on one thread; times are CPU time (what else the machine does
matters less so), medians over the repeats; ratios are medians of the repeats' ratios. Memory is the peak of resident
memory above that before the call (Linux only).
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import SwitchTransformersConfig

from raptor_hf import (
    SwitchTransformersForSequenceClassification,
    attach_adapters,
    per_sample_gradients,
    stream_parameters,
)
from raptor_hf.assets import tiny_switch_path
from raptor_hf.grad_sample import ENGINES
from raptor_hf.privacy.mechanism import ClippedSum


def tiny() -> tuple[torch.nn.Module, int, int, int]:
    model = SwitchTransformersForSequenceClassification.from_pretrained(
        tiny_switch_path(), num_labels=2, dtype=torch.float32
    )
    return model, 64, 32, 16


def wide() -> tuple[torch.nn.Module, int, int, int]:
    config = SwitchTransformersConfig(
        vocab_size=1000, d_model=768, d_kv=64, d_ff=3072, num_heads=12, num_layers=4, num_sparse_encoder_layers=2,
        num_experts=8, dropout_rate=0.0, router_jitter_noise=0.0, num_labels=2,
    )  # fmt: skip
    return SwitchTransformersForSequenceClassification(config), 8, 128, 128


MODELS: dict[str, Callable] = {"tiny": tiny, "switch-768x4": wide}


def resident(peak: bool) -> int:
    """Resident (or peak resident) memory of this process, MB; -1 where /proc is missing."""
    status = Path("/proc/self/status")
    if not status.exists():
        return -1
    key = "VmHWM" if peak else "VmRSS"
    return next(int(line.split()[1]) // 1024 for line in status.read_text().splitlines() if line.startswith(key))


def measure(run: Callable[[], None]) -> tuple[float, int]:
    """CPU seconds and extra peak memory (MB) of one call."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    before = resident(False)
    start = time.process_time()
    run()
    return time.process_time() - start, resident(True) - before


def steady_allocator() -> None:
    """Start again with an allocator that gives freed memory back, or peaks would hide in what an earlier call left."""
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.environ.update({"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"})
        os.execv(sys.executable, [sys.executable, *sys.argv])


def variants(model, batch, owner, streams, engines) -> dict[tuple[str, str], Callable[[], None]]:
    """(stream, variant) -> one micro-batch of it."""

    def same_passes(stream: str) -> Callable[[], None]:
        def run() -> None:
            loss = model(**batch).loss * batch["labels"].shape[0]
            torch.autograd.grad(loss, list(streams[stream].values()), allow_unused=True)

        return run

    def private(stream: str, engine: str) -> Callable[[], None]:
        mine = owner if stream == "expert" else None

        def run() -> None:
            grads = per_sample_gradients(model, batch, streams[stream], mode=engine, owner=mine)
            shapes = {name: p.shape for name, p in streams[stream].items()}
            ClippedSum(shapes, 1.0, num_owners=None if mine is None else 8).add(grads, mine)

        return run

    table: dict[tuple[str, str], Callable[[], None]] = {}
    for stream in ("shared", "expert"):
        table[stream, "same passes"] = same_passes(stream)
        for engine in engines:
            table[stream, engine] = private(stream, engine)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--engines", nargs="+", default=[e for e in ENGINES if e != "reference"], choices=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--peers", action="store_true", help="Opacus too, on the shared stream")
    args = parser.parse_args()
    steady_allocator()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name in args.models:
        torch.manual_seed(0)
        model, records, tokens, rank = MODELS[name]()
        base = copy.deepcopy(model) if args.peers else None
        attach_adapters(model, LoraConfig(r=rank, lora_alpha=rank), "last")
        model.train()
        batch = {
            "input_ids": torch.randint(3, model.config.vocab_size, (records, tokens)),
            "attention_mask": torch.ones(records, tokens, dtype=torch.long),
            "labels": torch.randint(0, 2, (records,)),
        }
        owner = torch.randint(0, 8, (records,))
        runs = variants(model, batch, owner, stream_parameters(model), args.engines)
        if base is not None:
            from peers import opacus_variants

            runs |= {("shared", variant): run for variant, run in opacus_variants(base, batch, rank).items()}
        times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        peaks: dict[tuple[str, str], list[int]] = {key: [] for key in runs}
        for repeat in range(args.repeats + 1):
            for key, run in runs.items():
                seconds, peak = measure(run)
                if repeat:  # the first round warms up
                    times[key].append(seconds)
                    peaks[key].append(peak)
        for stream, variant in runs:
            base = times[stream, "same passes"]
            mine = times[stream, variant]
            rows.append(
                {
                    "model": f"{name} (b={records}, T={tokens}, r={rank})",
                    "stream": stream,
                    "variant": variant,
                    "ms": round(1000 * statistics.median(mine), 1),
                    "ratio": round(statistics.median(m / b for m, b in zip(mine, base, strict=True)), 2),
                    "peak_MB": statistics.median(peaks[stream, variant]),
                }
            )
        cycle_base = [
            a + b for a, b in zip(times["shared", "same passes"], times["expert", "same passes"], strict=True)
        ]
        for engine in args.engines:
            cycle = [a + b for a, b in zip(times["shared", engine], times["expert", engine], strict=True)]
            rows.append(
                {
                    "model": rows[-1]["model"],
                    "stream": "both",
                    "variant": engine,
                    "ms": round(1000 * statistics.median(cycle), 1),
                    "ratio": round(statistics.median(c / b for c, b in zip(cycle, cycle_base, strict=True)), 2),
                    "peak_MB": max(peaks["shared", engine][-1], peaks["expert", engine][-1]),
                }
            )
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=120).print(table)
    if args.csv:
        with args.csv.open("w", newline="") as handle:
            writer = csv.DictWriter(handle, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
