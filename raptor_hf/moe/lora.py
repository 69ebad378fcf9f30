"""LoRA on the shared stream and on the experts of the protected layer, and which parameter belongs to which stream.

PEFT's own injection is not used: on MoE models its name matching reaches routers and the experts of other layers.
What is saved is PEFT's format (`moe.adapter_io`), so that stock PEFT loads it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from raptor_hf.errors import PrivacyConfigError, UnsupportedModelError
from raptor_hf.moe import families as _families  # registers the families
from raptor_hf.moe.block import SparseBlock, sparse_blocks
from raptor_hf.moe.layout import MoELayout, find_moe_layout, tied_or_shared
from raptor_hf.validate import integer, positive

__all__ = [
    "AdapterPlan",
    "LoraLinear",
    "adapter_plan",
    "adapters_disabled",
    "attach_adapters",
    "resolve_layer",
    "resolve_layers",
    "stream_parameters",
]

_ = _families

# Options of a PEFT `LoraConfig` that would change what is trained, and the values at which they do nothing.
_NEUTRAL = {
    "lora_dropout": 0.0,
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "rank_pattern": None,
    "alpha_pattern": None,
    "exclude_modules": None,
    "layers_to_transform": None,
    "layers_pattern": None,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "use_bdlora": False,
    "kasa_config": None,
}


class LoraLinear(nn.Module):
    """A frozen linear layer plus LoRA: base(x) + s B A x, with `lora_A` (r, in) and `lora_B` (out, r) in fp32."""

    def __init__(self, base_layer: nn.Linear, rank: int, scaling: float):
        super().__init__()
        self.base_layer = base_layer
        self.scaling = scaling
        self.adapters_enabled = True
        # set by the hooks engine: (base, x, A, B, scaling) -> base + scaling * B A x, noting what each record
        # contributes
        self.taped: Callable[..., torch.Tensor] | None = None
        device = base_layer.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, base_layer.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base_layer.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    @property
    def weight(self) -> torch.Tensor:
        """The base weight (some models read its dtype)."""
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        if not self.adapters_enabled:
            return out
        if self.taped is not None:
            return self.taped(out, x, self.lora_A, self.lora_B, self.scaling)
        update = F.linear(F.linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B)
        return out + (self.scaling * update).to(out.dtype)


@dataclass(frozen=True)
class AdapterPlan:
    """What is trained.

    Attributes:
        rank and alpha of LoRA. shared_targets: module paths with LoRA. layer: block index of the protected layer.
        trains: the roles that are trained, of `"shared"` (with the head) and `"expert"`.
        expert_layers: block indices whose experts carry adapters, in the order of their stages.
        all_layers: whether they do because every sparse layer is trained at once, not in stages.
        weights: `"adapters"`, or the base weights that `train_weights` made trainable.
    """

    rank: int
    alpha: float
    shared_targets: tuple[str, ...]
    layer: int
    layout: MoELayout
    trains: tuple[str, ...] = ("shared", "expert")
    expert_layers: tuple[int, ...] = ()
    all_layers: bool = False
    weights: str = "adapters"

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    @property
    def layers(self) -> int | str:
        """The protected layer's block index, or those of several stages as text, `"1,3"`."""
        return self.layer if self.all_layers or len(self.expert_layers) < 2 else ",".join(map(str, self.expert_layers))

    @property
    def protected(self):
        return self.layout.layer(self.layer)


def resolve_layer(layout: MoELayout, layer: int | str) -> int:
    """Block index of `layer`: an index, `"first"` or `"last"` (of the sparse layers)."""
    if layer == "first":
        return layout.sparse_layers[0].index
    if layer == "last":
        return layout.sparse_layers[-1].index
    if isinstance(layer, str) and not layer.lstrip("-").isdigit():
        raise PrivacyConfigError(
            f"`protected_layer={layer!r}` was given",
            "It names no layer",
            'Use a block index, "first", "last", or "auto" with a public dataset',
        )
    return layout.layer(int(layer)).index


def resolve_layers(layout: MoELayout, layers: int | str) -> tuple[int, ...]:
    """Block indices of the stages: of `"1,3"` two, of what `resolve_layer` takes one.

    Raises:
        PrivacyConfigError: a layer that is named twice, or layers with different numbers of experts.
    """
    found = tuple(resolve_layer(layout, part.strip()) for part in str(layers).split(","))
    if len(set(found)) < len(found) or len({layout.layer(index).num_experts for index in found}) > 1:
        raise PrivacyConfigError(
            f"`protected_layer={layers!r}` was given, which stands for the blocks {list(found)}",
            "Each stage protects another layer, and one statement describes them all: they must differ, and have the "
            "same number of experts",
            "Name each layer once, or make a run for each",
        )
    return found


