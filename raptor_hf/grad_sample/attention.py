"""Attention that works under `torch.func.vmap`: fused where the model runs fused attention, plain elsewhere.

The fused kernels have no batching rule of their own (on a CPU vmap would call them once a record, with a warning), and
the short cuts for masks look at values, which vmap cannot. Here the vmapped dimension is folded into the kernel's batch
dimension, and masks are always made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from raptor_hf.moe.folding import fold, unfold

__all__ = ["FOLDED", "vmappable_attention"]

FOLDED = "raptor_folded"
# What of `masking_utils` asks for the values of a mask, and the answer that needs none.
_ANSWERS = {"_ignore_bidirectional_mask_sdpa": False, "is_tracing": True}


def _answer(value: bool, *_args: object, **_kwargs: object) -> bool:
    return value


class _Fused(torch.autograd.Function):
    """softmax(s q k^T + mask) v for q, k, v (R, heads, T, d) and a mask (R, 1 or heads, T, T), boolean or additive."""

    @staticmethod
    def forward(q, k, v, mask, scale):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing is kept: only under vmap is there a backward pass."""

    @staticmethod
    def vmap(info, in_dims, *args):
        q, k, v, mask, scale = (fold(value, dim, info.batch_size) for value, dim in zip(args, in_dims, strict=True))
        # outside of the vmap: autograd follows the kernel, as everywhere else
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return unfold(out, info.batch_size), 0


def folded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers, for models that run `sdpa`; (R, heads, T, d) -> (R, T, heads, d).

    Dropout and biases that are trained or differ from record to record are computed by ordinary operations.
    """
    if kwargs.get("softcap") is not None:
        raise RuntimeError("Fused attention under vmap has no soft cap, and neither has `sdpa`. Use eager attention.")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        attention_mask = attention_mask.tril() if causal else attention_mask
    if dropout > 0 or position_bias is not None:
        out = _plain(query, key, value, attention_mask, dropout, scaling, position_bias)
    else:
        mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask.to(query.dtype)
        mask = mask.expand(query.shape[0], -1, -1, -1)
        out = _Fused.apply(query, key, value, mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    dropout: float,
    scaling: float,
    position_bias: torch.Tensor | None,
) -> torch.Tensor:
    scores = query @ key.mT * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return F.dropout(weights, dropout, training=True) @ value


def folded_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask of `sdpa`, made in every case."""
    short_cuts = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(*args, **{**kwargs, **short_cuts})


AttentionInterface.register(FOLDED, folded_attention)
AttentionMaskInterface.register(FOLDED, folded_mask)


@contextmanager
def vmappable_attention(model: nn.Module) -> Iterator[None]:
    """Fused attention with a batching rule in place of `sdpa`, ordinary operations in place of all other kernels."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(c, getattr(c, "_attn_implementation_internal", None)) for c in configs.values()]
    functions = {name: getattr(masking_utils, name) for name in _ANSWERS if hasattr(masking_utils, name)}
    try:
        for config, name in before:
            if name is not None:
                config._attn_implementation_internal = FOLDED if name == "sdpa" else "eager"
        for name in functions:
            setattr(masking_utils, name, functools.partial(_answer, _ANSWERS[name]))
        yield
    finally:
        for name, function in functions.items():
            setattr(masking_utils, name, function)
        for config, name in before:
            if name is not None:
                config._attn_implementation_internal = name
