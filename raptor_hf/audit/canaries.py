"""Gradient canaries: records whose per-sample gradient the auditor chooses, through the real trainer, in one run.

A canary's gradient points in a direction of its own, in every stream, and is far longer than the clipping norm. What
the trainer releases along that direction tells whether the canary was among the records, as well as the noise allows.
The trainer draws, clips, adds up, adds noise and steps as always: only `RaptorTrainer.record_gradients` is overridden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from raptor_hf.audit.directions import Directions
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.plan import make_streams
from raptor_hf.privacy.noise import EntropySource
from raptor_hf.streams import Stream
from raptor_hf.trainer import RaptorTrainer
from raptor_hf.validate import one_of, positive

__all__ = ["Canaries", "CanaryTrainer", "Observer", "canary_scores", "draw_canaries", "log_likelihood_ratio"]

_REAL, _FILLER = -1, -2


def _key(record: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(token) for token in record["input_ids"])


@dataclass(frozen=True)
class Canaries:
    """m canaries, the auditor's coins, and fillers in the place of those that are left out.

    A filler is a record of zero gradient, which is what an absent record is to a sum. It keeps the number of records,
    which is public and sets the sampling rate, from telling how many coins fell which way.

    Attributes:
        records: the m canary records. fillers: one a canary that is left out.
        included: (m,) bool, the coins. owners: (m,) the expert that owns each. lone: (m,) bool, True where no real
            record has the same owner.
    """

    records: Sequence[Mapping[str, Any]]
    fillers: Sequence[Mapping[str, Any]]
    included: np.ndarray
    owners: np.ndarray
    lone: np.ndarray
    _marks: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for index, record in enumerate(self.records):
            self._marks[_key(record)] = index
        for record in self.fillers:
            self._marks[_key(record)] = _FILLER
        if len(self._marks) != len(self.records) + len(self.fillers):
            raise PrivacyConfigError(
                "Two canaries have the same tokens",
                "A canary is known by its tokens, so the two would count as one",
                "Draw them again, or longer ones",
            )

    def training_set(self, real: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The real records, the canaries that are in, and the fillers: always as many."""
        if any(_key(record) in self._marks for record in real):
            raise PrivacyConfigError(
                "A real record has the tokens of a canary",
                "Its gradient would be replaced as well",
                "Draw the canaries again, or longer ones",
            )
        chosen = [record for record, there in zip(self.records, self.included, strict=True) if there]
        return [dict(record) for record in (*real, *chosen, *self.fillers)]

    def marks(self, batch: Mapping[str, torch.Tensor]) -> list[int]:
        """For every row of a collated batch: the canary's index, -2 for a filler, -1 for a real record."""
        ids = batch["input_ids"].tolist()
        mask = batch["attention_mask"].tolist() if "attention_mask" in batch else [[1] * len(row) for row in ids]
        rows = (
            tuple(token for token, there in zip(row, seen, strict=True) if there)
            for row, seen in zip(ids, mask, strict=True)
        )
        return [self._marks.get(row, _REAL) for row in rows]


def draw_canaries(
    candidates: Sequence[Mapping[str, Any]],
    candidate_owners: Sequence[int],
    real_owners: Sequence[int],
    count: int,
    *,
    lone: int = 0,
    entropy: EntropySource | None = None,
) -> Canaries:
    """Choose `count` canaries and flip their coins.

    Args:
        candidates: made-up records, no two alike. candidate_owners: the expert that owns each.
        real_owners: owners of the real records of the run. Experts among them are busy, all others empty.
        count: m. lone: how many of them are owned by an otherwise empty expert (at most; as many as there are).
        entropy: of the coins; default, the operating system's.

    Raises:
        PrivacyConfigError: too few candidates.
    """
    entropy = entropy or EntropySource()
    busy = set(int(owner) for owner in real_owners)
    owners = np.asarray(candidate_owners, dtype=np.int64)
    crowd = [i for i, owner in enumerate(owners) if not busy or int(owner) in busy]
    alone = [i for i, owner in enumerate(owners) if busy and int(owner) not in busy][:lone]
    included = entropy.coins(count) < 0.5
    missing = int((~included).sum())
    wanted = count - len(alone)
    if len(crowd) < wanted + count:  # for the worst coins: a refusal that hangs on the coins would bias them
        raise PrivacyConfigError(
            f"{count} canaries were asked for, and {len(candidates)} candidates given",
            f"{wanted + count} are needed whose owner has real records too, and there are {len(crowd)}",
            "Ask for fewer canaries, or give more candidates",
        )
    chosen = crowd[:wanted] + alone
    return Canaries(
        [candidates[i] for i in chosen],
        [candidates[i] for i in crowd[wanted : wanted + missing]],
        included,
        owners[chosen],
        np.array([False] * wanted + [True] * len(alone)),
    )


