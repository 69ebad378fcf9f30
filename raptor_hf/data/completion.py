"""Prompts and completions for causal language models."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raptor_hf.errors import PrivacyConfigError

__all__ = ["IGNORED", "CompletionCollator", "completion_log_likelihoods", "encode_completion"]

IGNORED = -100
"""The label of a token that is not supervised: the prompt's, and padding."""

# What collators and datasets of packed rows call the places where one record ends and the next begins.
_PACKED = ("seq_lengths", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k")


def encode_completion(
    tokenizer: Any,
    prompt: str,
    completion: str,
    *,
    max_length: int | None = None,
    end: bool = True,
    keep: Container[int] = (),
) -> dict[str, list[int]]:
    """One record: `input_ids`, `attention_mask`, and `labels` that are -100 on the prompt.

    Args:
        max_length: longer records lose tokens from the start of the prompt, then from the end of the completion.
        end: close the completion with the tokenizer's end-of-sequence token.
        keep: tokens that the prompt does not lose; if these alone are too many, the record stays longer.
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
        first = _shortened(first, max_length - len(second), keep)
    ids = first + second
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [IGNORED] * len(first) + second}


def _shortened(ids: list[int], length: int, keep: Container[int]) -> list[int]:
    """Without as many of the first tokens as there are too many, those to keep not counted."""
    excess = len(ids) - length
    left = []
    for token in ids:
        if excess > 0 and token not in keep:
            excess -= 1
        else:
            left.append(token)
    return left


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
