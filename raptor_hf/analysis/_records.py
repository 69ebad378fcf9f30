"""What the measurements share: batches of records, their losses and their per-sample gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.grad_sample import LossFn, engine_gradients, model_loss, residual_weighted
from raptor_hf.grad_sample.record_losses import record_losses
from raptor_hf.moe.lora import adapter_plan, stream_parameters
from raptor_hf.moe.ownership import owner_map
from raptor_hf.moe.routing import _evaluation, iterate_batches
from raptor_hf.validate import integer

__all__ = ["Batch", "GradientOptions", "Records", "evaluation_mode", "gradients", "mean_loss", "prepare"]

Batch = dict[str, torch.Tensor]
Collator = Callable[[list], Mapping[str, Any]] | None


@dataclass(frozen=True)
class GradientOptions:
    """How gradients are taken; the defaults are those of `RaptorConfig`.

    Attributes:
        mode: engine ("reference" where base weights are trained). ownership: rule of the owner map. residual_gamma:
            exponent of the residual weight in the expert stream (Eq. 22); None: no weight.
        owners: whether experts are trained by their owners' records (`raptor`, `expert_only`). False: by every record
            that activates them, with the model's own loss, as methods of one joint block do.
    """

    mode: str = "functorch"
    ownership: str = "gate"
    residual_gamma: float | None = 1.0
    owners: bool = True


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout, no jitter; autograd as it was."""
    enabled = torch.is_grad_enabled()
    with _evaluation(model), torch.set_grad_enabled(enabled):
        yield


@dataclass(frozen=True)
class Records:
    """Ready micro-batches on the model's device. Attributes: batches; size: number of records in all."""

    batches: Sequence[Batch]
    size: int


def prepare(model: nn.Module, data: Iterable, data_collator: Collator, batch_size: int) -> Records:
    """Collate `data` (a dataset of records, or ready batches) to what `model.forward` takes, labels included.

    Raises:
        PrivacyConfigError: no records, or records without labels.
    """
    integer("batch_size", batch_size, minimum=1)
    accepted = inspect.signature(model.forward).parameters
    device = next(model.parameters()).device
    batches = [
        {k: v.to(device) for k, v in raw.items() if k in accepted and isinstance(v, torch.Tensor)}
        for raw in iterate_batches(data, data_collator, batch_size)
    ]
    if not batches or any("labels" not in batch for batch in batches):
        raise PrivacyConfigError(
            "No records were given" if not batches else "Records without `labels` were given",
            "Losses and gradients cannot be measured on them",
            "Pass labelled records; a collator that renames `label` to `labels` will do",
        )
    return Records(batches, sum(next(iter(batch.values())).shape[0] for batch in batches))


@torch.no_grad()
def mean_loss(model: nn.Module, records: Records) -> float:
    """Mean over the records of each record's own loss, added up in float64."""
    return sum(float(record_losses(model, b, model_loss).double().sum()) for b in records.batches) / records.size


def gradients(
    model: nn.Module, records: Records, stream: str, options: GradientOptions
) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """Of every micro-batch: per-sample gradients of one stream as training takes them, and the owners, if it has them.

    What is yielded is what `privacy.clipping` takes: tensors (b, *shape) or `RecordGradients`.
    """
    parameters = stream_parameters(model)[stream]
    loss: LossFn = model_loss
    plan = adapter_plan(model)
    owned = stream == "expert" and options.owners
    if owned and options.residual_gamma is not None:
        loss = residual_weighted(model_loss, options.residual_gamma)
    for batch in records.batches:
        owner = None
        if owned:
            owner = owner_map(model, iter([batch]), plan.layer, rule=options.ownership).to(batch["labels"].device)
        yield engine_gradients(model, batch, parameters, mode=options.mode, loss_fn=loss, owner=owner), owner
