"""The command of the utility benchmark.

    python -m benchmarks.utility --task rt --model tiny --methods all --epsilons 1,4,8 --seeds 3 --output DIR

Runs what has no result in the output folder yet, verifies every run's privacy statement, and writes tables and plots.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.utility.console import Progress
from benchmarks.utility.driver import execute, last_words, load_results
from benchmarks.utility.report import write_report
from benchmarks.utility.settings import (
    GROUPS,
    TUNED_FILE,
    VARIANTS,
    Settings,
    rank_of,
    resolve_names,
    tuned_settings,
)
from benchmarks.utility.tasks import TASKS

__all__ = ["main", "make_parser", "plan"]

# Fields of `Settings` that a flag may set for all methods, over what was tuned.
OVERRIDES = {
    "train_size": int, "eval_size": int, "public_size": int, "max_length": int, "batch_size": int, "cycles": int,
    "learning_rate": float, "expert_learning_rate": float, "clip": float, "budget_split": float, "rank": int,
    "ownership": str, "dtype": str, "engine": str, "micro_batch": int,
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.utility", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="rt", help="rt, sst2, qnli, mnli, qqp, or imdb (public: for tuning)")
    parser.add_argument("--model", default="tiny", help="tiny, minilm, switch-base-8, olmoe, a Hub id or a path")
    parser.add_argument(
        "--methods", default="all", help=f"comma-separated: {', '.join(GROUPS)}, or {', '.join(VARIANTS)}"
    )
    parser.add_argument("--ablations", action="store_true", help="add the rows of the paper's Table 5")
    parser.add_argument("--baselines", action="store_true", help="add the rows of the paper's Tables 1 and 6")
    parser.add_argument(
        "--epsilons", default="1,4,8", help="comma-separated; inf runs private methods with clipping and no noise"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs a cell")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/utility"))
    parser.add_argument("--data-dir", help="folder with train*, dev* and public* files, instead of the Hub")
    parser.add_argument("--tuned", type=Path, default=TUNED_FILE, help="frozen settings of every method")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, one core each")
    parser.add_argument("--launcher", default="", help="command before each process, e.g. 'nice -n 10'")
    parser.add_argument("--routing-only", action="store_true", help="the routing table of the public corpus, no run")
    parser.add_argument("--report-only", action="store_true", help="tables of the results that are there")
    for name, kind in OVERRIDES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="for all methods, over what was tuned")
    return parser


def plan(args: argparse.Namespace) -> list[Settings]:
    """The runs that the arguments ask for; non-private methods once a seed, at epsilon = inf.

    Raises:
        ValueError: an unknown task or method, a budget that is none, no seed, or a folder that is not there.
        KeyError: a method without tuned settings.
    """
    if args.task not in TASKS:
        raise ValueError(f"`{args.task}` is no task. Choose from {', '.join(TASKS)}.")
    if args.data_dir is not None and not Path(args.data_dir).is_dir():
        raise ValueError(f"`--data-dir {args.data_dir}` is no folder. It holds files train*, dev* and public*.")
    if args.seeds < 1:
        raise ValueError(f"`--seeds {args.seeds}` asks for no run. Give 1 or more.")
    names = args.methods.split(",") + ["table5"] * args.ablations + ["table1", "table6"] * args.baselines
    epsilons = [float(text) for text in args.epsilons.split(",")]
    given = {name: getattr(args, name) for name in OVERRIDES if getattr(args, name) is not None}
    runs = []
    for name in resolve_names([n for n in names if n]):
        values = {"rank": rank_of(args.model, name), **tuned_settings(args.model, name, args.tuned), **given}
        if "cycles" not in values:  # those of the paper's settings follow from the size of the task
            raise ValueError(f"{args.tuned.name} leaves the number of cycles open. Give `--cycles`, epochs x n / B.")
        for epsilon in epsilons if VARIANTS[name].private else [math.inf]:
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                runs.append(Settings(args.task, args.model, name, epsilon, seed, data_dir=args.data_dir, **values))
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 when a run failed or there is nothing to report, 130 when interrupted."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        runs = plan(args)
    except (KeyError, ValueError) as error:
        parser.error(str(error.args[0]))
    if args.data_dir is not None:
        runs = [dataclasses.replace(settings, data_dir=str(Path(args.data_dir).resolve())) for settings in runs]
    if args.routing_only:
        from benchmarks.utility.worker import routing

        path = routing(runs[0], args.output)
        print(path.read_text(encoding="utf-8"))
        return 0
    failed: tuple[str, ...] = ()
    if not args.report_only:
        try:
            with Progress(f"{args.task}, {args.model}") as progress:
                failed = execute(runs, args.output, jobs=args.jobs, launcher=args.launcher, progress=progress).failed
        except KeyboardInterrupt:
            print(f"Interrupted. Finished runs stay in {args.output}; the same command goes on with the others.")
            return 130
    results = load_results(args.output, [settings.key for settings in runs])
    if results:
        for path in write_report(results, args.output / "report"):
            print(path)
        print((args.output / "report" / "tables.md").read_text(encoding="utf-8"))
    elif args.report_only:
        print(f"No result of these {len(runs)} runs is in {args.output}: the settings are part of a run's name.")
    for key in failed:
        print(f"No result: {key}. Its log, or that of its cell's first seed, is in {args.output / 'logs'}.")
        if words := last_words(args.output, key):
            print(f"    {words}")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    raise SystemExit(main())
