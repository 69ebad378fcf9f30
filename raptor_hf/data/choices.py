"""Multiple choice by a causal language model: the likeliest completion of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raptor_hf.data.completion import IGNORED, CompletionCollator, encode_completion

__all__ = ["choice_log_likelihoods", "choose"]

Record = Mapping[str, Any]


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@torch.no_grad()
def choice_log_likelihoods(
    model: nn.Module,
    questions: Sequence[Sequence[Record]],
    collate: Callable[[list], Mapping[str, torch.Tensor]],
    *,
    batch_size: int = 8,
) -> list[list[float]]:
    """The log-likelihood of every choice of every question.

    Args:
        questions: for each question one record a choice, as `encode_completion(..., end=False)` makes them. Choices of
            a question that differ in their last token alone, such as letters, are read off one row.
        collate: records -> batch. batch_size: rows in a forward pass.
    """
    rows = [(q, c, choices) for q, some in enumerate(questions) for c, choices in _rows(some)]
    rows.sort(key=lambda row: len(row[2][0]["input_ids"]))
    scores = [[0.0] * len(some) for some in questions]
    device = next(model.parameters()).device
    with _evaluation(model):
        for start in range(0, len(rows), batch_size):
            chunk = rows[start : start + batch_size]
            batch = {key: value.to(device) for key, value in collate([some[0] for _, _, some in chunk]).items()}
            logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
            for (q, c, some), row in zip(chunk, logits, strict=True):
                scores[q][c : c + len(some)] = _scores(row, some)
    return scores


def _rows(choices: Sequence[Record]) -> Iterator[tuple[int, Sequence[Record]]]:
    """(place of the first choice, choices that one row scores)."""
    beginnings = {tuple(record["input_ids"][:-1]) for record in choices}
    last_alone = all(sum(label != IGNORED for label in record["labels"]) == 1 and record["labels"][-1] != IGNORED
                     for record in choices)  # fmt: skip
    if len(beginnings) == 1 and last_alone and len(next(iter(beginnings))):
        yield 0, choices
    else:
        yield from ((place, [record]) for place, record in enumerate(choices))


def _scores(logits: torch.Tensor, choices: Sequence[Record]) -> list[float]:
    """The log-likelihoods of choices that stand at the same places of one row. logits (T, vocabulary)."""
    rows = [list(record["labels"][1:]) for record in choices]
    labels = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    places = (labels[0] != IGNORED).nonzero().squeeze(-1)
    following = logits[places].float().log_softmax(-1)  # (places, vocabulary)
    picked = following.gather(-1, labels[:, places].T)  # (places, choices)
    return picked.sum(0).tolist()


def choose(
    model: nn.Module, tokenizer: Any, prompt: str, choices: Sequence[str], *, per_token: bool = False
) -> tuple[int, list[float]]:
    """The choice that the model finds likeliest after the prompt, and every choice's log-likelihood.

    Args:
        per_token: divide by the number of the choice's tokens, so that long choices are not at a disadvantage.
    """
    records = [encode_completion(tokenizer, prompt, choice, end=False) for choice in choices]
    values = choice_log_likelihoods(model, [records], CompletionCollator(), batch_size=len(records))[0]
    if per_token:
        supervised = [sum(label != IGNORED for label in record["labels"]) for record in records]
        values = [value / max(1, count) for value, count in zip(values, supervised, strict=True)]
    return max(range(len(values)), key=values.__getitem__), values
