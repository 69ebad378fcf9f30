"""`raptor-hf check MODEL [--data FILE]`: what in a model would break the guarantee, before any training.

The structure is read, and a few records go through the model in train mode: a record's values must not move with its
neighbours. Exit code 1 when there is an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["main", "make_parser"]

# Made-up records when no data is given; lengths differ, so that there is padding.
_LENGTHS = (5, 9, 3)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = argparse.ArgumentParser(prog="raptor-hf check", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", metavar="MODEL", help="path, Hub id, or 'tiny-switch' (the bundled model)")
    parser.add_argument("--data", metavar="FILE", help=".csv, .tsv, .json or .jsonl with a text and a label column")
    parser.add_argument("--revision", default="main", help="revision on the Hub (default: %(default)s)")
    parser.add_argument("--engine", default="functorch", choices=("functorch", "hooks", "reference"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="type of the base weights")
    parser.add_argument("--max-length", type=int, default=128, help="longer records are cut (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings. Returns 1 when there is an error among them, else 0."""
    args = make_parser().parse_args(argv)
    from transformers import DataCollatorWithPadding

    from raptor_hf.checks import check_model
    from raptor_hf.data import DataArguments, load_task, tokenize_task

    task = None if args.data is None else load_task(DataArguments(train_file=args.data, max_train_samples=3))
    model, tokenizer = _load(args, 2 if task is None else max(2, len(task.labels)))
    if task is None:
        records = _made_up(min(len(tokenizer), model.config.vocab_size))
    else:
        records = list(tokenize_task(task, tokenizer, args.max_length).train)
    report = check_model(
        model, records=records, collate=DataCollatorWithPadding(tokenizer), mode=args.engine, raise_on_error=False
    )
    source = "made-up records" if args.data is None else f"the first {len(records)} records of {args.data}"
    _print(report, f"{args.model}, {source}, {args.engine} engine")
    return 1 if report.errors else 0


def _load(args: argparse.Namespace, num_labels: int) -> tuple[Any, Any]:
    """The model with a classification head of any weights: what is checked does not depend on them."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    import raptor_hf.models  # noqa: F401 (registers what transformers lacks with the Auto classes)
    from raptor_hf.assets import tiny_switch_path

    name, options = args.model, {"revision": args.revision}
    if name == "tiny-switch":
        name, options = str(tiny_switch_path()), {}
    model = AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=num_labels, dtype=getattr(torch, args.dtype), ignore_mismatched_sizes=True, **options
    )
    return model, AutoTokenizer.from_pretrained(name, **options)


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
