"""Every argument of `TrainingArguments` and `Trainer` is classified, and does what its class says."""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import SchedulerType

from raptor_hf import PrivacyConfigError, RaptorConfig, RaptorTrainer, load_adapter
from raptor_hf.arguments import (
    CHECKPOINTING,
    NO_EFFECT,
    REFUSED_ARGUMENTS,
    TRAINER_ARGUMENTS,
    WORKS,
    argument_rows,
    arguments_page,
)
from raptor_hf.config import configuration_page
from tests.helpers import collate, tiny_model, tiny_records
from tests.trainer.build import assert_refused, fix_draws, make_config, make_trainer, values

EVAL = Dataset.from_list(tiny_records(7, seed=9))
DOCS = Path(__file__).resolve().parent.parent / "docs"


def accuracy(prediction) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}


# ---- The table ----


def test_every_argument_is_classified_once():
    """A new release of transformers with an argument of its own fails here: decide, then add it."""
    names = [name for name, _, _ in argument_rows()]
    assert sorted(names) == sorted(set(names))
    declared = {declared.name for declared in dataclasses.fields(TrainingArguments)}
    assert declared - set(names) == set()
    assert set(inspect.signature(Trainer.__init__).parameters) - {"self"} - set(TRAINER_ARGUMENTS) == set()
    assert set(TRAINER_ARGUMENTS) <= set(inspect.signature(RaptorTrainer.__init__).parameters)


def test_the_page_is_made_from_the_table():
    assert (DOCS / "arguments.md").read_text() == arguments_page(), (
        "run python -m raptor_hf.arguments > docs/arguments.md"
    )
    for name, status, why in argument_rows():
        assert f"| `{name}` |" in arguments_page()
        assert why or status == "works", f"{name} is {status} without a reason"


def test_the_page_of_the_own_fields_is_made_from_them():
    assert (DOCS / "configuration.md").read_text() == configuration_page(), (
        "run python -m raptor_hf.config > docs/configuration.md"
    )
    inherited = {declared.name for declared in dataclasses.fields(TrainingArguments)} - {"max_grad_norm"}
    for declared in dataclasses.fields(RaptorConfig):
        own = f"| `{declared.name}` |" in configuration_page()
        assert own == (declared.name not in inherited), declared.name
        assert not own or declared.metadata["help"], declared.name


def test_defaults_are_accepted_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = make_config()
    for name, (accepts, _, _) in REFUSED_ARGUMENTS.items():
        assert accepts(getattr(config, name)), name


# ---- No effect ----

UNEXPECTED = {
    "torch_empty_cache_steps": 2, "data_seed": 3, "length_column_name": "tokens", "optim_target_modules": ["q"],
    "ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 5, "ddp_static_graph": True,
    "ddp_broadcast_buffers": True, "hub_always_push": True,
    "average_tokens_across_devices": False,
    "liger_kernel_config": {"rope": True}, "logging_nan_inf_filter": False,
}  # fmt: skip


@pytest.mark.parametrize("name", UNEXPECTED)
def test_an_argument_without_effect_says_so(name):
    with pytest.warns(UserWarning, match=f"`{name}=.*has no effect"):
        make_config(**{name: UNEXPECTED[name]})


def test_every_argument_without_effect_is_covered():
    silent = {"gradient_accumulation_steps", "ignore_data_skip", "local_rank"}  # own warning; always on; the launcher's
    refused = {"torch_compile_backend", "torch_compile_mode", "fsdp_config"}  # as soon as it is set, or beside it
    assert set(NO_EFFECT) - set(UNEXPECTED) == silent | refused
    for name in refused - {"fsdp_config"}:
        assert_refused(lambda name=name: make_config(**{name: "default"}), PrivacyConfigError, "torch_compile")


# ---- Depends on the engine ----


