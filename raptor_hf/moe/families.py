"""The families of models that raptor_hf handles, one small function each."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from raptor_hf.errors import UnsupportedModelError
from raptor_hf.moe.block import SparseBlock, SwitchSparseBlock
from raptor_hf.moe.fused import ATTENTION, find_fused_layers, fused_family
from raptor_hf.moe.layout import MoEFamily, SparseLayer, refuse_moe_layout, register_moe_layout, tell_by_structure
from raptor_hf.moe.routing import Routing

__all__ = ["FUSED", "HOOKS_ONLY", "REFUSED", "STRUCTURE", "SWITCH"]

_BLOCK = re.compile(r"(?:^|\.)block\.(\d+)\.")


def _switch_layers(model: nn.Module) -> list[SparseLayer]:
    layers = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "decoder":
            raise UnsupportedModelError(
                f"`{type(model).__name__}` with a decoder was given",
                "Switch is supported as an encoder: a block index would name one layer of the encoder and one of the "
                "decoder, and one protected layer could not be told from the other",
                "Load the checkpoint with `SwitchTransformersForSequenceClassification.from_pretrained`",
            )
        match = _BLOCK.search(name)
        if match is not None and isinstance(module, (SwitchTransformersSparseMLP, SwitchSparseBlock)):
            router = module.router
            layers.append(SparseLayer(int(match.group(1)), name, router.num_experts, 1, router, module.experts))
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

# ---- Stacked experts ----

MLA = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")

# Model types that the tests go through one by one: how the router ranks experts, and the attention's linear layers.
FUSED: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "olmoe": ("logits", ATTENTION),
    "mixtral": ("logits", ATTENTION),
    "qwen2_moe": ("logits", ATTENTION),
    "qwen3_moe": ("logits", ATTENTION),
    "qwen3_vl_moe_text": ("logits", ATTENTION),
    "deepseek_v2": ("logits", MLA),
    "deepseek_v3": ("sigmoid", MLA),
    "deepseek_ocr2_text": ("logits", ATTENTION),
    "glm4_moe": ("sigmoid", ATTENTION),
    "dots1": ("sigmoid", ATTENTION),
    "ernie4_5_moe": ("softmax", ATTENTION),
    "hunyuan_v1_moe": ("logits", ATTENTION),
    "granitemoe": ("logits", ATTENTION),
    "granitemoeshared": ("logits", ATTENTION),
    "flex_olmo": ("logits", ATTENTION),
    "minimax": ("logits", (*ATTENTION, "qkv_proj", "out_proj")),
    "gpt_oss": ("logits", ATTENTION),
    "aria_text": ("logits", ATTENTION),
    # weights of experts jump where a logit crosses a threshold, so that no gap says how far an owner's lead is safe
    "phimoe": (None, ATTENTION),
}
# `router_jitter_noise` of Phi-MoE is the threshold of its gates, in evaluation too
_OPTIONS: dict[str, dict[str, Any]] = {"phimoe": {"draws": True, "not_chance": ("router_jitter_noise",)}}
for _name, (_score, _targets) in FUSED.items():
    register_moe_layout(fused_family(_name, shared_targets=_targets, score=_score, **_OPTIONS.get(_name, {})))

# Model types that are told by structure alone, and that the tests go through one by one.
STRUCTURE = (
    "afmoe",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "beam",
    "cohere2_moe",
    "deepseek_v32",
    "dots3_note_text",
    "exaone_moe",
    "flint",
    "glm4_moe_lite",
    "glm4v_moe_text",
    "glm5_next_text",
    "glm_moe_dsa",
    "granitemoe_swa",
    "granitemoehybrid",
    "hy_v3",
    "hy_v4",
    "hy_v4_vl_text",
    "inkling2_loop_text",
    "inkling2_text",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lara_mini",
    "lfm2_moe",
    "mellum",
    "mimo_v2_flash",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mistral4",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen3_omni_moe_text",
    "qwen4_exp_text",
    "solar_open",
    "unlimited_ocr_text",
)
# Of these, those whose attention chooses tokens in ways that vmap cannot follow: the `hooks` engine only.
HOOKS_ONLY = ("glm5_next_text", "qwen4_exp_text")


def _by_structure(model: nn.Module) -> MoEFamily | None:
    """Decorated experts of an unregistered model type. Nothing is assumed about how its router ranks experts."""
    layers = find_fused_layers(model)
    if not layers:
        return None
    if model.config.get_text_config() is not model.config:
        raise UnsupportedModelError(
            f"`{type(model).__name__}` (model type {model.config.model_type!r}) was given",
            "It is a model of several media: what other media put among the tokens is counted and spread over the "
            "whole batch, so that a record with a wrong count shifts what its neighbours see",
            f"Use its language model alone (model type {model.config.get_text_config().model_type!r})",
        )
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    usual = dict.fromkeys((*ATTENTION, *MLA, *(f"{name}.linear" for name in ATTENTION)))
    targets = tuple(target for target in usual if any(name.endswith(f".{target}") for name in linears))
    return fused_family(model.config.model_type, shared_targets=targets or ATTENTION, gated=layers[0].experts.has_gate)


tell_by_structure(_by_structure)

_OTHER = "Use a family of the table in docs/families.md"
# Model types that are refused by name: why, and what to do instead.
REFUSED = {
    "llama4": (
        "It multiplies the *inputs* of all experts by their scores and computes every expert for every token; the "
        "kernel weights outputs",
        _OTHER,
    ),
    "jetmoe": (
        "Its attention is a mixture of experts too: a record has two sets of experts in one layer, and one owner "
        "cannot stand for both",
        _OTHER,
    ),
    "dbrx": ("Its experts are one matrix of all experts' rows, in a layout that the kernel does not read", _OTHER),
    "nllb-moe": (
        "In training it counts expert capacity over the whole batch: which expert a token reaches depends on the "
        "other records",
        _OTHER,
    ),
    "longcat_flash": (
        "Its router also chooses experts that only copy their input, and each layer has two attention blocks around "
        "one set of experts",
        _OTHER,
    ),
    "step3p7": (
        "Its experts are not decorated with `use_experts_implementation`, so that what calls them cannot be told by "
        "structure, and nothing has been tested on it",
        _OTHER,
    ),
    "doge": (
        "Its experts are rows of two embedding tables, retrieved by product keys: there are no projections that could "
        "carry an adapter for each expert",
        _OTHER,
    ),
    "deepseek_v4": (
        "Its first sparse layers choose experts by a table of token ids, which may name one expert twice, and its "
        "blocks need the ids beside the hidden states",
        _OTHER,
    ),
    "zaya": (
        "Its routers hand a state on from layer to layer, so that where a layer sends a token cannot be told from what "
        "comes into the layer",
        _OTHER,
    ),
    "gemma4_text": (
        "Its experts belong to the decoder layer itself, beside a dense network, and read other hidden states than "
        "the router does",
        _OTHER,
    ),
    "muse_spark_text": (
        "It normalises the output of every expert: the per-record kernel ends with the second projection",
        _OTHER,
    ),
    "ernie4_5_vl_moe_text": (
        "Its layers have two sets of experts, for text and for images, between which the kind of a token chooses: one "
        "owner cannot stand for both",
        _OTHER,
    ),
    "mistral_large4_text": (
        "PEFT does not put the saved adapters of its experts where they were trained, so that stock PEFT would compute "
        "something else than what the statement is about",
        _OTHER,
    ),
    "openai_privacy_filter": (
        "It labels every token of a record, while a record's loss here is that of a class or of a language model",
        _OTHER,
    ),
    "vitpose_backbone": (
        "Its experts are chosen by the data set that a record comes from, not by a router",
        _OTHER,
    ),
}
REFUSED["llama4_text"] = REFUSED["llama4"]
REFUSED["diffusion_gemma_text"] = REFUSED["gemma4_text"]
for _name, (_why, _instead) in REFUSED.items():
    refuse_moe_layout(_name, _why, _instead)
