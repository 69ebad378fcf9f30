"""Tiny random models of every supported family, and stock models with LoRA written out: W + s B A."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence

import torch
from peft import LoraConfig
from torch import nn
from torch.func import functional_call
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification

import raptor_hf.models  # noqa: F401 (registers classifiers)
from raptor_hf.moe import attach_adapters, stream_parameters
from raptor_hf.moe.families import FUSED
from tests.helpers import record_by_record

VOCAB, EXPERTS, LABELS, TOP_K, PAD = 50, 4, 3, 2, 0

COMMON = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=12, moe_intermediate_size=12, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=PAD,
    bos_token_id=1, eos_token_id=2, num_labels=LABELS, num_experts_per_tok=TOP_K, tie_word_embeddings=False,
    attention_dropout=0.0,
)  # fmt: skip
MLA = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, head_dim=4)
GROUPS = dict(n_group=2, topk_group=1, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=1.7)
SETTINGS: dict[str, dict] = {
    "olmoe": dict(num_experts=EXPERTS),
    "mixtral": dict(num_local_experts=EXPERTS),
    "qwen2_moe": dict(num_experts=EXPERTS, shared_expert_intermediate_size=12, decoder_sparse_step=1),
    "qwen3_moe": dict(num_experts=EXPERTS, decoder_sparse_step=1, mlp_only_layers=[0]),
    "deepseek_v2": dict(
        n_routed_experts=EXPERTS, topk_method="group_limited_greedy", **{**MLA, **GROUPS}
    ),
    "deepseek_v3": dict(n_routed_experts=EXPERTS, **MLA, **GROUPS),
    "deepseek_ocr2_text": dict(
        n_routed_experts=EXPERTS, topk_method="greedy", n_group=1, topk_group=1, n_shared_experts=2,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "glm4_moe": dict(n_routed_experts=EXPERTS, **GROUPS),
    "dots1": dict(n_routed_experts=EXPERTS, **GROUPS),
    "ernie4_5_moe": dict(
        moe_num_experts=EXPERTS, moe_k=TOP_K, moe_num_shared_experts=1, moe_layer_start_index=1,
        moe_layer_end_index=2, moe_layer_interval=1,
    ),
    "hunyuan_v1_moe": dict(num_experts=EXPERTS, moe_topk=TOP_K),
    "granitemoe": dict(num_local_experts=EXPERTS),
    "granitemoeshared": dict(num_local_experts=EXPERTS, shared_intermediate_size=12),
    "flex_olmo": dict(num_experts=EXPERTS),
    "qwen3_vl_moe_text": dict(num_experts=EXPERTS, decoder_sparse_step=1, mlp_only_layers=[0]),
    # lightning attention below and above an ordinary one
    "minimax": dict(
        num_local_experts=EXPERTS, block_size=4, layer_types=["linear_attention", "full_attention", "linear_attention"]
    ),
    "gpt_oss": dict(num_local_experts=EXPERTS, sliding_window=4),
    "aria_text": dict(moe_num_experts=EXPERTS, moe_topk=TOP_K, moe_num_shared_experts=1),
    # a wide threshold, so that gates of two experts are in use
    "phimoe": dict(num_local_experts=EXPERTS, input_jitter_noise=0.1, router_jitter_noise=0.4),
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
# Every name that one of the families told by structure has for one of these sizes; the others ignore it.
ANY = dict(
    num_experts=EXPERTS, num_local_experts=EXPERTS, n_routed_experts=EXPERTS, moe_num_experts=EXPERTS, n_group=1,
    moe_k=TOP_K, moe_topk=TOP_K, num_shared_experts=1, n_shared_experts=1, moe_num_shared_experts=1,
    shared_expert_intermediate_size=12, shared_intermediate_size=12, moe_shared_expert_intermediate_size=12,
    first_k_dense_replace=1, num_dense_layers=1, first_k_dense=1, topk_group=1, decoder_sparse_step=1,
    routed_scaling_factor=1.7, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
)  # fmt: skip
# Model types told by structure alone.
TOLD: dict[str, dict] = {
    "afmoe": {},
    "axk1": dict(head_dim=4),
    "axk2": {},
    "bailing_hybrid": dict(layer_types=LINEAR["layer_types"]),
    "beam": dict(mlp_layer_types=["dense", "sparse", "sparse"], n_group=2),
    "cohere2_moe": {},
    "deepseek_v32": {},
    "dots3_note_text": {},
    "exaone_moe": {},
    "flint": {},
    "glm4_moe_lite": {},
    "glm4v_moe_text": dict(rope_parameters={**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}),
    "glm5_next_text": dict(
        layer_types=["linear_attention", "indexed_attention", "linear_attention"], linear_head_dim=8,
        linear_num_heads=2, mlp_layer_types=["dense", "sparse", "sparse"], qk_rope_head_dim=0, head_dim=0,
        index_head_dim=8, index_n_heads=2, index_topk=4, index_kpool=2,
    ),
    "glm_moe_dsa": {},
    "granitemoe_swa": {},
    "granitemoehybrid": dict(
        mamba_n_heads=4, mamba_expand=2, mamba_d_head=8, mamba_d_state=4, layer_types=["mamba", "attention", "mamba"]
    ),
    "hy_v3": {},
    "hy_v4": {},
    "hy_v4_vl_text": dict(rope_parameters={**ROPE, "mrope_section": [1, 1, 0]}),
    "inkling_text": {},
    "inkling2_text": {},
    "inkling2_loop_text": {},
    "jamba": dict(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=1, expert_layer_offset=0, mamba_d_state=4,
        mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "kimi_linear": dict(
        layer_types=LINEAR["layer_types"], linear_head_dim=8, linear_num_heads=2,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "kolibri1": {},
    "laguna": {},
    "lara_mini": LINEAR,
    "lfm2_moe": dict(layer_types=["conv", "full_attention", "conv"], rope_parameters=ROPE),
    "mellum": {},
    "mimo_v2_flash": dict(
        num_key_value_heads=1,
        rope_parameters={f"{kind}_attention": {**ROPE, "partial_rotary_factor": 1.0} for kind in ("full", "sliding")},
    ),
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "mistral4": {},
    "nemotron_h": dict(
        layers_block_type=["attention", "moe", "mamba", "moe"], mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=4,
        n_groups=2, num_hidden_layers=4, moe_latent_size=None,
    ),
    "qwen3_5_moe_text": LINEAR,
    "qwen3_next": LINEAR,
    "qwen3_omni_moe_text": {},
    "qwen4_exp_text": dict(
        LINEAR, layer_types=["linear_attention", "indexed_attention", "linear_attention"], ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=1, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8,
        indexer_budget=4, indexer_compress_ratio=2,
    ),
    "solar_open": {},
    "unlimited_ocr_text": dict(mlp_layer_types=["dense", "sparse", "sparse"]),
}  # fmt: skip
FAMILIES = sorted(SETTINGS)
# these language models have an LM head only inside a model of several media
CAUSAL = [name for name in FAMILIES if name not in ("deepseek_ocr2_text", "qwen3_vl_moe_text")]
FLOAT64 = torch.float64


def config_of(family: str, **changes):
    return AutoConfig.for_model(family, **{**COMMON, **SETTINGS[family], **changes})


def told(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A stock classifier of a model type that structure alone tells, with a generic head where it has none."""
    config = AutoConfig.for_model(family, **{**COMMON, **ANY, **TOLD[family]})
    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    models = [
        c for n, c in vars(module).items()
        if inspect.isclass(c) and c.__module__ == module.__name__ and issubclass(c, PreTrainedModel)
        and n.endswith("Model") and "PreTrained" not in n and getattr(c, "config_class", 0) is type(config)
    ]  # fmt: skip
    AutoModel.register(type(config), models[0], exist_ok=True)
    if type(config) in AutoModelForSequenceClassification._model_mapping:
        made = AutoModelForSequenceClassification._model_mapping[type(config)]
    else:
        parent = next(c for c in models[0].__mro__[1:] if issubclass(c, PreTrainedModel))
        made = type("ToldForSequenceClassification", (GenericForSequenceClassification, parent), {
            "config_class": type(config), "accepts_loss_kwargs": False,
        })  # fmt: skip
    model = made._from_config(config, attn_implementation="eager")
    return settled(model, dtype)


