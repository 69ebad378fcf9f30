"""Prompts and completions for causal language models, and the choice among several completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raptor_hf.errors import PrivacyConfigError

__all__ = ["IGNORED", "CompletionCollator", "choose", "completion_log_likelihoods", "encode_completion"]

IGNORED = -100
"""The label of a token that is not supervised: the prompt's, and padding."""

# What collators and datasets of packed rows call the places where one record ends and the next begins.
_PACKED = ("seq_lengths", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k")


def encode_completion(
    tokenizer: Any, prompt: str, completion: str, *, max_length: int | None = None, end: bool = True
) -> dict[str, list[int]]:
    """One record: `input_ids`, `attention_mask`, and `labels` that are -100 on the prompt.

    Args:
        max_length: longer records lose tokens from the start of the prompt, then from the end of the completion.
        end: close the completion with the tokenizer's end-of-sequence token.
    """
    eos = tokenizer.eos_token_id
    first = list(tokenizer(prompt)["input_ids"])
    while first and first[-1] == eos:
        first.pop()
    second = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    if end and eos is not None:
        second.append(eos)
    if max_length is not None:
        second = second[:max_length]
        first = first[len(first) - min(len(first), max_length - len(second)) :]
    ids = first + second
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [IGNORED] * len(first) + second}


@dataclass
class CompletionCollator:
    """Pads on the right and stacks: one row a record, `labels` -100 on padding.

    A record without tokens becomes one padding token; without a supervised token its loss and gradient are zero.

    Attributes:
        pad_token_id: any id: padding is masked. max_length: refuse longer records (the model's limit).

    Raises:
        PrivacyConfigError: records that are packed rows of several, or too long.
    """

    pad_token_id: int = 0
    max_length: int | None = None

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [self._row(record) for record in records]
        width = max([1, *(len(row["input_ids"]) for row in rows)])
        fill = {"input_ids": self.pad_token_id, "attention_mask": 0, "labels": IGNORED}
        return {
            key: torch.tensor([row[key] + [value] * (width - len(row[key])) for row in rows], dtype=torch.long)
            for key, value in fill.items()
        }

    def _row(self, record: Mapping[str, Any]) -> dict[str, list[int]]:
        for name in _PACKED:
            if name in record:
                raise PrivacyConfigError(
                    f"A record with `{name}` was given",
                    "It is a packed row of several records: they would be clipped as one, and each would be protected "
                    "only as far as it fills a row alone",
                    "Turn packing off, and give one record a row",
                )
        ids = [int(token) for token in record["input_ids"]]
        if self.max_length is not None and len(ids) > self.max_length:
            raise PrivacyConfigError(
                f"A record of more than {self.max_length} tokens was given",
                "The model was not made for such lengths",
                "Cut the records beforehand, e.g. `encode_completion(..., max_length=...)`",
            )
        row = {
            "input_ids": ids,
            "attention_mask": [int(m) for m in record.get("attention_mask", [1] * len(ids))],
            "labels": [int(label) for label in record.get("labels", [IGNORED] * len(ids))],
        }
        if len({len(values) for values in row.values()}) != 1:
            raise PrivacyConfigError(
                "A record was given whose labels or mask are not as many as its tokens",
                "Which tokens are supervised cannot be told",
                "Give every token a label; -100 for those that are not supervised",
            )
        return row


@torch.no_grad()
def completion_log_likelihoods(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(B,) sums of the log-probabilities of each row's supervised tokens."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    supervised = labels != IGNORED
    picked = logits.log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return (picked * supervised).sum(-1)


def choose(
    model: nn.Module, tokenizer: Any, prompt: str, choices: Sequence[str], *, per_token: bool = False
) -> tuple[int, list[float]]:
    """The choice that the model finds likeliest after the prompt, and every choice's log-likelihood.

    Args:
        per_token: divide by the number of the choice's tokens, so that long choices are not at a disadvantage.
    """
    records = [encode_completion(tokenizer, prompt, choice, end=False) for choice in choices]
    device = next(model.parameters()).device
    batch = {key: value.to(device) for key, value in CompletionCollator()(records).items()}
    training = model.training
    model.eval()
    try:
        scores = completion_log_likelihoods(model, batch)
    finally:
        model.train(training)
    if per_token:
        scores = scores / (batch["labels"] != IGNORED).sum(-1).clamp_min(1)
    values = [float(score) for score in scores]
    return max(range(len(values)), key=values.__getitem__), values