@pytest.mark.parametrize("name", CHECKPOINTING)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
def test_checkpointing_depends_on_the_engine(name):
    assert_refused(lambda: make_config(**{name: True}), PrivacyConfigError, "hooks", "functorch")
    assert make_config(**{name: True, "grad_sample_mode": "hooks"}).activation_checkpointing
    options = {name: True, f"{name}_kwargs": {"use_reentrant": True}, "grad_sample_mode": "hooks"}
    assert_refused(lambda: make_config(**options), PrivacyConfigError, "reentrant")


def test_gradients_recorded_by_a_tracker_are_refused(monkeypatch):
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    assert make_config(report_to="none")
    assert_refused(lambda: make_config(report_to="wandb"), PrivacyConfigError, "WANDB_WATCH")
    monkeypatch.setenv("WANDB_WATCH", "false")
    assert make_config(report_to="wandb")


# ---- Works: optimizers and schedules ----


@pytest.mark.parametrize(
    "optim, more",
    [("adamw_torch", {}), ("adamw_torch_fused", {"adam_beta1": 0.8, "adam_epsilon": 1e-6}), ("adafactor", {}),
     ("adagrad", {}), ("rmsprop", {}), ("sgd", {"optim_args": "momentum=0.9"})],
)  # fmt: skip
def test_an_ordinary_optimizer_moves_both_streams(optim, more):
    trainer = make_trainer(optim=optim, weight_decay=0.01, max_steps=2, **more)
    before = values(trainer.model)
    trainer.train()
    after = values(trainer.model)
    assert all(not torch.equal(before[s][n], after[s][n]) for s in before for n in before[s])
    if "optim_args" in more:
        assert {group["momentum"] for group in trainer.optimizer.param_groups} == {0.9}
    if "adam_beta1" in more:
        assert {group["betas"][0] for group in trainer.optimizer.param_groups} == {0.8}


def test_weight_decay_pulls_the_adapters_only():
    """Without gradients but for noise 0: one cycle of SGD is exactly the decay."""
    trainer = make_trainer(weight_decay=0.5, shared_noise_multiplier=0.0, expert_noise_multiplier=0.0, max_steps=1)
    before = values(trainer.model)
    fix_draws(trainer, [([], [])]).train()
    after = values(trainer.model)
    name = next(n for n in before["shared"] if n.endswith("lora_A"))
    torch.testing.assert_close(after["shared"][name], before["shared"][name] * (1 - 0.1 * 0.5))


SCHEDULES = {
    "linear": {}, "cosine": {}, "constant": {}, "constant_with_warmup": {"warmup_steps": 2}, "polynomial": {},
    "inverse_sqrt": {"warmup_steps": 1}, "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}},
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 0.01}},
    "cosine_warmup_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 0.01}},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 2}},
}  # fmt: skip


class Rates(TrainerCallback):
    """The learning rates that the optimizer itself has at each step."""

    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self.seen.append({group["stream"]: group["lr"] for group in optimizer.param_groups})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_gives_the_rates_of_the_plain_trainer(schedule, tmp_path):
    """Both streams follow it, with the expert stream's own peak; the factor is the one of a plain optimizer."""
    settings = dict(lr_scheduler_type=schedule, learning_rate=0.1, **SCHEDULES[schedule])
    rates = Rates()
    trainer = make_trainer(callbacks=[rates], expert_learning_rate=0.1, max_steps=4, **settings)
    fix_draws(trainer, [([], [])] * 4).train()
    plain = Trainer(
        tiny_model(), TrainingArguments(str(tmp_path), use_cpu=True, max_steps=4, report_to="none", **settings)
    )
    plain.optimizer = torch.optim.SGD([nn_parameter()], lr=0.1)
    scheduler, wanted = plain.create_scheduler(4), []
    for _ in range(4):
        wanted.append(scheduler.get_last_lr()[0])
        plain.optimizer.step()
        scheduler.step()
    for seen, rate in zip(rates.seen, wanted, strict=True):
        assert seen == {"shared": pytest.approx(rate), "expert": pytest.approx(rate)}