def settled(model: nn.Module, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """With the experts' own code, spread weights of `dtype`, in evaluation mode; equal arguments give equal weights."""
    for part in model.modules():
        if hasattr(getattr(part, "config", None), "_experts_implementation"):
            part.config._experts_implementation = "eager"
    return spread(model, seed).to(dtype).eval()


def spread(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights under which tokens stay distinct and every expert is used; float32 numbers in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        if "correction_bias" in name:
            tensor.data = (noise * 0.1).to(tensor.dtype)
        elif isinstance(tensor, nn.Parameter):
            scale = 1.0 if "embed" in name else 0.3 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
            tensor.data = (noise * scale + (tensor.dim() == 1)).to(tensor.dtype)
    return model


def build(family: str, dtype: torch.dtype = torch.float32, *, head: str = "score", seed: int = 0, **changes):
    """A stock model in evaluation mode; equal arguments give equal weights."""
    auto = AutoModelForSequenceClassification if head == "score" else AutoModelForCausalLM
    model = auto.from_config(config_of(family, **changes), attn_implementation="eager")
    return settled(model, dtype, seed)


def records(count: int, seed: int = 0, longest: int = 9, causal: bool = False) -> list[dict]:
    """Records without padding, of random lengths of two tokens at least."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(2, longest + 1, (), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        prompt = int(torch.randint(1, length, (), generator=generator))
        label = [-100] * prompt + ids[prompt:] if causal else int(torch.randint(0, LABELS, (), generator=generator))
        found.append({"input_ids": ids, "attention_mask": [1] * length, "labels": label})
    return found


def collate(items: Sequence[Mapping], width: int = 0) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest record, or to `width`."""
    width = max([width, *(len(item["input_ids"]) for item in items)])
    fill = {"input_ids": PAD, "attention_mask": 0, "labels": -100}
    return {
        key: torch.tensor(
            [
                item[key] + [fill[key]] * (width - len(item[key])) if isinstance(item[key], list) else item[key]
                for item in items
            ]
        )
        for key in items[0]
    }


def shake(model: nn.Module, seed: int = 5) -> None:
    """Adapters far from zero, float32 numbers in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.3).to(parameter.dtype)


def adapt(model: nn.Module, *, layer="last", rank=2, alpha=3, **lora) -> nn.Module:
    """The model with adapters in both streams, far from zero; of a float64 model they are float64."""
    dtype = next(model.parameters()).dtype
    attach_adapters(model, LoraConfig(r=rank, lora_alpha=alpha, **lora), layer)
    if dtype == FLOAT64:
        for parameter in every_parameter(model).values():
            parameter.data = parameter.data.to(dtype)
    shake(model)
    return model


def every_parameter(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainables of both streams, by name."""
    streams = stream_parameters(model)
    return {**streams["shared"], **streams["expert"]}


class StockLora:
    """A stock model whose weights are W + s B A, computed by matrix products for the whole tensor of all experts."""

    def __init__(self, stock: nn.Module, values: Mapping[str, torch.Tensor], scaling: float):
        """`values`: our names -> adapters and head."""
        self.stock, self.scaling = stock, scaling
        self.values = {name: value.detach().clone().requires_grad_() for name, value in values.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        base = dict(self.stock.named_parameters())
        found = {}
        for name, a in self.values.items():
            if not name.endswith("lora_A"):
                continue
            b = self.values[name.removesuffix("A") + "B"]
            target = name.removesuffix(".lora_A") + ".weight"
            first = target.replace("expert_adapters.first.weight", "experts.up_proj")
            target = first if first in base else target.replace("expert_adapters.first.weight", "experts.gate_up_proj")
            target = target.replace("expert_adapters.second.weight", "experts.down_proj")
            update = b @ a
            # experts that are stored (E, in, out)
            update = update.mT if base[target].shape != update.shape else update
            found[target] = base[target].detach() + self.scaling * update
        found.update({name: value for name, value in self.values.items() if "lora_" not in name})
        return found

    def logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return functional_call(self.stock, self.weights(), (), inputs).logits

    def loss(self, item: Mapping, weighted: bool = False) -> torch.Tensor:
        """Mean negative log-likelihood of one record's own labels, without padding."""
        logits = self.logits(collate([item]))[0]
        if isinstance(item["labels"], int):
            terms = [-logits.log_softmax(-1)[item["labels"]]]
        else:
            pairs = [(t, label) for t, label in enumerate(item["labels"][1:]) if label != -100]
            terms = [-logits[t].log_softmax(-1)[label] for t, label in pairs]
        loss = sum(terms) / len(terms) if terms else logits.sum() * 0
        return loss * (1 - torch.exp(-loss.detach())) if weighted else loss

    def gradients(self, items: Sequence[Mapping], names: Sequence[str], owners: Sequence[int] | None = None, **kwargs):
        """name -> (b, *shape), or (b, *shape[1:]) of each record's owner."""
        found = record_by_record(
            len(items), names, lambda i: self.loss(items[i], **kwargs), lambda name, _i: self.values[name]
        )
        if owners is None:
            return found
        return {name: torch.stack([g[o] for g, o in zip(value, owners, strict=True)]) for name, value in found.items()}


def dispatch(model: nn.Module, item: Mapping, name: str) -> torch.Tensor:
    """(T, E) gate weights of a *stock* model in one sparse block, as its experts are called."""
    seen = []
    experts = model.get_submodule(name).experts
    handle = experts.register_forward_pre_hook(lambda _m, args: seen.append(args[1:]))
    with torch.no_grad():
        model(input_ids=torch.tensor([item["input_ids"]]))
    handle.remove()
    index, gate = seen[0]
    table = torch.zeros(index.shape[0], EXPERTS, dtype=FLOAT64)
    for t in range(index.shape[0]):
        for k in range(index.shape[1]):
            table[t, index[t, k]] += gate[t, k].double()
    return table


def brute_owners(model: nn.Module, items: Sequence[Mapping], name: str, rule: str) -> list[int]:
    """Owners of records by a *stock* model, one record at a time, ties to the lowest expert."""
    owners = []
    for item in items:
        table = dispatch(model, item, name)
        table = (table > 0).double() if rule == "vote" else table / table.sum(-1, keepdim=True)
        total = table.sum(0).tolist()
        owners.append(max(range(EXPERTS), key=lambda e: (total[e], -e)))
    return owners


__all__ = [
    "CAUSAL",
    "FAMILIES",
    "FUSED",
    "TOLD",
    "StockLora",
    "brute_owners",
    "build",
    "collate",
    "config_of",
    "records",
    "shake",
    "spread",
    "told",
]
