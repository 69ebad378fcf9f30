"""Privately fine-tune the bundled tiny Switch on Rotten Tomatoes sentences: offline, on a CPU, in minutes."""

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from raptor_hf import RaptorConfig, RaptorTrainer
from raptor_hf.assets import tiny_switch_path
from raptor_hf.data import classification_metrics, imdb_sentences, rotten_tomatoes

base = tiny_switch_path()
tokenizer = AutoTokenizer.from_pretrained(base)
model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2, dtype=torch.float32)


def tokenize(rows):
    return tokenizer(rows["text"], truncation=True, max_length=64)


train, test = (Dataset.from_list(rows).map(tokenize, batched=True) for rows in rotten_tomatoes(7_500))
public = Dataset.from_dict({"text": imdb_sentences(2_000)}).map(tokenize, batched=True)
args = RaptorConfig(
    output_dir="outputs/quickstart",
    target_epsilon=8.0,
    expected_batch_size=500,  # B, the logical batch
    per_device_train_batch_size=64,  # the micro-batch: memory only
    num_train_epochs=4,
    learning_rate=5e-3,
    lr_scheduler_type="cosine",
    save_strategy="no",
)
trainer = RaptorTrainer(
    model, args, train_dataset=train, eval_dataset=test, public_dataset=public,
    processing_class=tokenizer, compute_metrics=classification_metrics(),
)  # fmt: skip
trainer.train()
print(trainer.evaluate()["eval_accuracy"], trainer.privacy_statement().verdict)
trainer.save_model()
