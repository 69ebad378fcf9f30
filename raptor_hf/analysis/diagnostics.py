"""Measurements that look into a training run (Apps. B.9, G, H): role mismatch, expert SNR, noise sensitivity, drift.

Privacy:
    Every result is an exact function of the records given. On private records it is **private**: it is not covered by
    the epsilon of any run and must not be released. So every function here refuses records that were not declared
    public (`public_data=True`), unless the model belongs to a run of `RaptorConfig(research_diagnostics=True)`, whose
    privacy statement begins "NOT PRIVATE". Results say what they are in their field `private`. `suggest` has those
    that are meant for a public corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from raptor_hf.analysis._gate import private_unless
from raptor_hf.analysis._records import (
    Collator,
    GradientOptions,
    Records,
    evaluation_mode,
    gradients,
    mean_loss,
    prepare,
)
from raptor_hf.analysis.theory import (
    ExpertError,
    expert_error,
    expert_snr,
    expert_snr_summary,
    lambda_plus,
    role_mismatch,
)
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.moe.lora import adapter_plan, stream_parameters
from raptor_hf.moe.ownership import current_owner_map, owner_distribution, owner_map
from raptor_hf.moe.routing import iterate_batches
from raptor_hf.privacy.clipping import clip_and_sum_by_owner, clip_factors
from raptor_hf.validate import integer, one_of, positive, probability

__all__ = [
    "ExpertDiagnostics",
    "GradientOptions",
    "NoiseSensitivity",
    "OwnershipDrift",
    "RoleDiagnostics",
    "expert_diagnostics",
    "noise_sensitivity",
    "ownership_drift",
    "role_diagnostics",
]

ROLES = ("shared", "router", "head", "expert")
STREAMS = ("shared", "expert")


@dataclass(frozen=True)
class RoleDiagnostics:
    """Eq. 37 for a model.

    Attributes:
        mismatch: M_role in [0, 1]. norms: role -> mean over the records of the norm of their gradient in that role,
            before clipping. parameters: role -> trainable parameters. private: was it measured on private records?
    """

    mismatch: float
    norms: dict[str, float]
    parameters: dict[str, int]
    private: bool = True


@dataclass(frozen=True)
class ExpertDiagnostics:
    """Theorem 1 and Table 8 for the protected layer. Arrays are (E,) float64.

    Attributes:
        share: q_e. mu_squared: ||mu_e||^2. trace_sigma: tr Sigma_e (zero for an expert without records). error: the
            three parts of the mean squared error. snr: SNR_e. mean_snr, snr_cv: its mean and coefficient of variation.
        private: was it measured on private records?
    """

    share: np.ndarray = field(repr=False)
    mu_squared: np.ndarray = field(repr=False)
    trace_sigma: np.ndarray = field(repr=False)
    error: ExpertError = field(repr=False)
    snr: np.ndarray = field(repr=False)
    mean_snr: float
    snr_cv: float
    private: bool = True


@dataclass(frozen=True)
class NoiseSensitivity:
    """How much the loss rises when Gaussian noise is added to the parameters of one stream (Tab. 10).

    Attributes:
        stream: "shared" or "expert". parameters: d. noise_std: standard deviation a coordinate. loss_change: mean rise
            of the mean loss. standard_error: of that mean, over the draws of the noise. private: see the module.
    """

    stream: str
    parameters: int
    noise_std: float
    loss_change: float
    standard_error: float
    private: bool = True

    @property
    def value(self) -> float:
        """lambda_+ (Eq. 40): the rise for each unit of squared noise norm, zero when it was not above zero."""
        return lambda_plus(self.loss_change, self.noise_std, self.parameters)

    @property
    def measured(self) -> bool:
        """Is the rise above its own uncertainty (two standard errors)?"""
        return self.loss_change > 2 * self.standard_error

    @property
    def upper(self) -> float:
        """lambda of the rise plus two standard errors: what it could be when it was not `measured`."""
        return lambda_plus(max(self.loss_change, 0.0) + 2 * self.standard_error, self.noise_std, self.parameters)


@dataclass(frozen=True)
class OwnershipDrift:
    """How far the owners of the base model are from those that the current model would give (App. B.9).

    Attributes:
        changed: share of the records whose owner would be another one. mass: ||q' - q||_1 of the owner distributions,
            at most 2 `changed` (Theorem 5). records: how many were looked at. private: see the module.
    """

    changed: float
    mass: float
    records: int
    private: bool = True


def _role_of(model: nn.Module) -> dict[str, str]:
    layout = adapter_plan(model).layout
    return {name: layout.role(name) for stream in stream_parameters(model).values() for name in stream}


def role_diagnostics(
    model: nn.Module,
    data: Iterable,
    *,
    data_collator: Collator = None,
    batch_size: int = 32,
    options: GradientOptions | None = None,
    public_data: bool = False,
) -> RoleDiagnostics:
    """M_role of a model over records (Eq. 37): does each role get gradient in proportion to its parameters?

    The paper leaves open whose norm it is. Here: of each record's own gradient, before clipping, the mean over the
    records; that is what a single clipping norm acts on (Sec. 4.1). The expert role is the owner's adapter, with the
    residual weight of the expert stream; without owners (`options.owners`), all experts that the record activates.
    Frozen routers have a share of zero on both sides.

    Args:
        model: one that went through `attach_adapters` or `train_weights`. data: labelled records, or ready batches.
        public_data: state that the records are public; the result is private otherwise.

    Raises:
        PrivacyConfigError: records not declared public and no `research_diagnostics`; no labelled records.
    """
    private = private_unless(public_data, model)
    options = options or GradientOptions()
    records, roles = prepare(model, data, data_collator, batch_size), _role_of(model)
    sums = dict.fromkeys(ROLES, 0.0)
    with evaluation_mode(model):
        for stream in (name for name, trained in stream_parameters(model).items() if trained):
            for grads, _ in gradients(model, records, stream, options):
                for role in ROLES:
                    mine = {name: value for name, value in grads.items() if roles[name] == role}
                    if mine:
                        sums[role] += float(clip_factors(mine, 1.0)[1].sum())
    named = dict(model.named_parameters())
    counts = {role: sum(named[name].numel() for name, other in roles.items() if other == role) for role in ROLES}
    norms = {role: total / records.size for role, total in sums.items()}
    return RoleDiagnostics(role_mismatch(list(norms.values()), list(counts.values())), norms, counts, private)


def expert_diagnostics(
    model: nn.Module,
    data: Iterable,
    *,
    noise_multiplier: float,
    max_norm: float,
    expected_batch_size: float,
    dataset_size: int | None = None,
    data_collator: Collator = None,
    batch_size: int = 32,
    options: GradientOptions | None = None,
    public_data: bool = False,
) -> ExpertDiagnostics:
    """Bias, variances and SNR of every expert's released gradient at the model's present parameters (Thm. 1, Tab. 8).

    Args:
        noise_multiplier, max_norm: sigma_e and C_e. expected_batch_size: B. dataset_size: n; by default the number of
            records given. With a sample of the dataset, n_e is taken as its share of n.
        public_data: as in `role_diagnostics`.

    Raises:
        PrivacyConfigError: as `role_diagnostics`, or numbers that cannot be.
    """
    private = private_unless(public_data, model)
    options = options or GradientOptions()
    sigma, norm = positive("noise_multiplier", noise_multiplier), positive("max_norm", max_norm)
    batch = positive("expected_batch_size", expected_batch_size)
    records, plan = prepare(model, data, data_collator, batch_size), adapter_plan(model)
    size = integer("dataset_size", records.size if dataset_size is None else dataset_size, minimum=1)
    rate = probability("expected_batch_size / dataset_size", batch / size)
    experts = plan.protected.num_experts
    parameters = stream_parameters(model)["expert"]
    dimension = sum(p.numel() for p in parameters.values()) // experts
    sums = {name: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for name, p in parameters.items()}
    counts, squares = torch.zeros(experts, dtype=torch.float64), torch.zeros(experts, dtype=torch.float64)
    with evaluation_mode(model):
        for grads, owner in gradients(model, records, "expert", options):
            assert owner is not None  # the expert stream always has owners
            added, norms = clip_and_sum_by_owner(grads, owner, experts, norm)
            for name, value in added.items():
                sums[name] += value
            clipped = torch.where(norms.isfinite(), norms.clamp_max(norm), torch.zeros_like(norms))
            squares.index_add_(0, owner.cpu(), clipped.square().cpu())
            counts.index_add_(0, owner.cpu(), torch.ones_like(squares[owner.cpu()]))
    totals = sum(value.flatten(1).square().sum(1) for value in sums.values())
    owned = counts.clamp_min(1)
    mu_squared = (torch.as_tensor(totals).cpu() / owned.square()).numpy()
    trace_sigma = np.maximum((squares / owned).numpy() - mu_squared, 0.0)
    share = (counts / records.size).numpy()
    error = expert_error(
        share * size, mu_squared, trace_sigma, num_experts=experts, batch_size=batch, dataset_size=size,
        noise_multiplier=sigma, max_norm=norm, dimension=dimension,
    )  # fmt: skip
    snr = np.asarray(
        expert_snr(
            share * size, mu_squared, sample_rate=rate, noise_multiplier=sigma, max_norm=norm,
            dimension=dimension,
        )
    )  # fmt: skip
    return ExpertDiagnostics(share, mu_squared, trace_sigma, error, snr, *expert_snr_summary(snr), private)


def noise_sensitivity(
    model: nn.Module,
    data: Iterable,
    stream: str,
    *,
    noise_std: float,
    draws: int = 8,
    seed: int = 0,
    data_collator: Collator = None,
    batch_size: int = 32,
    public_data: bool = False,
) -> NoiseSensitivity:
    """Rise of the mean loss under N(0, noise_std^2 I) on the trainables of one stream (Eq. 40, Tab. 10).

    Each draw is used with both signs: the first-order term of the loss, whose mean is zero but whose size is not,
    cancels, and what is left is the curvature that the expectation is about. The parameters are put back exactly.

    Args:
        stream: "shared" or "expert" (the adapters of all experts of the protected layer together).
        draws: at least 2. seed: of this noise, which protects nothing. public_data: as in `role_diagnostics`.

    Raises:
        PrivacyConfigError: as `role_diagnostics`.
    """
    private = private_unless(public_data, model)
    records = prepare(model, data, data_collator, batch_size)
    return _noise_sensitivity(model, records, stream, noise_std, draws, seed, private=private)


@torch.no_grad()
def _noise_sensitivity(
    model: nn.Module, records: Records, stream: str, noise_std: float, draws: int, seed: int, *, private: bool
) -> NoiseSensitivity:
    parameters = stream_parameters(model)[one_of("stream", stream, STREAMS)]
    std = positive("noise_std", noise_std)
    integer("draws", draws, minimum=2)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    generator = torch.Generator().manual_seed(seed)
    changes = []
    with evaluation_mode(model):
        base = mean_loss(model, records)
        try:
            for _ in range(draws):
                noise = {name: std * torch.randn(p.shape, generator=generator) for name, p in parameters.items()}
                total = 0.0
                for sign in (1, -1):
                    for name, p in parameters.items():
                        p.copy_(before[name] + sign * noise[name].to(p))
                    total += mean_loss(model, records) - base
                changes.append(total / 2)
        finally:
            for name, p in parameters.items():
                p.copy_(before[name])
    error = float(np.std(changes, ddof=1) / np.sqrt(draws))
    count = sum(p.numel() for p in parameters.values())
    return NoiseSensitivity(stream, count, std, float(np.mean(changes)), error, private)


def ownership_drift(
    model: nn.Module,
    data: Iterable,
    *,
    rule: str = "gate",
    data_collator: Any = None,
    batch_size: int = 32,
    public_data: bool = False,
) -> OwnershipDrift:
    """Share of the records whose owner would change if owners were computed by the model as it is now.

    The guarantee does not depend on it (owners stay those of the base model); it says how well they still describe
    which expert a record uses. Records need no labels. `OwnershipDriftCallback` logs it during training.

    Raises:
        PrivacyConfigError: records not declared public (`public_data`) and no `research_diagnostics`, or a model
            whose base weights are trained.
    """
    private = private_unless(public_data, model)
    batches = list(iterate_batches(data, data_collator, batch_size))
    return drift_from(base_owners(model, batches, rule), model, batches, rule, private=private)


def base_owners(model: nn.Module, batches: Sequence[Mapping[str, Any]], rule: str) -> torch.Tensor:
    """(n,) owners by the base model under the adapters; refuses a model whose base weights are trained."""
    plan = adapter_plan(model)
    if plan.weights != "adapters":
        raise PrivacyConfigError(
            "Ownership drift of a model whose base weights are trained was asked for",
            "The base model that gave the owners is gone, and no drift would be found whatever it is",
            "Measure a method that trains adapters",
        )
    return owner_map(model, iter(batches), plan.layer, rule=rule)


def drift_from(
    base: torch.Tensor, model: nn.Module, batches: Sequence[Mapping[str, Any]], rule: str, *, private: bool
) -> OwnershipDrift:
    """`ownership_drift` against the owners `base` (n,). For callers that have asked `private_unless`."""
    plan = adapter_plan(model)
    now = current_owner_map(model, batches, plan.layer, rule)
    experts = plan.protected.num_experts
    mass = (owner_distribution(base, experts) - owner_distribution(now, experts)).abs().sum()
    changed = float((base != now).double().mean()) if len(base) else 0.0
    return OwnershipDrift(changed, float(mass), len(base), private)
