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
        expert_parameters: instead of those two, for experts that are stacked: paths, relative to the block, of the
            two parameters, (E, out, in) or transposed.
        head: attribute name of the trainable head.
        switch_off: sets what must be off in train mode (jitter, dropout inside experts); returns what it changed.
        not_chance: attributes of modules that are called jitter but are constants of the router: they stay.
    """

    name: str
    model_types: tuple[str, ...]
    find_layers: Callable[[nn.Module], list[SparseLayer]]
    wrap_block: Callable[[nn.Module], nn.Module]
    read_routing: Callable
    shared_targets: tuple[str, ...]
    expert_module: str = ""
    expert_projections: tuple[str, str] = ("", "")
    expert_parameters: tuple[str, str] | None = None
    head: str = "score"
    switch_off: Callable[[nn.Module], list[str]] = lambda _model: []
    not_chance: tuple[str, ...] = ()


_FAMILIES: dict[str, MoEFamily] = {}
# Families that are refused whatever their structure looks like: model type -> why, and what to do instead.
_REFUSED: dict[str, tuple[str, str]] = {}
# From a model of an unregistered type to a family that its structure tells, or None.
_BY_STRUCTURE: list[Callable[[nn.Module], MoEFamily | None]] = []


def register_moe_layout(family: MoEFamily) -> MoEFamily:
    """Add (or replace) a family for all its `model_types`."""
    for model_type in family.model_types:
        _FAMILIES[model_type] = family
        _REFUSED.pop(model_type, None)
    return family


def refuse_moe_layout(model_type: str, why: str, instead: str) -> None:
    """Refuse a family by name, with the reason and what to do instead."""
    _REFUSED[model_type] = (why, instead)


def tell_by_structure(tell: Callable[[nn.Module], MoEFamily | None]) -> None:
    """Add a function that tells the family of an unregistered model type, or None."""
    _BY_STRUCTURE.append(tell)


def _family_of(model: nn.Module) -> MoEFamily:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type in _REFUSED:
        why, instead = _REFUSED[model_type]
        raise UnsupportedModelError(f"`{type(model).__name__}` (model type {model_type!r}) was given", why, instead)
    family = _FAMILIES.get(model_type or "")
    for tell in _BY_STRUCTURE if family is None else ():
        family = family or tell(model)
    if family is None:
        raise UnsupportedModelError(
            f"`{type(model).__name__}` (model type {model_type!r}) was given",
            "No family registered with raptor_hf tells where its routers and routed experts are, nor does its "
            "structure (a dense model has none), so records cannot be given an owner expert; registered: "
            f"{', '.join(sorted(_FAMILIES))}",
            "Use a sparse Mixture-of-Experts model of a registered family, or add one with `register_moe_layout`",
        )
    return family


def _head_of(model: nn.Module, family: MoEFamily) -> str:
    """The family's task head, or the LM head of a model that has no other."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if hasattr(model, family.head) or output is None:
        return family.head
    return next((name for name, module in model.named_modules() if module is output), family.head)


@dataclass(frozen=True)
class MoELayout:
    """The sparse layers of a model and the role of each of its parameters.

    Attributes: head: path of the task head, or of the LM head, which stays frozen (see `trains_head`).
    """

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

    @property
    def trains_head(self) -> bool:
        """A task head is part of the shared stream; an LM head stays as it is, often tied to the embeddings."""
        return self.head == self.family.head

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
    family = _family_of(model)
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
    head = _head_of(model, family)
    prefixes[f"{head}."] = "head"
    return MoELayout(family, layers, head, prefixes)


def tied_or_shared(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Parameters that live under several names, with those names."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {parameter: aliases for parameter, aliases in names.items() if len(aliases) > 1}
