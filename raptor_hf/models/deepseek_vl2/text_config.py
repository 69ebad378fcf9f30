"""The language model's part of an original `config.json`, and which native model of `transformers` computes it.

The three sizes of DeepSeek-VL2 have three language models: plain multi-head attention and softmax routing (Tiny),
latent attention and softmax routing (Small), latent attention and sigmoid routing with a correction (the full one).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from raptor_hf.errors import UnsupportedModelError

__all__ = ["TINY", "original_text_values", "text_config"]

# The language model of DeepSeek-VL2-Tiny.
TINY: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 1280,
    "intermediate_size": 6848,
    "moe_intermediate_size": 896,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_mla": False,
    "kv_lora_rank": None,
    "q_lora_rank": None,
}

# What the original code assumes where a `config.json` is silent.
_ASSUMED: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "n_shared_experts": None,
    "n_routed_experts": None,
    "num_experts_per_tok": None,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_group": None,
    "topk_group": None,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 0,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
# Attributes that the native configurations compute, or spell in another way, and that do not go into a saved file.
_OWN = ("mlp_layer_types", "rope_parameters", "head_dim", "qk_head_dim", "num_nextn_predict_layers", "rope_interleave")


def _refuse(given: str, why: str, instead: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"`language_config` with {given} was given", why, instead)


def text_config(values: Mapping[str, Any] | PreTrainedConfig | None) -> PreTrainedConfig:
    """The native configuration of a language model that an original `language_config` describes.

    Args:
        values: the original keys; what is missing has the original's default. None: DeepSeek-VL2-Tiny. A native
            configuration is returned as it is.

    Raises:
        UnsupportedModelError: a language model that no native one computes.
    """
    if isinstance(values, PreTrainedConfig):
        if not isinstance(values, (DeepseekOcr2TextConfig, DeepseekV2Config, DeepseekV3Config)):
            raise _refuse(
                f"the class `{type(values).__name__}`",
                "Its layers are not those of a DeepSeek-VL2 language model",
                "Pass `DeepseekOcr2TextConfig`, `DeepseekV2Config` or `DeepseekV3Config`, or the original keys",
            )
        return values
    given = dict(TINY if values is None else values)
    given.pop("model_type", None)
    use_mla = given.pop("use_mla", None)
    merged = {**_ASSUMED, **given}
    merged.setdefault("num_key_value_heads", merged["num_attention_heads"])
    if merged["topk_method"] == "gready":  # so spelt in early versions of the original code
        merged["topk_method"] = "greedy"
    if use_mla is None:
        use_mla = merged["kv_lora_rank"] is not None
    _check(merged, use_mla)
    scoring, dense = merged.pop("scoring_func"), merged.pop("first_k_dense_replace")
    del merged["moe_layer_freq"]
    if not use_mla:
        for name in (*_LATENT, "norm_topk_prob"):
            merged.pop(name, None)
        layers = merged["num_hidden_layers"]
        kinds = ["dense"] * min(dense, layers) + ["sparse"] * max(layers - dense, 0)
        return DeepseekOcr2TextConfig(**merged, mlp_layer_types=kinds)
    if scoring == "softmax":
        return DeepseekV2Config(**merged, first_k_dense_replace=dense)
    del merged["topk_method"]
    merged["n_group"], merged["topk_group"] = merged["n_group"] or 1, merged["topk_group"] or 1
    return DeepseekV3Config(**merged, first_k_dense_replace=dense, num_nextn_predict_layers=0)


def _check(values: Mapping[str, Any], use_mla: bool) -> None:
    """Refuse what the native models would silently compute in another way."""
    if not values["n_routed_experts"] or not values["num_experts_per_tok"] or not values["n_shared_experts"]:
        raise _refuse(
            "a dense language model, or one without shared experts",
            "Every DeepSeek-VL2 has routed and shared experts, and the native layers always add both",
            "Use the `config.json` of a DeepSeek-VL2 checkpoint",
        )
    if values["moe_layer_freq"] != 1:
        raise _refuse(
            f"`moe_layer_freq={values['moe_layer_freq']}`",
            "The native layers are sparse from `first_k_dense_replace` on, all of them",
            "Use a checkpoint with `moe_layer_freq=1`",
        )
    if use_mla and values["kv_lora_rank"] is None:
        raise _refuse(
            "`use_mla=True` and no `kv_lora_rank`",
            "Latent attention has no width",
            "Set `kv_lora_rank`, or `use_mla=False` for DeepSeek-VL2-Tiny",
        )
    scoring, method = values["scoring_func"], values["topk_method"]
    if scoring == "softmax" and method in ("greedy", "group_limited_greedy") and not values["norm_topk_prob"]:
        return
    if use_mla and scoring == "sigmoid" and method == "noaux_tc":
        return
    raise _refuse(
        f"`scoring_func={scoring!r}`, `topk_method={method!r}`, `norm_topk_prob={values['norm_topk_prob']}` and "
        f"`use_mla={use_mla}`",
        "No native router computes these gate weights, and a record's owner is computed from them",
        "Use DeepSeek-VL2-Tiny, Small or the full one, whose routers are softmax (greedy, weights not normalised) or "
        "sigmoid (`noaux_tc`, latent attention)",
    )


def original_text_values(config: PreTrainedConfig) -> dict[str, Any]:
    """The original keys that describe a native configuration: the inverse of `text_config`."""
    values = config.to_dict()
    rope = dict(values.get("rope_parameters") or {})
    for name in (*_OWN, "transformers_version", "model_type", "architectures", "_name_or_path"):
        if name in values:
            del values[name]
    latent = not isinstance(config, DeepseekOcr2TextConfig)
    values["model_type"], values["use_mla"] = "deepseek_v2", latent
    values["rope_theta"] = rope.pop("rope_theta", _ASSUMED["rope_theta"])
    kind = rope.pop("rope_type", "default")
    values["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    values["moe_layer_freq"] = 1
    sigmoid = isinstance(config, DeepseekV3Config)
    values["scoring_func"] = "sigmoid" if sigmoid else "softmax"
    if sigmoid:
        values["topk_method"] = "noaux_tc"
    if not latent:
        kinds = list(config.mlp_layer_types or [])
        dense = kinds.count("dense")
        if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
            raise _refuse(
                f"`mlp_layer_types={kinds}`",
                "The original key `first_k_dense_replace` cannot say which layers are dense",
                "Put the dense layers first",
            )
        values["first_k_dense_replace"] = dense
        values.update(dict.fromkeys(_LATENT[:2]), norm_topk_prob=False)
        values.update(dict.fromkeys(_LATENT[2:], 0))
    return values
