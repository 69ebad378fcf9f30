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

from raptor_hf.errors import PrivacyConfigError, ReleaseError
from raptor_hf.moe.block import PROJECTIONS
from raptor_hf.moe.layout import MoELayout, SparseLayer, find_moe_layout
from raptor_hf.moe.lora import AdapterPlan, adapter_plan, attach_adapters

__all__ = ["adapter_state_dict", "check_loaded", "load_adapter", "refuse_trained_model", "save_adapter"]

# Names that PEFT's conversion for "qwen2_moe" and "mixtral" checkpoints looks for at the end of a target.
_REWRITTEN = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")
WEIGHTS, PREFIX = "adapter_model.safetensors", "base_model.model."
# What describes the adapter beside it: statement, manifest of a release, state of the budget.
_ABOUT = ("privacy.json", "release.json", "raptor_state.json")


def _adapted(plan: AdapterPlan) -> list[SparseLayer]:
    """The sparse layers whose experts carry adapters."""
    return [plan.layout.layer(index) for index in plan.expert_layers]


def _expert_keys(plan: AdapterPlan, layer: SparseLayer) -> dict[tuple[str, int], str]:
    """(projection of the block, expert) -> path of that expert's linear layer; empty where experts are stacked."""
    family = plan.layout.family
    if family.expert_parameters is not None:
        return {}
    return {
        (ours, expert): f"{layer.name}." + family.expert_module.format(expert=expert, projection=theirs)
        for ours, theirs in zip(PROJECTIONS, family.expert_projections, strict=True)
        for expert in range(layer.num_experts)
    }


def _stacked_keys(plan: AdapterPlan, layer: SparseLayer) -> dict[str, str]:
    """Projection -> where PEFT keeps its adapter: it wraps the module once for each parameter, the last one outside."""
    if plan.layout.family.expert_parameters is None:
        return {}
    path = f"{layer.name}.{layer.experts_path}"
    return {"first": f"{path}.base_layer", "second": path}


def _to_peft(kind: str, stacked: torch.Tensor) -> torch.Tensor:
    """(E, r, in) -> (E r, in), expert-major; (E, out, r) -> (out, r E), rank-major."""
    if kind == "lora_A":
        return stacked.flatten(0, 1)
    return stacked.permute(1, 2, 0).flatten(1)


def _from_peft(kind: str, value: torch.Tensor, experts: int) -> torch.Tensor:
    """The inverse of `_to_peft`."""
    if kind == "lora_A":
        return value.unflatten(0, (experts, -1))
    return value.unflatten(1, (-1, experts)).permute(2, 0, 1)


def adapter_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Adapters and head under PEFT's keys, fp32, on the CPU, each with storage of its own."""
    plan = adapter_plan(model)
    if plan.weights != "adapters":
        raise ReleaseError(
            "The adapter of a model was asked for whose base weights are trained",
            "It has none: the head alone would be written, as if it were all that was trained",
            "Save the whole model with `trainer.save_model()`; a release holds adapters only",
        )
    state: dict[str, torch.Tensor] = {}
    for path in plan.shared_targets:
        module = model.get_submodule(path)
        state[f"{PREFIX}{path}.lora_A.weight"] = module.lora_A
        state[f"{PREFIX}{path}.lora_B.weight"] = module.lora_B
    for layer in _adapted(plan):
        adapters = model.get_submodule(layer.name).expert_adapters
        for kind in ("lora_A", "lora_B"):
            for (projection, expert), path in _expert_keys(plan, layer).items():
                state[f"{PREFIX}{path}.{kind}.weight"] = getattr(adapters[projection], kind)[expert]
            for projection, path in _stacked_keys(plan, layer).items():
                state[f"{PREFIX}{path}.{kind}.weight"] = _to_peft(kind, getattr(adapters[projection], kind))
    for name, parameter in _head(model, plan):
        state[f"{PREFIX}{plan.layout.head}.{name}"] = parameter
    return {key: value.detach().cpu().clone().contiguous() for key, value in state.items()}


def _head(model: nn.Module, plan: AdapterPlan) -> list[tuple[str, nn.Parameter]]:
    """The trained head's parameters; none of an LM head's."""
    if not plan.layout.trains_head:
        return []
    return list(model.get_submodule(plan.layout.head).named_parameters())


def peft_config(model: nn.Module) -> LoraConfig:
    """A `LoraConfig` whose targets are the exact paths of the modules and stacked parameters that carry adapters.

    PEFT turns every target that ends in one of `_REWRITTEN` into the routed experts (or the router) of *all* layers,
    for most families of stacked experts. Such layers, e.g. shared experts, are named by their weight instead.
    """
    plan = adapter_plan(model)
    stacked = plan.layout.family.expert_parameters
    weights = [path for path in plan.shared_targets if stacked and path.rpartition(".")[2] in _REWRITTEN]
    layers = _adapted(plan)
    experts = {path for layer in layers for path in _expert_keys(plan, layer).values()}
    parameters = [f"{path}.weight" for path in weights]
    parameters += [f"{layer.name}.{name}" for layer in layers for name in stacked or ()]
    return LoraConfig(
        r=plan.rank,
        lora_alpha=plan.alpha,
        target_modules=sorted({*plan.shared_targets, *experts} - set(weights)),
        target_parameters=sorted(parameters) or None,
        modules_to_save=[plan.layout.head] if plan.layout.trains_head else None,
        base_model_name_or_path=getattr(model, "name_or_path", None) or None,
        inference_mode=True,
    )


