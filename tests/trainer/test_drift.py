"""What may differ between a checkpoint and the run that goes on from it, and what may not."""

from __future__ import annotations

import dataclasses
import logging
import shutil

import pytest
import torch
from transformers import TrainingArguments

from raptor_hf import PrivacyConfigError, RaptorConfig
from raptor_hf.binding import bind
from raptor_hf.resume import DRIFT, arguments, check_arguments
from tests.helpers import tiny_model, tiny_records
from tests.trainer.build import assert_refused, make_config, make_trainer

BASE = dict(save_strategy="steps", save_steps=1, optim="adamw_torch")
KNOWN = {"may change", "must not change", "changes the accounting"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The output folder of a run of two cycles; copy it before use."""
    folder = tmp_path_factory.mktemp("saved") / "out"
    make_trainer(max_steps=2, output_dir=str(folder), **BASE).train()
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "out")
    return tmp_path / "out"


def go_on(folder, resume=True, **changes):
    trainer = make_trainer(**{"max_steps": 3, "output_dir": str(folder), **BASE, **changes})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


# ---- Arguments ----


def test_every_argument_of_the_config_has_a_class():
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name for field in dataclasses.fields(RaptorConfig)} - inherited
    assert own <= set(DRIFT), own - set(DRIFT)
    assert set(DRIFT) <= own | inherited
    assert set(DRIFT.values()) == KNOWN


CHANGES = dict(
    target_delta=1e-4, shared_noise_multiplier=2.0, expert_noise_multiplier=2.0, budget_split=0.5, budget_rule="basic",
    accountant="pld", expected_batch_size=4, research_diagnostics=True, insecure_noise_seed=1,
    shared_max_grad_norm=2.0, expert_max_grad_norm=2.0, ownership="vote", expert_denominator="batch",
    residual_weighting=False, residual_gamma=2.0, secure_mode=True, lora_rank=3, lora_alpha=8.0,
    shared_target_modules=["q", "v"], optim="sgd", optim_args="x=1", learning_rate=0.2, expert_learning_rate=0.3,
    weight_decay=0.5, alternating=False, adam_beta1=0.5, adam_beta2=0.5, adam_epsilon=1e-3, lr_scheduler_type="linear",
)  # fmt: skip
# no second value is accepted by the config; or a change of it changes another argument too
NOT_CHANGED = {"method", "clipping", "max_grad_norm", "target_epsilon", "dataset_size"}


def test_every_fixed_argument_is_tried():
    fixed = {name for name, drift in DRIFT.items() if drift != "may change"}
    assert fixed - NOT_CHANGED <= set(CHANGES) and set(CHANGES) <= fixed


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:`insecure_noise_seed`")
def test_a_change_is_refused_by_name_with_both_values(name):
    before = make_config(optim="adamw_torch")
    after = make_config(**{"optim": "adamw_torch", name: CHANGES[name]})
    saved = arguments(before)
    check_arguments(saved, before)
    was, now = saved[name], arguments(after)[name]
    assert_refused(lambda: check_arguments(saved, after), PrivacyConfigError, f"`{name}` is {now!r}",
                   f"was {was!r} in the checkpoint", DRIFT[name])  # fmt: skip


@pytest.mark.parametrize("change", [dict(learning_rate=0.2), dict(residual_gamma=2.0), dict(expected_batch_size=4)])
def test_a_resumed_run_looks_at_them(folder, change):
    with pytest.raises(PrivacyConfigError, match=next(iter(change))):
        go_on(folder, **change)


def test_what_may_change(folder):
    trainer = go_on(
        folder, max_steps=4, per_device_train_batch_size=1, grad_sample_mode="hooks", seed=7, save_steps=2,
        protected_layer="3", logging_steps=1,
    )  # fmt: skip
    assert trainer.state.global_step == 4 and trainer.ledger.shared_steps == 4


# ---- Data and model ----


@pytest.mark.parametrize("column", ["labels", "input_ids"])
def test_another_training_set_of_the_same_size_is_refused(folder, column):
    records = tiny_records(24, seed=5)
    if column == "labels":
        records[7]["labels"] = (records[7]["labels"] + 1) % 3
    else:
        records[7]["input_ids"][0] += 1 if records[7]["input_ids"][0] < 50 else -1
    message = assert_refused(lambda: go_on(folder, records=records), PrivacyConfigError, "training set", column)
    assert "7" not in message


def test_the_same_records_in_another_order_are_refused(folder):
    """The owner map goes by position."""
    with pytest.raises(PrivacyConfigError, match="training set"):
        go_on(folder, records=tiny_records(24, seed=5)[::-1])


@pytest.mark.parametrize("role", ["router", "expert", "shared"])
def test_another_base_model_is_refused(folder, role):
    model = tiny_model()
    part = {"router": "router", "expert": "experts", "shared": "SelfAttention.k"}[role]
    name = next(n for n, _ in model.named_parameters() if part in n)
    model.get_parameter(name).data.flatten()[0] += 1e-3
    assert_refused(lambda: go_on(folder, model=model), PrivacyConfigError, "base model", f"`{role}`")


def test_the_binding_is_the_same_for_the_same(folder):
    one, two = (make_trainer(output_dir=str(folder)) for _ in range(2))
    first = bind(one.model, one._records, "gate")
    assert first == bind(two.model, two._records, "gate")
    assert set(first.records) == {"input_ids", "attention_mask", "labels"}
    assert set(first.model) == {"shared", "router", "expert"}


def test_the_kept_owner_map_is_used(folder, monkeypatch):
    monkeypatch.setattr("raptor_hf.binding.sharded_owner_map", lambda *a, **k: pytest.fail("computed again"))
    trainer = go_on(folder)
    assert trainer.state.global_step == 3 and trainer._owners.shape == (24,)


def test_without_the_private_file_owners_are_computed_again(folder, caplog):
    kept = go_on(folder)._owners
    shutil.rmtree(folder / ".cache")
    with caplog.at_level(logging.WARNING):
        again = go_on(folder, max_steps=4)
    assert torch.equal(again._owners, kept)
    assert "owner_map.npz" in caplog.text and "cannot be checked" in caplog.text
    model = tiny_model()
    next(p for n, p in model.named_parameters() if "router" in n).data.add_(1e-3)
    shutil.rmtree(folder / ".cache")
    assert_refused(lambda: go_on(folder, model=model, max_steps=5), PrivacyConfigError, "base model", "router")


# ---- Runs and their journal ----


def test_going_back_counts_what_came_after(folder, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = go_on(folder, resume=str(folder / "checkpoint-1"), max_steps=2)
    assert trainer.state.global_step == 2
    assert (trainer.ledger.shared_steps, trainer.ledger.expert_steps) == (3, 3)
    assert "1 shared and 1 expert steps that no checkpoint holds" in caplog.text
    # the abandoned branch is not taken up again
    again = go_on(folder, max_steps=3)
    assert again.state.global_step == 3 and again.ledger.shared_steps == 4


def test_a_checkpoint_resumed_into_another_folder_keeps_its_journal(folder, tmp_path):
    other = tmp_path / "elsewhere"
    trainer = go_on(other, resume=str(folder / "checkpoint-1"), max_steps=2)
    assert trainer.ledger.shared_steps == 3 and (other / "raptor_ledger.json").exists()


def test_a_new_run_in_an_old_folder(folder, caplog):
    """It starts from nothing, says so, and does not mix with the checkpoints of the old one."""
    with caplog.at_level(logging.WARNING):
        new = make_trainer(max_steps=1, output_dir=str(folder), **BASE)
        new.train()
    assert new.ledger.shared_steps == 1 and "holds an earlier run of 2 cycles" in caplog.text
    again = go_on(folder, max_steps=2)
    assert again.ledger.run == new.ledger.run and again.ledger.shared_steps == 2


def test_a_run_stopped_before_its_first_checkpoint(tmp_path, caplog):
    out = tmp_path / "out"
    make_trainer(max_steps=2, output_dir=str(out)).train()
    with caplog.at_level(logging.WARNING):
        again = make_trainer(max_steps=2, output_dir=str(out))
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2 and again.ledger.shared_steps == 4
    assert "before its first complete checkpoint" in caplog.text
    with pytest.raises(ValueError, match="No valid checkpoint"):
        make_trainer(output_dir=str(tmp_path / "nothing")).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_weights_only_is_not_resumed_from(tmp_path):
    out = tmp_path / "out"
    make_trainer(max_steps=1, output_dir=str(out), save_only_model=True, **BASE).train()
    assert_refused(lambda: go_on(out, resume=str(out / "checkpoint-1")), PrivacyConfigError, "optimizer.pt",
                   "save_only_model")  # fmt: skip


def test_a_finished_run_may_be_started_again(folder):
    """As a job scheduler does: nothing is trained and nothing spent."""
    trainer = go_on(folder, max_steps=2)
    assert trainer.state.global_step == 2 and trainer.ledger.shared_steps == 2
