"""Run by `test_end_to_end.py` in a process of its own, with an empty cache: verify, load, predict."""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoTokenizer, pipeline

from raptor_hf import load_release
from raptor_hf.cli import main as command

REPO = "example-org/adapter"


def main(texts: str) -> None:
    print("VERIFY")
    status = command(["verify", REPO, "--json", "--require-private"])
    print("LOAD")
    sentences = json.loads(texts)
    model, tokenizer = load_release(REPO), AutoTokenizer.from_pretrained(REPO)
    with torch.no_grad():
        logits = model(**tokenizer(sentences, padding=True, return_tensors="pt")).logits
    classify = pipeline("text-classification", model=model, tokenizer=REPO)
    labels = [row["label"] for row in classify(sentences)]
    print(json.dumps({"status": status, "logits": logits.tolist(), "labels": labels}))


if __name__ == "__main__":
    main(*sys.argv[1:])
