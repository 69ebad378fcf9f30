"""The families of models that raptor_hf handles, one small function each."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from raptor_hf.errors import UnsupportedModelError
from raptor_hf.moe.block import SparseBlock, SwitchSparseBlock
from raptor_hf.moe.layout import MoEFamily, SparseLayer, register_moe_layout
from raptor_hf.moe.routing import Routing

__all__ = ["SWITCH"]

_BLOCK = re.compile(r"(?:^|\.)block\.(\d+)\.")


def _switch_layers(model: nn.Module) -> list[SparseLayer]:
    layers = []
    for name, module in model.named_modules():
        if not isinstance(module, (SwitchTransformersSparseMLP, SwitchSparseBlock)):
            continue
        match = _BLOCK.search(name)
        if "decoder" in name.split(".") or match is None:
            raise UnsupportedModelError(
                f"`{type(model).__name__}` with a sparse decoder was given",
                "Switch is supported as an encoder: a block index would name one layer of the encoder and one of the "
                "decoder, and one protected layer could not be told from the other",
                "Load the checkpoint with `SwitchTransformersForSequenceClassification.from_pretrained`",
            )
        layers.append(
            SparseLayer(int(match.group(1)), name, module.router.num_experts, 1, module.router, module.experts)
        )
    return layers


def _switch_routing(block: nn.Module, hidden: torch.Tensor) -> Routing:
    router = block.router
    if isinstance(block, SparseBlock):
        index, _ = block.route(hidden)
        weight, bias = router.classifier.weight, router.classifier.bias
        logits = F.linear(hidden.to(router.dtype), weight.to(router.dtype), bias)
    else:
        # a copy, because the router's own cast of fp32 states is no copy and its jitter works in place
        one_hot, _, logits = router(hidden.clone())
        index = torch.where(one_hot.any(-1), one_hot.argmax(-1), router.num_experts).unsqueeze(-1)
    top = logits.topk(min(2, logits.shape[-1]), dim=-1).values
    gap = top[..., 0] - top[..., 1] if top.shape[-1] > 1 else torch.full_like(top[..., 0], float("inf"))
    return Routing(index, torch.ones_like(index, dtype=torch.float64), gap)


def _switch_off(model: nn.Module) -> list[str]:
    blocks = [m for m in model.modules() if isinstance(m, (SwitchTransformersSparseMLP, SwitchSparseBlock))]
    jitter = {block.router.jitter_noise for block in blocks} - {0}
    rates = {expert.dropout.p for block in blocks for expert in block.experts.values()} - {0}
    for block in blocks:
        block.router.jitter_noise = 0.0
        for expert in block.experts.values():
            expert.dropout.p = 0.0
    changed = [f"router jitter ({max(jitter)})"] if jitter else []
    return changed + ([f"dropout inside the routed experts ({max(rates)})"] if rates else [])


SWITCH = register_moe_layout(
    MoEFamily(
        name="switch",
        model_types=("switch_transformers",),
        find_layers=_switch_layers,
        wrap_block=SwitchSparseBlock,
        read_routing=_switch_routing,
        shared_targets=("q", "k", "v", "o"),
        expert_module="experts.expert_{expert}.{projection}",
        expert_projections=("wi", "wo"),
        switch_off=_switch_off,
    )
)
