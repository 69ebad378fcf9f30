"""Which experts each token of each record is sent to, read off forward passes of the frozen base model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raptor_hf.errors import PrivacyConfigError, UnsupportedModelError
from raptor_hf.moe.layout import MoELayout, SparseLayer

__all__ = ["Routing", "iterate_batches", "model_inputs", "routing_of", "token_mask"]

_LABELS = ("labels", "label", "label_ids")


@dataclass(frozen=True)
class Routing:
    """Routing of one sparse layer for B records of T tokens.

    Attributes:
        index: (B, T, K) int64 expert of each choice, no expert twice for a token; E where it was dropped (beyond
            capacity).
        gate: (B, T, K) gate weights, normalised to sum to 1 over a token's choices.
        gap: (B, T) distance of router logits between the last expert chosen and the first one not chosen: how far
            rounding would have to move a logit to change the choice.
    """

    index: torch.Tensor
    gate: torch.Tensor
    gap: torch.Tensor


class _Done(Exception):
    """Raised by the hook of the last layer of interest: what lies above it need not be computed."""


def token_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(B, T) bool, True on real tokens. Raises `PrivacyConfigError` on left padding."""
    mask = batch.get("attention_mask")
    if mask is None:
        ids = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]
        return torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device)
    mask = mask.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise PrivacyConfigError(
            "A batch with padding before or between real tokens was given",
            "Padding tokens are routed too: in front of a record they take expert capacity from it, so that its loss "
            "depends on the length of its neighbours",
            'Pad on the right: set `tokenizer.padding_side = "right"`',
        )
    return mask


def model_inputs(model: nn.Module, batch: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """The entries of a batch that `model.forward` takes, without labels, on the model's device."""
    device = device or next(model.parameters()).device
    accepted = inspect.signature(model.forward).parameters
    return {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
        if key in accepted and key not in _LABELS
    }


def iterate_batches(
    data: Iterable, data_collator: Callable[[list], Mapping[str, Any]] | None, batch_size: int
) -> Iterator[Mapping[str, Any]]:
    """Batches of a dataset of records, or of an iterable of ready batches (passed through)."""
    if not isinstance(data, Sequence) and not hasattr(data, "__getitem__"):
        yield from data
        return
    first = data[0] if len(data) else {}  # type: ignore[arg-type,index]
    ids = first.get("input_ids") if isinstance(first, Mapping) else None
    if isinstance(ids, torch.Tensor) and ids.dim() == 2:
        yield from data
        return
    if data_collator is None:
        from transformers import default_data_collator

        data_collator = default_data_collator
    for start in range(0, len(data), batch_size):  # type: ignore[arg-type]
        yield data_collator([data[i] for i in range(start, min(start + batch_size, len(data)))])  # type: ignore[arg-type,index]


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _check_distinct(index: torch.Tensor, layer: SparseLayer) -> None:
    """What is kept for a token and its owner has one place."""
    ordered = index.sort(-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < layer.num_experts)).any()):
        raise UnsupportedModelError(
            f"The router of `{layer.name}` chose an expert twice for one token",
            "A gradient has one place for each token and expert, so that part of a record's would be lost",
            "Use a router of which the K experts of a token are different, as `topk` gives them",
        )


def routing_of(
    model: nn.Module, layout: MoELayout, batch: Mapping[str, Any], layers: Sequence[int] | None = None
) -> dict[int, Routing]:
    """Routing of the sparse layers up to the deepest of `layers` (default: all), by block index.

    The forward pass stops at the deepest layer asked for. Evaluation mode: no jitter, no dropout.

    Raises:
        UnsupportedModelError: a router chose an expert twice for one token.
    """
    wanted = [layer for layer in layout.sparse_layers if layers is None or layer.index <= max(layers)]
    last = max(layer.index for layer in wanted)
    found: dict[int, Routing] = {}
    handles = []
    for layer in wanted:

        def hook(module: nn.Module, args: tuple, layer: SparseLayer = layer) -> None:
            found[layer.index] = layout.family.read_routing(module, args[0])
            _check_distinct(found[layer.index].index, layer)
            if layer.index == last:
                raise _Done

        handles.append(model.get_submodule(layer.name).register_forward_pre_hook(hook))
    try:
        with _evaluation(model):
            model(**model_inputs(model, batch))
    except _Done:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found