def _settings(config: Any) -> tuple[int, float, Any]:
    """(rank, alpha, target modules) of a `RaptorConfig`, or of a PEFT `LoraConfig`."""
    if not hasattr(config, "lora_rank"):
        for name, neutral in _NEUTRAL.items():
            if getattr(config, name, neutral) not in (neutral, None, {}, [], set()):
                raise PrivacyConfigError(
                    f"`peft_config.{name}={getattr(config, name)!r}` was given",
                    "The engines have no per-sample gradient for it, and an adapter trained without it would not be "
                    "what was asked for",
                    f"Leave it at {neutral!r}",
                )
        return config.r, config.lora_alpha, config.target_modules
    return config.lora_rank, config.lora_alpha, config.shared_target_modules


def _shared_targets(model: nn.Module, layout: MoELayout, targets: Any) -> tuple[str, ...]:
    wanted = layout.family.shared_targets if targets is None else targets
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if isinstance(wanted, str):
        chosen = [name for name in linears if re.fullmatch(wanted, name)]
        missing = [] if chosen else [wanted]
    else:
        matches = {t: [n for n in linears if n == t or n.endswith("." + t)] for t in wanted}
        missing = [t for t, names in matches.items() if not names]
        if targets is None and len(missing) < len(matches):
            missing = []  # a family's default names the layers of all its configurations
        chosen = [name for name in linears if any(name in names for names in matches.values())]
    if missing:
        raise UnsupportedModelError(
            f"`shared_target_modules` names {missing}",
            f"`{type(model).__name__}` has no linear layer of that name",
            f"Use names of its linear layers; the family's default is {list(layout.family.shared_targets)}",
        )
    roles = {name: layout.role(name + ".weight") for name in chosen}
    routers = [name for name, role in roles.items() if role == "router"]
    if routers:
        raise PrivacyConfigError(
            f"`shared_target_modules` reaches the router `{routers[0]}`",
            "Routing must stay as the public base model has it: the owner map is computed once by it, and a router "
            "trained on private records would change which experts a record uses",
            "Leave routers out of the targets",
        )
    shared = tuple(name for name, role in roles.items() if role == "shared")
    if not shared:
        raise UnsupportedModelError(
            f"`shared_target_modules={targets!r}` was given",
            "It names no shared linear layer (only experts or the head), so the shared stream would have no adapter",
            f"Use the family's default, {list(layout.family.shared_targets)}",
        )
    return shared


