"""Chooses every method's settings on public data, all methods with the same number of trials, and freezes them.

    python -m benchmarks.utility.tune --output outputs/tune --jobs 2

The task is IMDb sentences with the label of their review: public, so no trial spends privacy of the task that is
reported. From the paper's Table 4: learning rate, clipping norm and budget split, one after the other, each stage from
the best of the stages before. One run a trial scatters by more than most trials differ, so the best few are then run
again with other seeds, and the mean of those runs decides. Batch and cycles, the computing time, are the same for all:
24 cycles of 250 of 7,500 records in place of the paper's 1,347 of 1,000 of 67,349. So few cycles want larger rates:
ten times the grid's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.utility.console import Progress
from benchmarks.utility.driver import execute, load_results
from benchmarks.utility.files import write_json
from benchmarks.utility.settings import GROUPS, TUNED_FILE, VARIANTS, Settings, rank_of, resolve_names

__all__ = ["FINALISTS", "REPEATS", "STAGES", "averages", "best", "candidates", "finals", "main"]

RATES = (1e-3, 3e-3, 1e-2, 2e-2, 4e-2)
CLIPS = (0.1, 10.0)  # beside 1
SPLITS = (0.7, 0.8, 0.95)  # beside .9
STAGES = ("learning_rate", "clip", "last")
TRIALS = len(RATES) + len(CLIPS) + len(SPLITS)
FINALISTS, REPEATS = 3, 3
FINAL_SEED = 100  # and on: no trial has them, and no table


def candidates(stage: str, current: Settings, first_rates: Sequence[float] = RATES) -> list[Settings]:
    """The trials of a stage around the best settings so far: the same number for every method.

    Where a method has no clipping norm or no budget split, it gets as many more learning rates instead.
    """
    variant = VARIANTS[current.variant]

    def rates(factors: Sequence[float]) -> list[Settings]:
        return [dataclasses.replace(current, learning_rate=float(f"{current.learning_rate * f:.3g}")) for f in factors]

    if stage == "learning_rate":
        return [dataclasses.replace(current, learning_rate=rate) for rate in first_rates]
    if stage == "clip":
        if variant.private:
            return [dataclasses.replace(current, clip=value) for value in CLIPS]
        return rates((1.5, 0.7))
    if len(variant.streams) > 1:
        return [dataclasses.replace(current, budget_split=value) for value in SPLITS]
    return rates((0.6, 0.8, 1.25))


def best(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result (or average) with the largest accuracy; of equals, the one with the smaller loss."""
    return min(results, key=lambda result: (-result["accuracy"], result["eval_loss"]))


def finals(results: Sequence[dict[str, Any]], finalists: int, repeats: int) -> list[Settings]:
    """The `finalists` best trials, each with `repeats` seeds that no trial had."""
    ranked = sorted(results, key=lambda result: (-result["accuracy"], result["eval_loss"]))[:finalists]
    chosen = [Settings.from_dict(result["settings"]) for result in ranked]
    return [dataclasses.replace(s, seed=FINAL_SEED + k) for s in chosen for k in range(repeats)]


