"""Figures 4 to 7 of the paper, each with its numbers as a CSV file beside it.

    python -m benchmarks.utility.figures budget-sweep outputs/rho-*/report/runs.csv --output figure4.png
    python -m benchmarks.utility.figures corpus-size --task rt --model tiny --output figure5.png
    python -m benchmarks.utility.figures transfer --tasks rt --model tiny --output figure7.png

Nothing is trained here.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import DataCollatorWithPadding

from benchmarks.utility.report import csv_text
from benchmarks.utility.settings import Settings
from benchmarks.utility.tasks import TASKS, check_model_name
from benchmarks.utility.worker import base_model, prepared_task
from raptor_hf.analysis import (
    corpus_size_study,
    owners_by_layer,
    plot_budget_sweep,
    plot_entropy_vs_size,
    plot_transfer,
)
from raptor_hf.errors import PrivacyConfigError, RaptorError
from raptor_hf.moe import check_disjoint, find_moe_layout, routing_table
from raptor_hf.validate import integer

__all__ = ["budget_rows", "corpus_size", "default_sizes", "main", "make_parser", "transfer"]

# What the runs of a sweep share: only budget, split and seed may differ.
_SAME = ("task", "model", "variant", "train_records", "eval_records", "batch_size", "cycles", "learning_rate", "clip",
         "rank", "max_length")  # fmt: skip
_TRANSFER = """Owner entropy of every sparse layer on the task's public corpus and on its evaluation split (Fig. 7).

The second axis is computed from the evaluation split. It is not public and no epsilon covers it: nothing (no layer, no
setting) may be chosen by this figure, and it may be published only if the evaluation split may.
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.utility.figures", description=__doc__, formatter_class=raw
    )
    commands = parser.add_subparsers(dest="figure", required=True)
    sweep = commands.add_parser(
        "budget-sweep", help="Fig. 4", description="Accuracy over epsilon and budget split (Fig. 4), of finished runs."
    )
    sweep.add_argument("runs", nargs="+", type=Path, metavar="RUNS.csv", help="`report/runs.csv` of `--output` folders")
    sweep.add_argument("--variant", default="raptor", help="default: %(default)s")
    size = commands.add_parser(
        "corpus-size", help="Figs. 5 and 6",
        description="Owner entropy, and the layer it chooses, on parts of the public corpus (Figs. 5 and 6).",
    )  # fmt: skip
    size.add_argument("--task", default="rt", choices=list(TASKS), help="default: %(default)s")
    size.add_argument("--sizes", help="comma-separated; default: 10, 20, 50, 100, ... and the whole corpus")
    size.add_argument("--repeats", type=int, default=50, help="random parts of each size; default: %(default)s")
    moved = commands.add_parser("transfer", help="Fig. 7", description=_TRANSFER, formatter_class=raw)
    moved.add_argument("--tasks", default="rt", help="comma-separated; default: %(default)s")
    moved.add_argument("--eval-size", type=int, help="at most so many evaluation records; default: all")
    for command in (size, moved):
        command.add_argument("--model", default="tiny", help="tiny, minilm, switch-base-8, olmoe, a Hub id or a path")
        command.add_argument("--data-dir", help="as in `python -m benchmarks.utility`")
        command.add_argument("--public-size", type=int, default=2_000, help="public records; default: %(default)s")
        command.add_argument("--max-length", type=int, default=48, help="tokens of a record; default: %(default)s")
        command.add_argument("--ownership", default="gate", help="gate or vote; default: %(default)s")
        command.add_argument("--dtype", default="float32", help="of the weights; default: %(default)s")
    for command in (sweep, size, moved):
        command.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    return parser


def budget_rows(paths: Sequence[Path], variant: str = "raptor") -> list[dict[str, Any]]:
    """The runs of a budget sweep, each once: `epsilon`, `rho`, `seed` and `accuracy` (percent).

    Raises:
        ValueError: no such run, or runs that differ in more than budget, split and seed.
    """
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        with path.open(encoding="utf-8", newline="") as handle:
            found.update({row["key"]: row for row in csv.DictReader(handle) if row["variant"] == variant})
    if not found:
        raise ValueError(f"There is no run of `{variant}` in {', '.join(map(str, paths))}. Give runs.csv of its runs.")
    for name in _SAME:
        values = sorted({row[name] for row in found.values()})
        if len(values) > 1:
            raise ValueError(
                f"The runs have different values of `{name}`: {', '.join(values)}. The figure would show its effect as "
                "that of the budget split. Give the runs of one sweep."
            )
    rows = [
        {
            "epsilon": float(row["epsilon"]), "rho": float(row["budget_split"]), "seed": int(row["seed"]),
            "accuracy": 100 * float(row["accuracy"]),
        }
        for row in found.values()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row["epsilon"], row["rho"], row["seed"]))


