"""What the bundled tiny Switch can reach without privacy: LoRA on attention and one layer's experts, Rotten Tomatoes.

    python benchmarks/nonprivate_tiny_switch.py --seeds 3

The plain Hugging Face Trainer trains the same adapters and head that RaptorTrainer does. Test accuracy after the last
epoch, no model selection.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from raptor_hf import SwitchTransformersForSequenceClassification, attach_adapters
from raptor_hf.assets import tiny_switch_path
from raptor_hf.data import rotten_tomatoes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(tiny_switch_path()))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layer", default="last")
    args = parser.parse_args()
    warnings.simplefilter("ignore")

    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def tokenize(rows):
        return tokenizer(rows["text"], truncation=True, max_length=64)

    train, test = (Dataset.from_list(rows).map(tokenize, batched=True) for rows in rotten_tomatoes())
    accuracies = []
    for seed in range(args.seeds):
        set_seed(seed)
        model = SwitchTransformersForSequenceClassification.from_pretrained(
            args.model, num_labels=2, dtype=torch.float32
        )
        attach_adapters(model, LoraConfig(r=args.rank, lora_alpha=args.rank), args.layer)
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                model,
                TrainingArguments(
                    folder,
                    seed=seed,
                    num_train_epochs=args.epochs,
                    learning_rate=args.learning_rate,
                    per_device_train_batch_size=64,
                    per_device_eval_batch_size=256,
                    train_sampling_strategy="group_by_length",
                    lr_scheduler_type="cosine",
                    weight_decay=0.01,
                    save_strategy="no",
                    eval_strategy="epoch",
                    report_to=[],
                    logging_steps=1000,
                ),
                train_dataset=train,
                eval_dataset=test,
                data_collator=DataCollatorWithPadding(tokenizer),
                compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
            )
            trainer.train()
            accuracies.append(trainer.evaluate()["eval_accuracy"])
            print(f"seed {seed}: {accuracies[-1]:.4f}", flush=True)
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else float("nan")
    print(f"test accuracy {statistics.mean(accuracies):.4f} (standard deviation {spread:.4f}, {len(accuracies)} seeds)")


if __name__ == "__main__":
    main()
