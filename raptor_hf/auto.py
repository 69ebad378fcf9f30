"""Settings that a run leaves open and takes from public records: the budget split and the clipping norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers.utils import logging

from raptor_hf.analysis.suggest import (
    GradientOptions,
    PublicSensitivities,
    public_sensitivities,
    suggest_budget_split,
    suggest_clipping_norms,
)
from raptor_hf.config import RaptorConfig
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.moe.lora import adapter_plan
from raptor_hf.privacy import default_delta

__all__ = ["choose_from_public", "needs_public"]

logger = logging.get_logger(__name__)


def needs_public(args: RaptorConfig) -> bool:
    """Whether a setting is to be taken from public records."""
    return args.budget_split == "auto" or args.clipping_quantile is not None


# Records and noise vectors that the sensitivities are measured with: each noise level takes 17 passes over the records
# for each stream.
_RECORDS, _DRAWS = 200, 8


def _sensitivities(model: nn.Module, records: Any, collate: Callable, size: int) -> PublicSensitivities:
    """Measured with the least noise at which they can be told from zero: the loss is quadratic in small noise only."""
    some = [records[i] for i in range(0, len(records), -(-len(records) // _RECORDS))]
    for noise_std in (0.03, 0.1, 0.3):
        found = public_sensitivities(
            model, some, noise_std=noise_std, draws=_DRAWS, data_collator=collate, batch_size=size
        )
        if found.shared.measured or found.expert.measured:
            break
    return found


def choose_from_public(
    args: RaptorConfig,
    model: nn.Module,
    records: Any,
    collate: Callable,
    *,
    label_names: Sequence[str],
    dataset_size: int,
    cycles: int,
) -> dict[str, float]:
    """The values of the settings that `args` leaves open; no privacy is spent, as no private record is read.

    Args:
        records: labelled public records, disjoint from the private ones. label_names: the columns that labels are.

    Returns:
        field of `RaptorConfig` -> value.
    """
    if records is None or not set(label_names) <= set(records[0]):
        raise PrivacyConfigError(
            '`budget_split="auto"` or `clipping_quantile` was set without a `public_dataset` that has labels',
            "They are measured on public records; measured on the private ones they would tell about them",
            "Pass labelled public records as `public_dataset`, or set the values",
        )
    found: dict[str, float] = {}
    size = args.per_device_eval_batch_size
    if args.clipping_quantile is not None:
        gamma = args.residual_gamma if args.residual_weighting else None
        options = GradientOptions(mode=args.grad_sample_mode, ownership=args.ownership, residual_gamma=gamma)
        norms = suggest_clipping_norms(
            model, records, quantile=args.clipping_quantile, data_collator=collate, batch_size=size, options=options
        )
        found |= {"shared_max_grad_norm": norms.shared, "expert_max_grad_norm": norms.expert}
    if args.budget_split == "auto":
        assert args.expected_batch_size is not None and args.target_epsilon is not None  # as the config has checked
        split = suggest_budget_split(
            _sensitivities(model, records, collate, size),
            num_experts=adapter_plan(model).protected.num_experts,
            target_epsilon=args.target_epsilon,
            target_delta=args.target_delta if args.target_delta is not None else default_delta(dataset_size),
            sample_rate=args.expected_batch_size / dataset_size,
            steps=cycles,
            shared_max_norm=found.get("shared_max_grad_norm", args.shared_max_grad_norm),
            expert_max_norm=found.get("expert_max_grad_norm", args.expert_max_grad_norm),
        )
        found["budget_split"] = split.rho
        bounded = ", with an upper bound for the sensitivity that could not be told from zero" if split.bounded else ""
        logger.info(
            f"budget_split={split.rho:.3f} from public records{bounded} (Eq. 39 alone would say {split.eq39:.3f})."
        )
    return found
