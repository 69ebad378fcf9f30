"""What a run has planned and spent. All of it is public."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy.accounting import Mechanism, compute_epsilon, max_cycles

__all__ = [
    "LEDGER_FILE", "STATE_FILE", "PrivacyLedger", "PrivacyPlan", "adapter_digest", "archive_of", "read_json",
    "write_durably",
]  # fmt: skip

# In every checkpoint, written last: a folder without it is no checkpoint.
STATE_FILE = "raptor_state.json"
# In the output folder, written before each release.
LEDGER_FILE = "raptor_ledger.json"
# What the trained weights are saved as: adapters, or the whole model of a method that trains base weights.
_WEIGHTS = ("adapter_model.safetensors", "model.safetensors")


def archive_of(run: str) -> str:
    """Where the journal of `run` is kept when another run uses its output folder."""
    return LEDGER_FILE.replace(".json", f"-{run}.json")


def adapter_digest(directory: str | os.PathLike) -> str | None:
    """SHA-256 of the adapter (or whole model) in a folder; None without one."""
    for path in (Path(directory) / name for name in _WEIGHTS):
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read; after a crash at any point it is the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: Path) -> dict[str, Any] | None:
    """A file of this module; None when there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class PrivacyPlan:
    """The public constants of a run.

    Attributes:
        shared_noise_multiplier, expert_noise_multiplier: None for a stream that the method has not, 0 for no noise.
        sample_rate: p = B / n. cycles: planned cycles T. target_epsilon: None when the multipliers were given.
        protected_layer: block index, or those of stages, "1,3".
        insecure_noise, research_diagnostics: steps so made are not private, and stay so.
    """

    shared_noise_multiplier: float | None
    expert_noise_multiplier: float | None
    sample_rate: float
    cycles: int
    delta: float
    target_epsilon: float | None
    accountant: str
    dataset_size: int
    expected_batch_size: int
    protected_layer: int | str
    insecure_noise: bool = False
    research_diagnostics: bool = False

    @property
    def has_noise(self) -> bool:
        return bool(self.noise_multipliers) and all(sigma > 0 for sigma in self.noise_multipliers)

    @property
    def noise_multipliers(self) -> tuple[float, ...]:
        """Those of the streams that the method has."""
        both = (self.shared_noise_multiplier, self.expert_noise_multiplier)
        return tuple(sigma for sigma in both if sigma is not None)


