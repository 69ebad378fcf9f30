"""Diagnostics on private records only in runs whose statement says NOT PRIVATE, and drift logged during training."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from raptor_hf import PrivacyConfigError
from raptor_hf.analysis import (
    OwnershipDriftCallback,
    expert_diagnostics,
    joint_diagnostics,
    noise_sensitivity,
    ownership_drift,
    role_diagnostics,
)
from raptor_hf.moe import attach_adapters
from tests.analysis.build import of_a_run, researched
from tests.helpers import brute_owner, collate, stock_dispatch, tiny_model, tiny_records
from tests.trainer.build import (
    assert_refused,
    assert_refused_before_training,
    fix_draws,
    make_trainer,
    perturb_adapters,
    values,
)

BLOCK = 3
RECORDS = tiny_records(8, seed=5, shortest=3)
NOISE = {"noise_multiplier": 1.0, "max_norm": 1.0, "expected_batch_size": 4.0}
MEASUREMENTS = {
    "roles": lambda model, **how: role_diagnostics(model, RECORDS, data_collator=collate, **how),
    "experts": lambda model, **how: expert_diagnostics(model, RECORDS, data_collator=collate, **NOISE, **how),
    "noise": lambda model, **how: noise_sensitivity(
        model, RECORDS, "expert", noise_std=0.1, draws=2, data_collator=collate, **how
    ),
    "joint": lambda model, **how: joint_diagnostics(model, RECORDS, data_collator=collate, **NOISE, **how),
    "drift": lambda model, **how: ownership_drift(model, RECORDS, data_collator=collate, **how),
}
every_measurement = pytest.mark.parametrize("measure", MEASUREMENTS.values(), ids=MEASUREMENTS)


def adapted():
    return attach_adapters(tiny_model(), LoraConfig(r=2), BLOCK)


@every_measurement
def test_records_that_are_not_declared_public_are_refused_without_such_a_run(measure):
    for model in (adapted(), of_a_run(adapted(), research=False)):
        calls = []
        model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        for how in ({}, {"public_data": False}, {"public_data": "no"}, {"public_data": 1}):
            words = "public_data=True", "NOT PRIVATE"
            assert_refused(lambda how=how, m=model: measure(m, **how), PrivacyConfigError, *words)
        assert not calls, "refused before anything is computed"


@every_measurement
def test_public_records_are_free_and_others_need_the_run(measure):
    assert not measure(adapted(), public_data=True).private
    assert not measure(of_a_run(adapted(), research=False), public_data=True).private
    assert not measure(researched(adapted()), public_data=True).private
    assert measure(researched(adapted())).private


def measure_trained(trainer):
    return role_diagnostics(trainer.model, RECORDS, data_collator=collate)


def test_a_private_run_stays_closed_after_training():
    trainer = make_trainer()
    assert_refused(lambda: measure_trained(trainer), PrivacyConfigError, "belongs to no run")
    trainer.train()
    refused = "without `research_diagnostics`"
    assert_refused(lambda: measure_trained(trainer), PrivacyConfigError, refused)
    # the word is too late: what was trained was stated as private
    trainer.args.research_diagnostics = True
    assert_refused(lambda: measure_trained(trainer), PrivacyConfigError, refused)
    # nor does another trainer take the trained model over
    other = make_trainer(model=trainer.model, research_diagnostics=True)
    assert_refused(other.privacy_statement, PrivacyConfigError, "another trainer")
    assert_refused(lambda: measure_trained(trainer), PrivacyConfigError, refused)


def test_a_model_that_was_open_is_not_given_to_a_private_run():
    """Before any step too: what was measured on private records would be missing from the second statement."""
    first = make_trainer(RECORDS, research_diagnostics=True)
    first.privacy_statement()
    measure_trained(first)
    second = make_trainer(RECORDS, model=first.model)
    assert_refused(second.privacy_statement, PrivacyConfigError, "research_diagnostics", "Load the base model again")
    again = make_trainer(RECORDS, model=first.model, research_diagnostics=True)
    assert again.privacy_statement().verdict.startswith("NOT PRIVATE")


@pytest.mark.parametrize("when", ["before training", "after training"])
def test_a_run_of_research_diagnostics_is_open_and_says_so(when):
    trainer = make_trainer(research_diagnostics=True)
    trainer.privacy_statement() if when == "before training" else trainer.train()
    assert measure_trained(trainer).private
    assert trainer.privacy_statement().verdict.startswith("NOT PRIVATE")


# ---- During training ----


def merged_owners(trainer, records) -> list[int]:
    """Owners by the stock model with the adapters added to its weights."""
    merged = tiny_model()
    for name, module in trainer.model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            merged.get_submodule(name).weight.data += module.scaling * module.lora_B.data @ module.lora_A.data
    return [brute_owner(stock_dispatch(merged, record)[BLOCK].sum(0).tolist()) for record in records]


class Owners(TrainerCallback):
    """Of every cycle: owners by hand."""

    def __init__(self, trainer, records):
        self.trainer, self.records, self.found = trainer, records, []

    def on_step_end(self, args, state, control, **kwargs):
        self.found.append(merged_owners(self.trainer, self.records))


def test_drift_is_logged_by_cycle():
    public = tiny_records(40, seed=2, shortest=3)
    base = [brute_owner(stock_dispatch(tiny_model(), record)[BLOCK].sum(0).tolist()) for record in public]
    trainer = make_trainer(learning_rate=2.0, max_steps=5)
    drift = OwnershipDriftCallback(public, trainer.log, every=2, data_collator=collate, batch_size=7, public_data=True)
    by_hand = Owners(trainer, public)
    trainer.add_callback(drift)
    trainer.add_callback(by_hand)
    trainer.train()
    wanted = [sum(a != b for a, b in zip(base, now, strict=True)) / len(public) for now in by_hand.found]
    assert max(wanted) > 0.1 and len(set(wanted)) > 1
    assert [cycle for cycle, _ in drift.history] == [2, 4, 5]
    assert [found.changed for _, found in drift.history] == pytest.approx([wanted[1], wanted[3], wanted[4]])
    assert not any(found.private for _, found in drift.history)
    logged = {row["step"]: row["ownership_drift"] for row in trainer.state.log_history if "ownership_drift" in row}
    assert logged == {cycle: found.changed for cycle, found in drift.history}
    statement = trainer.privacy_statement()
    assert not statement.verdict.startswith("NOT PRIVATE") and statement.expert.steps_taken == 5


def test_private_records_are_logged_under_research_diagnostics_only():
    trainer = make_trainer()
    trainer.add_callback(OwnershipDriftCallback(RECORDS, trainer.log, every=1, data_collator=collate))
    assert_refused_before_training(trainer, PrivacyConfigError, "public_data=True", "research_diagnostics")
    open_run = make_trainer(research_diagnostics=True)
    drift = OwnershipDriftCallback(RECORDS, open_run.log, data_collator=collate)
    open_run.add_callback(drift)
    open_run.train()
    assert [cycle for cycle, _ in drift.history] == [2] and drift.history[0][1].private
    assert open_run.privacy_statement().verdict.startswith("NOT PRIVATE")


@pytest.mark.filterwarnings("ignore:.*insecure")
def test_measuring_changes_nothing_in_training():
    ends = []
    for watch in (False, True):
        torch.manual_seed(0)
        model = tiny_model(dropout_rate=0.2)
        trainer = fix_draws(make_trainer(model=model, insecure_noise_seed=3), [([1, 2, 3], [4, 5])] * 3)
        perturb_adapters(trainer.model)
        if watch:
            callback = OwnershipDriftCallback(RECORDS, trainer.log, every=1, data_collator=collate, public_data=True)
            trainer.add_callback(callback)
        trainer.train()
        ends.append(values(trainer.model))
    for stream, tensors in ends[0].items():
        assert all(torch.equal(value, ends[1][stream][name]) for name, value in tensors.items())
