"""The claim a run makes about its privacy, as a file that anybody can recompute.

Every field is public (mechanism and configuration, never data): no owner map, owner count, realised batch size, loss,
norm, seed or generator state has a place here.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from raptor_hf.errors import PrivacyConfigError, ReleaseError
from raptor_hf.privacy._card import NOISE_SOURCES, round_up, round_up_delta, statement_markdown
from raptor_hf.privacy.accounting import (
    ACCOUNTANTS,
    EpsilonBounds,
    Mechanism,
    check_delta,
    compute_epsilon,
)
from raptor_hf.validate import finite, integer, one_of, positive, probability

__all__ = ["NOT_COVERED", "OtherDelta", "PrivacyStatement", "StreamStatement"]

SCHEMA_VERSION = 1
NOT_COVERED = (
    "hyper-parameter search and model selection on the private data: only this run is accounted for",
    "evaluation data: metrics and losses computed on them are outside the guarantee",
    "replacing a record (instead of adding or removing one): by group privacy (2 epsilon, (1 + e^epsilon) delta)",
    "users, households or authors with several records: the unit is one record",
    "the number of records n, which is treated as public",
    "timing and memory side channels, and the rounding of floating-point noise",
)
_PACKAGES = ("accelerate", "dp-accounting", "numpy", "opacus", "peft", "prv-accountant", "raptor-hf", "scipy", "torch")
_DISTRIBUTIONS = {"prv": "prv-accountant", "pld": "dp-accounting"}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_versions() -> dict[str, str]:
    found = {name: _version(name) for name in sorted({*_PACKAGES, "transformers"})}
    return {name: version for name, version in found.items() if version is not None}


@dataclass(frozen=True)
class StreamStatement:
    """One stream of releases: sum of clipped gradients + noise, over a fixed denominator.

    Args:
        noise_multiplier: sigma; None for a stream without noise (not private).
        sample_rate: p = B / n, the Poisson rate.
        max_grad_norm: C, the per-record clip norm; None for a stream without clipping (not private).
        denominator: the public constant that divides the noisy sum (B, or B / E for an expert).
        steps_planned: releases the whole plan takes.
        steps_taken: releases counted so far (counted before each is made).
    """

    noise_multiplier: float | None
    sample_rate: float
    max_grad_norm: float | None
    denominator: float
    steps_planned: int
    steps_taken: int

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            positive("noise_multiplier", self.noise_multiplier)
        if self.max_grad_norm is not None:
            positive("max_grad_norm", self.max_grad_norm)
        probability("sample_rate", self.sample_rate)
        positive("denominator", self.denominator)
        integer("steps_planned", self.steps_planned)
        integer("steps_taken", self.steps_taken)

    @property
    def private(self) -> bool:
        return self.noise_multiplier is not None and self.max_grad_norm is not None


@dataclass(frozen=True)
class OtherDelta:
    """Upper bounds of epsilon at another delta; None where nothing is certified (above 20, or too many steps)."""

    delta: float
    epsilon_planned: float | None
    epsilon_spent: float | None


@dataclass(frozen=True)
class PrivacyStatement:
    """What a run claims. Make one with `build`, read one with `from_json`, check one with `recompute`.

    The first field is the sentence a reader sees; it cannot disagree with the rest (construction refuses it).
    `epsilon_spent` counts the releases made, `epsilon_planned` the whole plan; both are upper bounds at `delta`, None
    for a run without noise or clipping. `num_experts`, `protected_layer` (several, `"1,3"`, for stages) and `ownership`
    are None where no expert stream is trained.

    Formal guarantee: for a statement whose verdict does not begin with "NOT PRIVATE", everything the run releases is
    (epsilon_spent, delta)-DP per record under add/remove, provided the code that ran is the code that is described.
    """

    verdict: str
    method: str
    epsilon_spent: float | None
    epsilon_planned: float | None
    delta: float
    target_epsilon: float | None
    other_deltas: tuple[OtherDelta, ...]
    shared: StreamStatement | None
    expert: StreamStatement | None
    dataset_size: int
    expected_batch_size: float
    num_experts: int | None
    protected_layer: int | str | None
    ownership: str | None
    parallel_composition: str
    accountant: str
    accountant_version: str | None
    accountant_error: float | None
    noise_source: str
    research_diagnostics: bool
    base_model: str | None
    public_corpus: str | None
    disjointness: str | None
    packages: Mapping[str, str]
    not_covered: tuple[str, ...] = NOT_COVERED
    unit: str = "one record"
    adjacency: str = "add or remove one record"
    sampling: str = "Poisson, drawn afresh for each release, independently for each stream"
    dataset_size_is_public: bool = True
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        _check_version(self.schema_version)
        check_delta("delta", self.delta)
        integer("dataset_size", self.dataset_size, minimum=1)
        positive("expected_batch_size", self.expected_batch_size)
        one_of("accountant", self.accountant, ACCOUNTANTS)
        one_of("noise_source", self.noise_source, tuple(NOISE_SOURCES))
        if not self.streams:
            raise PrivacyConfigError("No stream was given", "A statement describes at least one", "Pass `shared`")
        for name, stream in self.streams.items():
            if not math.isclose(stream.sample_rate * self.dataset_size, self.expected_batch_size, rel_tol=1e-9):
                raise ReleaseError(
                    f"`{name}.sample_rate={stream.sample_rate!r}` with {self.dataset_size} records was given",
                    f"It is not the expected batch size {self.expected_batch_size!r} over that number",
                    "Use sample_rate = expected_batch_size / dataset_size",
                )
        for name in ("epsilon_spent", "epsilon_planned"):
            value = getattr(self, name)
            if (value is not None and finite(name, value) < 0) or (value is None) == self._has_noise:
                raise ReleaseError(
                    f"`{name}={value!r}` was given",
                    "Epsilon is a number >= 0 exactly where every stream is clipped and noised",
                    "Build the statement with `PrivacyStatement.build`",
                )
        verdict = _verdict(
            self.method, self._has_noise, self.epsilon_spent, self.delta, self.noise_source, self.research_diagnostics
        )
        if self.verdict != verdict:
            raise ReleaseError(
                f"The statement begins {self.verdict!r}",
                f"Its own numbers say {verdict!r}",
                "Do not publish it; build it again with `PrivacyStatement.build`",
            )

    @property
    def streams(self) -> dict[str, StreamStatement]:
        """The trained streams by name, in the order in which a cycle runs them."""
        pairs = {"shared": self.shared, "expert": self.expert}
        return {name: stream for name, stream in pairs.items() if stream is not None}

    @property
    def _has_noise(self) -> bool:
        return all(stream.private for stream in self.streams.values())

    @property
    def private(self) -> bool:
        """Whether the run as a whole has the guarantee that it states."""
        return not self.verdict.startswith("NOT PRIVATE")

    @classmethod
    def build(
        cls,
        *,
        method: str,
        shared: StreamStatement | None,
        expert: StreamStatement | None,
        delta: float,
        dataset_size: int,
        expected_batch_size: float,
        target_epsilon: float | None = None,
        num_experts: int | None = None,
        protected_layer: int | str | None = None,
        ownership: str | None = None,
        accountant: str = "prv",
        noise_source: str = "os_entropy",
        research_diagnostics: bool = False,
        base_model: str | None = None,
        public_corpus: str | None = None,
        disjointness: str | None = None,
        not_covered: tuple[str, ...] = NOT_COVERED,
    ) -> PrivacyStatement:
        """Compute the epsilons and write the statement.

        A method with one block (a baseline) passes it as `shared` and None as `expert`.

        Raises:
            PrivacyConfigError: for values out of range, or an epsilon above 20 at `delta`.
        """
        streams = [stream for stream in (shared, expert) if stream is not None]
        noisy = bool(streams) and all(stream.private for stream in streams)
        planned, spent = _mechanisms(streams, "steps_planned"), _mechanisms(streams, "steps_taken")
        epsilon_planned = epsilon_spent = error = None
        others: list[OtherDelta] = []
        if noisy:
            bounds = compute_epsilon(planned, delta, accountant=accountant)
            epsilon_planned, error = bounds.upper, bounds.upper - bounds.estimate
            epsilon_spent = compute_epsilon(spent, delta, accountant=accountant).upper
            for other in (1e-6, 1e-8):
                others.append(OtherDelta(other, _upper(planned, other, accountant), _upper(spent, other, accountant)))
        return cls(
            verdict=_verdict(method, noisy, epsilon_spent, delta, noise_source, research_diagnostics),
            method=method,
            epsilon_spent=epsilon_spent,
            epsilon_planned=epsilon_planned,
            delta=float(delta),
            target_epsilon=target_epsilon,
            other_deltas=tuple(others),
            shared=shared,
            expert=expert,
            dataset_size=dataset_size,
            expected_batch_size=float(expected_batch_size),
            num_experts=num_experts,
            protected_layer=protected_layer,
            ownership=ownership,
            parallel_composition=_parallel_composition(expert, num_experts, protected_layer, ownership),
            accountant=accountant,
            accountant_version=_version(_DISTRIBUTIONS[one_of("accountant", accountant, ACCOUNTANTS)]),
            accountant_error=error,
            noise_source=noise_source,
            research_diagnostics=bool(research_diagnostics),
            base_model=base_model,
            public_corpus=public_corpus,
            disjointness=disjointness,
            packages=_package_versions(),
            not_covered=tuple(not_covered),
        )

    def recompute(self, *, accountant: str | None = None) -> EpsilonBounds:
        """Epsilon spent, from the numbers in this statement.

        Args:
            accountant: "prv" or "pld"; default, the one that made the claim. That one must reproduce each claim; the
                other one must not refute it (PLD: its pessimistic value; PRV: its lower bound).

        Returns:
            The bounds at `delta`; infinities for a run without noise or clipping.

        Raises:
            ReleaseError: when a claimed epsilon is smaller than what is found.
        """
        accountant = self.accountant if accountant is None else one_of("accountant", accountant, ACCOUNTANTS)
        if not self._has_noise:
            return EpsilonBounds(math.inf, math.inf, math.inf)
        streams = list(self.streams.values())
        found = EpsilonBounds(0.0, 0.0, 0.0)
        rows = [OtherDelta(self.delta, self.epsilon_planned, self.epsilon_spent), *self.other_deltas]
        for row in rows:
            for count, claim in (("steps_planned", row.epsilon_planned), ("steps_taken", row.epsilon_spent)):
                if claim is None:  # claims nothing
                    continue
                bounds = compute_epsilon(_mechanisms(streams, count), row.delta, accountant=accountant)
                limit = bounds.lower if accountant == "prv" != self.accountant else bounds.upper
                if claim < limit * (1 - 1e-6):
                    raise ReleaseError(
                        f"The statement claims an epsilon of {claim:.6g} at delta = {row.delta:g} ({count})",
                        f"Its own noise multipliers, rates and steps give {limit:.6g} by the {accountant} accountant",
                        "Do not rely on it: ask its author for a statement built by `PrivacyStatement.build`",
                    )
                if row is rows[0] and count == "steps_taken":
                    found = bounds
        return found

    def to_json(self) -> str:
        """A JSON object, the verdict first; floats keep all their digits."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyStatement:
        """The inverse of `to_json`.

        Raises:
            ReleaseError: for another schema version, missing or unknown fields, or numbers that contradict each other.
        """
        try:
            values = json.loads(text)
            version = values.get("schema_version")
        except (AttributeError, json.JSONDecodeError) as error:
            given = f"The text is not a privacy statement ({error})"
            raise ReleaseError(given, "It must be a JSON object", _AGAIN) from error
        _check_version(version)
        names = {item.name for item in dataclasses.fields(cls)}
        if set(values) != names:
            raise ReleaseError(
                f"The statement has fields that differ: {sorted(set(values) ^ names)}",
                f"Schema version {SCHEMA_VERSION} has exactly its own fields",
                _AGAIN,
            )
        try:
            for name in ("shared", "expert"):
                values[name] = None if values[name] is None else StreamStatement(**values[name])
            values["other_deltas"] = tuple(OtherDelta(**row) for row in values["other_deltas"])
            values["not_covered"] = tuple(values["not_covered"])
        except TypeError as error:
            raise ReleaseError(f"The statement is damaged ({error})", "A field has another shape", _AGAIN) from error
        return cls(**values)

    def to_markdown(self) -> str:
        """The privacy section of a model card: the verdict, a table, and what is not covered."""
        return statement_markdown(self)


