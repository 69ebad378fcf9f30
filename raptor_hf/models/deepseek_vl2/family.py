"""How DeepSeek-VL2's sparse layers are handled: as stacked experts; the vision part is shared and frozen."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from raptor_hf.models.deepseek_vl2.configuration import DeepseekVL2Config
from raptor_hf.moe.families import MLA
from raptor_hf.moe.fused import ATTENTION, fused_family, read_fused_routing
from raptor_hf.moe.layout import register_moe_layout
from raptor_hf.moe.routing import Routing

__all__ = ["DEEPSEEK_VL2"]


def _read_routing(block: nn.Module, hidden: torch.Tensor) -> Routing:
    """Softmax of the logits (Tiny, Small), or sigmoid plus a correction (the full model)."""
    corrected = hasattr(block.gate, "e_score_correction_bias")
    return read_fused_routing(block, hidden, score="sigmoid" if corrected else "logits")


# The names are those of attention layers in the language model; the vision tower has none of them.
DEEPSEEK_VL2 = register_moe_layout(
    replace(
        fused_family(DeepseekVL2Config.model_type, shared_targets=tuple(dict.fromkeys((*ATTENTION, *MLA)))),
        read_routing=_read_routing,
    )
)
