"""Trainers on tiny models and random records, for the tests of this folder."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import TrainerCallback

from raptor_hf import RaptorConfig, RaptorTrainer, plan, stream_parameters
from raptor_hf.errors import RaptorError
from raptor_hf.privacy.sampling import Cycle
from tests.helpers import collate, tiny_model, tiny_records

# Everything that is private is in `train_dataset`; the collator is the plain one of the helpers.
SETTINGS = dict(
    use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_strategy="no", seed=42,
    optim="sgd", lr_scheduler_type="constant", learning_rate=0.1, per_device_train_batch_size=4,
    expected_batch_size=8, max_steps=2, shared_noise_multiplier=1.0, expert_noise_multiplier=1.0,
    protected_layer="last", lora_rank=2, lora_alpha=4.0,
)  # fmt: skip


def make_config(**changes) -> RaptorConfig:
    settings = {**SETTINGS, **changes}
    if "target_epsilon" in changes:
        for name in ("shared_noise_multiplier", "expert_noise_multiplier"):
            settings[name] = changes.get(name)
    settings.setdefault("output_dir", tempfile.mkdtemp(prefix="raptor-test-"))
    return RaptorConfig(**settings)


def make_trainer(records: int | Sequence[dict] = 24, model: nn.Module | None = None, **changes) -> RaptorTrainer:
    """A trainer; keywords that `RaptorTrainer` takes go to it, all others to the config."""
    names = ("eval_dataset", "public_dataset", "compute_metrics", "callbacks", "optimizers", "peft_config",
             "processing_class", "data_collator", "train_dataset")  # fmt: skip
    own = {name: changes.pop(name) for name in names if name in changes}
    rows = tiny_records(records, seed=5) if isinstance(records, int) else list(records)
    own.setdefault("train_dataset", Dataset.from_list(rows))
    own.setdefault("data_collator", collate)
    return RaptorTrainer(model=tiny_model() if model is None else model, args=make_config(**changes), **own)


# A trainer refuses adapters that are not at their start; those that a test has perturbed hold no training.
PERTURBED: weakref.WeakSet = weakref.WeakSet()
_holds_training = plan.holds_training
plan.holds_training = lambda model: model not in PERTURBED and _holds_training(model)


def perturb_adapters(model: nn.Module, seed: int = 3, scale: float = 0.3) -> None:
    """Adapters as after some training: LoRA's B is not zero, so that every tensor has a gradient."""
    PERTURBED.add(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameters in stream_parameters(model).values():
            for parameter in parameters.values():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


class FixedCycles:
    """A loader of given draws: (shared, expert) pairs of record indices."""

    def __init__(self, cycles: Iterable[tuple[Iterable[int], Iterable[int]]]):
        self.cycles = [Cycle(*(np.array(sorted(draw), dtype=np.int64) for draw in pair)) for pair in cycles]
        self.dataset = range(1)

    def __len__(self) -> int:
        return len(self.cycles)

    def __iter__(self):
        return iter(self.cycles)


def fix_draws(trainer: RaptorTrainer, cycles: Iterable[tuple[Iterable[int], Iterable[int]]]) -> RaptorTrainer:
    """Replace the coins, and nothing else."""
    loader = FixedCycles(cycles)
    trainer.get_train_dataloader = lambda: loader
    trainer.args.max_steps = len(loader)
    return trainer


def values(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Copies of the trainables, float64, by stream."""
    return {
        stream: {name: p.detach().double().clone() for name, p in parameters.items()}
        for stream, parameters in stream_parameters(model).items()
    }


def difference(after: dict, before: dict) -> dict[str, dict[str, torch.Tensor]]:
    return {s: {n: after[s][n] - before[s][n] for n in before[s]} for s in before}


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(sum(t.double().square().sum() for t in tensors.values()) ** 0.5)


class Recorder(TrainerCallback):
    """Keeps the update of every cycle."""

    def __init__(self):
        self.updates: list[dict[str, dict[str, torch.Tensor]]] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.last = values(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        now = values(model)
        self.updates.append(difference(now, self.last))
        self.last = now


def run(trainer: RaptorTrainer) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Train; the update of every cycle, by stream and tensor."""
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    trainer.remove_callback(recorder)
    return recorder.updates


def files(folder: str | Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())


def assert_refused(action, kind: type[RaptorError], *words: str) -> str:
    """`action` raises `kind` with three parts, and its message has all `words`. Returns the message."""
    with pytest.raises(kind) as caught:
        action()
    error = caught.value
    assert type(error) is kind or issubclass(type(error), kind)
    for part in (error.given, error.why, error.instead):
        assert len(part.split()) >= 2, f"a part says nothing: {part!r}"
        assert part.rstrip(".") in str(error)
    for word in words:
        assert word.lower() in str(error).lower(), f"{word!r} is missing in: {error}"
    return str(error)


def assert_refused_before_training(trainer, kind: type[RaptorError], *words: str) -> str:
    """`assert_refused` of `train`, and nothing was updated nor spent."""
    before = values(trainer.model)
    message = assert_refused(trainer.train, kind, *words)
    after = values(trainer.model)
    assert all(torch.equal(before[s][n], after[s][n]) for s in before for n in before[s])
    assert trainer.ledger is None or trainer.ledger.shared_steps == 0
    return message
