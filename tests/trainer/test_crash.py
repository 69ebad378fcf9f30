"""`kill -9` at any point, and disks that fill: nothing spent is forgotten, and the run goes on and ends."""

from __future__ import annotations

import errno
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raptor_hf import state as state_module
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy.accounting import Mechanism, compute_epsilon
from tests.trainer.build import make_trainer, values

DRIVER = Path(__file__).with_name("crash_driver.py")
CYCLES, EVERY, TARGET, DELTA, RATE = 6, 2, 6.0, 1e-3, 0.5


def points(seed: int, count: int) -> list[str]:
    """Seeded kill points: single kills, and runs that are killed twice before they may end."""
    draw = random.Random(seed)
    found = ["any:" + ",".join(f"{draw.random():.4f}" for _ in range(1 + i % 2)) for i in range(count)]
    found += [f"saving:{draw.random():.4f}" for _ in range(max(1, count // 3))]
    return [*found, f"between:{draw.random():.4f}"]


def drive(folder: Path, specs: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(folder), *specs], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def check(folder: Path, specs: list[str]) -> None:
    noise = json.loads((folder / "whole" / "out" / "raptor_ledger.json").read_text())["plan"]
    sigmas = (noise["shared_noise_multiplier"], noise["expert_noise_multiplier"])
    kills = 0
    for run in json.loads((folder / "report.json").read_text()):
        told = f"{run['spec']}: {run}"
        lost = 0
        for killed in run["killed"]:
            if killed["code"] == 0:
                break
            assert killed["code"] == -9, told
            kills += 1
            # every release that was made had been written down; at most one more of each stream and kill
            for counted, made in zip(killed["ledger"], killed["released"], strict=True):
                assert made <= counted <= made + kills, told
            lost = max(killed["ledger"]) - max([0, *killed["complete"]])
        assert run["code"] == 0 and run["ended"] is not None and run["ended"]["finite"], told
        spent, made = run["ended"]["spent"], run["released"]
        assert all(m <= c for m, c in zip(made, spent, strict=True)) and spent == run["ledger"], told
        true = compute_epsilon([Mechanism(s, RATE, m) for s, m in zip(sigmas, made, strict=True)], DELTA).upper
        assert true <= run["ended"]["epsilon"] + 1e-9 <= TARGET + 1e-9, told
        # all the budget was used, and only lost work is missing
        assert max(spent) == CYCLES, told
        if len(run["killed"]) == 1:
            assert run["ended"]["step"] == CYCLES - lost, told
            assert lost <= EVERY, told
    assert kills >= len(specs) - 1


def test_killed_at_random_points(tmp_path):
    """`python -m pytest -m slow tests/trainer/test_crash.py` tries many more."""
    specs = points(seed=3, count=2)
    drive(tmp_path / "runs", specs)
    check(tmp_path / "runs", specs)


@pytest.mark.slow
def test_killed_at_many_random_points(tmp_path):
    specs = points(seed=11, count=12)
    drive(tmp_path / "runs", specs)
    check(tmp_path / "runs", specs)


# ---- Disks that fill ----


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def saved_run(folder: Path, **changes):
    return make_trainer(output_dir=str(folder), save_strategy="steps", save_steps=1, **{"max_steps": 3, **changes})


@pytest.mark.parametrize("victim", ["optimizer.pt", "scheduler.pt", "trainer_state.json", "raptor_state.json"])
def test_a_disk_that_fills_while_saving_leaves_the_last_checkpoint(tmp_path, monkeypatch, victim):
    """The file of the second checkpoint is cut short; `resume_from_checkpoint=True` takes the first."""
    trainer = saved_run(tmp_path)

    def breaks(original):
        def write(*args, **kwargs):
            path = next(Path(a) for a in args if isinstance(a, (str, Path)) and not str(a).startswith("{"))
            if trainer.state.global_step == 2 and path.name == victim:
                path.write_bytes(b"half")
                full()
            return original(*args, **kwargs)

        return write

    monkeypatch.setattr(torch, "save", breaks(torch.save))
    monkeypatch.setattr(state_module, "write_durably", breaks(state_module.write_durably))
    save_json = type(trainer.state).save_to_json
    if victim == "trainer_state.json":
        monkeypatch.setattr(type(trainer.state), "save_to_json", breaks(save_json))
    with pytest.raises(OSError, match="No space"):
        trainer.train()
    assert (tmp_path / "checkpoint-2").is_dir()
    monkeypatch.undo()
    again = saved_run(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    # cycle 2 was released and lost, and made again
    assert again.ledger.shared_steps == again.ledger.expert_steps == 4


def test_a_release_that_cannot_be_written_down_is_not_made(tmp_path, monkeypatch):
    trainer = saved_run(tmp_path)
    before = values(trainer.model)
    monkeypatch.setattr(state_module, "write_durably", full)
    with pytest.raises(OSError, match="No space"):
        trainer.train()
    after = values(trainer.model)
    assert all(torch.equal(after[s][n], before[s][n]) for s in before for n in before[s])
    assert trainer.state.global_step == 0


def test_a_file_that_was_cut_short_later_is_noticed(tmp_path):
    saved_run(tmp_path).train()
    damaged = tmp_path / "checkpoint-3" / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(PrivacyConfigError, match=r"adapter_model\.safetensors"):
        saved_run(tmp_path, max_steps=4).train(str(tmp_path / "checkpoint-3"))
    again = saved_run(tmp_path, max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4 and again.ledger.shared_steps == 5


def test_the_previous_checkpoint_outlives_the_writing_of_the_next(tmp_path, monkeypatch):
    """Also when only one is kept: it is deleted after the new one is complete, not before."""
    seen = []
    original = state_module.PrivacyLedger.save

    def looking(self, directory, **more):
        if more:
            seen.append(sorted(p.parent.name for p in tmp_path.glob("checkpoint-*/raptor_state.json")))
        original(self, directory, **more)

    monkeypatch.setattr(state_module.PrivacyLedger, "save", looking)
    saved_run(tmp_path, save_total_limit=1).train()
    assert seen == [[], ["checkpoint-1"], ["checkpoint-2"]]
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_the_ledger_is_for_its_owner_only(tmp_path):
    saved_run(tmp_path).train()
    assert (tmp_path / "raptor_ledger.json").stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.rglob("*.partial"))
