"""`raptor-hf train CONFIG.yaml [--field value ...]`: private fine-tuning for text classification.

Every field of `RaptorConfig`, `DataArguments` and `ModelArguments` is a flag and a YAML key.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raptor_hf.config import RaptorConfig
from raptor_hf.data import DataArguments, TextTask, classification_metrics, load_task, tokenize_task
from raptor_hf.errors import RaptorError, UnsupportedModelError
from raptor_hf.hub.contents import WEIGHTS
from raptor_hf.scripts import _config
from raptor_hf.scripts._summary import print_summary

__all__ = ["ModelArguments", "load_model", "main", "make_parser", "run"]

PROG = "raptor-hf train"


@dataclass
class ModelArguments:
    """Which base model."""

    model_name_or_path: str = field(
        default="tiny-switch", metadata={"help": "Hub id or path of the base model; 'tiny-switch' is the bundled one."}
    )
    model_revision: str = field(default="main", metadata={"help": "Revision of the base model on the Hub."})
    dtype: str = field(default="float32", metadata={"help": "Type of the frozen base weights: float32 or bfloat16."})


TYPES = (ModelArguments, DataArguments, RaptorConfig)


def make_parser() -> Any:
    """The parser of the command's flags."""
    return _config.make_parser(TYPES, prog=PROG)


def load_model(args: ModelArguments, num_labels: int, **more: Any) -> tuple[Any, Any]:
    """The base classifier and its tokenizer.

    Args:
        more: further options of `from_pretrained` of the model, such as the classes' names (`TextTask.head`).

    Raises:
        UnsupportedModelError: there is no such model, or none that can be loaded.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    import raptor_hf.models  # noqa: F401 (registers what transformers lacks with the Auto classes)
    from raptor_hf.assets import tiny_switch_path

    name, options = args.model_name_or_path, {"revision": args.model_revision}
    if name == "tiny-switch":
        name, options = str(tiny_switch_path()), {}
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=num_labels, dtype=getattr(torch, args.dtype), **options, **more
        )
        return model, AutoTokenizer.from_pretrained(name, **options)
    except RaptorError:
        raise
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedModelError(
            f"The model `{args.model_name_or_path}` (revision {args.model_revision}) could not be loaded",
            f"{reason.rstrip('.')}. Nothing is known of a model that is not there",
            "Give a folder with a model and its tokenizer, the id of a model on the Hub (with a connection, and with "
            "`hf auth login` if it is gated), or tiny-switch",
        ) from error


def run(model: Any, tokenizer: Any, task: TextTask, args: RaptorConfig) -> tuple[Any, dict[str, float]]:
    """Train, evaluate and save; returns the trainer and the evaluation's metrics."""
    from transformers import DataCollatorWithPadding

    from raptor_hf.trainer import RaptorTrainer

    trainer = RaptorTrainer(
        model=model,
        args=args,
        train_dataset=task.train,
        eval_dataset=task.evaluation,
        public_dataset=task.public,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=classification_metrics(),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate() if task.evaluation is not None else {}
    trainer.save_model()
    return trainer, metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(flag in arguments for flag in ("-h", "--help")):
        make_parser().print_help()
        return 0
    model_args, data_args, args = _config.parse_dataclasses(TYPES, arguments, prog=PROG)
    task = load_task(data_args)
    model, tokenizer = load_model(model_args, **task.head)
    task = tokenize_task(task, tokenizer, data_args.max_seq_length)
    trainer, metrics = run(model, tokenizer, task, args)
    print_summary(trainer, metrics)
    if trainer.privacy_statement().private and (Path(args.output_dir) / WEIGHTS).is_file():
        command = ["raptor-hf", "export", args.output_dir, "RELEASE", "--labels", *task.labels]
        print(f"to publish the adapter: {shlex.join(command)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
