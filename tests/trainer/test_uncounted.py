"""No trainer states, saves or goes on from training that its ledger does not count."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from raptor_hf import PrivacyConfigError, export_release, load_adapter
from tests.helpers import tiny_model, tiny_records
from tests.trainer.build import assert_refused, make_trainer

EVERY = dict(save_strategy="steps", save_steps=1)


def trained(**changes):
    trainer = make_trainer(**changes)
    trainer.train()
    return trainer


def assert_claims_nothing(trainer, tmp_path, *words: str) -> None:
    """Statement, training and export are refused, and saving leaves no statement."""
    assert_refused(trainer.privacy_statement, PrivacyConfigError, *words)
    assert_refused(trainer.train, PrivacyConfigError, *words)
    assert_refused(lambda: export_release(trainer, tmp_path / "release"), PrivacyConfigError, *words)
    if trainer.ledger is None:
        trainer.save_model(str(tmp_path / "saved"))
        assert not (tmp_path / "saved" / "privacy.json").exists()
    else:
        assert_refused(lambda: trainer.save_model(str(tmp_path / "saved")), PrivacyConfigError, *words)
        assert not (tmp_path / "saved" / "privacy.json").exists()
    assert not (tmp_path / "release").exists()


# ---- Another trainer's training ----


@pytest.mark.filterwarnings("ignore:`insecure_noise_seed`")
@pytest.mark.parametrize("change", [dict(), dict(insecure_noise_seed=1)])
def test_a_new_trainer_around_a_trained_model(tmp_path, change):
    second = make_trainer(model=trained(**change).model)
    assert_claims_nothing(second, tmp_path, "another trainer")


def test_a_new_trainer_around_a_loaded_adapter(tmp_path):
    first = trained()
    first.save_model(str(tmp_path / "first"))
    second = make_trainer(model=load_adapter(tiny_model(), tmp_path / "first"))
    assert_claims_nothing(second, tmp_path, "adapter of `first`")
    # what does not train is allowed
    records = Dataset.from_list(tiny_records(4))
    assert second.evaluate(records)["eval_loss"] > 0 and len(second.predict(records).predictions) == 4


def test_an_adapter_loaded_after_the_statement_or_the_training(tmp_path):
    trained().save_model(str(tmp_path / "first"))
    early = make_trainer()
    assert early.privacy_statement().shared.steps_taken == 0
    load_adapter(early.model, tmp_path / "first")
    assert_claims_nothing(early, tmp_path, "adapter of `first`")
    late = trained()
    load_adapter(late.model, tmp_path / "first")
    assert_claims_nothing(late, tmp_path, "adapter of `first`")


def test_adapters_that_came_by_another_way(tmp_path):
    model = make_trainer().model
    model.load_state_dict(trained().model.state_dict())
    assert_claims_nothing(make_trainer(model=model), tmp_path, "lora_B")


def test_the_runs_own_earlier_adapter_is_counted(tmp_path):
    trainer = trained(output_dir=str(tmp_path), **EVERY)
    load_adapter(trainer.model, tmp_path / "checkpoint-1")
    assert trainer.privacy_statement().shared.steps_taken == 2
    trainer.save_model(str(tmp_path / "saved"))
    # the folder's state is no longer that of the adapter beside it
    trained().model.save_pretrained(tmp_path / "checkpoint-1")
    load_adapter(trainer.model, tmp_path / "checkpoint-1")
    assert_refused(trainer.privacy_statement, PrivacyConfigError, "checkpoint-1")


def test_resuming_takes_up_what_was_counted(tmp_path):
    """Also into a model that already holds the adapter, which the checkpoint's replaces."""
    trained(output_dir=str(tmp_path), **EVERY)
    model = load_adapter(tiny_model(), tmp_path / "checkpoint-1")
    again = make_trainer(model=model, max_steps=3, output_dir=str(tmp_path))
    again.train(resume_from_checkpoint=True)
    assert again.privacy_statement().shared.steps_taken == 3
    again.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "privacy.json").read_text())["shared"]["steps_taken"] == 3


