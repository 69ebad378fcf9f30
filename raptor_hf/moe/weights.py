"""Training base weights instead of adapters, for the baselines that do: all parameters, or the feed-forward layers."""

from __future__ import annotations

import os
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from raptor_hf.errors import PrivacyConfigError, UnsupportedModelError
from raptor_hf.moe.layout import MoELayout, find_moe_layout
from raptor_hf.moe.lora import AdapterPlan, resolve_layers, switch_off_chance
from raptor_hf.validate import one_of

__all__ = ["load_weights", "train_weights"]

WEIGHTS = ("full", "ffn")
# What describes another adapter or model that was saved in the same folder before.
_STALE = ("privacy.json", "release.json", "raptor_state.json", "adapter_model.safetensors", "adapter_config.json")


def train_weights(model: nn.Module, which: str, protected_layer: int | str) -> nn.Module:
    """Make base weights of `model` trainable, in float32, in place; no adapters.

    Args:
        which: `"full"`, every parameter, routers too (there is no owner map that they could contradict); `"ffn"`, the
            feed-forward layers, dense and routed, and the head.
        protected_layer: as in `attach_adapters`; it only names a layer in the plan.

    Returns:
        The same object. `model.save_pretrained` writes the whole model.

    Raises:
        UnsupportedModelError: no layout. PrivacyConfigError: the model carries adapters.
    """
    one_of("which", which, WEIGHTS)
    if getattr(model, "raptor_adapters", None) is not None:
        raise PrivacyConfigError(
            "A model that already carries raptor adapters was given",
            "Base weights and adapters would be trained and accounted as one",
            "Load the base model again",
        )
    layout = find_moe_layout(model)
    layer = resolve_layers(layout, protected_layer)[0]
    switch_off_chance(model, layout)
    for name, parameter in model.named_parameters():
        chosen = which == "full" or _feed_forward(layout, name)
        parameter.requires_grad_(chosen)
        if chosen and parameter.dtype != torch.float64:
            parameter.data = parameter.data.float()
    if len({p.dtype for p in model.parameters() if p.is_floating_point()}) > 1:
        raise UnsupportedModelError(
            "A base model that is not float32 was given",
            "Trained weights are float32 and the frozen ones would not be",
            'Load it in float32 (`dtype="float32"`); `bf16=True` computes in bfloat16',
        )
    model.raptor_adapters = AdapterPlan(0, 0.0, (), layer, layout, weights=which)  # type: ignore[assignment]
    model.save_pretrained = MethodType(_save_pretrained, model)  # type: ignore[assignment]
    return model


def _feed_forward(layout: MoELayout, name: str) -> bool:
    """Routed experts, what stands in their place in dense blocks (the same attribute), and the head."""
    role = layout.role(name)
    if role in ("expert", "head"):
        return role == "expert" or layout.trains_head
    places = {layer.name.rpartition(".")[2] for layer in layout.sparse_layers}
    return role == "shared" and bool(places & set(name.split(".")))


def _save_pretrained(self: nn.Module, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
    """Write the whole model, and delete what describes another one there."""
    for name in _STALE:
        (Path(save_directory) / name).unlink(missing_ok=True)
    type(self).save_pretrained(self, save_directory, *args, **kwargs)  # type: ignore[operator]


def load_weights(model: nn.Module, directory: str | os.PathLike) -> nn.Module:
    """Load the weights that `model.save_pretrained` wrote, into `model` (in place)."""
    loaded = type(model).from_pretrained(directory, dtype=next(model.parameters()).dtype)  # type: ignore[attr-defined]
    model.load_state_dict(loaded.state_dict())
    return model
