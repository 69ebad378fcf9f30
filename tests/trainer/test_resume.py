"""Checkpoints, resuming and the budget: nothing that was spent is forgotten, nothing is drawn twice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects

from raptor_hf import PrivacyConfigError, stream_parameters
from tests.helpers import collate, tiny_model, tiny_records
from tests.trainer.audits import draws_of
from tests.trainer.build import Recorder, files, fix_draws, make_trainer, norm, run, values

EVERY = dict(save_strategy="steps", save_steps=1)
BUDGET = dict(target_epsilon=6.0, target_delta=1e-3, expected_batch_size=4)


def checkpoint(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step}"


def trained(folder: Path, steps: int = 2, **changes):
    trainer = make_trainer(max_steps=steps, output_dir=str(folder), **EVERY, **changes)
    trainer.train()
    return trainer


# ---- Resuming ----


def test_resume_restores_weights_optimizer_and_counters(tmp_path):
    first = trained(tmp_path, steps=3, optim="adamw_torch")
    again = make_trainer(max_steps=3, output_dir=str(tmp_path), optim="adamw_torch")
    fix_draws(again, [([], [])] * 3)
    again.train(resume_from_checkpoint=str(checkpoint(tmp_path, 3)))  # nothing is left to do
    assert again.state.global_step == 3
    assert (again.ledger.shared_steps, again.ledger.expert_steps) == (3, 3)
    for name, value in first.model.named_parameters():
        assert torch.equal(value, again.model.get_parameter(name)), name
    assert again.ledger.epsilon() == first.ledger.epsilon()


def test_a_resumed_run_counts_on(tmp_path):
    trained(tmp_path, steps=2)
    again = make_trainer(max_steps=5, output_dir=str(tmp_path))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == again.ledger.shared_steps == again.ledger.expert_steps == 5
    statement = again.privacy_statement()
    assert (statement.shared.steps_taken, statement.expert.steps_taken) == (5, 5)


def test_fresh_coins_and_noise_after_resuming(tmp_path):
    """Twice from the same checkpoint, with the same seed: other draws, other noise."""
    trained(tmp_path, steps=2)
    updates, draws = [], []
    for _ in range(2):
        trainer = make_trainer(max_steps=4, output_dir=str(tmp_path))
        recorder = Recorder()
        trainer.add_callback(recorder)
        trainer.train(resume_from_checkpoint=str(checkpoint(tmp_path, 2)))
        assert len(recorder.updates) == 2
        updates.append(recorder.updates)
        draws.append([tuple(cycle[0]) for cycle in draws_of(trainer, 30)])
    assert draws[0] != draws[1]
    for one, two in zip(*updates, strict=True):
        for stream in one:
            gap = norm({name: one[stream][name] - two[stream][name] for name in one[stream]})
            assert gap > 0.9 * norm(one[stream])


def test_a_checkpoint_holds_nothing_private(tmp_path):
    """No coins, no noise state, no owner map, no loss: the files are known, and the texts are searched.

    The owner map is in one file that only its owner may read, in a folder that the Hub's client does not upload.
    """
    folder = tmp_path / "out"
    trainer = trained(folder, steps=2, logging_strategy="steps", logging_steps=1)
    owners = trainer._owners.tolist()
    known = {
        "adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "privacy.json", "raptor_state.json",
        "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin",
    }  # fmt: skip
    private = folder / ".cache" / "huggingface" / "raptor_private" / "owner_map.npz"
    assert private.stat().st_mode & 0o777 == 0o600 and private.parent.stat().st_mode & 0o777 == 0o700
    assert np.load(private)["owners"].tolist() == owners
    assert list(filter_repo_objects(files(folder), ignore_patterns=DEFAULT_IGNORE_PATTERNS)) == [
        name for name in files(folder) if not name.endswith("owner_map.npz")
    ]
    private.unlink()
    assert {Path(name).name for name in files(folder)} <= known | {"README.md", "raptor_ledger.json"}
    squeezed = re.sub(r"\s", "", "".join(p.read_text() for p in folder.rglob("*.json")))
    squeezed = squeezed.replace('"expert_denominator":"owners"', "")  # a setting, and public
    assert ",".join(map(str, owners)) not in squeezed
    for word in ("owner_map", "owners", '"loss"', "train_loss", "batch_sizes", "norms"):
        assert f"{word}:" not in squeezed and f'"{word}"' not in squeezed, word
    state = json.loads((checkpoint(folder, 2) / "raptor_state.json").read_text())
    assert set(state) == {
        "run", "plan", "shared_steps", "expert_steps", "cycle", "arguments", "base_model", "files", "adapter_sha256",
    }  # fmt: skip


def test_the_generator_in_a_checkpoint_tells_nothing_of_the_draws(tmp_path):
    """Two runs of one seed with other draws leave the same `rng_state.pth`: it never advanced with the records."""
    states = []
    for drawn in ([], range(24)):
        folder = tmp_path / str(len(states))
        trainer = make_trainer(model=tiny_model(dropout_rate=0.1), output_dir=str(folder), **EVERY)
        fix_draws(trainer, [(drawn, drawn)]).train()
        states.append(torch.load(checkpoint(folder, 1) / "rng_state.pth", weights_only=False)["cpu"])
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "change",
    [
        dict(expected_batch_size=4),
        dict(target_delta=1e-4),
        dict(shared_noise_multiplier=2.0),
        dict(protected_layer="first"),
        dict(records=23),
    ],
)
def test_a_resume_that_changes_the_accounting_is_refused(tmp_path, change):
    trained(tmp_path)
    records = change.pop("records", 24)
    trainer = make_trainer(records, max_steps=4, output_dir=str(tmp_path), **change)
    before = values(trainer.model)
    with pytest.raises(PrivacyConfigError, match="checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    after = values(trainer.model)
    assert all(torch.equal(after[s][n], before[s][n]) for s in before for n in before[s])


@pytest.mark.parametrize("change", [dict(insecure_noise_seed=1), dict(research_diagnostics=True)])
@pytest.mark.filterwarnings("ignore:`insecure_noise_seed`")
def test_a_run_that_was_not_private_does_not_become_private_by_resuming(tmp_path, change):
    trained(tmp_path, **change)
    with pytest.raises(PrivacyConfigError, match="checkpoint"):
        make_trainer(max_steps=4, output_dir=str(tmp_path)).train(resume_from_checkpoint=True)


def test_a_checkpoint_without_a_budget_is_refused(tmp_path):
    trained(tmp_path)
    (checkpoint(tmp_path, 2) / "raptor_state.json").unlink()
    with pytest.raises(PrivacyConfigError, match="raptor_state"):
        make_trainer(max_steps=4, output_dir=str(tmp_path)).train(str(checkpoint(tmp_path, 2)))


def test_a_crash_between_the_streams_counts_the_first(tmp_path):
    """The counter is raised before the release: a crash can only over-count."""
    trainer = make_trainer(max_steps=2)
    spent = []

    def crash(*args, **kwargs):
        spent.append((trainer.ledger.shared_steps, trainer.ledger.expert_steps))
        raise KeyboardInterrupt

    trainer.create_optimizer()
    trainer._start(None)
    trainer.optimizer.step = crash
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert spent == [(1, 0)]


def test_load_best_model_at_end(tmp_path):
    evaluation = Dataset.from_list(tiny_records(8, seed=2))
    trainer = make_trainer(
        output_dir=str(tmp_path), eval_dataset=evaluation, eval_strategy="steps", eval_steps=1, max_steps=3,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False, learning_rate=2.0,
        **EVERY,
    )  # fmt: skip
    trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = min(losses, key=losses.get)
    assert trainer.state.best_model_checkpoint == str(checkpoint(tmp_path, best))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=1e-4)
    # what was spent stays spent, whichever adapter is kept
    assert trainer.ledger.shared_steps == 3


# ---- Budget ----


def test_the_budget_is_met_and_never_passed(tmp_path):
    """Train to the end, raise `max_steps`, resume, call `train` again: epsilon stays under the target throughout."""
    first = trained(tmp_path, steps=3, **BUDGET)
    spent = first.ledger.epsilon()
    assert 0.98 * 6.0 < spent <= 6.0
    with pytest.raises(PrivacyConfigError, match="target_epsilon"):
        first.train()
    longer = make_trainer(max_steps=30, output_dir=str(tmp_path), **BUDGET)
    longer.train(resume_from_checkpoint=str(checkpoint(tmp_path, 3)))  # a warning, and the checkpoint's model
    assert longer.state.global_step == 3 and longer.ledger.epsilon() == spent
    part = make_trainer(max_steps=30, output_dir=str(tmp_path), **BUDGET)
    part.train(resume_from_checkpoint=str(checkpoint(tmp_path, 1)))
    # cycles 2 and 3 were released, whether or not one goes on from before them
    assert part.state.global_step == 1 and part.ledger.epsilon() == spent
    assert all(torch.isfinite(p).all() for s in stream_parameters(part.model).values() for p in s.values())
    assert part.evaluate(Dataset.from_list(tiny_records(4)))["eval_loss"] > 0
    part.privacy_statement().recompute()


def test_the_ledger_itself_refuses_one_step_too_many():
    """Also without the callback that ends training in time."""
    trainer = make_trainer(max_steps=2, **BUDGET)
    trainer.remove_callback(trainer._budget_callback)
    trainer.train()
    trainer.args.max_steps = 50
    before = values(trainer.model)
    with pytest.raises(PrivacyConfigError):
        trainer.train()
    with pytest.raises(PrivacyConfigError, match="one more step"):
        trainer.training_step(trainer.model, draws_cycle(trainer))
    after = values(trainer.model)
    assert all(torch.equal(after[s][n], before[s][n]) for s in before for n in before[s])
    assert trainer.ledger.epsilon() <= 6.0


def draws_cycle(trainer):
    return next(iter(trainer.get_train_dataloader()))


def test_training_again_without_a_target_adds_up():
    trainer = make_trainer(max_steps=2)
    trainer.train()
    trainer.train()
    assert trainer.ledger.shared_steps == trainer.ledger.expert_steps == 4
    statement = trainer.privacy_statement()
    assert statement.shared.steps_taken == 4
    assert statement.epsilon_planned >= statement.epsilon_spent > 0


def test_a_second_trainer_does_not_forget_what_the_first_spent():
    model = tiny_model()
    make_trainer(model=model).train()
    second = make_trainer(model=model)
    with pytest.raises(PrivacyConfigError, match="another trainer"):
        second.train()


def test_a_second_trainer_that_has_nothing_to_forget_may_train():
    model = tiny_model()
    make_trainer(model=model)
    assert len(run(make_trainer(model=model))) == 2
    assert collate(tiny_records(2))["labels"].shape == (2,)


@pytest.mark.parametrize("change", [dict(expected_batch_size=16), dict(shared_noise_multiplier=0.5)])
def test_changing_the_accounting_between_two_calls_of_train_is_refused(change):
    """The draws would follow the new rate, and the accounting the old one."""
    trainer = make_trainer()
    trainer.train()
    for name, value in change.items():
        setattr(trainer.args, name, value)
    with pytest.raises(PrivacyConfigError, match="training so far"):
        trainer.train()
    assert trainer.ledger.shared_steps == 2


def test_a_statement_asked_for_early_binds_nothing():
    trainer = make_trainer(max_steps=2, **BUDGET)
    few = trainer.privacy_statement().shared.noise_multiplier
    trainer.args.max_steps = 6
    trainer.train()
    assert trainer.privacy_statement().shared.noise_multiplier > few
    assert trainer.state.global_step == 6 and trainer.ledger.epsilon() <= 6.0
