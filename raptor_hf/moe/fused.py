"""Families whose routed experts are stacked in two tensors: every class that `use_experts_implementation` decorates.

All of them call `experts(hidden (N, H), index (N, K), gates (N, K))`, with `gate_up_proj` (E, 2I, H), or `up_proj`
(E, I, H) where there is no gate, and `down_proj` (E, H, I); some store these transposed, some add biases. So the
shipped block stays as it is, with its own router, shared experts and their gate, and only what happens inside that call
is replaced.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import torch
from torch import nn

from raptor_hf.errors import UnsupportedModelError
from raptor_hf.moe.block import SparseBlock
from raptor_hf.moe.experts import routed_experts
from raptor_hf.moe.layout import MoEFamily, SparseLayer
from raptor_hf.moe.routing import Routing

__all__ = ["FusedSparseBlock", "find_fused_layers", "fused_family", "is_fused_experts", "read_fused_routing"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|block|h)\.(\d+)\.")
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
_ROUTERS = ("gate", "router")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")


class FusedSparseBlock(SparseBlock):
    """Any shipped sparse block around stacked experts; `wrap_fused` makes a shipped block one, in place."""

    _shipped: type[nn.Module]

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rows = hidden.shape[:-1]
        return self._shipped.forward(self, hidden, *args, **kwargs)

    def run_experts(self, hidden: torch.Tensor, index: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """What the shipped block's `self.experts(...)` computes: (N, H)."""
        x = hidden.view(*self._rows, hidden.shape[-1])
        index, gate = (t.view(*self._rows, t.shape[-1]) for t in (index, gate))
        if self._kernel:
            out = routed_experts(x, index, gate.to(x.dtype), self.stack(), self._owner)
        else:
            out = self._plain(x, index, gate)
        return out.view_as(hidden)

    def weights(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        first, second = self.stacked_weights()
        return first.unbind(0), second.unbind(0)

    def stacked_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (getattr(self.experts, name) for name in parameter_names(self.experts))
        return (first.mT, second.mT) if self.experts.is_transposed else (first, second)

    @property
    def experts_implementation(self) -> str | None:
        return getattr(getattr(self.experts, "config", None), "_experts_implementation", None)

    def biases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self.experts.has_bias:
            return None
        first, second = (getattr(self.experts, f"{name}_bias") for name in parameter_names(self.experts))
        return first, second

    def activation(self, pre: torch.Tensor) -> torch.Tensor:
        return self.experts._apply_gate(pre) if self.experts.has_gate else self.experts.act_fn(pre)

    def train(self, mode: bool = True) -> FusedSparseBlock:
        """As usual, but the router stays in evaluation mode: chance must not choose a record's experts."""
        super().train(mode)
        self.get_submodule(_router_path(self)).eval()
        return self


_WRAPPED: dict[type, type] = {}


def _wrapped_class(shipped: type[nn.Module]) -> type[nn.Module]:
    if shipped not in _WRAPPED:
        _WRAPPED[shipped] = type(f"Sparse{shipped.__name__}", (FusedSparseBlock, shipped), {"_shipped": shipped})
    return _WRAPPED[shipped]


def wrap_fused(block: nn.Module) -> FusedSparseBlock:
    """Make a shipped block a `FusedSparseBlock` of the same class, modules and names. In place."""
    block.__class__ = _wrapped_class(type(block))
    assert isinstance(block, FusedSparseBlock)
    block.expert_adapters, block.adapters_enabled, block._kernel, block._owner = None, True, False, None
    block.num_experts = len(block.experts.down_proj)
    block.experts.forward = block.run_experts
    return block


def is_fused_experts(module: nn.Module) -> bool:
    """Is `module` decorated with `use_experts_implementation`?"""
    return all(hasattr(module, flag) for flag in _FLAGS) and hasattr(module, "down_proj")


def parameter_names(experts: nn.Module) -> tuple[str, str]:
    """Names of the two weights of decorated experts."""
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def _router_path(block: nn.Module) -> str:
    children = dict(block.named_children())
    found = [name for name in _ROUTERS if name in children]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"The sparse block `{type(block).__name__}` was given",
            f"Its router is not the one module among {' and '.join(f'`{name}`' for name in _ROUTERS)} of the block, so "
            "it cannot be told what must stay frozen",
            "Register the family with `register_moe_layout`",
        )
    return found[0]


