"""`raptor-hf audit --attack lira`: plan, shadow models, attacks, report."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from raptor_hf import __version__
from raptor_hf.audit import folder as store
from raptor_hf.audit import report as reports
from raptor_hf.audit.shadows import Cell, Design, Task, make_design, read_results, run_processes
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.scripts._audit import Records, cell_settings, cells_of, check_cells, records_digest, write_cells
from raptor_hf.scripts._shadow import PLAN
from raptor_hf.validate import integer, probability

__all__ = ["run"]

WORKER = "raptor_hf.scripts._shadow"


def run(args: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    """Plan or go on, train what is missing, attack, write the report."""
    integer("--jobs", args.jobs, minimum=1)
    probability("--confidence", args.confidence, one=False)
    cells = cells_of(settings, args.methods, args.epsilons)
    folder = store.open_folder(args.output)
    design = _plan(args, settings, cells, folder)
    tasks = [Task(cell.name, shadow) for shadow in range(args.shadows) for cell in cells]
    store.subfolder(folder, "work")
    with _progress(len(tasks)) as on_done:
        run_processes(folder, tasks, _command(args, folder), jobs=args.jobs, on_done=on_done)
    results = {cell.name: read_results(folder, cell.name, design) for cell in cells}
    found = {
        "schema_version": reports.SCHEMA_VERSION,
        "kind": "lira",
        "shadows": args.shadows,
        "members": int(design.masks[0].sum()),
        "pool": design.masks.shape[1],
        "blocks": len(np.unique(design.blocks)),
        "confidence": args.confidence,
        "packages": reports.versions(),
        "cells": [reports.attack_cell(cell, results[cell.name], design, args.confidence) for cell in cells],
    }
    markdown = reports.membership_markdown(found)
    reports.plot(folder, cells, results, design)
    reports.write_report(folder, found, markdown)
    publish(args.publish_summary, found)
    print(markdown)
    return 0


def publish(path: str | None, found: Mapping[str, Any]) -> None:
    """The summary that the owner of the audit chose to publish; nothing without a path."""
    if path is not None:
        Path(path).write_text(json.dumps(reports.public_summary(found), indent=2) + "\n", encoding="utf-8")


def _plan(args: argparse.Namespace, settings: Mapping[str, Any], cells: Sequence[Cell], folder: Path) -> Design:
    """The audit's design: drawn and kept, or read where the audit goes on."""
    found = {cell.name: cell_settings(settings, cell, args.overrides) for cell in cells}
    model_args, data_args, _ = check_cells(found)[cells[0].name]
    train = Records(model_args, data_args).raw.train
    pool, design = _draw(args, len(train))  # refused before anything is bound to it
    store.bind(
        folder,
        {
            "kind": "lira",
            "version": __version__,
            "settings": found,
            "shadows": args.shadows,
            "members": args.members,
            "non_members": args.non_members,
        },
    )
    write_cells(folder, found)
    if not (folder / PLAN).is_file():
        store.write_arrays(
            folder / PLAN, masks=design.masks, blocks=design.blocks, pool=pool,
            digest=np.array(records_digest(train.select(pool))),
        )  # fmt: skip
    plan = store.read_arrays(folder / PLAN)
    if plan["pool"].max() >= len(train) or str(plan["digest"]) != records_digest(train.select(plan["pool"])):
        raise PrivacyConfigError(
            "The training set is not what it was when the audit began",
            "Models of different records would be compared as if only membership told them apart",
            "Restore the records, or name a new folder",
        )
    return Design(plan["masks"], plan["blocks"])


def _draw(args: argparse.Namespace, size: int) -> tuple[np.ndarray, Design]:
    """The pool (indices of the training set) and who trains on what, from the operating system's entropy."""
    members = args.members if args.members is not None else size // 2
    outside = args.non_members if args.non_members is not None else min(members, size - members)
    if members < 1 or outside < 1 or members + outside > size:
        raise PrivacyConfigError(
            f"{members} members and {outside} non-members were asked for",
            f"The training set has {size} records, and a pool of both is drawn from it",
            "Lower `--members` or `--non-members`",
        )
    rng = np.random.default_rng()
    pool = np.sort(rng.choice(size, members + outside, replace=False))
    design = make_design(args.shadows, len(pool), members, rng)
    reports.check_design(design)
    return pool, design


def _command(args: argparse.Namespace, folder: Path) -> Callable[[Sequence[Task]], list[str]]:
    start = shlex.split(args.launcher) if args.launcher else [sys.executable]
    return lambda tasks: [*start, "-m", WORKER, str(folder), *map(str, tasks)]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar with the time left on a terminal; a line a finished model elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    started, first, last = time.monotonic(), -1, -1

    def left(done: int) -> str:
        fresh = done - first
        if fresh < 1:
            return "time left: unknown until the first model is done"
        seconds = (time.monotonic() - started) / fresh * (total - done)
        return f"about {seconds / 60:.1f} minutes left"

    columns = (
        TextColumn("shadow models"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("shadows", total=total, left="")

        def on_done(done: int) -> None:
            nonlocal first, last
            first = done if first < 0 else first
            if done != last:
                last = done
                bar.update(shown, completed=done, left=left(done))
                if not console.is_terminal:
                    console.print(f"{done} of {total} shadow models, {left(done)}")

        yield on_done
