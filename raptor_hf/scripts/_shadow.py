"""The worker of `raptor-hf audit --attack lira`: trains shadow models and scores the pool by each.

    python -m raptor_hf.scripts._shadow AUDIT_FOLDER CELL:SHADOW [CELL:SHADOW ...]

Run by the audit, also through `accelerate launch`: then all processes train one model, and the main one scores it.
"""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raptor_hf.audit.folder import read_arrays, write_arrays
from raptor_hf.audit.scores import record_scores
from raptor_hf.audit.shadows import Task, result_path
from raptor_hf.scripts._audit import Records, parse_cell

__all__ = ["main", "train_shadow"]

PLAN = "plan.npz"
_SEED = 10_000


def train_shadow(folder: Path, task: Task, records: dict[str, Records]) -> None:
    """Train one shadow on its half, score the whole pool, and write the result."""
    from transformers import DataCollatorWithPadding, set_seed

    from raptor_hf.data import classification_metrics
    from raptor_hf.trainer import RaptorTrainer

    plan = read_arrays(folder / PLAN)
    mask, pool = plan["masks"][task.shadow], plan["pool"]
    output = folder / "work" / f"{task.cell}-{task.shadow}"
    model_args, data_args, args = parse_cell(folder, task.cell, output_dir=str(output), seed=_SEED + task.shadow)
    data = records.setdefault(repr(data_args), Records(model_args, data_args))
    # The head and the adapters start from here; the noise and the coins never do.
    set_seed(args.seed)
    model, tokenizer = data.model()
    text = data.task(tokenizer)
    collator = DataCollatorWithPadding(tokenizer)
    started = time.monotonic()
    trainer = RaptorTrainer(
        model=model,
        args=args,
        train_dataset=text.train.select(pool[mask]),
        eval_dataset=text.evaluation,
        public_dataset=text.public,
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=classification_metrics(),
    )
    trainer.train()
    seconds = time.monotonic() - started
    accuracy = trainer.evaluate()["eval_accuracy"] if text.evaluation is not None else float("nan")
    if trainer.is_world_process_zero():
        statement = trainer.privacy_statement()
        found = record_scores(trainer.model, text.train.select(pool), collator, args.per_device_eval_batch_size)
        write_arrays(
            result_path(folder, task),
            losses=found.loss,
            confidences=found.confidence,
            masks=mask,
            accuracies=np.float64(accuracy),
            epsilons=np.float64(np.inf if statement.epsilon_spent is None else statement.epsilon_spent),
            deltas=np.float64(statement.delta),
            seconds=np.float64(seconds),
        )
        shutil.rmtree(output)  # a model of private records, and its owner map
    trainer.accelerator.wait_for_everyone()


def main(argv: Sequence[str] | None = None) -> int:
    """Do the tasks in turn; those whose results are there are left out."""
    folder, *tasks = list(sys.argv[1:] if argv is None else argv)
    warnings.simplefilter("ignore")
    records: dict[str, Records] = {}
    for task in map(Task.parse, tasks):
        if not result_path(Path(folder), task).is_file():
            train_shadow(Path(folder), task, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
