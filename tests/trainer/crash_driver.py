"""Kills training at given points and lets it go on: `python crash_driver.py FOLDER SPEC...`, SPEC = MODE:FRACTION,...

Each SPEC is one run in a folder of its own, killed (SIGKILL) once for each of its points and then left to end. MODE is
`any` (the point is a fraction of all Python and C calls of the training loop), `saving` (of those while a checkpoint is
written) or `between` (after the release of the shared stream of that fraction of the cycles). Every attempt is a fork
of this process, which has imported everything and computed nothing. Writes FOLDER/report.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from raptor_hf import RaptorTrainer, plan, state, streams
from tests.trainer.build import make_trainer

CYCLES, SAVE = 6, 2
TARGET = dict(target_epsilon=6.0, target_delta=1e-3, expected_batch_size=4)


def start(folder: Path):
    return make_trainer(
        8, max_steps=CYCLES, output_dir=str(folder / "out"), save_strategy="steps", save_steps=SAVE,
        save_total_limit=2, optim="adamw_torch", lr_scheduler_type="linear", **TARGET,
    )  # fmt: skip


def memoised(module, name: str, folder: Path) -> None:
    """Keep what the accountant computed for the next attempts: it is the same numbers each time, and slow."""
    original = getattr(module, name)

    def remembering(*args, **kwargs):
        key = hashlib.sha256(repr((name, args, sorted(kwargs.items()))).encode()).hexdigest()
        path = folder / key
        if not path.exists():
            partial = folder / f"{key}.{os.getpid()}"
            partial.write_bytes(pickle.dumps(original(*args, **kwargs)))
            partial.rename(path)
        return pickle.loads(path.read_bytes())

    setattr(module, name, remembering)


class Killer:
    """Counts events, and ends the process at the one that was asked for."""

    def __init__(self, mode: str, at: int | None):
        self.mode, self.at, self.count, self.saving, self.in_saving = mode, at, 0, False, 0

    def event(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def profile(self, frame, event, argument) -> None:
        if event in ("call", "c_call"):
            self.in_saving += self.saving
            if self.mode == "any" or self.saving:
                self.event()


def attempt(folder: Path, mode: str, at: int | None) -> None:
    """One process: train from scratch, or from what is there; note every release the moment it is made."""
    killer = Killer(mode, at)
    log = os.open(folder / "releases", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    release, save = streams.release, RaptorTrainer._save_checkpoint

    def noting(clipped, *args):
        released = release(clipped, *args)
        os.write(log, b"s" if clipped.num_owners is None else b"e")
        if mode == "between" and clipped.num_owners is None:
            killer.event()
        return released

    def watching(self, *args):
        killer.saving = True
        save(self, *args)
        killer.saving = False

    streams.release, RaptorTrainer._save_checkpoint = noting, watching
    began = (folder / "out" / "raptor_ledger.json").exists()
    trainer = start(folder)
    if mode != "between":
        loop = trainer._inner_training_loop
        trainer._inner_training_loop = lambda **kwargs: (sys.setprofile(killer.profile), loop(**kwargs))[1]
    trainer.train(resume_from_checkpoint=began)
    sys.setprofile(None)
    trainer.save_model()
    ended = {
        "step": trainer.state.global_step, "epsilon": trainer.ledger.epsilon(),
        "events": {"any": killer.count, "saving": killer.in_saving},
        "spent": [trainer.ledger.shared_steps, trainer.ledger.expert_steps],
        "finite": all(bool(torch.isfinite(p).all()) for p in trainer._trainables().values()),
    }  # fmt: skip
    (folder / "ended.json").write_text(json.dumps(ended))


def fork(folder: Path, mode: str, at: int | None) -> int:
    """The exit code of an attempt; -9 when it was killed."""
    child = os.fork()
    if child == 0:
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            attempt(folder, mode, at)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ledger(folder: Path) -> list[int]:
    path = folder / "out" / "raptor_ledger.json"
    if not path.exists():
        return [0, 0]
    found = json.loads(path.read_text())
    return [found["shared_steps"], found["expert_steps"]]


def released(folder: Path) -> list[int]:
    path = folder / "releases"
    made = path.read_bytes() if path.exists() else b""
    return [made.count(b"s"), made.count(b"e")]


def run(folder: Path, spec: str, totals: dict[str, int]) -> dict:
    mode, _, points = spec.partition(":")
    folder.mkdir(parents=True)
    killed = []
    for point in filter(None, points.split(",")):
        code = fork(folder, mode, 1 + int(float(point) * totals[mode]))
        complete = sorted(int(p.parent.name[11:]) for p in folder.glob("out/checkpoint-*/raptor_state.json"))
        killed.append({"code": code, "ledger": ledger(folder), "released": released(folder), "complete": complete})
        if code != -signal.SIGKILL:
            break  # it ended before the point
    if not (folder / "ended.json").exists():
        code = fork(folder, mode, None)
    ended = json.loads((folder / "ended.json").read_text()) if (folder / "ended.json").exists() else None
    return {"spec": spec, "killed": killed, "code": code, "ended": ended, "released": released(folder),
            "ledger": ledger(folder), "output": (folder / "output").read_text()[-3000:]}  # fmt: skip


if __name__ == "__main__":
    target = Path(sys.argv[1])
    totals = {"between": CYCLES}
    memory = target / "memory"
    memory.mkdir(parents=True)
    memoised(plan, "calibrate_noise_multipliers", memory)
    memoised(state, "max_cycles", memory)
    memoised(state, "compute_epsilon", memory)
    totals.update(run(target / "whole", "any:", totals)["ended"]["events"])
    report = [run(target / str(index), spec, totals) for index, spec in enumerate(sys.argv[2:])]
    (target / "report.json").write_text(json.dumps(report, indent=1))
