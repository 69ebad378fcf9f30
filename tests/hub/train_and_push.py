"""Run by `test_end_to_end.py` in a process of its own: load a base model from the Hub, train, push.

python train_and_push.py CANARY SEED OUTPUT_DIR PREDICTIONS
"""

from __future__ import annotations

import json
import sys

import torch
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorWithPadding

from raptor_hf import RaptorConfig, RaptorTrainer, SwitchTransformersForSequenceClassification

BASE, REPO = "example-org/base", "example-org/adapter"
TEXTS = ["w5 w6 w7", "w8 w9 w10 w11", "w12 w40 w41 w42 w43"]


def main(canary: str, seed: str, output: str, predictions: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = SwitchTransformersForSequenceClassification.from_pretrained(BASE, num_labels=3)
    texts = [f"w{2 + i} w{3 + i} w{4 + 2 * (i % 20)}" for i in range(23)] + [canary]
    rows = Dataset.from_dict({"text": texts, "labels": [i % 3 for i in range(24)]})
    args = RaptorConfig(
        output_dir=output, push_to_hub=True, hub_model_id=REPO, hub_strategy="every_save", hub_private_repo=True,
        save_strategy="steps", save_steps=1, max_steps=2, seed=int(seed), use_cpu=True, report_to="none",
        logging_steps=1, disable_tqdm=True, expected_batch_size=8, per_device_train_batch_size=4, learning_rate=0.1,
        optim="sgd", shared_noise_multiplier=1.0, expert_noise_multiplier=1.0, lora_rank=2,
    )  # fmt: skip
    trainer = RaptorTrainer(
        model,
        args,
        train_dataset=rows.map(lambda row: tokenizer(row["text"])),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    trainer.push_to_hub(license="mit", labels=["bad", "so so", "good"])
    if not trainer.is_world_process_zero():
        return
    with torch.no_grad():
        logits = model.eval()(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits
    with open(predictions, "w") as file:
        json.dump(logits.tolist(), file)


if __name__ == "__main__":
    main(*sys.argv[1:])
