"""Fine-tune a sparse model on a GLUE task, or on your own CSV, TSV or JSON files, with differential privacy.

The script has the shape of the plain `run_glue.py` of transformers. What makes it private: the import, the config
class, and the privacy arguments.

    python examples/run_glue.py --model_name_or_path google/switch-base-8 --task_name sst2 \
        --target_epsilon 8 --expected_batch_size 1000 --per_device_train_batch_size 32 \
        --num_train_epochs 20 --learning_rate 1e-3 --output_dir outputs/sst2 --do_train --do_eval

    python examples/run_glue.py --model_name_or_path tiny-switch --train_file private.csv --validation_file test.csv \
        --class_names negative positive --target_epsilon 8 --output_dir outputs/mine --do_train --do_eval
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import evaluate
import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    set_seed,
)

from raptor_hf import RaptorConfig, RaptorTrainer
from raptor_hf.assets import tiny_switch_path
from raptor_hf.data.metrics import Accuracy

TASK_TO_KEYS = {
    "cola": ("sentence", None),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence", None),
    "wnli": ("sentence1", "sentence2"),
}


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "Hub id or path; 'tiny-switch' is the bundled model."})
    task_name: str | None = field(default=None, metadata={"help": f"A GLUE task: {', '.join(TASK_TO_KEYS)}."})
    train_file: str | None = field(default=None, metadata={"help": "Private records: .csv, .tsv, .json or .jsonl."})
    validation_file: str | None = field(default=None, metadata={"help": "Evaluation records, same columns."})
    public_file: str | None = field(default=None, metadata={"help": "Public records, to choose the layer on."})
    sentence1_key: str | None = field(default=None, metadata={"help": "Text column of the files."})
    sentence2_key: str | None = field(default=None, metadata={"help": "Second text column of the files."})
    class_names: list[str] | None = field(
        default=None, metadata={"help": "All labels that the files can have; their number and names are published."}
    )
    max_seq_length: int = field(default=128, metadata={"help": "Longer records are cut, in tokens."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many records."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many records."})


def read_files(args: ScriptArguments) -> datasets.DatasetDict:
    files = {"train": args.train_file, "validation": args.validation_file, "public": args.public_file}
    files = {split: path for split, path in files.items() if path is not None}
    splits = datasets.DatasetDict()
    for split, path in files.items():
        suffix = Path(path).suffix
        builder = "json" if suffix in (".json", ".jsonl") else "csv"
        options = {"sep": "\t"} if suffix == ".tsv" else {}
        splits[split] = datasets.load_dataset(builder, data_files=path, split="train", **options)
    return splits


def load_metric(task_name: str | None):
    try:
        return evaluate.load("glue", task_name) if task_name else Accuracy(keep_in_memory=True)
    except (ConnectionError, FileNotFoundError, OSError) as error:
        print(f"The GLUE metric needs the Hub ({type(error).__name__}); accuracy is computed instead.", file=sys.stderr)
        return Accuracy(keep_in_memory=True)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, RaptorConfig))
    args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    # Records
    if args.task_name is not None:
        raw = datasets.load_dataset("nyu-mll/glue", args.task_name)
        keys = TASK_TO_KEYS[args.task_name]
    elif args.train_file is not None:
        raw = read_files(args)
        text = [name for name in raw["train"].column_names if name not in ("label", "idx", "id")]
        keys = (args.sentence1_key or text[0], args.sentence2_key)
    else:
        raise SystemExit("Give --task_name or --train_file.")
    named = hasattr(raw["train"].features["label"], "names")
    label_list = raw["train"].features["label"].names if named else args.class_names
    if label_list is None:
        # the head's size is published: it must not tell which labels occur in the private records
        raise SystemExit("Name the labels that the files can have: --class_names negative positive")
    label_ids = {label: index for index, label in enumerate(label_list)}

    # Model
    name = str(tiny_switch_path()) if args.model_name_or_path == "tiny-switch" else args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=len(label_list), id2label=dict(enumerate(label_list)), label2id=label_ids, dtype=torch.float32
    )

    def preprocess(rows):
        texts = [rows[key] for key in keys if key is not None]
        result = tokenizer(*texts, max_length=args.max_seq_length, truncation=True)
        if "label" in rows:
            result["labels"] = rows["label"] if named else [label_ids[str(label)] for label in rows["label"]]
        return result

    encoded = raw.map(preprocess, batched=True, remove_columns=raw["train"].column_names)
    train = encoded["train"]
    if args.max_train_samples is not None:
        train = train.select(range(min(args.max_train_samples, len(train))))
    evaluation = encoded.get("validation") or encoded.get("validation_matched")
    if evaluation is not None and args.max_eval_samples is not None:
        evaluation = evaluation.select(range(min(args.max_eval_samples, len(evaluation))))

    # Metrics
    metric = load_metric(args.task_name)

    def compute_metrics(p: EvalPrediction):
        return metric.compute(predictions=np.argmax(p.predictions, axis=1), references=p.label_ids)

    # Training
    trainer = RaptorTrainer(
        model=model,
        args=training_args,
        train_dataset=train if training_args.do_train else None,
        eval_dataset=evaluation if training_args.do_eval else None,
        public_dataset=encoded.get("public"),
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        print(json.dumps(json.loads(trainer.privacy_statement().to_json())["verdict"]))
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
