"""The flags that say which runs are wanted, and those runs: what every command here has in common."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from benchmarks.utility.settings import (
    GROUPS,
    TUNED_FILE,
    VARIANTS,
    Settings,
    rank_of,
    resolve_names,
    tuned_settings,
)
from benchmarks.utility.tasks import TASKS, check_model_name

__all__ = ["add_run_flags", "plan"]

# Fields of `Settings` that a flag may set for all methods, over what was tuned.
OVERRIDES = {
    "train_size": int, "eval_size": int, "public_size": int, "max_length": int, "batch_size": int, "cycles": int,
    "learning_rate": float, "expert_learning_rate": float, "clip": float, "budget_split": float, "rank": int,
    "ownership": str, "dtype": str, "engine": str, "micro_batch": int,
}  # fmt: skip


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `plan`."""
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
    parser.add_argument("--data-dir", help="folder with train*, dev* and public* files, instead of the Hub")
    parser.add_argument("--tuned", type=Path, default=TUNED_FILE, help="frozen settings of every method")
    for name, kind in OVERRIDES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="for all methods, over what was tuned")


def plan(args: argparse.Namespace) -> list[Settings]:
    """The runs that the arguments ask for; non-private methods once a seed, at epsilon = inf.

    Raises:
        ValueError: an unknown task or method, what can be no model, a budget that is none, no seed, or a folder that is
            not there.
        KeyError: a method without tuned settings.
    """
    if args.task not in TASKS:
        raise ValueError(f"`{args.task}` is no task. Choose from {', '.join(TASKS)}.")
    check_model_name(args.model)
    if args.data_dir is not None and not Path(args.data_dir).is_dir():
        raise ValueError(f"`--data-dir {args.data_dir}` is no folder. It holds files train*, dev* and public*.")
    if args.seeds < 1:
        raise ValueError(f"`--seeds {args.seeds}` asks for no run. Give 1 or more.")
    names = args.methods.split(",") + ["table5"] * args.ablations + ["table1", "table6"] * args.baselines
    epsilons = [float(text) for text in args.epsilons.split(",")]
    data_dir = None if args.data_dir is None else str(Path(args.data_dir).resolve())
    given = {name: getattr(args, name) for name in OVERRIDES if getattr(args, name) is not None}
    runs = []
    for name in resolve_names([n for n in names if n]):
        values = {"rank": rank_of(args.model, name), **tuned_settings(args.model, name, args.tuned), **given}
        if "cycles" not in values:  # those of the paper's settings follow from the size of the task
            raise ValueError(f"{args.tuned.name} leaves the number of cycles open. Give `--cycles`, epochs x n / B.")
        for epsilon in epsilons if VARIANTS[name].private else [math.inf]:
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                runs.append(Settings(args.task, args.model, name, epsilon, seed, data_dir=data_dir, **values))
    return runs
