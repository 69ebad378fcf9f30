"""How the quickstart's learning rate, batch size and epochs were chosen: on public data only.

    python benchmarks/tune_quickstart.py

The stand-in for the private task is made of IMDb sentences (public) with the label of their review: a noisy sentiment
task of the same size and format. Every setting is trained at epsilon 8 and scored on held-out IMDb sentences. Rotten
Tomatoes is never read.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import warnings

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from raptor_hf import RaptorConfig, RaptorTrainer, SwitchTransformersForSequenceClassification
from raptor_hf.assets import tiny_switch_path
from raptor_hf.data import classification_metrics
from raptor_hf.data.demo import labelled_imdb_sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[500, 1000])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[2e-3, 5e-3, 1e-2])
    parser.add_argument("--epochs", type=float, nargs="+", default=[4])
    parser.add_argument("--budget-splits", type=float, nargs="+", default=[0.9])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--shared-norms", type=float, nargs="+", default=[1.0])
    parser.add_argument("--expert-norms", type=float, nargs="+", default=[1.0])
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    tokenizer = AutoTokenizer.from_pretrained(tiny_switch_path())
    rows = labelled_imdb_sentences(9_500, seed=1)
    random.Random(1).shuffle(rows)
    data = Dataset.from_list(rows).map(lambda r: tokenizer(r["text"], truncation=True, max_length=64), batched=True)
    train, test = data.select(range(7_500)), data.select(range(7_500, 9_500))
    settings = itertools.product(
        args.batch_sizes, args.learning_rates, args.epochs, args.budget_splits, args.ranks, args.shared_norms,
        args.expert_norms, range(args.repeats),
    )  # fmt: skip
    for batch, rate, epochs, split, rank, shared_norm, expert_norm, _ in settings:
        model = SwitchTransformersForSequenceClassification.from_pretrained(
            tiny_switch_path(), num_labels=2, dtype=torch.float32
        )
        with tempfile.TemporaryDirectory() as folder:
            trainer = RaptorTrainer(
                model,
                RaptorConfig(
                    folder,
                    target_epsilon=8.0,
                    expected_batch_size=batch,
                    per_device_train_batch_size=64,
                    per_device_eval_batch_size=256,
                    num_train_epochs=epochs,
                    learning_rate=rate,
                    budget_split=split,
                    shared_max_grad_norm=shared_norm,
                    expert_max_grad_norm=expert_norm,
                    lora_rank=rank,
                    lora_alpha=rank,
                    lr_scheduler_type="cosine",
                    warmup_steps=0.1,
                    save_strategy="no",
                    report_to=[],
                    disable_tqdm=True,
                    logging_steps=1000,
                    protected_layer="last",
                ),
                train_dataset=train,
                eval_dataset=test,
                processing_class=tokenizer,
                compute_metrics=classification_metrics(),
            )
            trainer.train()
            accuracy = trainer.evaluate()["eval_accuracy"]
        print(
            f"B={batch} lr={rate:g} epochs={epochs:g} rho={split:g} rank={rank} "
            f"C_s={shared_norm:g} C_e={expert_norm:g}: accuracy {accuracy:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