class CanaryTrainer(RaptorTrainer):
    """`RaptorTrainer` on records some of which are canaries.

    Args:
        canaries: those whose records are in `train_dataset` (see `Canaries.training_set`).
        directions: "random" (orthonormal, over all tensors of a stream) or "dirac" (one coordinate each: no memory).
        scale: length of a canary's gradient before it is clipped, in units of the clipping norm. Above 1 the clipping
            is audited as well.
        Everything else as for `RaptorTrainer`.
    """

    def __init__(
        self, *args: Any, canaries: Canaries, directions: str = "random", scale: float = 100.0, seed: int = 0,
        **kwargs: Any,
    ):  # fmt: skip
        self.canaries = canaries
        self._kind = one_of("directions", directions, ("random", "dirac"))
        self._scale = positive("scale", scale)
        self._direction_seed = seed
        self._directions: dict[str, Directions] = {}
        super().__init__(*args, **kwargs)

    def directions(self, stream: Stream) -> Directions:
        """The canaries' directions in a stream; the same whenever it is asked for them."""
        if stream.name not in self._directions:
            self._directions[stream.name] = Directions(
                stream, len(self.canaries.records), kind=self._kind, seed=self._direction_seed
            )
        return self._directions[stream.name]

    def record_gradients(
        self, stream: Stream, batch: Mapping[str, torch.Tensor], owner: torch.Tensor | None
    ) -> Mapping[str, Any]:
        """The records' gradients, with those of canaries and fillers replaced."""
        grads = super().record_gradients(stream, batch, owner)
        marks = self.canaries.marks(batch)
        if all(mark == _REAL for mark in marks):
            return grads
        grads = {name: g.clone() if isinstance(g, torch.Tensor) else g.dense() for name, g in grads.items()}
        directions = self.directions(stream)
        assert stream.max_norm is not None  # a method that clips nothing has no per-sample gradients
        for row, mark in enumerate(marks):
            if mark == _FILLER:
                for value in grads.values():
                    value[row] = 0
            elif mark != _REAL:
                planted = directions.parts(mark, stream.max_norm * self._scale)
                for name, value in grads.items():
                    value[row] = planted[name].to(value)
        return grads


class Observer(TrainerCallback):
    """What an adversary sees who gets the adapter after every cycle: each release along each canary's direction.

    Plain SGD with a constant learning rate turns a cycle's update into its release, exactly.

    Attributes:
        seen: stream -> (T, m) float64. Entry (t, i) is the release of cycle t times denominator / C, along canary i:
            noise of standard deviation sigma, plus 1 where the canary was drawn.
        lone: (T, m) the same in an expert without real records, along all m directions: those of its own canaries
            carry them, all others nothing but noise. Empty where there is no such expert.
        lone_owner: that expert.
    """

    def __init__(self, trainer: CanaryTrainer):
        self.trainer = trainer
        self.streams: dict[str, Stream] = {}
        self.seen: dict[str, list[np.ndarray]] = {}
        self.lone: list[np.ndarray] = []
        alone = trainer.canaries.owners[trainer.canaries.lone]
        self.lone_owner = int(np.bincount(alone).argmax()) if len(alone) else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer.ledger is not None  # training has begun
        self.streams = make_streams(self.trainer.args, self.trainer.model, self.trainer.ledger.plan)
        self.seen = {name: [] for name in self.streams}
        self._last = self._now()

    def _now(self) -> dict[str, dict[str, torch.Tensor]]:
        return {
            name: {key: p.detach().double().cpu().clone() for key, p in stream.parameters.items()}
            for name, stream in self.streams.items()
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now, canaries = self._now(), self.trainer.canaries
        for name, stream in self.streams.items():
            assert stream.max_norm is not None
            released = {
                key: (self._last[name][key] - now[name][key])
                * (stream.denominators[key] / (self._rate(p) * stream.max_norm))
                for key, p in stream.parameters.items()
            }
            directions = self.trainer.directions(stream)
            self.seen[name].append(directions.project(released, canaries.owners))
            if self.lone_owner is not None and stream.owned == set(stream.parameters):
                self.lone.append(directions.project(released, np.full(len(canaries.owners), self.lone_owner)))
        self._last = now

    def _rate(self, parameter: torch.nn.Parameter) -> float:
        for group in self.trainer.optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                return float(group["lr"])
        raise RuntimeError("The optimizer does not hold a trained parameter; this is a bug.")


def log_likelihood_ratio(seen: np.ndarray, noise_multiplier: float, sample_rate: float) -> np.ndarray:
    """(m,) log-likelihood ratio of "in" against "out", from (T, m) observations of a subsampled Gaussian.

    Per cycle: log((1 - p) + p exp((2 x - 1) / (2 sigma^2))), the optimal test where nothing else lies on the direction.
    """
    exponent = (2 * seen - 1) / (2 * noise_multiplier**2)
    left = math.log1p(-sample_rate) if sample_rate < 1 else -math.inf
    return np.logaddexp(left, math.log(sample_rate) + exponent).sum(0)


def canary_scores(observer: Observer, sample_rate: float) -> dict[str, np.ndarray]:
    """Scores (m,) of the canaries: "joint" over both streams, one for each stream, and of the last adapter alone.

    "final" uses only the difference of the last adapter and the first.
    """
    parts, final = {}, []
    for name, rows in observer.seen.items():
        sigma, seen = observer.streams[name].noise_multiplier, np.stack(rows)
        parts[name] = log_likelihood_ratio(seen, sigma, sample_rate) if sigma else seen.sum(0)
        # in units of the accumulated noise, so that streams of different noise may be added
        final.append(seen.sum(0) / (sigma**2 if sigma else 1.0))
    return {"joint": np.sum(list(parts.values()), 0), **parts, "final": np.sum(final, 0)}
