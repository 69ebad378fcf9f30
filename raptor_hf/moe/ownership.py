"""The owner of a record: the expert that its tokens use most (Eq. 5), by the frozen base model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from raptor_hf.moe.layout import MoELayout, find_moe_layout
from raptor_hf.moe.lora import adapters_disabled
from raptor_hf.moe.precision import full_precision
from raptor_hf.moe.routing import Routing, _evaluation, iterate_batches, model_inputs, routing_of, token_mask
from raptor_hf.validate import integer, one_of

__all__ = ["OWNERSHIP_RULES", "current_owner_map", "owner_distribution", "owner_map", "owner_scores"]

OWNERSHIP_RULES = ("gate", "vote")

# How far batching may move a router logit: a matrix product of another shape adds in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_PRECISION_TOLERANCE = 5e-2


def owner_scores(routing: Routing, mask: torch.Tensor, num_experts: int, rule: str) -> torch.Tensor:
    """Scores (B, E) float64: the sum over a record's real, not dropped tokens of gate weights (or votes) for e.

    Args:
        routing: index and gate (B, T, K). mask: (B, T) bool. rule: "gate" (Eq. 5) or "vote" (g := 1[e in top-k]).
    """
    one_of("rule", rule, OWNERSHIP_RULES)
    weight = routing.gate.double() if rule == "gate" else torch.ones_like(routing.gate, dtype=torch.float64)
    kept = mask.unsqueeze(-1) & (routing.index < num_experts)
    scores = torch.zeros(mask.shape[0], num_experts, dtype=torch.float64, device=mask.device)
    index = routing.index.clamp(max=num_experts - 1).flatten(1)
    return scores.scatter_add_(1, index, (weight * kept).flatten(1))


def _argmax_lowest(scores: torch.Tensor) -> torch.Tensor:
    # numpy's argmax takes the first of equals, torch's makes no promise
    return torch.from_numpy(np.argmax(scores.cpu().numpy(), axis=-1))


def _uncertain(
    routings: dict[int, Routing], layer: int, mask: torch.Tensor, scores: torch.Tensor, tol: float
) -> torch.Tensor:
    """(B,) bool: could rounding of the size of `tol` in a router logit have changed the record's owner?

    A token that could go elsewhere in an earlier layer changes everything above it, and in a layer where a token of
    the record was dropped, one changed choice can move another token over the capacity.
    """
    unsure = torch.zeros(mask.shape[0], dtype=torch.bool, device=mask.device)
    for index, routing in routings.items():
        close = (routing.gap < tol) & mask
        if index < layer:
            unsure |= close.any(-1)
        else:
            top = scores.topk(min(2, scores.shape[-1]), dim=-1).values
            margin = top[:, 0] - top[:, -1] if top.shape[-1] > 1 else torch.full_like(top[:, 0], float("inf"))
            fractional = tol * mask.sum(-1) if routing.index.shape[-1] > 1 else 0.0
            unsure |= close.any(-1) & (margin <= 2 * close.sum(-1) + fractional)
            unsure |= margin < fractional
        dropped = (routing.index.amax(-1) >= scores.shape[-1]) & mask
        unsure |= close.any(-1) & dropped.any(-1)
    return unsure


def _one_record(batch: Mapping[str, torch.Tensor], row: int, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Record `row` alone, without its padding."""
    tokens, width = int(mask[row].sum()), mask.shape[1]
    single = {}
    for key, value in batch.items():
        value = value[row : row + 1]
        single[key] = value[:, :tokens] if value.dim() >= 2 and value.shape[1] == width else value
    return single


def owner_map(
    model: nn.Module,
    dataset_or_batches: Iterable,
    layer: int,
    *,
    rule: str = "gate",
    data_collator: Callable[[list], Mapping[str, Any]] | None = None,
    batch_size: int = 32,
    layout: MoELayout | None = None,
) -> torch.Tensor:
    """Owner expert of every record at block `layer` (Eq. 5), computed by the base model (adapters switched off).

    Formal guarantees:
        The owner of a record is a function of that record and of the public base model alone: records whose owner
        could change with the rounding of a batched forward pass are computed again alone and without padding. So
        adding a record to the dataset changes no other record's owner, which parallel composition over the experts
        needs. The map itself is private: never log it, never release it.

    Args:
        dataset_or_batches: records (mappings with `input_ids`, collated by `data_collator`), or ready batches.
        layer: block index of a sparse layer. rule: "gate", or "vote". batch_size: speed only, never the result.

    Returns:
        LongTensor (n,), on the CPU. Ties go to the lowest expert.
    """
    integer("batch_size", batch_size, minimum=1)
    batches = iterate_batches(dataset_or_batches, data_collator, batch_size)
    with adapters_disabled(model):
        return current_owner_map(model, batches, layer, rule, layout)


def current_owner_map(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    layer: int,
    rule: str = "gate",
    layout: MoELayout | None = None,
) -> torch.Tensor:
    """Owners of the records of ready batches by the model as it is now, its adapters on: to measure how they drift.

    Never for training: the trained adapters depend on all records, and parallel composition needs owners that do not.
    """
    one_of("rule", rule, OWNERSHIP_RULES)
    layout = layout or find_moe_layout(model)
    experts = layout.layer(layer).num_experts
    dtype = next(model.parameters()).dtype
    tol = _TOLERANCE.get(dtype, _HALF_PRECISION_TOLERANCE)
    owners = []
    # `tol` is for sums in another order: TF32 or autocast would move a logit further, and differ between machines
    with full_precision(next(model.parameters()).device):
        for raw in batches:
            batch = model_inputs(model, raw)
            if hasattr(model, "embed_images"):  # once, also for a record that is computed again alone
                with _evaluation(model):
                    batch = model.embed_images(batch)
            mask = token_mask(batch)
            routings = routing_of(model, layout, batch, [layer])
            scores = owner_scores(routings[layer], mask, experts, rule)
            for row in _uncertain(routings, layer, mask, scores, tol).nonzero().flatten().tolist():
                single = _one_record(batch, row, mask)
                alone = routing_of(model, layout, single, [layer])[layer]
                scores[row] = owner_scores(alone, token_mask(single), experts, rule)[0]
            owners.append(_argmax_lowest(scores))
    return torch.cat(owners) if owners else torch.zeros(0, dtype=torch.long)


def owner_distribution(owners: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Fraction of records owned by each expert, (E,) float64. Private when the records are."""
    counts = torch.bincount(owners, minlength=num_experts).double()
    return counts / counts.sum().clamp_min(1)
