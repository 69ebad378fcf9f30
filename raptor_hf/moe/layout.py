"""What is what in a sparse MoE model: the sparse layers, and the role of every parameter (mechanism section 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from raptor_hf.errors import UnsupportedModelError

__all__ = ["MoEFamily", "MoELayout", "SparseLayer", "find_moe_layout", "register_moe_layout"]

EXPERT_ADAPTERS = "expert_adapters"


@dataclass(frozen=True)
class SparseLayer:
    """One sparse layer.

    Attributes:
        index: block index in the network (counting dense blocks). name: module path of the sparse block.
        router, experts, shared_experts: its modules, with the paths relative to the block in `*_path`.
    """

    index: int
    name: str
    num_experts: int
    top_k: int
    router: nn.Module
    experts: nn.Module
    router_path: str = "router"
    experts_path: str = "experts"
    shared_experts: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class MoEFamily:
    """How to handle one family of models. Register it with `register_moe_layout`.

    Attributes:
        name: the family's name. model_types: values of `config.model_type` it serves.
        find_layers: model -> its sparse layers (empty: dense). Raises `UnsupportedModelError` where it must refuse.
        wrap_block: shipped sparse block -> the `SparseBlock` that replaces it.
        read_routing: (sparse block, hidden (B, T, H)) -> `moe.routing.Routing`, by the block's own router.
        shared_targets: names of the attention projections that get LoRA by default.
        expert_module: path of one projection of one expert, relative to the block, as a format string with the
            fields `expert` and `projection`; `expert_projections` are the values of `projection`, in order.
        head: attribute name of the trainable head.
        switch_off: sets what must be off in train mode (jitter, dropout inside experts); returns what it changed.
    """

    name: str
    model_types: tuple[str, ...]
    find_layers: Callable[[nn.Module], list[SparseLayer]]
    wrap_block: Callable[[nn.Module], nn.Module]
    read_routing: Callable
    shared_targets: tuple[str, ...]
    expert_module: str
    expert_projections: tuple[str, str]
    head: str = "score"
    switch_off: Callable[[nn.Module], list[str]] = lambda _model: []


_FAMILIES: dict[str, MoEFamily] = {}


def register_moe_layout(family: MoEFamily) -> MoEFamily:
    """Add (or replace) a family for all its `model_types`."""
    for model_type in family.model_types:
        _FAMILIES[model_type] = family
    return family


@dataclass(frozen=True)
class MoELayout:
    """The sparse layers of a model and the role of each of its parameters."""

    family: MoEFamily
    sparse_layers: list[SparseLayer]
    head: str
    _prefixes: dict[str, str] = field(repr=False, default_factory=dict)

    def role(self, parameter_name: str) -> str:
        """`"router"`, `"expert"`, `"head"` or `"shared"`; adapters have the role of what they sit on."""
        name = parameter_name.removeprefix("base_model.model.")
        for prefix, role in self._prefixes.items():
            if name.startswith(prefix):
                return role
        return "shared"

    def layer(self, index: int) -> SparseLayer:
        """The sparse layer of block `index`; raises `UnsupportedModelError` when that block is not sparse."""
        for layer in self.sparse_layers:
            if layer.index == index:
                return layer
        sparse = ", ".join(str(layer.index) for layer in self.sparse_layers)
        raise UnsupportedModelError(
            f"`protected_layer={index}` was asked for",
            f"Block {index} has no routed experts, so there is nothing for the expert stream to train; "
            f"the sparse blocks are {sparse}",
            'Choose one of them, "first", "last" or "auto"',
        )


def find_moe_layout(model: nn.Module) -> MoELayout:
    """Tell a model's sparse layers and roles.

    Raises:
        UnsupportedModelError: the model is dense, or of a family that is not registered.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    family = _FAMILIES.get(model_type or "")
    if family is None:
        raise UnsupportedModelError(
            f"`{type(model).__name__}` (model type {model_type!r}) was given",
            "No family registered with raptor_hf tells where its routers and routed experts are (a dense model has "
            f"none), so records cannot be given an owner expert; registered: {', '.join(sorted(_FAMILIES))}",
            "Use a sparse Mixture-of-Experts model of a registered family, or add one with `register_moe_layout`",
        )
    layers = family.find_layers(model)
    if not layers:
        raise UnsupportedModelError(
            f"`{type(model).__name__}` was given",
            "It has no sparse layer (a dense configuration of its family), so there are no experts to protect",
            "Use a configuration with at least one sparse layer",
        )
    prefixes: dict[str, str] = {}
    for layer in layers:
        prefixes[f"{layer.name}.{layer.router_path}."] = "router"
        prefixes[f"{layer.name}.{layer.experts_path}."] = "expert"
        prefixes[f"{layer.name}.{EXPERT_ADAPTERS}."] = "expert"
    prefixes[f"{family.head}."] = "head"
    return MoELayout(family, layers, family.head, prefixes)


def tied_or_shared(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Parameters that live under several names, with those names."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {parameter: aliases for parameter, aliases in names.items() if len(aliases) > 1}
