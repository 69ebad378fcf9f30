"""Silence is a bug: set-ups under which training would run, spend the budget and do nothing, or something else."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from raptor_hf import stream_parameters
from raptor_hf.watch import SilentFailureError
from tests.trainer.build import Recorder, assert_refused, make_trainer


def ready(**changes):
    """A trainer whose adapters exist, so that optimizers can be built on them."""
    return make_trainer(max_steps=3, **changes)


def groups(trainer) -> list[dict]:
    return [{"params": list(p.values()), "stream": s} for s, p in stream_parameters(trainer.model).items()]


class Lazy(torch.optim.SGD):
    """Takes steps for one stream only."""

    asleep = "shared"

    def step(self, closure=None):
        for group in self.param_groups:
            if group["stream"] == self.asleep:
                for p in group["params"]:
                    p.grad = None
        return super().step(closure)


class Meddler(TrainerCallback):
    """A callback that does `what` to the trainer's parts before the optimizer's step."""

    def __init__(self, what):
        self.what = what

    def on_pre_optimizer_step(self, args, state, control, **parts):
        self.what(**parts)


@pytest.mark.parametrize("stream", ["shared", "expert"])
def test_an_optimizer_that_leaves_a_stream_alone(stream):
    trainer = ready()
    trainer.optimizer = Lazy(groups(trainer), lr=0.1)
    trainer.optimizer.asleep = stream
    assert_refused(trainer.train, SilentFailureError, f"{stream} stream", "exactly as it was")
    assert trainer.state.global_step == 0


def test_a_callback_that_drops_the_gradients():
    trainer = ready(callbacks=[Meddler(lambda optimizer, **_: optimizer.zero_grad())])
    assert_refused(trainer.train, SilentFailureError, "expert stream", "exactly as it was")


def frozen_of(model, role: str) -> torch.nn.Parameter:
    name = next(n for n, p in model.named_parameters() if role in n and not p.requires_grad)
    return model.get_parameter(name)


@pytest.mark.parametrize("role", ["router", "layer_norm", "SelfAttention"])
def test_a_frozen_parameter_that_changes(role):
    def meddle(model, **_):
        frozen_of(model, role).data.add_(1e-3)

    trainer = ready(callbacks=[Meddler(meddle)])
    assert_refused(trainer.train, SilentFailureError, "frozen parameter", role)
    assert trainer.state.global_step == 1


def test_a_parameter_that_is_unfrozen_on_the_way():
    trainer = ready(callbacks=[Meddler(lambda model, **_: frozen_of(model, "SelfAttention").requires_grad_(True))])
    assert_refused(trainer.train, SilentFailureError, "frozen parameter", "SelfAttention")


def test_a_scheduler_of_another_optimizer():
    trainer = ready()
    trainer.optimizer = torch.optim.SGD(groups(trainer), lr=0.1)
    trainer.lr_scheduler = LambdaLR(torch.optim.SGD(groups(trainer), lr=0.1), lambda step: 1 / (step + 1))
    assert_refused(trainer.train, SilentFailureError, "another optimizer")


def test_a_learning_rate_that_does_not_follow_the_schedule():
    class Overwrite(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            optimizer.param_groups[-1]["lr"] = 0.5

    trainer = ready(callbacks=[Overwrite()], lr_scheduler_type="linear")
    assert_refused(trainer.train, SilentFailureError, "learning rates", "0.5")


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_stream_whose_learning_rate_is_always_zero():
    trainer = ready()
    trainer.optimizer = torch.optim.SGD(groups(trainer), lr=0.1)
    trainer.lr_scheduler = LambdaLR(trainer.optimizer, [lambda step: 1.0, lambda step: 0.0])
    assert_refused(trainer.train, SilentFailureError, "learning rate", "0 in each of the 3 cycles")


@pytest.mark.parametrize(
    "settings",
    [
        dict(optim="adamw_torch", weight_decay=0.1, lr_scheduler_type="cosine"),
        dict(lr_scheduler_type="linear", warmup_steps=2),  # the first cycle has learning rate 0
        dict(expert_learning_rate=1e-6, shared_noise_multiplier=0.0, expert_noise_multiplier=0.0),
        dict(optim="adamw_torch", learning_rate=1e-12),
        dict(optim="sgd", learning_rate=1e-30, shared_noise_multiplier=0.5),  # invisible in float32
        dict(optim="adafactor"),
    ],
)
def test_ordinary_runs_are_not_disturbed(settings):
    trainer, recorder = ready(**settings), Recorder()
    trainer.add_callback(recorder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert trainer.state.global_step == 3
    assert not trainer._first_cycle._armed, "the check never took place"


def test_it_looks_again_in_the_next_training():
    trainer = ready()
    trainer.train()
    trainer.add_callback(Meddler(lambda model, **_: frozen_of(model, "router").data.add_(1.0)))
    assert_refused(trainer.train, SilentFailureError, "router")