def nn_parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1))


def test_all_schedules_are_covered():
    assert {kind.value for kind in SchedulerType} == set(SCHEDULES) | {"reduce_lr_on_plateau", "greedy"}


def test_a_schedule_that_follows_the_evaluation_split():
    rates = Rates()
    trainer = make_trainer(
        callbacks=[rates], lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        eval_strategy="steps", eval_steps=1, eval_dataset=EVAL, max_steps=4, metric_for_best_model="eval_loss",
    )  # fmt: skip
    losses = iter([1.0, 2.0, 3.0, 4.0])
    evaluate = type(trainer).evaluate

    def worse(*args, **kwargs):
        return {**evaluate(trainer, *args, **kwargs), "eval_loss": next(losses)}

    trainer.evaluate = worse
    trainer.train()
    assert [round(r["shared"], 4) for r in rates.seen] == [0.1, 0.1, 0.05, 0.025]
    assert any("lr_scheduler_type" in line for line in trainer.privacy_statement().not_covered)


def test_the_greedy_schedule_follows_the_evaluation_split_too():
    trainer = make_trainer(
        lr_scheduler_type="greedy", eval_strategy="steps", eval_steps=1, eval_dataset=EVAL, max_steps=2,
        metric_for_best_model="eval_loss",
    )  # fmt: skip
    trainer.train()
    assert any("lr_scheduler_type" in line for line in trainer.privacy_statement().not_covered)


# ---- Works: evaluation, saving, choosing ----


def test_evaluation_during_training_and_the_best_model(tmp_path):
    trainer = make_trainer(
        output_dir=str(tmp_path), eval_dataset=EVAL, compute_metrics=accuracy, max_steps=3, eval_strategy="steps",
        eval_steps=1, eval_on_start=True, save_strategy="steps", save_steps=1, save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False, save_only_model=True,
    )  # fmt: skip
    trainer.train()
    assert len([e for e in trainer.state.log_history if "eval_loss" in e]) == 4
    assert len(list(tmp_path.glob("checkpoint-*"))) <= 2
    best = trainer.state.best_model_checkpoint
    fresh = make_trainer(max_steps=1).model
    load_adapter(fresh, best)
    for stream, tensors in values(fresh).items():
        for name, value in tensors.items():
            torch.testing.assert_close(values(trainer.model)[stream][name], value)
    lines = [line for line in trainer.privacy_statement().not_covered if "evaluation split" in line]
    assert any("load_best_model_at_end" in line and "not private" in line for line in lines)
    assert trainer.privacy_statement().shared.steps_taken == 3  # all that was spent, not what the best model had


