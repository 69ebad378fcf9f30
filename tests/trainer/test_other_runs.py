"""What another run trained is not taken for a public base model, and no run goes on as another method."""

from __future__ import annotations

import json

import pytest
from transformers import TrainerCallback

from raptor_hf import PrivacyConfigError, UnsupportedModelError
from raptor_hf.state import LEDGER_FILE
from tests.helpers import tiny_model
from tests.trainer.build import make_trainer

ONE = dict(shared_noise_multiplier=1.0, expert_noise_multiplier=None)
NONE = dict(shared_noise_multiplier=None, expert_noise_multiplier=None)
BUDGET = dict(target_epsilon=3.0, target_delta=1e-3, max_steps=6)


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


def stopped(folder, **changes):
    """A run that was killed after two cycles, before its first checkpoint."""
    trainer = make_trainer(output_dir=str(folder), callbacks=[Stop()], **BUDGET, **changes)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return trainer


# ---- A run that was stopped before its first checkpoint ----


@pytest.mark.parametrize(
    "first, then",
    [
        (dict(method="matched_global"), dict(method="raptor")),  # whose expert stream then had no noise
        (dict(method="raptor"), dict(method="matched_global")),  # whose statement then lacked the expert releases
        (dict(method="raptor"), dict(clipping="global")),
        (dict(method="raptor"), dict(shared_max_grad_norm=7.0)),
    ],
)
@pytest.mark.parametrize("old_journal", [False, True])
def test_it_does_not_go_on_as_another_method(tmp_path, first, then, old_journal):
    """`old_journal`: one without arguments, as earlier versions wrote: the streams themselves must fit."""
    stopped(tmp_path, **first)
    path = tmp_path / LEDGER_FILE
    if old_journal:
        if "shared_max_grad_norm" in then:
            pytest.skip("not in the plan")
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "arguments"}))
    again = make_trainer(output_dir=str(tmp_path), **BUDGET, **then)
    with pytest.raises(PrivacyConfigError, match=", and was"):
        again.train(resume_from_checkpoint=True)


def test_it_goes_on_as_the_same_method(tmp_path):
    first = stopped(tmp_path)
    again = make_trainer(output_dir=str(tmp_path), **BUDGET)
    again.train(resume_from_checkpoint=True)
    assert again.ledger.plan.noise_multipliers == first.ledger.plan.noise_multipliers
    assert again.ledger.shared_steps == again.ledger.expert_steps > 4


def test_the_journal_holds_no_seed(tmp_path):
    with pytest.warns(UserWarning, match="NOT private"):
        stopped(tmp_path, insecure_noise_seed=123456789)
    assert "123456789" not in (tmp_path / LEDGER_FILE).read_text()


# ---- A model that another run trained ----


@pytest.mark.parametrize(
    "first, then",
    [
        (dict(method="nonprivate_ffn", **NONE), dict(method="raptor")),
        (dict(method="monolithic_full", **ONE), dict(method="monolithic_full", **ONE)),
    ],
)
def test_a_trained_whole_model_is_no_base_model(tmp_path, first, then):
    trainer = make_trainer(output_dir=str(tmp_path / "first"), **first)
    trainer.train()
    trainer.save_model()
    model = type(trainer.model).from_pretrained(tmp_path / "first")
    again = make_trainer(model=model, output_dir=str(tmp_path / "again"), **then)
    with pytest.raises(PrivacyConfigError, match="which a run has trained"):
        again.train()
    with pytest.raises(PrivacyConfigError, match="which a run has trained"):
        again.privacy_statement()


def test_its_own_run_goes_on_with_it(tmp_path):
    settings = dict(method="monolithic_full", output_dir=str(tmp_path), save_strategy="steps", save_steps=1, **ONE)
    trainer = make_trainer(**settings)
    trainer.train()
    model = type(trainer.model).from_pretrained(tmp_path / "checkpoint-1")
    again = make_trainer(model=model, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again.privacy_statement().shared.steps_taken == 3  # one of them lost


def test_a_base_model_beside_an_adapter_is_untouched(tmp_path):
    """The output folder may be the folder of the base model."""
    base = tiny_model()
    base.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    trainer = make_trainer(model=type(base).from_pretrained(tmp_path), output_dir=str(tmp_path))
    for _ in range(2):
        trainer.train()
        trainer.save_model()
        assert trainer.privacy_statement().private
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_trained_whole_model_does_not_lie_beside_an_adapters_statement(tmp_path):
    trainer = make_trainer(method="nonprivate_ffn", output_dir=str(tmp_path), **NONE)
    trainer.train()
    trainer.save_model()
    before = (tmp_path / "model.safetensors").read_bytes()
    again = make_trainer(output_dir=str(tmp_path))
    with pytest.raises(PrivacyConfigError, match="another run has trained"):
        again.train()
    elsewhere = make_trainer()
    elsewhere.train()
    with pytest.raises(PrivacyConfigError, match="another run has trained"):
        elsewhere.save_model(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before and not (tmp_path / "adapter_config.json").exists()


@pytest.mark.parametrize("changes", [dict(method="monolithic_full", **ONE), dict(shared_target_modules=["wi"])])
def test_adapters_of_peft_are_refused(tmp_path, changes):
    trainer = make_trainer(method="nonprivate_lora", output_dir=str(tmp_path), **NONE)
    trainer.train()
    trainer.save_model()
    model = tiny_model()
    model.load_adapter(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="adapter of PEFT"):
        make_trainer(model=model, **changes)
