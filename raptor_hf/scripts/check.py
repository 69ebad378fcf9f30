"""`raptor-hf check MODEL [--data FILE]`: what in a model would break the guarantee, before any training.

The structure is read, and a few records go through the model in train mode: a record's values must not move with its
neighbours. MODEL may be the configuration file of `raptor-hf train` instead: its settings are checked as well, and its
model and first records are taken. Exit code 1 when there is an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "make_parser"]

PROG = "raptor-hf check"
# Made-up records when no data is given; lengths differ, so that there is padding.
_LENGTHS = (5, 9, 3)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder, Hub id, 'tiny-switch' (the bundled model), or a .yaml file of `raptor-hf train`, whose settings "
        "are then the defaults of the flags",
    )
    parser.add_argument("--data", metavar="FILE", help=".csv, .tsv, .json or .jsonl with a text and a label column")
    parser.add_argument("--revision", help="revision on the Hub (default: main)")
    parser.add_argument("--engine", choices=("functorch", "hooks", "reference"), help="default: functorch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of the base weights (default: float32)")
    parser.add_argument("--max-length", type=int, help="longer records are cut (default: 128)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings. Returns 1 when there is an error among them, else 0.

    Raises:
        RaptorError: a configuration, file or model that cannot be read or used.
    """
    args = make_parser().parse_args(argv)
    from transformers import DataCollatorWithPadding

    from raptor_hf.checks import check_model
    from raptor_hf.data import load_task, tokenize_task
    from raptor_hf.scripts.train import load_model

    model_args, data_args, engine = _settings(args)
    has_data = data_args.train_file is not None or data_args.dataset_name is not None
    # nothing is trained or released from a file of flags; one of `raptor-hf train` must hold up as it stands
    task = load_task(data_args, undeclared=args.data is not None) if has_data else None
    # a head of any weights: what is checked does not depend on them
    model, tokenizer = load_model(
        model_args, 2 if task is None else max(2, len(task.labels)), ignore_mismatched_sizes=True
    )
    if task is None:
        records = _made_up(min(len(tokenizer), model.config.vocab_size))
    else:
        records = list(tokenize_task(task, tokenizer, data_args.max_seq_length).train)
    report = check_model(
        model, records=records, collate=DataCollatorWithPadding(tokenizer), mode=engine, raise_on_error=False
    )
    source = "made-up records"
    if has_data:
        source = f"the first {len(records)} records of {data_args.train_file or data_args.dataset_name}"
    _print(report, f"{model_args.model_name_or_path}, {source}, {engine} engine")
    return 1 if report.errors else 0


def _settings(args: argparse.Namespace) -> tuple[Any, Any, str]:
    """Model, data and engine: from the configuration file if there is one, then from the flags."""
    from raptor_hf.data import DataArguments
    from raptor_hf.scripts import _config
    from raptor_hf.scripts.train import TYPES, ModelArguments

    if Path(args.model).suffix in (".yaml", ".yml"):
        # all of it is parsed, so that a setting that training would refuse is refused here
        model, data, config = _config.parse_dataclasses(TYPES, [args.model], prog=PROG)
        engine = config.grad_sample_mode
    else:
        model, data, engine = ModelArguments(model_name_or_path=args.model), DataArguments(), "functorch"
    if args.data is not None:
        data.dataset_name, data.train_file, data.validation_file, data.public_file = None, args.data, None, None
    model.model_revision = args.revision or model.model_revision
    model.dtype = args.dtype or model.dtype
    data.max_seq_length = args.max_length or data.max_seq_length
    data.max_train_samples = 3
    data.max_eval_samples = 3
    return model, data, args.engine or engine


def _made_up(vocabulary: int) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": [(7 * row + 3 * place + 11) % vocabulary for place in range(length)],
            "attention_mask": [1] * length,
            "labels": row % 2,
        }
        for row, length in enumerate(_LENGTHS)
    ]


def _print(report: Any, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    if not report.findings:
        print(f"{title}: nothing found that would break the guarantee.")
    else:
        table = Table(title=title, show_lines=True)
        for column in ("severity", "what", "why it matters", "what to do"):
            table.add_column(column, overflow="fold")
        for finding in report.findings:
            table.add_row(finding.severity, finding.what, finding.why, finding.instead)
        Console().print(table)
    if report.layout is not None:
        for layer in report.layout.sparse_layers:
            print(f"sparse block {layer.index}: {layer.num_experts} experts, {layer.top_k} a token")


if __name__ == "__main__":
    raise SystemExit(main())