@dataclass
class PrivacyLedger:
    """Write-ahead counters of the two streams' releases.

    A counter is raised before its release is computed, and written to `journal` where there is one, so that a crash
    can only over-count. `spend` refuses the release that would cross the target.

    Attributes:
        run: a random name of the run, the same in its journal and in all its checkpoints. journal: a file.
        arguments: those of the training so far that must not change.
    """

    plan: PrivacyPlan
    shared_steps: int = 0
    expert_steps: int = 0
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    journal: Path | None = field(default=None, repr=False)
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)
    _limit: int | None = field(default=None, repr=False)
    _cache: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)

    def mechanisms(self) -> list[Mechanism]:
        """The releases so far, grouped."""
        plan = self.plan
        pairs = ((plan.shared_noise_multiplier, self.shared_steps), (plan.expert_noise_multiplier, self.expert_steps))
        return [Mechanism(sigma, plan.sample_rate, steps) for sigma, steps in pairs if sigma is not None]

    def epsilon(self) -> float | None:
        """Upper bound of epsilon spent so far, at the plan's delta; None without noise."""
        if not self.plan.has_noise:
            return None
        key = (self.shared_steps, self.expert_steps)
        if key not in self._cache:
            bounds = compute_epsilon(self.mechanisms(), self.plan.delta, accountant=self.plan.accountant)
            self._cache[key] = bounds.upper
        return self._cache[key]

    def cycles_left(self, limit: int) -> int:
        """How many more cycles fit under the target, at most `limit`. Sets what `spend` enforces: call it first."""
        plan = self.plan
        if plan.target_epsilon is None or not plan.has_noise:
            self._limit = None
            if plan.has_noise:  # a plan whose epsilon cannot be told is refused now, not at the first log or save
                steps = max(limit, self.shared_steps, self.expert_steps)
                planned = [Mechanism(sigma, plan.sample_rate, steps) for sigma in plan.noise_multipliers]
                compute_epsilon(planned, plan.delta, accountant=plan.accountant)
            return limit
        left = max_cycles(
            plan.target_epsilon,
            plan.delta,
            (plan.shared_noise_multiplier, plan.expert_noise_multiplier),
            plan.sample_rate,
            spent=(self.shared_steps, self.expert_steps),
            limit=limit,
            accountant=plan.accountant,
        )
        self._limit = max(self.shared_steps, self.expert_steps) + left
        return left

    def exhausted(self) -> bool:
        """True when the next cycle would cross the target."""
        return self._limit is not None and max(self.shared_steps, self.expert_steps) >= self._limit

    def spend(self, stream: str) -> None:
        """Count one release of `stream` before it is made."""
        name = f"{stream}_steps"
        if self._limit is not None and getattr(self, name) >= self._limit:
            raise PrivacyConfigError(
                f"Another release of the {stream} stream was asked for",
                f"The budget of epsilon {self.plan.target_epsilon} is spent: one more step would cross it",
                "Stop here, or start a new run with a larger `target_epsilon`",
            )
        setattr(self, name, getattr(self, name) + 1)
        if self.journal is not None:
            self._write(self.journal, arguments=self.arguments)

    def go_on(self, planned: PrivacyPlan) -> None:
        """Go on with what `planned` says, from the steps counted so far.

        The noise multipliers stay in force (what was spent was spent with them); `cycles` may change. Any other
        difference is an error that names it.
        """
        noise = {
            name: getattr(self.plan, name)
            for name in ("shared_noise_multiplier", "expert_noise_multiplier")
            # a stream that the training so far had not has no noise to go on with, and one that it had may not vanish
            if planned.target_epsilon is not None and None not in (getattr(self.plan, name), getattr(planned, name))
        }
        expected = replace(planned, cycles=self.plan.cycles, **noise)
        for name, value in asdict(self.plan).items():
            if value != getattr(expected, name):
                raise PrivacyConfigError(
                    f"`{name}` is {getattr(planned, name)!r}, and was {value!r} in the training so far (checkpoint)",
                    "The accounting composes the steps of one plan",
                    f"Go on with the same `{name}`, or start a new run",
                )
        self.plan = replace(expected, cycles=planned.cycles)

    def count_lost_work(self, directory: str | os.PathLike) -> bool:
        """Count what the run released after the state that was loaded, by its journals in `directory`.

        Returns: True when there is one. A journal of another run says nothing about this one.
        """
        found = [read_json(Path(directory) / name) for name in (LEDGER_FILE, archive_of(self.run))]
        own = [journal for journal in found if journal is not None and journal.get("run") == self.run]
        for journal in own:
            self.shared_steps = max(self.shared_steps, int(journal["shared_steps"]))
            self.expert_steps = max(self.expert_steps, int(journal["expert_steps"]))
        return bool(own)

    def open_journal(self, directory: str | os.PathLike) -> None:
        """Count in `directory` from now on; the journal that another run left there is kept under its run's name."""
        path = Path(directory) / LEDGER_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        found = read_json(path)
        if found is not None and found.get("run") not in (None, self.run):
            write_durably(path.with_name(archive_of(str(found["run"]))), path.read_bytes())
        self.journal = path

    def save(self, directory: str | os.PathLike, **more: Any) -> None:
        """Write the state, `more` beside it, and to which adapter it belongs."""
        self._write(Path(directory) / STATE_FILE, adapter_sha256=adapter_digest(directory), **more)

    def _write(self, path: Path, **more: Any) -> None:
        steps = {"shared_steps": self.shared_steps, "expert_steps": self.expert_steps}
        data = {"run": self.run, "plan": asdict(self.plan), **steps, **more}
        write_durably(path, (json.dumps(data, indent=2) + "\n").encode())

    @classmethod
    def load(cls, saved: Mapping[str, Any], planned: PrivacyPlan) -> PrivacyLedger:
        """Go on from a saved state; see `go_on`."""
        ledger = cls(PrivacyPlan(**saved["plan"]), int(saved["shared_steps"]), int(saved["expert_steps"]), saved["run"])
        ledger.go_on(planned)
        return ledger
