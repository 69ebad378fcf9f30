"""Measuring: seconds and peak memory of one call, interleaved repeats, child processes, and tables of the results.

On a CPU, seconds are CPU time of one thread (what else the machine does matters less so) and memory is the peak of
resident memory above that before the call (Linux only). Time and memory are measured in processes of their own: peaks
show only under an allocator that gives freed memory back at once, and that makes every allocation slower.
On a GPU both come from one process: wall time between synchronisations, and the allocator's own peak, which includes
the weights.
"""

from __future__ import annotations

import argparse
import csv
import gc
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

# From a page up: smaller tensors would come from what the process already holds, and not be seen.
_STEADY = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TRIM_THRESHOLD_": "4096"}


def _resident(key: str) -> float:
    """A line of /proc/self/status, MB; NaN where there is none."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith(key))


def measure(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds and peak memory (MB) of one call."""
    gc.collect()  # what another variant left
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start, torch.cuda.max_memory_allocated(device) / 2**20
    marks = Path("/proc/self/clear_refs")
    if marks.exists():
        marks.write_text("5")  # the high-water mark starts here
    before, start = _resident("VmRSS"), time.process_time()
    run()
    return time.process_time() - start, _resident("VmHWM") - before


def interleaved(runs: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> Samples:
    """All variants in turn, `repeats` times, after one round that warms up."""
    samples: Samples = {key: {"seconds": [], "peak": []} for key in runs}
    for repeat in range(repeats + 1):
        for key, run in runs.items():
            seconds, peak_mb = measure(run, device)
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
            subprocess.run(command, check=True, env={**os.environ, **(_STEADY if kind == "memory" else {})})
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
