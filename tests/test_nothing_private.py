"""Canaries: a run with checkpoints and logging on, and then a search of every file and every logged value for them.

What must not be found: texts and token ids of records, losses, realised batch sizes, the owner map and its counts,
per-record norms, un-noised sums. The search itself is tested on planted values.
"""

from __future__ import annotations

import io
import json
import logging
import math
import pickle
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.utils import logging as hf_logging

from raptor_hf.moe import owner_map
from tests.helpers import tiny_model, tiny_records
from tests.trainer.build import fix_draws, make_trainer

# Sizes that no public number of the run has: n = 211, B = 8.
SIZES = [(97, 83), (101, 89)]
RECORDS = 211
CANARY = "the patient was seen by doctor canary"
# The one place where the owner map may lie.
OWNERS = "owner_map"
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")


class Secrets:
    """Private values, as they could be written: texts, byte strings, whole numbers and fractions."""

    def __init__(self):
        self.texts: list[str] = []
        self.bytes: list[bytes] = []
        self.integers: set[int] = set()
        self.floats: list[float] = []
        self.chief: list[float] = []
        self.folder = "no folder"  # its name has a counter

    def sequence(self, values) -> None:
        """Whole numbers in a row: as a list, separated by spaces, and as arrays of the usual types."""
        values = [int(v) for v in values]
        self.texts += [", ".join(map(str, values)), ",".join(map(str, values)), " ".join(map(str, values))]
        self.texts += ["\n".join(map(str, values))]
        self.bytes += [np.array(values, dtype=kind).tobytes() for kind in ("<i8", "<i4")]
        if max(values) < 128:
            self.bytes.append(np.array(values, dtype="i1").tobytes())

    def number(self, value: float, chief: bool = False) -> None:
        """A fraction; a chief one (a loss, the norm of a sum) is also looked for rounded to four digits."""
        if math.isfinite(value) and abs(value) > 1e-6:
            self.floats.append(value)
            self.chief += [value] if chief else []
            self.bytes += [np.array(value, dtype="<f8").tobytes(), np.array(value, dtype=">f8").tobytes()]

    def tensor(self, value: torch.Tensor) -> None:
        flat = value.detach().float().flatten()
        if flat.numel() >= 8 and bool(flat.any()):
            start = int(flat.ne(0).nonzero()[0])
            self.bytes.append(flat[start : start + 8].numpy().tobytes())

    # ---- Search ----

    def in_text(self, text: str) -> Iterator[str]:
        yield from (f"text {secret[:30]!r}" for secret in self.texts if secret in text)
        text = text.replace(self.folder, "")
        for match in NUMBER.finditer(text):
            around = text[max(0, match.start() - 30) : match.end() + 10]
            yield from (f"{found} in {around!r}" for found in self.in_numbers([match.group()]))

    def in_numbers(self, numbers: Iterable[str]) -> Iterator[str]:
        """Numbers as they are written: how many digits there are decides how near a secret they must come.

        There are hundreds of secrets: a coarser comparison would find one near some public number by chance.
        """
        secret, chief = np.array(self.floats), np.array(self.chief)
        for text in numbers:
            number, digits = float(text), len(text.partition(".")[2].partition("e")[0])
            if number.is_integer():
                if int(number) in self.integers:
                    yield f"count {int(number)}"
            elif digits >= 7 and np.isclose(secret, number, rtol=1e-7, atol=0).any():
                yield f"value {number}"
            elif digits >= 4 and bool((np.abs(chief - number) <= 0.501 * 10.0**-digits).any()):
                yield f"rounded {number}"

    def in_bytes(self, data: bytes) -> Iterator[str]:
        yield from (f"bytes {secret[:8]!r}" for secret in self.bytes if secret in data)
        yield from (f"text {secret[:30]!r}" for secret in self.texts if secret.encode() in data)

    def in_file(self, path: Path) -> list[str]:
        data = path.read_bytes()
        found = list(self.in_bytes(data))
        if path.suffix in (".json", ".md", ".txt", ".csv", ".jsonl", ".yaml"):
            found += self.in_text(data.decode())
        return found


