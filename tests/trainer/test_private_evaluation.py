"""Evaluation on the training records is refused; data sets that draw random numbers do not couple records."""

import random

import numpy as np
import pytest
import torch
from datasets import Dataset

from raptor_hf import PrivacyConfigError
from raptor_hf.privacy._card import round_up_delta
from raptor_hf.privacy.noise import EntropySource
from raptor_hf.streams import secret_masks
from tests.helpers import tiny_records
from tests.trainer.build import make_trainer

TRAIN, OTHER = tiny_records(24, seed=5), tiny_records(12, seed=6)


@pytest.mark.parametrize(
    "evaluation",
    [
        Dataset.from_list(TRAIN),
        Dataset.from_list(TRAIN).select(range(4, 9)),
        {"held_out": Dataset.from_list(OTHER), "train": Dataset.from_list(TRAIN)},
    ],
    ids=["all", "a part", "one of several"],
)
def test_evaluating_on_training_records_is_refused_before_training(evaluation):
    with pytest.raises(PrivacyConfigError, match="Evaluation on the training records"):
        make_trainer(TRAIN, eval_dataset=evaluation)


def test_evaluate_and_predict_refuse_them_too():
    trainer = make_trainer(TRAIN, eval_dataset=Dataset.from_list(OTHER))
    assert "eval_loss" in trainer.evaluate()
    for run in (trainer.evaluate, trainer.predict):
        with pytest.raises(PrivacyConfigError, match="Evaluation on the training records"):
            run(trainer.train_dataset)


def test_some_records_in_common_are_no_reason_to_refuse():
    make_trainer(TRAIN, eval_dataset=Dataset.from_list([*OTHER, TRAIN[0]]))


def test_private_diagnostics_may_evaluate_on_them_and_are_not_private():
    trainer = make_trainer(TRAIN, eval_dataset=Dataset.from_list(TRAIN), research_diagnostics=True)
    assert "eval_loss" in trainer.evaluate()
    assert trainer.privacy_statement().verdict.startswith("NOT PRIVATE")


def _draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_augmentation_draws_from_secret_generators_and_leaves_the_public_ones_as_they_were():
    inside = []
    for _ in range(2):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        with secret_masks(EntropySource(), torch.device("cpu")):
            inside.append(_draws())
        after = _draws()
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        assert after == _draws()
    assert all(a != b for a, b in zip(*inside, strict=True))


@pytest.mark.parametrize("delta", [4.8847e-6, 1e-5, 0.0303, 5.4601e-5, 1e-10])
def test_a_rounded_delta_is_never_smaller(delta):
    for digits in (3, 4):
        rounded = float(round_up_delta(delta, digits))
        assert delta <= rounded <= delta * (1 + 10.0 ** (1 - digits))
