"""Families that are refused, with a reason, and families that structure alone tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from raptor_hf.errors import UnsupportedModelError
from raptor_hf.moe import MoEFamily, find_moe_layout, register_moe_layout
from raptor_hf.moe import layout as layouts
from raptor_hf.moe.families import REFUSED
from raptor_hf.moe.fused import fused_family
from raptor_hf.moe.table import families_table
from tests.families import build

DOCS = Path(__file__).resolve().parents[2] / "docs"


class Bare(nn.Module):
    """A model of which the configuration alone is real."""

    def __init__(self, config):
        super().__init__()
        self.config = config


@pytest.mark.parametrize("name", REFUSED)
def test_families_refused_by_name(name):
    config = AutoConfig.for_model(name)  # the name must be one that transformers knows
    with pytest.raises(UnsupportedModelError) as refusal:
        find_moe_layout(Bare(config))
    error = refusal.value
    assert name in error.given and error.why == REFUSED[name][0] and "families" in error.instead


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("muse_spark_text", {}, "normalise their output"),
        (
            "gemma4_text",
            dict(enable_moe_block=True, num_experts=2, top_k_experts=1, moe_intermediate_size=8),
            "more than hidden states",
        ),
        ("deepseek_v4", dict(num_local_experts=2), r"more than hidden states \(`input_ids`\)"),
        ("zaya", dict(num_experts=2), r"more than hidden states \(`prev_router_hidden_states`\)"),
    ],
)
def test_experts_that_the_kernel_does_not_compute_are_refused(name, settings, words, monkeypatch):
    """By structure, as if nobody had listed the families."""
    monkeypatch.setattr(layouts, "_REFUSED", {})
    config = AutoConfig.for_model(name, **{"num_hidden_layers": 2, **settings})
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    with pytest.raises(UnsupportedModelError, match=words):
        find_moe_layout(model)


def test_a_model_of_several_media_is_refused():
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig())
    with pytest.raises(UnsupportedModelError, match=r"several media.*qwen3_vl_moe_text"):
        find_moe_layout(model)


def test_a_block_without_one_router_is_refused():
    model = build("olmoe")
    block = model.model.layers[0].mlp
    block.router = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match="router"):
        find_moe_layout(model)


def test_experts_outside_a_numbered_layer_are_refused():
    model = build("olmoe")
    model.model.extra = model.model.layers[0].mlp
    model.model.layers = nn.ModuleList()
    with pytest.raises(UnsupportedModelError, match="numbered layer"):
        find_moe_layout(model)


def test_a_registered_family_is_no_longer_refused(monkeypatch):
    monkeypatch.setattr(layouts, "_REFUSED", dict(layouts._REFUSED))
    monkeypatch.setattr(layouts, "_FAMILIES", dict(layouts._FAMILIES))
    family = register_moe_layout(fused_family("dbrx"))
    assert isinstance(family, MoEFamily)
    with pytest.raises(UnsupportedModelError, match="no sparse layer"):
        find_moe_layout(Bare(AutoConfig.for_model("dbrx")))


def test_the_table_in_the_docs_is_the_codes():
    assert (DOCS / "families.md").read_text(encoding="utf-8") == families_table()
    assert all(f"| `{name}` |" in families_table() for name in REFUSED)