def _check_experts(name: str, experts: nn.Module) -> None:
    """Refuse experts that do more than the kernel computes."""
    if experts.has_post_expert_norm:
        raise UnsupportedModelError(
            f"The routed experts `{name}` ({type(experts).__name__}) were given",
            "They normalise their output: the per-record kernel ends with the second projection",
            "Use a family whose experts are two projections, e.g. OLMoE, Mixtral, Qwen-MoE or DeepSeek",
        )


def _refuse_quantized(name: str, module: nn.Module) -> None:
    if name.endswith(".experts") and not all(p.is_floating_point() for p in module.parameters(recurse=False)):
        raise UnsupportedModelError(
            f"The routed experts `{name}` ({type(module).__name__}) were given",
            "They are quantized: the per-record kernel multiplies by their weights as they are",
            "Load the model dequantized, e.g. GPT-OSS with `quantization_config=Mxfp4Config(dequantize=True)`",
        )


def _check_block(block: nn.Module) -> None:
    """Refuse a block whose routing depends on more than its own input, or that is a whole decoder layer."""
    shipped = getattr(block, "_shipped", type(block))
    names = [n for n, p in inspect.signature(shipped.forward).parameters.items() if p.kind != p.VAR_KEYWORD]
    if len(names) > 2:
        raise UnsupportedModelError(
            f"The sparse block `{shipped.__name__}` was given",
            f"Its `forward` takes more than hidden states (`{names[2]}`), so where it sends a token cannot be told "
            "from what comes into the layer",
            "Register the family with `register_moe_layout`",
        )


def find_fused_layers(model: nn.Module) -> list[SparseLayer]:
    """The sparse layers of a model with decorated experts, from structure alone; empty without any."""
    layers = []
    for name, experts in model.named_modules():
        _refuse_quantized(name, experts)
        if not is_fused_experts(experts) or "." not in name:
            continue
        _check_experts(name, experts)
        path, _, experts_path = name.rpartition(".")
        block, match = model.get_submodule(path), _LAYER.search(name)
        router_path = _router_path(block)
        if experts_path != "experts" or match is None:
            raise UnsupportedModelError(
                f"The routed experts `{name}` were given",
                "They are not the `experts` of a sparse block in a numbered layer, so no layer can be protected",
                "Register the family with `register_moe_layout`",
            )
        _check_block(block)
        router = getattr(block, router_path)
        shared = tuple(m for m in (getattr(block, key, None) for key in _SHARED) if m is not None)
        layers.append(
            SparseLayer(
                index=int(match.group(1)), name=path, num_experts=len(experts.down_proj),
                top_k=int(getattr(router, "top_k", getattr(block, "top_k", 1))), router=router, experts=experts,
                router_path=router_path, shared_experts=shared,
            )
        )  # fmt: skip
    return layers


# ---- Routing ----


class _Captured(Exception):
    """Carries the arguments of the experts' call out of the block."""