def test_early_stopping_counts_only_what_ran():
    trainer = make_trainer(
        eval_dataset=EVAL, max_steps=9, eval_strategy="steps", eval_steps=1, metric_for_best_model="eval_loss",
        callbacks=[EarlyStoppingCallback(1, early_stopping_threshold=1e9)],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    steps = trainer.state.global_step
    assert steps < 9 and trainer.privacy_statement().shared.steps_taken == steps
    assert any("metric_for_best_model" in line for line in trainer.privacy_statement().not_covered)


def test_no_choice_no_notice():
    trainer = make_trainer(eval_dataset=EVAL, eval_strategy="epoch")
    assert not any("let the run choose" in line for line in trainer.privacy_statement().not_covered)


class Batched:
    """Metrics over batches, as `batch_eval_metrics` wants them."""

    def __init__(self):
        self.right, self.count = 0.0, 0

    def __call__(self, prediction, compute_result=False):
        logits, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
        self.right, self.count = self.right + float((logits.argmax(-1) == labels).sum()), self.count + len(labels)
        return {"accuracy": self.right / self.count} if compute_result else {}


@pytest.mark.parametrize(
    "settings",
    [dict(batch_eval_metrics=True), dict(eval_accumulation_steps=1), dict(include_for_metrics=["inputs", "loss"]),
     dict(dataloader_num_workers=1, dataloader_persistent_workers=True, dataloader_prefetch_factor=1),
     dict(eval_use_gather_object=False, eval_do_concat_batches=True, label_names=["labels"])],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
def test_arguments_of_evaluation(settings):
    metrics = Batched() if "batch_eval_metrics" in settings else accuracy
    trainer = make_trainer(eval_dataset=EVAL, compute_metrics=metrics, per_device_eval_batch_size=3, **settings)
    found = trainer.evaluate()["eval_accuracy"]
    logits = torch.cat([trainer.model(input_ids=torch.tensor([r["input_ids"]])).logits for r in EVAL])
    right = logits.argmax(-1) == torch.tensor([r["labels"] for r in EVAL])
    assert found == pytest.approx(float(right.float().mean()))


def test_prediction_loss_only():
    trainer = make_trainer(eval_dataset=EVAL, compute_metrics=accuracy, prediction_loss_only=True)
    metrics = trainer.evaluate()
    assert "eval_loss" in metrics and "eval_accuracy" not in metrics
    assert trainer.predict(EVAL).predictions is None


@pytest.mark.parametrize("keep", [True, False])
def test_unused_columns(keep):
    """With `remove_unused_columns=False` the collator sees them."""
    seen = set()

    def watch(records):
        seen.update(*records)
        return collate(records)

    rows = [{**record, "text": "a secret"} for record in tiny_records(12)]
    make_trainer(rows, remove_unused_columns=not keep, data_collator=watch, max_steps=1).train()
    assert ("text" in seen) == keep


@pytest.mark.parametrize("strategy, count", [("steps", 3), ("epoch", 1), ("no", 0)])
def test_logging_and_saving_strategies(strategy, count, tmp_path):
    trainer = make_trainer(
        24, logging_strategy=strategy, save_strategy=strategy, logging_steps=1, save_steps=1, max_steps=-1,
        num_train_epochs=1, output_dir=str(tmp_path),
    )  # fmt: skip
    trainer.train()
    assert len([e for e in trainer.state.log_history if "epsilon" in e]) == count
    assert len(list(tmp_path.glob("checkpoint-*"))) == count


# ---- Works: determinism, precision ----


def test_full_determinism_leaves_noise_and_sampling_secret():
    updates = []
    try:
        for _ in range(2):
            trainer = make_trainer(full_determinism=True, seed=1, max_steps=1)
            before = values(trainer.model)
            trainer.train()
            updates.append((before, values(trainer.model)))
    finally:
        torch.use_deterministic_algorithms(False)
    (one, one_after), (other, other_after) = updates
    name = next(iter(one["shared"]))
    assert torch.equal(one["shared"][name], other["shared"][name])  # the adapters start alike
    assert not torch.equal(one_after["shared"][name], other_after["shared"][name])


def test_tf32_is_left_to_the_device():
    assert make_config(tf32=False).tf32 is False
    make_trainer(tf32=False, max_steps=1).train()


def test_the_seed_is_that_of_the_adapters():
    first, second = (make_trainer(seed=seed, max_steps=1) for seed in (1, 2))
    name = next(n for n in values(first.model)["shared"] if n.endswith("lora_A"))
    assert not torch.equal(values(first.model)["shared"][name], values(second.model)["shared"][name])


def test_training_length_and_rates_are_numbers_of_cycles():
    trainer = make_trainer(24, max_steps=-1, num_train_epochs=2, logging_strategy="epoch")
    trainer.train()
    assert trainer.state.global_step == math.ceil(2 * 24 / 8)
    assert np.isfinite([e["epsilon"] for e in trainer.state.log_history if "epsilon" in e]).all()


def test_what_works_is_a_field_that_the_config_takes():
    accepted = set(inspect.signature(make_config().__class__).parameters)
    assert set(WORKS) <= accepted
