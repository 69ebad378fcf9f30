"""A run as data: its settings, the key they hash to, and the methods and ablations of the paper's tables."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["GROUPS", "TUNED_FILE", "VARIANTS", "Settings", "Variant", "rank_of", "resolve_names", "tuned_settings"]

TUNED_FILE = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True)
class Variant:
    """A row of a table.

    Attributes:
        method: `RaptorConfig.method`. label: how tables name it. options: further fields of `RaptorConfig`.
        tuned_as: whose tuned settings it takes (an ablation those of `raptor`: nothing else may differ).
    """

    method: str
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tuned_as: str = ""

    @property
    def private(self) -> bool:
        return not self.method.startswith("nonprivate")

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams with a noise of their own; a block of everything counts as the shared one."""
        if self.method == "raptor" and self.options.get("clipping", "per_stream") == "per_stream":
            return ("shared", "expert")
        return ("expert",) if self.method == "expert_only" else ("shared",)

    def engine(self, wanted: str) -> str:
        """`wanted`, or "functorch" for methods that train base weights, which the hooks engine does not take."""
        return "functorch" if self.method in ("monolithic_full", "nonprivate_ffn") else wanted


def _raptor(label: str, **options: Any) -> Variant:
    return Variant("raptor", label, options, "raptor")


VARIANTS: dict[str, Variant] = {
    "nonprivate_lora": Variant("nonprivate_lora", "non-private LoRA"),
    "nonprivate_ffn": Variant("nonprivate_ffn", "non-private FFN"),
    "monolithic_lora": Variant("monolithic_lora", "monolithic LoRA"),
    "monolithic_full": Variant("monolithic_full", "monolithic full"),
    "matched_global": Variant("matched_global", "A: matched scope, global"),
    "shared_only": Variant("shared_only", "B: shared only"),
    "expert_only": Variant("expert_only", "C: experts only"),
    "raptor": _raptor("RAPTOR"),
    "raptor_first": _raptor("RAPTOR, first layer", protected_layer="first"),
    "raptor_last": _raptor("RAPTOR, last layer", protected_layer="last"),
    "batch_denominator": _raptor("D_e = B", expert_denominator="batch"),
    "global_clip": _raptor("full-model clip", clipping="global"),
    "no_alternating": _raptor("no alternating", alternating=False),
    "no_residual": _raptor("no residual weight", residual_weighting=False),
    "expert_clip": _raptor("RAPTOR, C_e = 0.02", expert_max_grad_norm=0.02),
}

_METHODS = ("nonprivate_lora", "nonprivate_ffn", "monolithic_lora", "monolithic_full")
GROUPS: dict[str, tuple[str, ...]] = {
    "all": (*_METHODS, "matched_global", "shared_only", "expert_only", "raptor"),
    "table1": (*_METHODS, "raptor_first", "raptor_last", "raptor"),
    "table2": ("nonprivate_lora", "nonprivate_ffn", "monolithic_lora", "raptor"),
    "table5": ("raptor", "batch_denominator", "global_clip", "no_alternating", "no_residual"),
    "table6": ("matched_global", "shared_only", "expert_only", "raptor"),
}


def resolve_names(names: Sequence[str]) -> list[str]:
    """Names of variants and groups as variants, each once, in the order of `VARIANTS`.

    Raises:
        ValueError: a name that is neither.
    """
    wanted: set[str] = set()
    for name in names:
        if name not in VARIANTS and name not in GROUPS:
            raise ValueError(f"`{name}` is no method. Choose from {', '.join([*GROUPS, *VARIANTS])}.")
        wanted.update(GROUPS.get(name, (name,)))
    return [name for name in VARIANTS if name in wanted]


@dataclass(frozen=True)
class Settings:
    """All that decides a run, but for the randomness of sampling and noise, which no setting decides.

    Attributes:
        task, model: names of benchmarks.utility.tasks. variant: a key of `VARIANTS`.
        epsilon: the budget; inf for no noise (and, for a non-private method, no clipping).
        seed: of the initial adapters and head. Sampling and noise come from the operating system in every run.
        train_size, eval_size: at most so many records of a split (None: all). max_length: tokens of a record.
        batch_size: B. cycles: T. clip: C of every stream. budget_split: rho, of variants with two streams.
        learning_rate: of both streams. rank: LoRA's. dtype: of the frozen weights.
        engine, micro_batch: speed and memory only.
    """

    task: str
    model: str
    variant: str
    epsilon: float
    seed: int
    train_size: int | None = None
    eval_size: int | None = None
    public_size: int = 2_000
    max_length: int = 48
    batch_size: int = 250
    cycles: int = 24
    learning_rate: float = 1e-2
    expert_learning_rate: float | None = None
    clip: float = 1.0
    budget_split: float = 0.9
    rank: int = 16
    ownership: str = "gate"
    dtype: str = "float32"
    engine: str = "hooks"
    micro_batch: int = 64
    data_dir: str | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"`{self.variant}` is no variant. Choose from {', '.join(VARIANTS)}.")
        if not self.epsilon > 0:
            raise ValueError(f"`epsilon={self.epsilon}` is no budget. Give a positive number, or inf for no noise.")
        if not VARIANTS[self.variant].private and math.isfinite(self.epsilon):
            raise ValueError(f"`{self.variant}` has no budget, so it has no epsilon of {self.epsilon}. Use inf.")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; epsilon = inf is the text "inf"."""
        values = dataclasses.asdict(self)
        return {**values, "epsilon": "inf" if math.isinf(self.epsilon) else self.epsilon}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`."""
        return cls(**{**values, "epsilon": float(values["epsilon"])})

    @property
    def key(self) -> str:
        """File name of the run: readable, and different for different settings.

        Where the data lie, and what only costs time or memory, is no part of it.
        """
        values = {k: v for k, v in self.to_dict().items() if k not in ("data_dir", "micro_batch", "engine")}
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.task}-{self.model.replace('/', '_')}-{self.variant}-{self.epsilon:g}-s{self.seed}-{digest}"

    @property
    def cell(self) -> tuple[str, str, str, float]:
        """What the runs of a cell of the table share."""
        return (self.task, self.model, self.variant, self.epsilon)


def rank_of(model: str, variant: str) -> int:
    """LoRA rank: 16 (128 for Switch-base, 64 for OLMoE); monolithic LoRA, which adapts every layer's experts, less.

    The paper's counts on Switch-base (14.16 M monolithic, 17.30 M RAPTOR) are those of ranks 32 and 128. On the bundled
    model, with two sparse layers in place of six, half the rank keeps that proportion: 0.86 against the paper's 0.82.
    """
    base = model.rsplit("/", 1)[-1].lower()
    rank = 128 if base.startswith("switch-base") else 64 if base.startswith("olmoe") else 16
    if VARIANTS[variant].method == "monolithic_lora":
        return 32 if base.startswith("switch-base") else rank // 2
    return rank


def tuned_settings(model: str, variant: str, path: Path = TUNED_FILE) -> dict[str, Any]:
    """The settings frozen for a variant: those of `model`, else of "default", else of the bundled model.

    Raises:
        KeyError: nothing was tuned for that method.
    """
    chosen = json.loads(path.read_text(encoding="utf-8"))["chosen"]
    name = VARIANTS[variant].tuned_as or variant
    for key in (model, "default", "tiny"):
        if name in chosen.get(key, {}):
            own = key != "tiny" or model == "tiny"  # a rank belongs to a model
            return {field: value for field, value in chosen[key][name].items() if own or field != "rank"}
    raise KeyError(f"{path.name} has no settings for `{name}`; make them: python -m benchmarks.utility.tune")
