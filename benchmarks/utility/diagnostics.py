"""Tables 8 and 10 of the paper: roles, experts and noise after training, measured on public records.

    python -m benchmarks.utility.diagnostics --task rt --model tiny --output outputs/diagnostics

Trains each run as `python -m benchmarks.utility` does, on the same settings, and checks its privacy statement. Then it
measures, on labelled records of the task's public corpus: M_role, the experts' signal-to-noise ratio, and how much the
loss rises under noise on the parameters of each stream. No private record is read for it, so it costs no privacy beyond
the run's. Measured runs are kept in OUTPUT/diagnostics; the same command goes on with the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import DataCollatorWithPadding

from benchmarks.utility.command import add_run_flags, plan
from benchmarks.utility.files import write_json
from benchmarks.utility.report import csv_text
from benchmarks.utility.settings import VARIANTS, Settings
from benchmarks.utility.tasks import labelled_public
from benchmarks.utility.verify import verify
from benchmarks.utility.worker import base_model, prepared_task, trained
from raptor_hf import RaptorTrainer
from raptor_hf.analysis import (
    GradientOptions,
    expert_diagnostics,
    joint_diagnostics,
    noise_sensitivity,
    role_diagnostics,
)
from raptor_hf.data import TextTask, tokenize_task
from raptor_hf.errors import PrivacyConfigError, RaptorError
from raptor_hf.methods import get_method
from raptor_hf.moe import check_disjoint
from raptor_hf.moe.lora import stream_parameters
from raptor_hf.validate import integer, positive

__all__ = ["check_measurable", "main", "make_parser", "measure", "public_records", "write_tables"]

ROLES = ("shared", "router", "head", "expert")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.utility.diagnostics", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_run_flags(parser)
    parser.set_defaults(methods="monolithic_lora,monolithic_full,raptor", epsilons="8", seeds=1)
    parser.add_argument("--output", type=Path, default=Path("outputs/diagnostics"))
    parser.add_argument("--records", type=int, default=512, help="public records to measure on; default: %(default)s")
    parser.add_argument("--draws", type=int, default=8, help="noise vectors a stream; default: %(default)s")
    parser.add_argument(
        "--noise-std", type=float,
        help="of the noise on each parameter (Table 10); default: sigma C / D, that of one released gradient",
    )  # fmt: skip
    return parser


def check_measurable(runs: Sequence[Settings]) -> None:
    """Refuse runs for which the diagnostics are not defined, before any is trained.

    Raises:
        PrivacyConfigError: a method or budget without noise, or an ablation with one clipping norm for both streams.
    """
    for settings in runs:
        variant = VARIANTS[settings.variant]
        if not variant.private or math.isinf(settings.epsilon):
            raise PrivacyConfigError(
                f"`{settings.variant}` at epsilon {settings.epsilon:g} was asked for",
                "It adds no noise: there is no ratio of signal and noise, and what it trains is not private",
                "Take private methods and finite `--epsilons`",
            )
        if variant.options.get("clipping") == "global":
            raise PrivacyConfigError(
                f"`{settings.variant}` was asked for",
                "Its one clipping norm runs over a record's shared gradient and its owner's, and no diagnostic here "
                "is defined for that",
                "Leave it out",
            )


def public_records(settings: Settings, size: int) -> Dataset:
    """Labelled public records of the task, tokenized, none of which is a training record.

    Raises:
        PrivacyConfigError: the public corpus has no labels, or shares a record with the training set.
    """
    task = prepared_task(settings)
    found = labelled_public(settings.task, task.labels, size=size, data_dir=settings.data_dir)
    _, tokenizer = base_model(settings, task)
    public = tokenize_task(
        TextTask(found, None, None, task.text_columns, task.labels), tokenizer, settings.max_length
    ).train
    check_disjoint(public.remove_columns("labels"), task.train.remove_columns("labels"))
    return public


def measure(
    trainer: RaptorTrainer, settings: Settings, public: Dataset, *, draws: int = 8, noise_std: float | None = None
) -> dict[str, Any]:
    """The diagnostics of one trained run.

    Args:
        public: labelled public records. draws: noise vectors a stream. noise_std: None for sigma C / D of the mechanism
            that releases the stream, the noise on a coordinate of one released gradient.

    Returns:
        `m_role`, `norms` and `parameters` by role; `snr` of the experts, `mean_snr`, `snr_cv` (None where no expert is
        trained); `sensitivity`, a row a stream.
    """
    variant, args, model = VARIANTS[settings.variant], trainer.args, trainer.model
    method, statement = get_method(variant.method), trainer.privacy_statement()
    options = GradientOptions(
        mode=trainer.engine, ownership=args.ownership, owners=method.owners,
        residual_gamma=args.residual_gamma if args.residual_weighting else None,
    )  # fmt: skip
    common: dict[str, Any] = {"data_collator": DataCollatorWithPadding(trainer.processing_class), "public_data": True}
    # a record's gradient of all base weights is as large as the model
    at_once = settings.micro_batch if method.weights == "adapters" else 1
    roles = role_diagnostics(model, public, options=options, batch_size=at_once, **common)
    streams = {name: parameters for name, parameters in stream_parameters(model).items() if parameters}

    def mechanism(stream: str) -> Any:
        return statement.expert if stream == "expert" and statement.expert is not None else statement.shared

    experts: Any = None
    if "expert" in streams:
        released = mechanism("expert")
        noise = {
            "noise_multiplier": released.noise_multiplier, "max_norm": released.max_grad_norm,
            "expected_batch_size": settings.batch_size, "batch_size": at_once,
        }  # fmt: skip
        if method.owners:
            size = statement.dataset_size
            experts = expert_diagnostics(model, public, dataset_size=size, options=options, **noise, **common)
        else:
            experts = joint_diagnostics(model, public, mode=trainer.engine, **noise, **common)
    sensitivity = []
    for stream in streams:
        released = mechanism(stream)
        std = noise_std or released.noise_multiplier * released.max_grad_norm / released.denominator
        found = noise_sensitivity(model, public, stream, noise_std=std, draws=draws, batch_size=64, **common)
        sensitivity.append(
            {
                "stream": stream, "parameters": found.parameters, "noise_std": std, "loss_change": found.loss_change,
                "standard_error": found.standard_error, "lambda_plus": found.value, "measured": found.measured,
            }
        )  # fmt: skip
    return {
        "m_role": roles.mismatch,
        "norms": roles.norms,
        "parameters": roles.parameters,
        "snr": None if experts is None else experts.snr.tolist(),
        "mean_snr": None if experts is None else experts.mean_snr,
        "snr_cv": None if experts is None or math.isnan(experts.snr_cv) else experts.snr_cv,
        "sensitivity": sensitivity,
    }


def diagnose(settings: Settings, args: argparse.Namespace, public: Dataset) -> dict[str, Any]:
    """Train and measure one run; what goes into its file."""
    began = time.perf_counter()
    with trained(settings, args.output) as trainer:
        statement, between = trainer.privacy_statement(), time.perf_counter()
        epsilon = verify(statement, settings, len(prepared_task(settings).train))
        found = measure(trainer, settings, public, draws=args.draws, noise_std=args.noise_std)
    return {
        "settings": settings.to_dict(),
        "records": len(public),
        "protected_layer": statement.protected_layer,
        "epsilon": epsilon,
        **found,
        "train_seconds": round(between - began, 1),
        "measure_seconds": round(time.perf_counter() - between, 1),
    }


def _run_row(result: Mapping[str, Any]) -> dict[str, Any]:
    settings = result["settings"]
    return {
        **{name: settings[name] for name in ("task", "model", "variant", "epsilon", "seed", "clip", "cycles")},
        **{name: result[name] for name in ("records", "m_role", "mean_snr", "snr_cv")},
        **{f"norm_{role}": result["norms"][role] for role in ROLES},
        **{f"parameters_{role}": result["parameters"][role] for role in ROLES},
        **{name: result[name] for name in ("train_seconds", "measure_seconds")},
    }


def _mean(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    text = f"{statistics.mean(numbers):.3g}"
    if len(numbers) > 1:
        text += f" ± {statistics.stdev(numbers) / math.sqrt(len(numbers)):.1g}"
    return text


def write_tables(results: Sequence[Mapping[str, Any]], output: Path) -> list[Path]:
    """`table8.csv` (a row a run), `table10.csv` (a row a run and stream), and `tables.md` with both.

    In `tables.md`: means over the seeds, ± their standard error, for Table 8; every run for Table 10.
    """
    output.mkdir(parents=True, exist_ok=True)
    rows = [_run_row(result) for result in results]
    names = ("task", "model", "variant", "epsilon", "seed")
    noise = [{**{n: r["settings"][n] for n in names}, **row} for r in results for row in r["sensitivity"]]
    paths = [output / name for name in ("table8.csv", "table10.csv", "tables.md")]
    paths[0].write_text(csv_text(rows, list(rows[0])), encoding="utf-8")
    paths[1].write_text(csv_text(noise, list(noise[0])), encoding="utf-8")

    def label(row: Mapping[str, Any]) -> str:
        return f"| {row['task']} | {row['model']} | {VARIANTS[row['variant']].label} | {row['epsilon']:g} |"

    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(label(row), []).append(row)
    eight = [
        f"{name} {_mean([r['m_role'] for r in mine])} | {_mean([r['mean_snr'] for r in mine])} "
        f"| {_mean([r['snr_cv'] for r in mine])} | {len(mine)} |"
        for name, mine in cells.items()
    ]
    ten = [
        f"{label(row)} {row['seed']} | {row['stream']} | {row['parameters']:,} | {row['noise_std']:.3g} "
        f"| {row['loss_change']:.3g} ± {row['standard_error']:.1g} | {row['lambda_plus']:.3g} |"
        for row in noise
    ]
    sizes = ", ".join(f"{size:,}" for size in sorted({result["records"] for result in results}))
    paths[2].write_text(
        f"Measured on {sizes} labelled public records, after training.\n\n## Table 8\n\n"
        "| task | model | method | ε | M_role | mean SNR | CV of SNR | runs |\n|---|---|---|---|---|---|---|---|\n"
        + "\n".join(eight)
        + "\n\n## Table 10\n\nRise of the loss ± its standard error over the draws of the noise; λ₊ is zero where "
        "there is none.\n\n| task | model | method | ε | seed | stream | parameters | noise a parameter | rise | λ₊ |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(ten) + "\n",
        encoding="utf-8",
    )
    return paths


def _result(settings: Settings, args: argparse.Namespace, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    noise = "" if args.noise_std is None else f"-{args.noise_std:g}"
    path = args.output / "diagnostics" / f"{settings.key}-{args.records}-{args.draws}{noise}.json"
    if not path.exists():
        write_json(path, make())
        print(f"{settings.key}: measured", flush=True)
    return json.loads(path.read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 130 when interrupted."""
    parser = make_parser()
    args = parser.parse_args(argv)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        integer("records", args.records, minimum=1)
        integer("draws", args.draws, minimum=2)
        if args.noise_std is not None:
            positive("noise_std", args.noise_std)
        runs = plan(args)
        check_measurable(runs)
        public = public_records(runs[0], args.records)
    except (KeyError, RaptorError, ValueError, FileNotFoundError) as error:
        parser.error(str(error.args[0]))
    try:
        results = [_result(settings, args, partial(diagnose, settings, args, public)) for settings in runs]
    except KeyboardInterrupt:
        print(f"Interrupted. Measured runs stay in {args.output}; the same command goes on with the others.")
        return 130
    for path in write_tables(results, args.output / "report"):
        print(path)
    print((args.output / "report" / "tables.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