def test_the_best_model_is_counted(tmp_path):
    trainer = trained(
        output_dir=str(tmp_path), eval_dataset=Dataset.from_list(tiny_records(8, seed=2)), eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss", **EVERY,
    )  # fmt: skip
    assert trainer.privacy_statement().shared.steps_taken == 2
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "privacy.json").exists()


# ---- A statement and the adapter beside it ----


def test_an_adapter_is_never_beside_an_older_statement(tmp_path):
    trainer = trained()
    trainer.save_model(str(tmp_path))
    (tmp_path / "release.json").write_text("{}")
    trainer.train()
    trainer.model.save_pretrained(tmp_path)
    assert not {"privacy.json", "release.json", "raptor_state.json"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("place", ["raptor_hf.state.PrivacyLedger.save", "raptor_hf.trainer.STATEMENT_FILE"])
def test_a_save_that_dies_leaves_no_older_statement(tmp_path, monkeypatch, place):
    trainer = trained()
    trainer.save_model(str(tmp_path))
    trainer.train()

    class Dies:
        def __get__(self, *_):
            raise KeyboardInterrupt

        def __rtruediv__(self, _):
            raise KeyboardInterrupt

    monkeypatch.setattr(place, Dies())
    with pytest.raises(KeyboardInterrupt):
        trainer.save_model(str(tmp_path))
    assert (tmp_path / "adapter_model.safetensors").exists() and not (tmp_path / "privacy.json").exists()


# ---- A folder of two runs ----


class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt


@pytest.fixture
def two_runs(tmp_path):
    """The folder of a run that died after 4 cycles with a checkpoint at 2, then used by another run."""
    first = make_trainer(max_steps=8, output_dir=str(tmp_path), save_strategy="steps", save_steps=2, callbacks=[Dies()])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert first.ledger.shared_steps == 4 and not (tmp_path / "checkpoint-4").exists()
    trained(max_steps=1, output_dir=str(tmp_path))
    return tmp_path, first.ledger.run


def go_on(folder, steps: int):
    trainer = make_trainer(max_steps=steps, output_dir=str(folder))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return trainer


def test_lost_work_stays_counted_when_another_run_used_the_folder(two_runs):
    folder, run = two_runs
    kept = folder / f"raptor_ledger-{run}.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    trainer = go_on(folder, 3)
    assert trainer.privacy_statement().shared.steps_taken == trainer.ledger.expert_steps == 5
    kept.unlink()
    assert go_on(folder, 3).ledger.shared_steps == 6  # the journal goes on where it was


def test_a_resume_without_the_runs_own_journal_is_refused(two_runs, caplog):
    folder, run = two_runs
    (folder / f"raptor_ledger-{run}.json").unlink()
    trainer = make_trainer(max_steps=3, output_dir=str(folder))
    assert_refused(
        lambda: trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2")), PrivacyConfigError, "another run"
    )
    (folder / "raptor_ledger.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert go_on(folder, 3).ledger.shared_steps == 3
    assert "Only the checkpoint's own counters are known" in caplog.text


# ---- Arguments that are assigned later ----


@pytest.mark.parametrize(
    "change",
    [dict(ownership="vote"), dict(shared_max_grad_norm=9.0), dict(expert_max_grad_norm=9.0),
     dict(expert_denominator="batch"), dict(learning_rate=0.5)],
)  # fmt: skip
def test_arguments_that_change_between_two_calls_of_train(change):
    trainer = trained()
    before = trainer.privacy_statement()
    parameters = {name: p.clone() for name, p in trainer._trainables().items()}
    for name, value in change.items():
        setattr(trainer.args, name, value)
    assert trainer.privacy_statement() == before
    assert_refused(trainer.train, PrivacyConfigError, "training so far", *change)
    assert all(torch.equal(p, parameters[name]) for name, p in trainer._trainables().items())


@pytest.mark.filterwarnings("ignore:`insecure_noise_seed`")
def test_what_was_not_private_stays_so():
    trainer = trained(research_diagnostics=True)
    trainer.args.research_diagnostics = False
    assert trainer.privacy_statement().verdict.startswith("NOT PRIVATE")
    trainer = trained(insecure_noise_seed=1)
    trainer.args.insecure_noise_seed = None
    trainer.entropy = make_trainer().entropy
    assert trainer.privacy_statement().verdict.startswith("NOT PRIVATE")