def attach_adapters(
    model: nn.Module,
    config: Any,
    protected_layer: int | str,
    *,
    trains: tuple[str, ...] = ("shared", "expert"),
    all_layers: bool = False,
) -> nn.Module:
    """Freeze `model`, put LoRA on the shared stream and on every expert of one layer, and make the head trainable.

    A task head (`score`) is trained in full, as part of the shared stream. A causal language model has none: its LM
    head stays frozen, and the streams are LoRA alone.

    In place. `model.save_pretrained` then writes the adapter in PEFT's format (not the base weights).

    Args:
        config: a `RaptorConfig` (`lora_rank`, `lora_alpha`, `shared_target_modules`) or a PEFT `LoraConfig`.
        protected_layer: block index of the protected layer l*, `"first"`, `"last"`; or several, `"1,3"`, for stages.
        trains: the roles to train; the others' adapters stay frozen at zero, and the head with `"shared"`.
        all_layers: put adapters on the experts of every sparse layer (for methods without owners).

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: no layout, or targets that do not exist.
        PrivacyConfigError: the model already carries adapters, targets reach a router, unsupported LoRA options.
    """
    if getattr(model, "raptor_adapters", None) is not None:
        raise PrivacyConfigError(
            "A model that already carries raptor adapters was given",
            "Two sets of adapters would be trained and accounted as one",
            "Load the base model again, or train the adapters it has",
        )
    layout = find_moe_layout(model)
    stages = resolve_layers(layout, protected_layer)
    rank, alpha, targets = _settings(config)
    integer("lora_rank", rank, minimum=1)
    positive("lora_alpha", alpha)
    shared = _shared_targets(model, layout, targets)
    if not (hasattr(model, layout.head) if layout.trains_head else model.get_submodule(layout.head)):
        raise UnsupportedModelError(
            f"`{type(model).__name__}` was given",
            f"It has no head named `{layout.head}` to train, and no LM head either",
            "Use a model class with a head, e.g. through `AutoModelForSequenceClassification`",
        )
    layers = tuple(sparse.index for sparse in layout.sparse_layers) if all_layers else stages
    plan = AdapterPlan(rank, float(alpha), shared, stages[0], layout, trains, layers, all_layers)
    switch_off_chance(model, layout)
    model.requires_grad_(False)
    for name in shared:
        _replace(model, name, LoraLinear(model.get_submodule(name), rank, plan.scaling))
    for sparse in layout.sparse_layers:
        shipped = model.get_submodule(sparse.name)
        block = shipped if isinstance(shipped, SparseBlock) else layout.family.wrap_block(shipped)
        block.train(shipped.training)
        if sparse.index in layers:
            block.add_expert_adapters(rank, alpha)
        _replace(model, sparse.name, block)
    if layout.trains_head:
        _train_head(model.get_submodule(layout.head))
    for name, parameter in model.named_parameters():
        role = "expert" if layout.role(name) == "expert" else "shared"
        parameter.requires_grad_(parameter.requires_grad and role in trains)
    shared_storage = [names for parameter, names in tied_or_shared(model).items() if parameter.requires_grad]
    if shared_storage:
        raise UnsupportedModelError(
            f"The trainable parameter {shared_storage[0]} is tied",
            "It would belong to two modules, and its per-sample gradient would be counted once for each",
            "Untie it in the model's configuration (`tie_word_embeddings=False`)",
        )
    model.raptor_adapters = plan
    from raptor_hf.moe.adapter_io import bind_save_pretrained

    bind_save_pretrained(model)
    return model


def switch_off_chance(model: nn.Module, layout: MoELayout) -> None:
    """Switch off what the family says would make a record's computation depend on its neighbours' chance."""
    if changed := layout.family.switch_off(model):
        warnings.warn(
            f"Switched off: {' and '.join(changed)}. They would make a record's computation depend on chance that is "
            "shared with its neighbours. All other dropout stays as the model has it.",
            stacklevel=3,
        )


def _train_head(head: nn.Module) -> None:
    """Make a task head trainable, in fp32 at least, whatever its inputs are."""
    for parameter in head.parameters():
        parameter.requires_grad_(True)
        if parameter.dtype != torch.float64:
            parameter.data = parameter.data.float()
    head.register_forward_pre_hook(_widen)


def _widen(module: nn.Module, args: tuple) -> tuple:
    weight = getattr(module, "weight", None)
    return args if weight is None else tuple(x.to(weight.dtype) for x in args)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def adapter_plan(model: nn.Module) -> AdapterPlan:
    """The plan of a model that went through `attach_adapters`; raises `PrivacyConfigError` for any other."""
    plan = getattr(model, "raptor_adapters", None)
    if plan is None:
        raise PrivacyConfigError(
            f"A `{type(model).__name__}` without adapters was given",
            "Its parameters have not been divided into the two streams",
            "Call `attach_adapters(model, config, protected_layer)` first",
        )
    return plan


def stream_parameters(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """`{"shared": {name: Parameter}, "expert": {name: Parameter}}`: the trainables of each stream.

    Expert tensors carry a leading expert dimension: `lora_A` (E, r, in), `lora_B` (E, out, r).
    """
    plan = adapter_plan(model)
    streams: dict[str, dict[str, nn.Parameter]] = {"shared": {}, "expert": {}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        role = plan.layout.role(name)
        if role == "router" and plan.weights != "full":
            raise PrivacyConfigError(
                f"The router parameter `{name}` is trainable",
                "Routing must stay as the public base model has it, or the owner map no longer says which expert a "
                "record touches",
                "Freeze it: `parameter.requires_grad_(False)`",
            )
        streams["expert" if role == "expert" else "shared"][name] = parameter
    return streams


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Compute as the base model does: every adapter off."""
    modules = [m for m in model.modules() if isinstance(m, LoraLinear)] + list(sparse_blocks(model).values())
    before = [module.adapters_enabled for module in modules]
    for module in modules:
        module.adapters_enabled = False
    try:
        yield
    finally:
        for module, enabled in zip(modules, before, strict=True):
            module.adapters_enabled = enabled
