"""Log-likelihoods of choices against one forward pass a choice, without padding, of a stock model."""

from __future__ import annotations

import pytest
import torch

from raptor_hf.data import CompletionCollator, choice_log_likelihoods
from tests.families import build


def record(prompt, choice):
    ids = [*prompt, *choice]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * len(prompt) + list(choice)}


def by_hand(model, item):
    """Sum of log-probabilities from the second token on, in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([item["input_ids"]])).logits[0].double()
    probabilities = logits.softmax(-1)
    pairs = enumerate(item["labels"])
    return sum(float(probabilities[t - 1, label].log()) for t, label in pairs if t > 0 and label != -100)


LETTERS = [record([3, 4, 5], [letter]) for letter in (11, 12, 13)]
LONG = [record([6, 7], choice) for choice in ([9, 8], [9], [9, 8, 10, 11])]
SHORT = [record([3], [letter]) for letter in (20, 21)]
ODD = [record([], [9, 8]), record([5], [7]), record([5, 6], [7])]
WITHOUT_PROMPT = [record([], [7]), record([], [8])]
OTHER_PROMPTS = [record([3, 4], [7]), record([5, 6], [7])]
QUESTIONS = [LETTERS, LONG, SHORT, ODD, WITHOUT_PROMPT, LETTERS[::-1], OTHER_PROMPTS]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_against_one_pass_a_choice(batch_size):
    model = build("olmoe", head="lm").train()
    seen = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((module.training, *kwargs["input_ids"].shape)), with_kwargs=True
    )
    scores = choice_log_likelihoods(model, QUESTIONS, CompletionCollator(), batch_size=batch_size)
    handle.remove()
    # letters of one question share a row; the model is put back into the mode it was in
    assert sum(rows for _, rows, _ in seen) == 1 + 3 + 1 + 3 + 2 + 1 + 2
    assert not any(training for training, *_ in seen) and model.training
    assert all(rows <= batch_size for _, rows, _ in seen)
    model.eval()
    expected = [[by_hand(model, item) for item in some] for some in QUESTIONS]
    assert [len(some) for some in scores] == [len(some) for some in expected]
    for some, others in zip(scores, expected, strict=True):
        assert some == pytest.approx(others, abs=2e-5)
    assert scores[4] == [0.0, 0.0]  # nothing predicts a first token
    assert len({round(value, 3) for some in expected[:4] for value in some}) > 8
