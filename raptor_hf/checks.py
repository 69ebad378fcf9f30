"""Preflight: what would break the guarantee is found before training, and refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from raptor_hf.errors import PrivacyConfigError, UnsupportedModelError
from raptor_hf.moe.layout import MoELayout, find_moe_layout
from raptor_hf.moe.routing import token_mask

__all__ = ["check_batch", "check_dataset", "check_model", "check_processing_class", "check_sizes"]


def check_model(model: nn.Module) -> MoELayout:
    """Refuse a model whose structure couples the records of a batch; return its layout.

    Raises:
        UnsupportedModelError: dense, of an unknown family, or with layers that mix records.
        PrivacyConfigError: a setting of the model that mixes records.
    """
    layout = find_moe_layout(model)
    config = model.config
    for flag in ("output_router_logits", "add_router_probs"):
        if getattr(config, flag, False):
            raise PrivacyConfigError(
                f"The model's `config.{flag}` is True",
                "The auxiliary load-balancing loss is a product of averages over the whole batch: one record's "
                "gradient would depend on its neighbours",
                f"Set `model.config.{flag} = False`; a frozen router needs no balancing",
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedModelError(
                f"The model has batch normalisation (`{name}`)",
                "It normalises a record by statistics of the other records of the batch",
                "Use a model with layer or RMS normalisation",
            )
    return layout


def check_dataset(dataset: Any) -> None:
    """Refuse a training set whose records cannot be drawn by index."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise PrivacyConfigError(
            f"`train_dataset` is a `{type(dataset).__name__}` without length or index",
            "Poisson sampling flips a coin for every record in every cycle, and the accounting is of that sampling; "
            "a stream of records cannot be sampled so",
            "Pass a map-style dataset, e.g. `datasets.Dataset`",
        )


def check_sizes(dataset: Any, dataset_size: int, expected_batch_size: int) -> None:
    """Refuse B > n, and a public n that is not the number of records."""
    if len(dataset) != dataset_size:
        raise PrivacyConfigError(
            f"`dataset_size={dataset_size}` was set for a training set of another length",
            "The sampling rate p = B / n and delta are computed from it, while every record that is there is sampled",
            "Leave `dataset_size` unset, or pass exactly that many records",
        )
    if expected_batch_size > dataset_size:
        raise PrivacyConfigError(
            f"`expected_batch_size={expected_batch_size}` was set for {dataset_size} records",
            "The sampling rate p = B / n cannot exceed 1",
            "Lower `expected_batch_size` (or `per_device_train_batch_size`), or add records",
        )


def check_processing_class(processing_class: Any) -> None:
    """Refuse a tokenizer that pads on the left."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if getattr(tokenizer, "padding_side", "right") == "left":
        raise PrivacyConfigError(
            'The tokenizer has `padding_side="left"`',
            "Padding in front of a record is routed before it and takes its expert capacity, so that its loss depends "
            "on the length of its neighbours",
            'Set `tokenizer.padding_side = "right"`',
        )


def check_batch(batch: Mapping[str, Any], records: int, label_names: Sequence[str]) -> None:
    """Refuse a collated batch that does not keep one row a record, pads on the left, or lacks labels."""
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != records:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise PrivacyConfigError(
                f"The data collator made `{key}` of {shape} from {records} records",
                "Per-sample gradients need exactly one row a record: packing or dropping records would clip several "
                "people as one, or not at all",
                "Use a collator that pads and stacks, e.g. `DataCollatorWithPadding`",
            )
    if "input_ids" in batch:
        token_mask(batch)
    missing = [name for name in label_names if name not in batch]
    if missing:
        raise PrivacyConfigError(
            f"The training batches have no `{missing[0]}`",
            "Without labels there is no loss to differentiate",
            f"Add a `{missing[0]}` column to `train_dataset`, or name the label columns in `label_names`",
        )


def check_collator(collate: Callable[[list], Mapping[str, Any]], records: list, label_names: Sequence[str]) -> None:
    """Collate one record alone and two together, and check both batches."""
    for some in (records[:1], records[:2]):
        if some:
            check_batch(collate(some), len(some), label_names)
