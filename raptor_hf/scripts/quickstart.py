"""`raptor-hf quickstart`: the whole job on the bundled tiny Switch and real sentences, offline, in minutes.

Routing table on public IMDb sentences -> protected layer; owner map; private training on Rotten Tomatoes sentences;
evaluation on the held-out ones; adapter, tokenizer and privacy statement saved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = argparse.ArgumentParser(prog="raptor-hf quickstart", description=__doc__.split("\n\n")[0])
    parser.add_argument("--output-dir", default="outputs/quickstart", help="where adapter, statement and plot go")
    parser.add_argument("--epsilon", type=float, default=8.0, help="target epsilon of the run")
    parser.add_argument("--epochs", type=float, default=4.0, help="epochs (an epoch is n / B cycles)")
    parser.add_argument("--batch-size", type=int, default=500, help="B, records a stream draws in a cycle, expected")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="learning rate of both streams")
    parser.add_argument("--train-size", type=int, default=7_500, help="private sentences to train on")
    parser.add_argument("--public-size", type=int, default=2_000, help="public sentences to choose the layer on")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    args = make_parser().parse_args(argv)
    began = time.perf_counter()
    from raptor_hf.analysis import plot_routing_table
    from raptor_hf.config import RaptorConfig
    from raptor_hf.data import DataArguments, load_task, tokenize_task
    from raptor_hf.scripts._summary import print_summary
    from raptor_hf.scripts.train import ModelArguments, load_model, run

    config = RaptorConfig(
        output_dir=args.output_dir,
        target_epsilon=args.epsilon,
        num_train_epochs=args.epochs,
        expected_batch_size=args.batch_size,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=128,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
    )
    task = load_task(DataArguments(dataset_name="rotten_tomatoes_demo", max_train_samples=args.train_size))
    assert task.public is not None  # the demo has a public corpus
    task = replace(task, public=task.public.select(range(min(args.public_size, len(task.public)))))
    model, tokenizer = load_model(ModelArguments(), **task.head)
    trainer, metrics = run(model, tokenizer, tokenize_task(task, tokenizer, max_length=64), config)
    selection = trainer.layer_selection
    plot = Path(args.output_dir) / "routing_table.png"
    plot_routing_table(selection.table, plot, chosen=selection.layer)
    extra = {
        "owner entropy / log E, public": ", ".join(
            f"block {row['block']}: {row['normalised_entropy']:.3f}" for row in selection.table
        ),
        "time": f"{time.perf_counter() - began:.0f} s",
        "saved": f"{args.output_dir} (adapter, tokenizer, privacy.json), {plot}",
    }
    print_summary(trainer, metrics, extra)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