@torch.no_grad()
def read_fused_routing(block: nn.Module, hidden: torch.Tensor, score: str | None = None) -> Routing:
    """Where the block's own router sends every token. See `MoEFamily.read_routing`, and `fused_family` for `score`."""
    experts, router = block.experts, getattr(block, _router_path(block))
    logits: list[torch.Tensor] = []

    def capture(_hidden: torch.Tensor, index: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        raise _Captured(index, gate)

    before = vars(experts).get("forward")
    handle = router.register_forward_hook(lambda _m, _a, out: logits.append(out[0]))
    experts.forward = capture
    try:
        block.forward(hidden.clone())
    except _Captured as captured:
        index, gate = captured.args
    finally:
        handle.remove()
        if before is None:
            del experts.forward
        else:
            experts.forward = before
    ranked = index.sort(dim=-1).values
    if bool(((ranked[..., 1:] == ranked[..., :-1]) & (ranked[..., 1:] < len(experts.down_proj))).any()):
        raise UnsupportedModelError(
            f"The router of `{type(block).__name__}` sent a token to one expert twice",
            "A record's gradient for its owner is taken from one choice of each token, and would be wrong",
            "Use a router whose choices differ",
        )
    rows = hidden.shape[:-1]
    gate = gate.double()
    gate = gate / gate.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    gap = _gap(router, logits[0].reshape(*rows, -1).double(), index.view(*rows, -1), score)
    return Routing(index.view(*rows, -1), gate.view(*rows, -1), gap)


def _gap(router: nn.Module, logits: torch.Tensor, index: torch.Tensor, score: str | None) -> torch.Tensor:
    """(B, T): how far a logit would have to move, at least, to change a token's experts.

    A router that adds a correction to sigmoid or softmax scores is looked at in those scores: they move less than the
    logits do. Zero ("unsure") for a router that is not known, or that chose otherwise than this function expects.
    """
    if score is None:
        return torch.zeros_like(logits[..., 0])
    scores = {"logits": lambda x: x, "sigmoid": torch.sigmoid, "softmax": lambda x: x.softmax(-1)}[score](logits)
    tensors = [*router.named_buffers(), *router.named_parameters()]
    bias = next((value for name, value in tensors if "correction_bias" in name), None)
    if bias is not None:
        scores = scores + bias.reshape(-1).to(scores)
    groups = int(getattr(router, "num_group", 1) or 1)
    if getattr(router, "topk_method", None) == "greedy":
        groups = 1
    return _gap_of_scores(scores, groups, int(getattr(router, "topk_group", 1) or 1), index, bias is not None)


def _gap_of_scores(scores: torch.Tensor, groups: int, kept: int, index: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Distance between chosen and not chosen, of groups and of experts; zero where `index` is another choice."""
    infinite = torch.full_like(scores[..., 0], float("inf"))
    gap = infinite
    if groups > 1:
        grouped = scores.unflatten(-1, (groups, -1))
        value = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1) if pairs else grouped.amax(-1)
        order = value.sort(dim=-1, descending=True)
        if kept < groups:
            gap = order.values[..., kept - 1] - order.values[..., kept]
        allowed = torch.zeros_like(value).scatter(-1, order.indices[..., :kept], 1.0).bool()
        scores = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = torch.zeros_like(scores).scatter(-1, index, 1.0).bool()
    worst = scores.masked_fill(~chosen, float("inf")).amin(-1)
    best = scores.masked_fill(chosen, float("-inf")).amax(-1)
    return torch.minimum(gap, worst - best).nan_to_num(nan=0.0, posinf=float("inf")).clamp_min(0.0)


# ---- Families ----


def _switch_off(model: nn.Module, draws: bool = False, keep: tuple[str, ...] = ()) -> list[str]:
    """Jitter of the blocks, and the key-value cache, which training has no use for."""
    found = set()
    for layer in find_fused_layers(model):
        for module in model.get_submodule(layer.name).modules():
            for key, value in list(vars(module).items()):
                if "jitter" in key and key not in keep and isinstance(value, float) and value > 0:
                    found.add(value)
                    setattr(module, key, 0.0)
    if getattr(model, "config", None) is not None and hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    changed = [f"router jitter ({max(found)})"] if found else []
    # `FusedSparseBlock.train` leaves the router in evaluation mode
    return changed + (["the router's random choice of experts in training (it takes the best ones)"] if draws else [])


def fused_family(
    name: str,
    model_types: tuple[str, ...] | None = None,
    *,
    shared_targets: tuple[str, ...] = ATTENTION,
    score: str | None = None,
    gated: bool = True,
    draws: bool = False,
    not_chance: tuple[str, ...] = (),
) -> MoEFamily:
    """A family of stacked experts, for `register_moe_layout`.

    Args:
        model_types: default: the name. shared_targets: names of the attention's linear layers.
        score: by what the router ranks experts: `"logits"` (or a monotone function of them), or `"sigmoid"` or
            `"softmax"` of them plus a correction. None: not known, and owners are computed one record at a time.
        gated: do the experts have `gate_up_proj` (else `up_proj`)? draws: does the router draw experts in training?
        not_chance: see `MoEFamily`.
    """
    return MoEFamily(
        name=name,
        model_types=model_types or (name,),
        find_layers=find_fused_layers,
        wrap_block=wrap_fused,
        read_routing=functools.partial(read_fused_routing, score=score),
        shared_targets=shared_targets,
        expert_parameters=("experts.gate_up_proj" if gated else "experts.up_proj", "experts.down_proj"),
        switch_off=functools.partial(_switch_off, draws=draws, keep=not_chance),
        not_chance=not_chance,
    )