def default_sizes(records: int) -> list[int]:
    """10, 20, 50, 100, ... below `records`, and `records`."""
    steps = [factor * 10**power for power in range(1, 9) for factor in (1, 2, 5)]
    return [size for size in steps if size < records] + [records]


def _settings(args: argparse.Namespace, task: str) -> Settings:
    return Settings(
        task, args.model, "raptor", math.inf, 0, public_size=args.public_size, max_length=args.max_length,
        eval_size=getattr(args, "eval_size", None), ownership=args.ownership, dtype=args.dtype, data_dir=args.data_dir,
    )  # fmt: skip


def _public(settings: Settings) -> tuple[Any, dict[str, Any], Dataset, Dataset]:
    """Base model, options of the routing functions, public corpus (checked) and evaluation split."""
    task = prepared_task(settings)
    if task.public is None or task.evaluation is None:
        raise PrivacyConfigError(
            f"`{settings.task}` without a public corpus was given",
            "There is nothing but private records to compute the routing of",
            "Put one into the data folder as public*.tsv",
        )
    check_disjoint(task.public, task.train.remove_columns("labels"))
    model, tokenizer = base_model(settings, task)
    options = {"rule": settings.ownership, "data_collator": DataCollatorWithPadding(tokenizer), "batch_size": 128}
    return model.eval(), options, task.public, task.evaluation


def corpus_size(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw Figs. 5 and 6; the rows of the CSV file, one a size and block."""
    model, options, public, _ = _public(_settings(args, args.task))
    owners = owners_by_layer(model, public, **options)
    experts = find_moe_layout(model).sparse_layers[0].num_experts
    sizes = [int(text) for text in args.sizes.split(",")] if args.sizes else default_sizes(len(public))
    study = corpus_size_study(owners, experts, sizes, repeats=args.repeats)
    plot_entropy_vs_size(study, args.output)
    rows = []
    for place, size in enumerate(study.sizes):
        for block, values in sorted(study.entropies.items()):
            low, high = np.quantile(values[place], [0.05, 0.95])
            rows.append(
                {
                    "task": args.task, "records": size, "block": block, "entropy": round(values[place].mean(), 4),
                    "quantile_05": round(low, 4), "quantile_95": round(high, 4),
                    "chosen_share": float((study.chosen[place] == block).mean()),
                }
            )  # fmt: skip
    return rows


def transfer(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw Fig. 7; the rows of the CSV file, one a task and block."""
    tables: dict[str, tuple[Any, Any]] = {}
    for name in args.tasks.split(","):
        model, options, public, evaluation = _public(_settings(args, name))
        tables[name] = tuple(routing_table(model, data, **options) for data in (public, evaluation))
    plot_transfer(
        {name: pair[0] for name, pair in tables.items()}, {name: pair[1] for name, pair in tables.items()}, args.output,
        other_name="evaluation split (not public)",
    )  # fmt: skip
    return [
        {
            "task": name, "block": mine["block"], "public": round(mine["normalised_entropy"], 4),
            "evaluation": round(other["normalised_entropy"], 4),
        }
        for name, pair in tables.items()
        for mine, other in zip(*pair, strict=True)
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = make_parser()
    args = parser.parse_args(argv)
    numbers = args.output.with_suffix(".csv")
    try:
        if args.figure == "budget-sweep":
            if numbers.resolve() in {path.resolve() for path in args.runs}:
                raise ValueError(
                    f"`{numbers}` holds the runs, and the figure's numbers would replace it. Change `--output`."
                )
            rows = budget_rows(args.runs, args.variant)
            plot_budget_sweep(rows, args.output)
        else:
            check_model_name(args.model)
            integer("public_size", args.public_size, minimum=1)
            rows = corpus_size(args) if args.figure == "corpus-size" else transfer(args)
    except (OSError, RaptorError, ValueError) as error:
        parser.error(str(error))
    numbers.write_text(csv_text(rows, list(rows[0])), encoding="utf-8")
    print(f"{args.output}\n{numbers}\n{numbers.read_text(encoding='utf-8')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
