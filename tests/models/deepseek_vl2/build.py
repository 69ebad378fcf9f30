"""Tiny random DeepSeek-VL2 models of its three kinds, records with images, and a collator of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from raptor_hf.models.deepseek_vl2 import DeepseekVL2Config, DeepseekVL2ForConditionalGeneration
from tests.families import settled

VOCAB, EXPERTS, TOP_K, IMAGE, PAD = 50, 4, 2, 49, 0
# 14 pixels and patches of 4: a grid of 3 x 3 with two pixels left over, 2 x 2 tokens a view after padding
PIXELS, PATCH, GRID, SIDE, WIDTH, HIDDEN = 14, 4, 3, 2, 8, 16

LANGUAGE = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=12, moe_intermediate_size=12, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, n_routed_experts=EXPERTS,
    n_shared_experts=2, num_experts_per_tok=TOP_K, first_k_dense_replace=1, moe_layer_freq=1, n_group=1, topk_group=1,
    pad_token_id=PAD, bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-6, rope_theta=10000.0, routed_scaling_factor=1.3,
)  # fmt: skip
LATENT = dict(
    use_mla=True, kv_lora_rank=8, q_lora_rank=None, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8
)  # fmt: skip
KINDS = {
    "tiny": dict(
        use_mla=False, topk_method="greedy", kv_lora_rank=None, q_lora_rank=None, qk_rope_head_dim=0,
        qk_nope_head_dim=0, v_head_dim=0,
    ),
    "small": dict(topk_method="greedy", scoring_func="softmax", **LATENT),
    "full": dict(topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, **LATENT),
}  # fmt: skip


def values_of(kind: str = "tiny", **language) -> dict:
    """A `config.json` under the original names."""
    return {
        "model_type": "deepseek_vl_v2",
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "language_config": {"model_type": "deepseek_v2", **LANGUAGE, **KINDS[kind], **language},
        "vision_config": {
            "model_type": "vision", "model_name": "siglip_so400m_patch14_384", "image_size": PIXELS,
            "patch_size": PATCH, "width": WIDTH, "layers": 2, "heads": 2, "mlp_ratio": 1.6,
        },
        "projector_config": {
            "model_type": "mlp_projector", "projector_type": "downsample_mlp_gelu", "input_dim": WIDTH,
            "n_embed": HIDDEN, "depth": 2, "mlp_ratio": 1, "downsample_ratio": 2,
        },
        "tile_tag": "2D",
        "global_view_pos": "head",
        "candidate_resolutions": [[14, 14], [28, 14], [14, 28]],
        "image_token_id": IMAGE,
    }  # fmt: skip


def config_of(kind: str = "tiny", **language) -> DeepseekVL2Config:
    return DeepseekVL2Config.from_dict(values_of(kind, **language))


def build(kind: str = "tiny", dtype: torch.dtype = torch.float32, seed: int = 0) -> DeepseekVL2ForConditionalGeneration:
    """In evaluation mode; equal arguments give equal weights."""
    model = DeepseekVL2ForConditionalGeneration._from_config(config_of(kind), attn_implementation="eager")
    return settled(model, dtype, seed)


def image_tokens(wide: int, high: int) -> int:
    """Counted by hand: rows of the global view, the separator, rows of the mosaic."""
    return sum(SIDE + 1 for _ in range(SIDE)) + 1 + sum(wide * SIDE + 1 for _ in range(high * SIDE))


def record(crops: Sequence[tuple[int, int]], seed: int = 0, words: int = 4, answer: int = 2) -> dict:
    """A record with an image for each crop: beginning, then (placeholders, words) for each image, then the answer."""
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        return torch.randint(3, IMAGE, (count,), generator=generator).tolist()

    ids = [1, *some(1)]
    for wide, high in crops:
        ids += [IMAGE] * image_tokens(wide, high) + some(words)
    ids += [] if crops else some(words)
    ids, prompt = ids + some(answer), len(ids)
    views = sum(1 + wide * high for wide, high in crops)
    return {
        "input_ids": ids,
        "attention_mask": [1] * len(ids),
        "labels": [-100] * prompt + ids[prompt:],
        "pixel_values": torch.randn(views, 3, PIXELS, PIXELS, generator=generator).tolist(),
        "spatial_crop": [list(crop) for crop in crops],
    }


# one tile, two images, none, other crops: lengths and views differ
CROPS = [[(1, 1)], [(2, 1), (1, 1)], [], [(1, 2)], [(2, 2)], []]
ITEMS = [record(crops, seed) for seed, crops in enumerate(CROPS)]


def collate(items: Sequence[Mapping], width: int = 0, views: int = 0, dtype: torch.dtype = torch.float32) -> dict:
    """Pad on the right: tokens to the longest record (or `width`), views with zeros, images with (0, 0)."""
    width = max([width, *(len(item["input_ids"]) for item in items)])
    fill = {"input_ids": PAD, "attention_mask": 0, "labels": -100}
    batch = {
        key: torch.tensor([list(item[key]) + [value] * (width - len(item[key])) for item in items])
        for key, value in fill.items()
    }
    views = max([views, 1, *(len(item["pixel_values"]) for item in items)])
    images = max([1, *(len(item["spatial_crop"]) for item in items)])
    batch["pixel_values"] = torch.zeros(len(items), views, 3, PIXELS, PIXELS, dtype=dtype)
    batch["spatial_crop"] = torch.zeros(len(items), images, 2, dtype=torch.int64)
    for row, item in enumerate(items):
        if item["spatial_crop"]:
            batch["pixel_values"][row, : len(item["pixel_values"])] = torch.tensor(item["pixel_values"], dtype=dtype)
            batch["spatial_crop"][row, : len(item["spatial_crop"])] = torch.tensor(item["spatial_crop"])
    return batch


def inputs(batch: Mapping) -> dict:
    """Without labels."""
    return {key: value for key, value in batch.items() if key != "labels"}


def language_layers(model: nn.Module) -> nn.ModuleList:
    return model.language.model.layers