class Payloads(TrainerCallback):
    """What a tracker would be sent."""

    def __init__(self):
        self.sent: list[str] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.sent.append(json.dumps({**logs}))

    def on_train_end(self, args, state, control, **kwargs):
        self.sent.append(state.to_json_string() if hasattr(state, "to_json_string") else str(state))
        self.sent.append(args.to_json_string())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of two cycles, and what was private in it."""
    folder = tmp_path_factory.mktemp("run")
    monkeypatch = pytest.MonkeyPatch()
    secrets, stream, payloads = Secrets(), io.StringIO(), Payloads()
    rows = [{**row, "text": f"{CANARY} {i}"} for i, row in enumerate(tiny_records(RECORDS, seed=2, shortest=6))]
    secrets.folder = str(folder)
    secrets.texts.append(CANARY)
    for row in rows:
        secrets.sequence(row["input_ids"])

    import raptor_hf.privacy.clipping as clipping
    import raptor_hf.streams as streams

    factors, release = clipping.clip_factors, streams.release

    def watch_norms(grads, max_norm):
        found = factors(grads, max_norm)
        for norm in found[1].tolist():
            secrets.number(norm)
        return found

    def watch_sums(clipped, *args, **kwargs):
        secrets.number(float(sum(v.double().square().sum() for v in clipped.sums.values()) ** 0.5), chief=True)
        for value in clipped.sums.values():
            secrets.tensor(value)
        return release(clipped, *args, **kwargs)

    monkeypatch.setattr(clipping, "clip_factors", watch_norms)
    monkeypatch.setattr(streams, "release", watch_sums)
    handler = logging.StreamHandler(stream)
    root, verbosity = logging.getLogger(), hf_logging.get_verbosity()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    hf_logging.set_verbosity_debug()
    hf_logging.enable_propagation()
    try:
        trainer = make_trainer(
            rows, train_dataset=Dataset.from_list(rows), output_dir=str(folder), save_strategy="steps", save_steps=1,
            logging_strategy="steps", logging_steps=1, logging_first_step=True, per_device_train_batch_size=32,
            max_steps=2, optim="adamw_torch", callbacks=[payloads], log_level="debug", disable_tqdm=False,
            per_device_eval_batch_size=64,
        )  # fmt: skip
        owners = owner_map(tiny_model(), trainer._records, 3, data_collator=trainer.data_collator, batch_size=64)
        counts = torch.bincount(owners, minlength=4).tolist()
        secrets.sequence(owners[:40])
        secrets.sequence(counts)
        secrets.integers |= {count for count in counts if count > 50}  # smaller ones are also indices of parameters
        drawn = [(range(a), range(RECORDS - b, RECORDS)) for a, b in SIZES]
        secrets.integers |= {size for pair in SIZES for size in pair}
        fix_draws(trainer, drawn)
        with torch.no_grad():
            trainer.model.eval()
            for draw in [*drawn[0], *drawn[1], range(RECORDS)]:
                batch = trainer.data_collator([trainer._records[i] for i in draw])
                secrets.number(float(trainer.model(**batch).loss), chief=True)
        output = trainer.train()
        trainer.save_state()
        trainer.save_model()
        trainer.log_metrics("train", output.metrics)
        trainer.save_metrics("train", output.metrics)
    finally:
        monkeypatch.undo()
        root.removeHandler(handler)
        root.setLevel(level)
        hf_logging.disable_propagation()
        hf_logging.set_verbosity(verbosity)
    return trainer, folder, secrets, stream.getvalue(), payloads.sent


def test_the_run_had_secrets_and_wrote_files(run):
    trainer, folder, secrets, log, sent = run
    assert len(secrets.floats) > 300 and len(secrets.integers) > 4 and len(secrets.bytes) > 500
    names = {path.name for path in folder.rglob("*")}
    assert {"trainer_state.json", "optimizer.pt", "scheduler.pt", "training_args.bin", "privacy.json"} <= names
    assert {"checkpoint-1", "checkpoint-2", "adapter_model.safetensors", "train_results.json"} <= names
    assert len(sent) >= 4 and len(log) > 200


def test_no_file_has_a_secret(run):
    _, folder, secrets, _, _ = run
    for path in (p for p in folder.rglob("*") if p.is_file()):
        if OWNERS in path.name:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, f"{path} can be read by others"
            assert "checkpoint" not in str(path.relative_to(folder)), "the owner map lies in what is copied and pushed"
            continue
        assert not (found := secrets.in_file(path)), f"{path.name}: {found[:3]}"


def test_no_binary_file_has_a_private_number(run):
    """Inside pickles and tensors too: whatever loads is walked through."""
    _, folder, secrets, _, _ = run
    for path in [*folder.rglob("*.pt"), *folder.rglob("*.bin"), *folder.rglob("*.pth")]:
        loaded = torch.load(path, weights_only=False)
        loaded = vars(loaded) if hasattr(loaded, "__dict__") and not isinstance(loaded, dict) else loaded
        numbers = [repr(n) for n in _numbers(loaded) if math.isfinite(n)]
        if "rng" not in path.name:  # 624 random words
            assert not (found := list(secrets.in_numbers(numbers))), f"{path.name}: {found[:3]}"


def _numbers(value) -> Iterator[float]:
    if isinstance(value, dict):
        for part in value.values():
            yield from _numbers(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        yield value.item()


def test_nothing_logged_has_a_secret(run):
    trainer, _, secrets, log, sent = run
    for text in [log, *sent, json.dumps(trainer.state.log_history), str(trainer.privacy_statement())]:
        assert not (found := list(secrets.in_text(text))), found[:3]


def test_optimizer_state_is_computed_from_noisy_gradients(run):
    """Adam's first moment of an un-noised sum would be 0.1 of it."""
    trainer, _, secrets, _, _ = run
    moments = Secrets()
    for state in trainer.optimizer.state.values():
        moments.tensor(state["exp_avg"])
    assert moments.bytes and not set(moments.bytes) & set(secrets.bytes)


