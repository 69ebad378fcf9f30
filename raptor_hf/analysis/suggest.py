"""Settings chosen on a labelled *public* corpus: the budget split rho and the clipping norms C_s and C_e.

No privacy is spent, as no private record is read. That is the caller's statement: pass public records only, disjoint
from the private set (`raptor_hf.moe.check_disjoint` checks for equal records), and name the corpus in your report.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from raptor_hf.analysis._records import Collator, GradientOptions, evaluation_mode, gradients, prepare
from raptor_hf.analysis.budget import NoiseCosts, optimal_split
from raptor_hf.analysis.diagnostics import NoiseSensitivity, _noise_sensitivity
from raptor_hf.analysis.theory import optimal_budget_split
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy.clipping import clip_factors
from raptor_hf.validate import integer, positive, probability

__all__ = [
    "BudgetSplit",
    "ClippingNorms",
    "PublicSensitivities",
    "public_sensitivities",
    "suggest_budget_split",
    "suggest_clipping_norms",
]


@dataclass(frozen=True)
class PublicSensitivities:
    """Noise sensitivity of both streams, measured on public records. Attributes: shared, expert; records: how many."""

    shared: NoiseSensitivity
    expert: NoiseSensitivity
    records: int


@dataclass(frozen=True)
class BudgetSplit:
    """A suggested `budget_split`.

    Attributes:
        rho: the suggestion, within the limits. optimum: before they were applied. eq39: what the paper's rule gives
            for the same two lambdas, for comparison. shared_share: mu_s^2 / mu^2 at the optimum.
        bounded: was a sensitivity that could not be told from zero replaced by its upper bound?
    """

    rho: float
    optimum: float
    eq39: float
    shared_share: float
    bounded: bool


@dataclass(frozen=True)
class ClippingNorms:
    """Suggested C_s (`shared`) and C_e (`expert`): a quantile of public records' gradient norms."""

    shared: float
    expert: float
    quantile: float
    records: int


def public_sensitivities(
    model: nn.Module,
    public_data: Iterable,
    *,
    noise_std: float = 0.01,
    draws: int = 8,
    seed: int = 0,
    data_collator: Collator = None,
    batch_size: int = 32,
) -> PublicSensitivities:
    """lambda_s and lambda_e (Eq. 40) on labelled public records, at the model's present parameters.

    Args:
        model: one that went through `attach_adapters`; its parameters are put back exactly.
        public_data: public records with labels, or ready batches.
        noise_std: of the noise on each coordinate of the adapters. In the range where the loss is quadratic in it,
            lambda does not depend on it; larger noise is measured with less error.
        draws: noise vectors for each stream, each used with both signs.

    Cost: (2 draws + 1) evaluations of the public records for each stream.
    """
    records = prepare(model, public_data, data_collator, batch_size)
    measured = {
        stream: _noise_sensitivity(model, records, stream, noise_std, draws, seed, private=False)
        for stream in ("shared", "expert")
    }
    return PublicSensitivities(measured["shared"], measured["expert"], records.size)


def suggest_budget_split(
    sensitivities: PublicSensitivities,
    *,
    num_experts: int,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    shared_max_norm: float = 1.0,
    expert_max_norm: float = 1.0,
    limits: tuple[float, float] = (0.05, 0.95),
) -> BudgetSplit:
    """The rho at which the noise of both streams together raises the loss least, for one joint budget.

    Minimises lambda_s d_s (sigma_s C_s)^2 + lambda_e d_e (sigma_e E C_e)^2 subject to mu_s^2 + mu_e^2 = mu^2
    (`budget.optimal_split`). Eq. 39 of the paper divides epsilon as if the streams' noise were inversely proportional
    to their share of it, and leaves the dimensions d out; its value is reported beside.

    Args:
        sensitivities: of `public_sensitivities`. num_experts: E of the protected layer. sample_rate: p = B / n.
        steps: T cycles. limits: what rho is clamped to, as either stream would otherwise be left with noise alone on
            the word of a surrogate that knows nothing of what the stream could learn.

    Raises:
        PrivacyConfigError: private measurements, or neither sensitivity can be told from zero. (When one can, the
            other's upper bound stands in for it, and `bounded` says so.)
    """
    pair = (sensitivities.shared, sensitivities.expert)
    low, high = (probability("limits", limit, one=False) for limit in limits)
    if any(one.private for one in pair):
        raise PrivacyConfigError(
            "Sensitivities of private records were given",
            "A budget split chosen with their help would depend on the records outside the accounting",
            "Measure them with `public_sensitivities` on a public corpus",
        )
    if not any(one.measured for one in pair):
        raise PrivacyConfigError(
            f"Sensitivities were given of which neither can be told from zero (rises of the loss of "
            f"{pair[0].loss_change:.3g} and {pair[1].loss_change:.3g}, with standard errors of "
            f"{pair[0].standard_error:.3g} and {pair[1].standard_error:.3g})",
            "A split chosen by them would be chosen by rounding errors",
            "Measure with a larger `noise_std`, more `draws` or more public records, or set `budget_split`",
        )
    shared, expert = (one.value if one.measured else one.upper for one in pair)
    integer("num_experts", num_experts, minimum=1)
    norms = positive("shared_max_norm", shared_max_norm), num_experts * positive("expert_max_norm", expert_max_norm)
    costs = NoiseCosts(
        shared * sensitivities.shared.parameters * norms[0] ** 2,
        expert * sensitivities.expert.parameters * norms[1] ** 2,
    )
    found = optimal_split(
        costs, target_epsilon=target_epsilon, target_delta=target_delta, sample_rate=sample_rate, steps=steps
    )
    eq39 = optimal_budget_split(
        expert / shared, num_experts=num_experts, shared_max_norm=shared_max_norm, expert_max_norm=expert_max_norm
    )
    bounded = not all(one.measured for one in pair)
    rho = min(max(found.budget_split, low), high)
    return BudgetSplit(rho, found.budget_split, eq39, found.shared_share, bounded)


def suggest_clipping_norms(
    model: nn.Module,
    public_data: Iterable,
    *,
    quantile: float = 0.5,
    data_collator: Collator = None,
    batch_size: int = 32,
    options: GradientOptions | None = None,
) -> ClippingNorms:
    """The `quantile` of public records' per-sample gradient norms in each stream, as C_s and C_e.

    The norms are those that the mechanism clips: of all shared trainables together, and of the owner's adapter under
    the residual-weighted loss. At fresh adapters (B = 0) the gradient with respect to A is zero, so norms grow when
    training begins; take a higher quantile, or measure on a model trained for a little on public records.

    Raises:
        PrivacyConfigError: no labels, or the quantile of a stream's norms is zero or not finite.
    """
    probability("quantile", quantile)
    options = options or GradientOptions()
    records = prepare(model, public_data, data_collator, batch_size)
    found = {}
    with evaluation_mode(model):
        for stream in ("shared", "expert"):
            norms = torch.cat([clip_factors(g, 1.0)[1] for g, _ in gradients(model, records, stream, options)])
            value = float(norms.quantile(quantile))
            if not 0 < value < float("inf"):
                raise PrivacyConfigError(
                    f"The {quantile:g} quantile of the gradient norms of the {stream} stream on them is {value}",
                    "It is no bound to clip to",
                    "Take a higher quantile, or set the clipping norm",
                )
            found[stream] = value
    return ClippingNorms(found["shared"], found["expert"], quantile, records.size)