def averages(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs as settings: one entry for the runs that differ in nothing but the seed.

    Returns:
        {"settings": a dictionary, with the seed of the first run, "accuracy" and "eval_loss": means over the runs,
        "runs": their accuracies}, in the order of their first runs.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        alike = {**result["settings"], "seed": None}
        groups.setdefault(json.dumps(alike, sort_keys=True), []).append(result)
    return [
        {
            "settings": members[0]["settings"],
            "accuracy": statistics.mean(m["accuracy"] for m in members),
            "eval_loss": statistics.mean(m["eval_loss"] for m in members),
            "runs": [m["accuracy"] for m in members],
        }
        for members in groups.values()
    ]


def _row(result: dict[str, Any]) -> dict[str, Any]:
    settings = result["settings"]
    names = ("learning_rate", "batch_size", "cycles", "clip", "budget_split", "rank")
    return {**{name: settings[name] for name in names}, "accuracy": round(result["accuracy"], 4)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.utility.tune", description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/utility-tune"))
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--methods", default="all", help="comma-separated methods; ablations take RAPTOR's settings")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--launcher", default="", help="command before each process, e.g. 'nice -n 10'")
    parser.add_argument("--rates", help="comma-separated learning rates of the first stage, for a costly model")
    parser.add_argument("--stages", type=int, default=len(STAGES), help="only the first so many stages")
    parser.add_argument(
        "--finalists", type=int, default=FINALISTS, help="the best trials that are run again; 0 or 1: none"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help="new seeds of each finalist")
    parser.add_argument("--file", type=Path, default=TUNED_FILE, help="where the frozen settings go")
    args = parser.parse_args(argv)
    first_rates = tuple(map(float, args.rates.split(","))) if args.rates else RATES
    names = [name for name in resolve_names(args.methods.split(",")) if name in GROUPS["all"]]
    current = {
        name: Settings(
            "imdb", args.model, name, args.epsilon if VARIANTS[name].private else float("inf"), seed=0,
            rank=rank_of(args.model, name),
        )
        for name in names
    }  # fmt: skip
    tried: dict[str, dict[str, Settings]] = {name: {} for name in names}
    for stage in STAGES[: args.stages]:
        for name in names:
            tried[name].update({s.key: s for s in candidates(stage, current[name], first_rates)})
        if not _make(args, f"tuning, {stage}", [s for name in names for s in tried[name].values()]):
            return 1
        for name in names:
            current[name] = Settings.from_dict(best(load_results(args.output, list(tried[name])))["settings"])
    trials = {name: load_results(args.output, list(tried[name])) for name in names}
    again: dict[str, list[Settings]] = {name: [] for name in names}
    if args.finalists > 1 and args.repeats > 0:
        again = {name: finals(trials[name], args.finalists, args.repeats) for name in names}
        if not _make(args, "tuning, finals", [s for name in names for s in again[name]]):
            return 1
    _freeze(args, trials, {name: load_results(args.output, [s.key for s in again[name]]) for name in names})
    return 0


def _make(args: argparse.Namespace, title: str, runs: Sequence[Settings]) -> bool:
    with Progress(title) as progress:
        outcome = execute(runs, args.output, jobs=args.jobs, launcher=args.launcher, progress=progress)
    if outcome.failed:
        print(f"No result of {', '.join(outcome.failed)}: see {args.output / 'logs'}.")
    return not outcome.failed


def _freeze(args: argparse.Namespace, trials: dict[str, list], again: dict[str, list]) -> None:
    """Write settings, trials and finals of each method to `args.file`, and leave other models and methods there."""
    frozen = json.loads(args.file.read_text(encoding="utf-8")) if args.file.exists() else {"chosen": {}, "trials": {}}
    frozen["about"] = (
        "Made by `python -m benchmarks.utility.tune` on public IMDb sentences (7,500 to train, 2,000 to score; one run "
        "a trial, the best of them again with other seeds), then frozen for every task, epsilon and seed."
    )
    for name, results in trials.items():
        # A trial that made a finalist is among the best by selection, partly by chance: it does not count here.
        winner = best(averages(again[name]) or results)
        chosen = _row(winner)
        chosen.pop("accuracy")
        frozen["chosen"].setdefault(args.model, {})[name] = chosen
        record: dict[str, Any] = {
            "epsilon": "inf" if not VARIANTS[name].private else args.epsilon,
            "count": len(results),
            "rows": [_row(result) for result in results],
        }
        if again[name]:
            record["finals"] = [{**_row(mean), "runs": mean["runs"]} for mean in averages(again[name])]
        frozen["trials"].setdefault(args.model, {})[name] = record
        print(
            f"{name}: {chosen} (accuracy {winner['accuracy']:.4f}; {len(results)} trials, {len(again[name])} runs more)"
        )
    write_json(args.file, frozen)


if __name__ == "__main__":
    raise SystemExit(main())