def refuse_trained_model(directory: str | os.PathLike) -> None:
    """Refuse a folder with a whole model that a run has trained: an adapter's statement beside it is not about it."""
    path = Path(directory)
    if (path / "raptor_state.json").exists() and not (path / WEIGHTS).exists() and any(path.glob("model*.safetensors")):
        raise PrivacyConfigError(
            f"The folder `{path.name}` holds a whole model that another run has trained",
            "The statement of an adapter would lie beside it, and whoever loads the folder would get both",
            "Use another `output_dir`",
        )


def save_adapter(model: nn.Module, directory: str | os.PathLike) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`; the weights file is replaced atomically.

    The statement, manifest and state of the adapter that was there before are deleted first.

    Raises:
        PrivacyConfigError: the folder holds a whole model that another run trained.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    refuse_trained_model(path)
    for name in _ABOUT:
        (path / name).unlink(missing_ok=True)
    partial = path / (WEIGHTS + ".partial")
    save_file(adapter_state_dict(model), partial, metadata={"format": "pt"})
    partial.replace(path / WEIGHTS)
    peft_config(model).save_pretrained(path)


def _expert_layers(keys: Any, layout: MoELayout) -> list[SparseLayer]:
    found = [
        layer
        for layer in layout.sparse_layers
        if any(key.startswith(f"{PREFIX}{layer.name}.{layer.experts_path}.") for key in keys)
    ]
    if found:
        return found
    raise PrivacyConfigError(
        "An adapter without expert weights was given",
        "It has no protected layer, so it is not an adapter of this package",
        "Load it with `peft.PeftModel.from_pretrained`",
    )


def load_adapter(model: nn.Module, directory: str | os.PathLike) -> nn.Module:
    """Load a saved adapter into `model` (in place), attaching adapters first where it has none.

    A trainer around the model evaluates and predicts; training, statements and exports are refused, because what the
    adapter has spent is counted elsewhere. To train on, resume from a checkpoint.

    Raises:
        PrivacyConfigError: the file's tensors are not exactly those that the model's adapters need.
    """
    path = Path(directory)
    saved = load_file(path / WEIGHTS)
    if getattr(model, "raptor_adapters", None) is None:
        config = LoraConfig.from_pretrained(str(path))
        layout = find_moe_layout(model)
        layers = _expert_layers(saved, layout)
        experts = tuple(f"{layer.name}.{layer.experts_path}." for layer in layers)
        named = {*config.target_modules, *(t.removesuffix(".weight") for t in config.target_parameters or ())}
        config.target_modules = sorted(target for target in named if not target.startswith(experts))
        config.target_parameters = None
        attach_adapters(model, config, ",".join(str(layer.index) for layer in layers))
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
    model.raptor_loaded = str(path)  # type: ignore[assignment]
    with torch.no_grad():
        for target in plan.shared_targets:
            module = model.get_submodule(target)
            module.lora_A.copy_(saved[f"{PREFIX}{target}.lora_A.weight"])
            module.lora_B.copy_(saved[f"{PREFIX}{target}.lora_B.weight"])
        for sparse in _adapted(plan):
            adapters = model.get_submodule(sparse.name).expert_adapters
            for kind in ("lora_A", "lora_B"):
                for (projection, expert), target in _expert_keys(plan, sparse).items():
                    getattr(adapters[projection], kind)[expert].copy_(saved[f"{PREFIX}{target}.{kind}.weight"])
                for projection, target in _stacked_keys(plan, sparse).items():
                    stacked = getattr(adapters[projection], kind)
                    stacked.copy_(_from_peft(kind, saved[f"{PREFIX}{target}.{kind}.weight"], len(stacked)))
        for name, parameter in _head(model, plan):
            parameter.copy_(saved[f"{PREFIX}{plan.layout.head}.{name}"])
    return model


def check_loaded(model: nn.Module, directory: str | os.PathLike) -> None:
    """Refuse a model into which PEFT put adapters elsewhere than the file's, or with other values.

    Args:
        model: what `peft.PeftModel.from_pretrained(base, directory)` returned.

    Raises:
        PrivacyConfigError: an adapter or a trained head sits on another tensor, is missing or has other values.
    """
    saved = load_file(Path(directory) / WEIGHTS)
    carried = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name or ".modules_to_save." in name:
            carried[name.replace(".default", "").replace(".modules_to_save", "")] = parameter.detach().cpu()
    wrong = {name: "is in the file and not on the model" for name in saved.keys() - carried.keys()}
    wrong.update({name: "carries an adapter that is not saved" for name in carried.keys() - saved.keys()})
    for name in saved.keys() & carried.keys():
        if not torch.equal(saved[name].to(carried[name].dtype), carried[name]):
            wrong[name] = "has other values on the model than in the file"
    if wrong:
        name = min(wrong)
        raise PrivacyConfigError(
            f"`{name}` {wrong[name]}",
            "PEFT matched the adapter with other tensors, and the model computes something else than what was trained",
            "Load it with `raptor_hf.moe.load_adapter`",
        )


def _save_pretrained(
    self: nn.Module, save_directory: str | os.PathLike, is_main_process: bool = True, **_: Any
) -> None:
    """Write the adapter (PEFT format). The base weights are public and are not written again."""
    if is_main_process:
        save_adapter(self, save_directory)


def bind_save_pretrained(model: nn.Module) -> None:
    """Make `model.save_pretrained` write the adapter, as a PEFT model's does."""
    model.save_pretrained = MethodType(_save_pretrained, model)
