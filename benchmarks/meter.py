"""Measuring: seconds and peak memory of one call, interleaved repeats, child processes, and tables of the results.

On a CPU, seconds are CPU time of one thread (what else the machine does matters less so) and memory is the peak of what
PyTorch's allocator gives out during the call, to the byte, from its profiler: nothing that was there before, and no
memory that other libraries take for themselves. Time and memory are measured in processes of their own, as the profiler
makes every operation slower.
On a GPU both come from one process: wall time between synchronisations, and the allocator's own peak, which includes
the weights.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = [
    "Samples",
    "common_arguments",
    "in_children",
    "interleaved",
    "median_ratio",
    "peak",
    "prepare",
    "show",
    "work",
    "write",
]

Samples = dict[str, dict[str, list[float]]]
"""Key of a variant -> {"seconds": [..], "peak": [MB, ..]}, one entry a repeat."""


def _allocated(run: Callable[[], object]) -> float:
    """Peak (MB) of what the CPU allocator gave out and did not get back yet during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0) / 2**20


def measure(run: Callable[[], object], device: torch.device, memory: bool = True) -> tuple[float, float]:
    """Seconds and peak memory (MB) of one call; on a CPU of either the one or the other, the other is NaN."""
    gc.collect()  # what another variant left
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start, torch.cuda.max_memory_allocated(device) / 2**20
    if memory:
        return float("nan"), _allocated(run)
    start = time.process_time()
    run()
    return time.process_time() - start, float("nan")


def interleaved(
    runs: Mapping[str, Callable[[], object]], repeats: int, device: torch.device, *, memory: bool
) -> Samples:
    """All variants in turn, `repeats` times, after one round that warms up. memory: measure that, not the time."""
    samples: Samples = {key: {"seconds": [], "peak": []} for key in runs}
    for repeat in range(repeats + 1):
        for key, run in runs.items():
            seconds, peak_mb = measure(run, device, memory)
            if repeat:
                samples[key]["seconds"].append(seconds)
                samples[key]["peak"].append(peak_mb)
    return samples


class _Work(TorchDispatchMode):
    """`FlopCounterMode` without its hooks on modules, which cannot be where a backward pass runs in a backward pass."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        self.total += count(*args, **(kwargs or {}), out_val=out) if count else 0
        return out


def work(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Floating-point operations of the matrix products of one call (10^9): what no load on the machine can blur."""
    found = {}
    for key, run in runs.items():
        with _Work() as counter:
            run()
        found[key] = counter.total / 1e9
    return found


def common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=None, help="directory for the table (CSV) and the figure (PNG)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda"')
    parser.add_argument("--measure", choices=["time", "memory"], default=None, help=argparse.SUPPRESS)
    parser.add_argument("--raw", type=Path, default=None, help=argparse.SUPPRESS)


def prepare(device: str) -> torch.device:
    """The device, and the settings that all benchmarks run under."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(f"`--device {device}` was given, but this PyTorch sees no GPU.")
    return torch.device(device)


def in_children(script: str, arguments: Sequence[str], device: str) -> Any:
    """What `script` measures with `arguments`, in one process for time and one for memory (on a GPU, one for both).

    Returns:
        what the script wrote to `--raw`: for time, with the lists named "peak" taken from the process for memory.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("time",) if device.startswith("cuda") else ("time", "memory"):
            raw = Path(folder) / f"{kind}.json"
            command = [sys.executable, script, *arguments, "--device", device, "--measure", kind, "--raw", str(raw)]
            quiet = {"KINETO_LOG_LEVEL": "6", **os.environ}  # else the profiler prints two lines for every call
            subprocess.run(command, check=True, env=quiet)
            found[kind] = json.loads(raw.read_text())
    return _with_peaks(found["time"], found.get("memory", found["time"]))


def _with_peaks(times: Any, peaks: Any) -> Any:
    if not isinstance(times, dict):
        return times
    return {key: peaks[key] if key == "peak" else _with_peaks(value, peaks[key]) for key, value in times.items()}


def median_ratio(mine: Sequence[float], base: Sequence[float]) -> float:
    """Median of the repeats' ratios, each within one round."""
    return statistics.median(m / b for m, b in zip(mine, base, strict=True))


def peak(samples: Samples, *keys: str) -> float:
    """Median peak (MB) of a variant; of several that run one after another, the largest."""
    return max(statistics.median(samples[key]["peak"]) for key in keys)


def show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=130).print(table)


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
