"""Canary runs on the tiny model of the trainer's tests."""

from __future__ import annotations

import contextlib
import os

from datasets import Dataset

from raptor_hf.audit.canaries import CanaryTrainer, Observer, draw_canaries
from raptor_hf.audit.verdict import CanaryResult
from tests.helpers import collate, tiny_model, tiny_records
from tests.trainer.build import make_config
from tests.trainer.oracle import owners

# Candidates are longer than any real record, so that none is one.
CANDIDATES = tiny_records(400, seed=77, longest=20, shortest=14)
CANDIDATE_OWNERS = owners(CANDIDATES)
REAL = tiny_records(40, seed=5)
REAL_OWNERS = owners(REAL)
EMPTY = 1


def observed_run(canaries: int = 200, lone: int = 8, directions: str = "random", **changes):
    """One run with the coins of the operating system; expert `EMPTY` has canaries and no real record.

    By default it claims an epsilon of about 2: small enough that 200 canaries can refute it. The clipping norms are not
    1, and not the same, so that noise or denominators without them, or with the other's, are seen.
    """
    real = [row for row, owner in zip(REAL, REAL_OWNERS, strict=True) if owner != EMPTY]
    busy = [owner for owner in REAL_OWNERS if owner != EMPTY]
    drawn = draw_canaries(CANDIDATES, CANDIDATE_OWNERS, busy, canaries, lone=lone)
    settings = dict(
        expected_batch_size=60, per_device_train_batch_size=64, max_steps=16, learning_rate=0.05, lora_rank=4,
        shared_noise_multiplier=2.5, expert_noise_multiplier=6.0, target_delta=1e-5, shared_max_grad_norm=1.5,
        expert_max_grad_norm=2.0,
    )  # fmt: skip
    trainer = CanaryTrainer(
        tiny_model(), make_config(**{**settings, **changes}), canaries=drawn, directions=directions,
        train_dataset=Dataset.from_list(drawn.training_set(real)), data_collator=collate,
    )  # fmt: skip
    observer = Observer(trainer)
    trainer.add_callback(observer)
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        trainer.train()
    return CanaryResult.of(trainer, observer), trainer, observer


def canary_run(**changes) -> CanaryResult:
    """The result of `observed_run`."""
    return observed_run(**changes)[0]
