"""Chooses every method's settings on public data, all methods with the same number of trials, and freezes them.

    python -m benchmarks.utility.tune --output outputs/tune --jobs 2

The task is IMDb sentences with the label of their review: public, so no trial spends privacy of the task that is
reported. From the paper's Table 4: learning rate, clipping norm and budget split, one after the other, each stage from
the best of the stages before. Batch and cycles, the computing time, are the same for all: 24 cycles of 250 of 7,500
records in place of the paper's 1,347 of 1,000 of 67,349. So few cycles want larger rates: ten times the grid's.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.utility.console import Progress
from benchmarks.utility.driver import execute, load_results
from benchmarks.utility.files import write_json
from benchmarks.utility.settings import GROUPS, TUNED_FILE, VARIANTS, Settings, rank_of, resolve_names

__all__ = ["STAGES", "best", "candidates", "main"]

RATES = (1e-3, 3e-3, 1e-2, 2e-2, 4e-2)
CLIPS = (0.1, 10.0)  # beside 1
SPLITS = (0.7, 0.8, 0.95)  # beside .9
STAGES = ("learning_rate", "clip", "last")
TRIALS = len(RATES) + len(CLIPS) + len(SPLITS)


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
    """The result with the largest accuracy; of equals, the one with the smaller loss."""
    return min(results, key=lambda result: (-result["accuracy"], result["eval_loss"]))


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
        runs = [settings for name in names for settings in tried[name].values()]
        with Progress(f"tuning, {stage}") as progress:
            outcome = execute(runs, args.output, jobs=args.jobs, launcher=args.launcher, progress=progress)
        if outcome.failed:
            print(f"No result of {', '.join(outcome.failed)}: see {args.output / 'logs'}.")
            return 1
        for name in names:
            current[name] = Settings.from_dict(best(load_results(args.output, list(tried[name])))["settings"])
    _freeze(args, names, current, tried)
    return 0


def _freeze(args: argparse.Namespace, names: list[str], current: dict[str, Settings], tried: dict) -> None:
    import json

    frozen = json.loads(args.file.read_text(encoding="utf-8")) if args.file.exists() else {"chosen": {}, "trials": {}}
    frozen["about"] = (
        "Made by `python -m benchmarks.utility.tune` on public IMDb sentences (7,500 to train, 2,000 to score, one run "
        "a trial), then frozen for every task, epsilon and seed."
    )
    for name in names:
        results = load_results(args.output, list(tried[name]))
        chosen = _row(best(results))
        chosen.pop("accuracy")
        frozen["chosen"].setdefault(args.model, {})[name] = chosen
        frozen["trials"].setdefault(args.model, {})[name] = {
            "epsilon": "inf" if not VARIANTS[name].private else args.epsilon,
            "count": len(results),
            "rows": [_row(result) for result in results],
        }
        print(f"{name}: {chosen} (accuracy {best(results)['accuracy']:.4f}, {len(results)} trials)")
    write_json(args.file, frozen)


if __name__ == "__main__":
    raise SystemExit(main())