PLANTS = {
    "loss.json": lambda s: json.dumps({"loss": round(s.chief[0], 4)}).encode(),
    "mean.txt": lambda s: f"'loss': {s.chief[4]}, ".encode(),
    "norm.json": lambda s: json.dumps({"norms": s.floats[5:7]}).encode(),
    "size.json": lambda s: json.dumps({"batch": SIZES[0][0]}).encode(),
    "counts.md": lambda s: f"expert counts: {max(s.integers)}".encode(),
    "text.log": lambda s: f"could not read {CANARY} 12".encode(),
    "ids.pkl": lambda s: pickle.dumps(np.array(tiny_records(RECORDS, seed=2, shortest=6)[7]["input_ids"])),
    "ids.json": lambda s: json.dumps(tiny_records(RECORDS, seed=2, shortest=6)[9]["input_ids"]).encode(),
    "float.bin": lambda s: b"head" + np.array(s.floats[3], dtype="<f8").tobytes(),
}


@pytest.mark.parametrize("name", PLANTS)
def test_the_search_finds_what_is_planted(run, name, tmp_path):
    secrets = run[2]
    (tmp_path / name).write_bytes(PLANTS[name](secrets))
    assert secrets.in_file(tmp_path / name)


def test_the_search_finds_a_saved_tensor(run, tmp_path):
    """The clipped sum of a stream, as `torch.save` writes it."""
    secrets = run[2]
    raw = next(secret for secret in reversed(secrets.bytes) if len(secret) == 32)
    torch.save({"grad": torch.from_numpy(np.frombuffer(raw, dtype=np.float32).copy())}, tmp_path / "grad.pt")
    assert secrets.in_file(tmp_path / "grad.pt")
