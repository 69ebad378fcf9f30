"""The methods of `Trainer` that `RaptorTrainer` overrides still exist and are still called as they were.

A failure here means that a new version of transformers must be read before it is supported.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from datasets import Dataset
from transformers import Trainer

from raptor_hf import PrivacyConfigError, RaptorTrainer
from tests.helpers import tiny_records
from tests.trainer.build import fix_draws, make_trainer

SIGNATURES = {
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
    "create_optimizer": ["self", "model"],
    "log": ["self", "logs", "start_time"],
    "_save": ["self", "output_dir", "state_dict"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_best_model": ["self"],
    "floating_point_ops": ["self", "inputs"],
    "get_train_dataloader": ["self"],
    "set_initial_training_values": ["self", "args", "dataloader"],
    "get_total_train_batch_size": ["self", "args"],
}
# Called, not overridden.
USED = {
    "_prepare_inputs": ["self", "inputs"],
    "compute_loss_context_manager": ["self"],
    "get_optimizer_cls_and_kwargs": ["args", "model"],
    "get_decay_parameter_names": ["self", "model"],
    "_remove_unused_columns": ["self", "dataset", "description"],
    "_get_collator_with_removed_columns": ["self", "data_collator", "description"],
}
PUBLIC = {"train", "hyperparameter_search", "__init__"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    theirs = list(inspect.signature(getattr(Trainer, name)).parameters)
    assert theirs == SIGNATURES[name]
    assert list(inspect.signature(getattr(RaptorTrainer, name)).parameters) == theirs


@pytest.mark.parametrize("name", USED)
def test_signature_of_what_is_called(name):
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == USED[name]


def test_nothing_else_is_overridden():
    overridden = {name for name in vars(RaptorTrainer) if callable(getattr(Trainer, name, None))}
    overridden -= {"__module__", "__doc__", "__firstlineno__", "__static_attributes__"}
    assert overridden == set(SIGNATURES) | PUBLIC


def test_the_constructor_takes_every_argument_of_the_trainer():
    theirs, ours = (list(inspect.signature(cls.__init__).parameters) for cls in (Trainer, RaptorTrainer))
    assert set(theirs) <= set(ours)
    assert ours[: ours.index("public_dataset")] == theirs


def test_the_training_loop_calls_the_seams(tmp_path, monkeypatch):
    """Each override is reached by an ordinary run: none has become dead code."""
    called = set()
    for name in SIGNATURES:
        original = getattr(RaptorTrainer, name)

        def spy(self, *args, name=name, original=original, **kwargs):
            called.add(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(RaptorTrainer, name, spy)
    settings = dict(
        output_dir=str(tmp_path), save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, max_steps=2, logging_strategy="steps", logging_steps=1,
    )  # fmt: skip
    trainer = make_trainer(**settings, eval_dataset=Dataset.from_list(tiny_records(4, seed=11)))
    trainer.train()
    again = make_trainer(**{**settings, "max_steps": 3}, eval_dataset=trainer.eval_dataset)
    again.train(resume_from_checkpoint=True)
    assert called == set(SIGNATURES)


def test_gradients_are_not_clipped_or_scaled_after_the_noise():
    """The loop's own clipping and accumulation stay off: what leaves `training_step` is what the optimizer sees."""
    trainer = make_trainer()
    assert trainer.args.max_grad_norm == 0 and trainer.args.gradient_accumulation_steps == 1
    assert trainer.accelerator.gradient_accumulation_steps == 1
    cycle = next(iter(fix_draws(trainer, [([], [])]).get_train_dataloader()))
    trainer._start(None)
    trainer.create_optimizer()
    assert float(trainer.training_step(trainer.model, cycle, num_items_in_batch=7)) == 0
    grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    assert grads and max(float(g.abs().max()) for g in grads) > 0.5


@pytest.mark.parametrize(
    "change", [lambda g: torch.cat([g, g]), lambda g: g.sum(0, keepdim=True)], ids=["two a record", "one for all"]
)
def test_other_numbers_of_gradients_than_records_are_refused(monkeypatch, change):
    """A record with two rows would count twice the clipping norm."""
    given = RaptorTrainer.record_gradients

    def changed(self, *args):
        return {name: change(value) for name, value in given(self, *args).items()}

    monkeypatch.setattr(RaptorTrainer, "record_gradients", changed)
    trainer = fix_draws(make_trainer(), [([1, 3], [])])
    with pytest.raises(PrivacyConfigError, match="not one for each record"):
        trainer.train()
