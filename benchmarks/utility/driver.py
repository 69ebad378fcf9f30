"""Runs settings in processes of their own, a few at a time, and remembers what is done."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.utility.settings import Settings

__all__ = ["Outcome", "execute", "last_words", "load_results", "seconds_left"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """What became of a call of `execute`: keys of all results, and of runs without one (the log says why)."""

    done: tuple[str, ...]
    failed: tuple[str, ...]


def load_results(output: Path, keys: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The finished runs in `output`, all or those of `keys`."""
    paths = sorted((output / "runs").glob("*.json"))
    wanted = None if keys is None else set(keys)
    return [json.loads(p.read_text(encoding="utf-8")) for p in paths if wanted is None or p.stem in wanted]


def last_words(output: Path, key: str) -> str:
    """The last line of a run's log, mostly its error; empty where another seed's log has it, or nothing was said."""
    path = output / "logs" / f"{key}.log"
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def seconds_left(durations: Sequence[float], remaining: int, jobs: int) -> float | None:
    """Estimate from the runs so far: None before the first one is done."""
    if not durations:
        return None
    return statistics.mean(durations) * remaining / max(1, min(jobs, remaining))


@contextlib.contextmanager
def _only_driver(output: Path) -> Iterator[None]:
    """Two drivers on one folder would train the same runs."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"Another driver works on `{output}`. Wait for it, or give another `--output`.") from None
        yield


def _interrupt(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _groups(pending: Sequence[Settings]) -> list[list[Settings]]:
    """The seeds of a cell share a process: it imports, tokenizes and calibrates once."""
    cells: dict[tuple, list[Settings]] = {}
    for settings in pending:
        cells.setdefault(settings.cell, []).append(settings)
    return list(cells.values())


def _start(output: Path, group: Sequence[Settings], launcher: Sequence[str]) -> subprocess.Popen:
    environment = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    log = output / "logs" / f"{group[0].key}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [*launcher, sys.executable, "-m", "benchmarks.utility.worker", str(output.resolve())]
    with log.open("w") as handle:
        return subprocess.Popen(
            [*command, *(s.key for s in group)], stdout=handle, stderr=subprocess.STDOUT, env=environment
        )


def execute(
    runs: Sequence[Settings],
    output: Path,
    *,
    jobs: int = 1,
    launcher: str = "",
    progress: Callable[[int, int, float | None], None] = lambda done, total, left: None,
    poll_seconds: float = 0.5,
) -> Outcome:
    """Make the results of `runs` that `output` does not hold yet.

    A failed process costs the rest of its cell, no other cell. Interrupted or failed, call again: what is done stays.

    Args:
        jobs: processes at a time. launcher: command put before each process, such as `nice -n 10` or `srun -n1`.
        progress: called with (runs done, runs in all, estimated seconds left) at the start and after each change.

    Raises:
        SystemExit: another driver works on the same folder.
    """
    keys = list(dict.fromkeys(settings.key for settings in runs))

    def finished(key: str) -> bool:
        return (output / "runs" / f"{key}.json").exists()

    with _only_driver(output):
        pending = list({s.key: s for s in runs if not finished(s.key)}.values())
        for settings in pending:
            path = output / "settings" / f"{settings.key}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings.to_dict(), indent=1) + "\n", encoding="utf-8")
        waiting, active = _groups(pending), []
        main_thread = threading.current_thread() is threading.main_thread()  # no other may set a handler
        before = signal.signal(signal.SIGTERM, _interrupt) if main_thread else None  # so that the processes end too
        prefix, known, durations, seen = shlex.split(launcher), len(keys) - len(pending), [], set()
        count = known
        progress(count, len(keys), None)
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    active.append(_start(output, waiting.pop(0), prefix))
                time.sleep(poll_seconds)
                active = [process for process in active if process.poll() is None]
                new = {s.key for s in pending if s.key not in seen and finished(s.key)}
                if new:
                    seen |= new
                    durations += [result["seconds"] for result in load_results(output, sorted(new))]
                    count = known + len(seen)
                    progress(count, len(keys), seconds_left(durations, len(keys) - count, jobs))
        finally:
            for process in active:
                process.terminate()
            for process in active:
                process.wait()
            if main_thread:
                signal.signal(signal.SIGTERM, before)
    return Outcome(tuple(k for k in keys if finished(k)), tuple(k for k in keys if not finished(k)))
