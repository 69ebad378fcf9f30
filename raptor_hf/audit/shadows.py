"""Shadow models: which records each is trained on, and the processes that train them.

The trainers themselves are made by the caller (`raptor_hf.scripts._shadow`): this module knows designs, tasks and
processes, no models.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raptor_hf.audit.folder import read_arrays, subfolder
from raptor_hf.errors import PrivacyConfigError, RaptorError
from raptor_hf.validate import integer

__all__ = ["Cell", "Design", "ShadowResults", "Task", "make_design", "read_results", "result_path", "run_processes"]

SHADOWS = "shadows"


@dataclass(frozen=True)
class Design:
    """Which shadow is trained on which records.

    Attributes:
        masks: (K, n) bool, True where the record is a member.
        blocks: (K,) int. Shadows of one block share a shuffle of the records, so their masks depend on each other;
            masks of different blocks are independent.
    """

    masks: np.ndarray
    blocks: np.ndarray

    def shadows_for(self, target: int) -> np.ndarray:
        """(K,) bool: the shadows that may be used to attack shadow `target`, all those of the other blocks.

        Another shadow of the same block would give away the target's mask (with halves, it is the complement), and
        a record's number of "in" shadows would then tell its membership.
        """
        return self.blocks != self.blocks[target]


def make_design(shadows: int, pool: int, members: int, rng: np.random.Generator) -> Design:
    """A random subset of `members` of `pool` records for each of `shadows` models, balanced where it can be.

    A block of pool / gcd(pool, members) shadows deals one shuffle of the pool out in equal hands, so that each record
    is in equally many of its shadows (one of two for halves). Where the number of shadows is no multiple (at least
    twofold) of that, every shadow draws a subset of its own.
    """
    integer("shadows", shadows, minimum=2)
    integer("members", members, minimum=1)
    if members >= pool:
        raise PrivacyConfigError(
            f"{members} members of a pool of {pool} records were asked for",
            "An attack needs records that the model was not trained on",
            "Give `--non-members` 1 or more",
        )
    size = pool // math.gcd(pool, members)
    masks, blocks = np.zeros((shadows, pool), dtype=bool), np.arange(shadows)
    if shadows % size == 0 and shadows >= 2 * size:
        blocks = np.repeat(np.arange(shadows // size), size)
        for first in range(0, shadows, size):
            order = rng.permutation(pool)
            for hand in range(size):
                masks[first + hand, np.take(order, range(hand * members, (hand + 1) * members), mode="wrap")] = True
    else:
        for row in masks:
            row[rng.choice(pool, members, replace=False)] = True
    return Design(masks, blocks)


# ---- What is trained ----


@dataclass(frozen=True)
class Cell:
    """One line of the table: a method at a budget. Attributes: flags: what is added to the configuration's own."""

    name: str
    method: str
    epsilon: float | None
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """One shadow model of one cell."""

    cell: str
    shadow: int

    def __str__(self) -> str:
        return f"{self.cell}:{self.shadow}"

    @classmethod
    def parse(cls, text: str) -> Task:
        cell, _, shadow = text.rpartition(":")
        return cls(cell, int(shadow))


def result_path(folder: Path, task: Task) -> Path:
    """Where the result of a task lies: there, and whole, once the task is done."""
    return folder / SHADOWS / task.cell / f"{task.shadow:04d}.npz"


@dataclass(frozen=True)
class ShadowResults:
    """All shadows of a cell.

    Attributes:
        losses, confidences: (K, n) float64 scores of every record of the pool by every shadow.
        masks: (K, n) bool. accuracies: (K,), NaN without an evaluation split. epsilons: (K,) stated, inf without
            privacy. deltas: (K,). seconds: (K,).
    """

    losses: np.ndarray
    confidences: np.ndarray
    masks: np.ndarray
    accuracies: np.ndarray
    epsilons: np.ndarray
    deltas: np.ndarray
    seconds: np.ndarray


def read_results(folder: Path, cell: str, design: Design) -> ShadowResults:
    """The results of a cell, checked against the design.

    Raises:
        RaptorError: one is missing, or was made with another design.
    """
    rows: dict[str, list[Any]] = {}
    for shadow in range(len(design.masks)):
        path = result_path(folder, Task(cell, shadow))
        if not path.is_file():
            raise RaptorError(
                f"The result of shadow {shadow} of `{cell}` is missing",
                "An attack on some of the shadows would not be the one that was planned",
                "Repeat the command: it trains what is missing",
            )
        found = read_arrays(path)
        if not np.array_equal(found["masks"], design.masks[shadow]):
            raise RaptorError(
                f"`{path}` was made for other members",
                "Members and non-members would be mixed up",
                "Delete it and repeat the command",
            )
        for name, value in found.items():
            rows.setdefault(name, []).append(value)
    return ShadowResults(**{name: np.stack(values) for name, values in rows.items()})


# ---- Processes ----


def child_environment(parallel: int) -> dict[str, str]:
    """The environment of a worker: with several of them, one thread each."""
    changes = {"TOKENIZERS_PARALLELISM": "false"}
    if parallel > 1:
        changes.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
    return {**os.environ, **changes}


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that the workers are stopped too."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread, which alone may set handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_processes(
    folder: Path,
    tasks: Sequence[Task],
    command: Callable[[Sequence[Task]], list[str]],
    *,
    jobs: int = 1,
    on_done: Callable[[int], None] = lambda done: None,
    poll: float = 0.5,
) -> None:
    """Run the tasks whose results are missing in at most `jobs` worker processes at a time.

    Args:
        command: tasks -> the worker's command line. A worker does its tasks in turn and writes each result once it
            is whole; it may die at any point, and only what is missing is run the next time.
        on_done: called with the number of results that are there.

    Raises:
        RaptorError: a worker failed. The others finish the shadow they are at only if they are not stopped first.
    """
    missing = [task for task in tasks if not result_path(folder, task).is_file()]
    for cell in {task.cell for task in missing}:
        subfolder(folder, SHADOWS, cell)
    logs = subfolder(folder, "logs")
    chunks = [chunk for chunk in (missing[j::jobs] for j in range(jobs)) if chunk]
    running: list[tuple[subprocess.Popen, Path, Sequence[Task]]] = []
    with _terminated_like_interrupted():
        try:
            for number, chunk in enumerate(chunks):
                log = logs / f"worker-{os.getpid()}-{number}.log"
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    process = subprocess.Popen(
                        command(chunk), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                        env=child_environment(len(chunks)), start_new_session=True,
                    )  # fmt: skip
                running.append((process, log, chunk))
            while running:
                on_done(sum(result_path(folder, task).is_file() for task in tasks))
                for item in list(running):
                    if item[0].poll() is not None:
                        running.remove(item)
                        _check_finished(folder, *item)
                if running:
                    time.sleep(poll)
        finally:
            for process, _, _ in running:
                _stop(process)
    on_done(sum(result_path(folder, task).is_file() for task in tasks))


def _stop(process: subprocess.Popen) -> None:
    """End a worker and whatever it started (a launcher's own workers), all in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=5)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _check_finished(folder: Path, process: subprocess.Popen, log: Path, chunk: Sequence[Task]) -> None:
    left = [task for task in chunk if not result_path(folder, task).is_file()]
    if process.returncode == 0 and not left:
        return
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    print(f"The last lines of {log}:", *lines[-15:], sep="\n", file=sys.stderr)
    raise RaptorError(
        f"The worker for {left[0] if left else chunk[-1]} ended with exit code {process.returncode}",
        "Without its shadows the attack is not the one that was planned",
        f"See `{log}`, and repeat the command once the cause is gone: it trains what is missing",
    )
