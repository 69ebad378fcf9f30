"""Saving and loading adapters in PEFT's format: stock `peft.PeftModel.from_pretrained(base, path)` reads them."""

from __future__ import annotations

import os
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.moe.block import PROJECTIONS
from raptor_hf.moe.lora import AdapterPlan, adapter_plan, attach_adapters

__all__ = ["adapter_state_dict", "load_adapter", "save_adapter"]

WEIGHTS, PREFIX = "adapter_model.safetensors", "base_model.model."


def _expert_paths(plan: AdapterPlan) -> dict[tuple[str, int], str]:
    """(projection of the block, expert) -> path of that expert's linear layer in the base model."""
    family, layer = plan.layout.family, plan.protected
    return {
        (ours, expert): f"{layer.name}." + family.expert_module.format(expert=expert, projection=theirs)
        for ours, theirs in zip(PROJECTIONS, family.expert_projections, strict=True)
        for expert in range(layer.num_experts)
    }


def adapter_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Adapters and head under PEFT's keys, fp32, on the CPU, each with storage of its own."""
    plan = adapter_plan(model)
    state: dict[str, torch.Tensor] = {}
    for path in plan.shared_targets:
        module = model.get_submodule(path)
        state[f"{PREFIX}{path}.lora_A.weight"] = module.lora_A
        state[f"{PREFIX}{path}.lora_B.weight"] = module.lora_B
    adapters = model.get_submodule(plan.protected.name).expert_adapters
    for (projection, expert), path in _expert_paths(plan).items():
        state[f"{PREFIX}{path}.lora_A.weight"] = adapters[projection].lora_A[expert]
        state[f"{PREFIX}{path}.lora_B.weight"] = adapters[projection].lora_B[expert]
    for name, parameter in model.get_submodule(plan.layout.head).named_parameters():
        state[f"{PREFIX}{plan.layout.head}.{name}"] = parameter
    return {key: value.detach().cpu().clone().contiguous() for key, value in state.items()}


def peft_config(model: nn.Module) -> LoraConfig:
    """A `LoraConfig` whose targets are the exact module paths that carry adapters."""
    plan = adapter_plan(model)
    return LoraConfig(
        r=plan.rank,
        lora_alpha=plan.alpha,
        target_modules=sorted([*plan.shared_targets, *_expert_paths(plan).values()]),
        modules_to_save=[plan.layout.head],
        base_model_name_or_path=getattr(model, "name_or_path", None) or None,
        inference_mode=True,
    )


def save_adapter(model: nn.Module, directory: str | os.PathLike) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`; the weights file is replaced atomically."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    partial = path / (WEIGHTS + ".partial")
    save_file(adapter_state_dict(model), partial, metadata={"format": "pt"})
    partial.replace(path / WEIGHTS)
    peft_config(model).save_pretrained(path)


def _protected_layer(keys: Any, layout: Any) -> int:
    for layer in layout.sparse_layers:
        if any(key.startswith(f"{PREFIX}{layer.name}.{layer.experts_path}.") for key in keys):
            return layer.index
    raise PrivacyConfigError(
        "An adapter without expert weights was given",
        "It has no protected layer, so it is not an adapter of this package",
        "Load it with `peft.PeftModel.from_pretrained`",
    )


def load_adapter(model: nn.Module, directory: str | os.PathLike) -> nn.Module:
    """Load a saved adapter into `model` (in place), attaching adapters first where it has none.

    Raises:
        PrivacyConfigError: the file's tensors are not exactly those that the model's adapters need.
    """
    path = Path(directory)
    saved = load_file(path / WEIGHTS)
    if getattr(model, "raptor_adapters", None) is None:
        from raptor_hf.moe.layout import find_moe_layout

        config = LoraConfig.from_pretrained(str(path))
        layout = find_moe_layout(model)
        layer = _protected_layer(saved, layout)
        experts = f"{layout.layer(layer).name}."
        config.target_modules = sorted(t for t in config.target_modules if not t.startswith(experts))
        attach_adapters(model, config, layer)
    plan = adapter_plan(model)
    expected = adapter_state_dict(model)
    wrong = sorted(set(expected) ^ set(saved))
    wrong += [key for key in set(expected) & set(saved) if expected[key].shape != saved[key].shape]
    if wrong:
        raise PrivacyConfigError(
            f"The adapter in `{path}` does not fit the model: `{wrong[0]}`"
            + (f" and {len(wrong) - 1} more" * (len(wrong) > 1)),
            "Other layers, ranks or a different protected layer would be loaded in part only",
            "Load it into the base model it was trained on, with the settings it was trained with",
        )
    with torch.no_grad():
        for target in plan.shared_targets:
            module = model.get_submodule(target)
            module.lora_A.copy_(saved[f"{PREFIX}{target}.lora_A.weight"])
            module.lora_B.copy_(saved[f"{PREFIX}{target}.lora_B.weight"])
        adapters = model.get_submodule(plan.protected.name).expert_adapters
        for (projection, expert), target in _expert_paths(plan).items():
            adapters[projection].lora_A[expert].copy_(saved[f"{PREFIX}{target}.lora_A.weight"])
            adapters[projection].lora_B[expert].copy_(saved[f"{PREFIX}{target}.lora_B.weight"])
        for name, parameter in model.get_submodule(plan.layout.head).named_parameters():
            parameter.copy_(saved[f"{PREFIX}{plan.layout.head}.{name}"])
    return model


def _save_pretrained(
    self: nn.Module, save_directory: str | os.PathLike, is_main_process: bool = True, **_: Any
) -> None:
    """Write the adapter (PEFT format). The base weights are public and are not written again."""
    if is_main_process:
        save_adapter(self, save_directory)


def bind_save_pretrained(model: nn.Module) -> None:
    """Make `model.save_pretrained` write the adapter, as a PEFT model's does."""
    model.save_pretrained = MethodType(_save_pretrained, model)