_AGAIN = "Ask for the file that `PrivacyStatement.to_json` wrote"


def _check_version(version: object) -> None:
    if version != SCHEMA_VERSION:
        raise ReleaseError(
            f"The statement has schema version {version!r}",
            f"This version of the package reads version {SCHEMA_VERSION}",
            "Read it with the version of the package that wrote it (field `packages`)",
        )


def _verdict(
    method: str, noisy: bool, epsilon: float | None, delta: float, noise_source: str, research_diagnostics: bool
) -> str:
    """The first sentence of the statement: a function of the other fields, so that it cannot disagree with them."""
    reasons = []
    if not noisy:
        reasons.append(f"{method} trains without clipping or without noise")
    if noise_source == "insecure_seed":
        reasons.append("the noise comes from a seed, and whoever knows the seed can subtract it")
    if research_diagnostics:
        reasons.append("private diagnostics were computed and shown")
    if reasons:
        return "NOT PRIVATE: " + "; ".join(reasons)
    return f"({round_up(epsilon)}, {round_up_delta(delta)})-differentially private per record (add or remove one)"


def _mechanisms(streams: list[StreamStatement], count: str) -> list[Mechanism]:
    return [
        Mechanism(stream.noise_multiplier, stream.sample_rate, getattr(stream, count))
        for stream in streams
        if stream.noise_multiplier is not None
    ]


def _upper(mechanisms: list[Mechanism], delta: float, accountant: str) -> float | None:
    try:
        return compute_epsilon(mechanisms, delta, accountant=accountant).upper
    except PrivacyConfigError:  # above 20, or a delta below the rounding error of that many steps
        return None


def _parallel_composition(
    expert: StreamStatement | None, num_experts: int | None, layer: int | str | None, ownership: str | None
) -> str:
    if expert is None or ownership is None:
        return "no expert is trained on its owners alone: nothing composes in parallel"
    if isinstance(layer, str):
        return (
            f"the layers {layer} are trained one after another, and these stages compose sequentially; within each, "
            f"its {num_experts} experts compose in parallel: the {ownership!r} rule gives each record one owner there, "
            f"fixed by the frozen base model, and the record moves that expert's sum alone"
        )
    return (
        f"the {num_experts} experts of layer {layer} compose in parallel: the {ownership!r} rule gives each record one "
        f"owner, fixed by the frozen base model, and the record moves that expert's sum alone; together they cost as "
        f"much as one expert"
    )
