"""Families that are refused, with a reason, and families that structure alone tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, NemotronHConfig

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


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_experts_in_other_layouts_are_refused(monkeypatch):
    """By structure, as if nobody had listed the families."""
    monkeypatch.setattr(layouts, "_REFUSED", {})
    gpt = on_meta(GptOssConfig(num_hidden_layers=1, num_local_experts=2, layer_types=["full_attention"]))
    with pytest.raises(UnsupportedModelError, match="biases and are stored transposed and interleave"):
        find_moe_layout(gpt)
    nemotron = on_meta(NemotronHConfig(layers_block_type=["attention", "moe"], num_hidden_layers=2))
    with pytest.raises(UnsupportedModelError, match="have no gate"):
        find_moe_layout(nemotron)


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
    family = register_moe_layout(fused_family("phimoe"))
    assert isinstance(family, MoEFamily)
    with pytest.raises(UnsupportedModelError, match="no sparse layer"):
        find_moe_layout(Bare(AutoConfig.for_model("phimoe")))


def test_the_table_in_the_docs_is_the_codes():
    assert (DOCS / "families.md").read_text(encoding="utf-8") == families_table()
    assert all(f"| `{name}` |" in families_table() for name in REFUSED)
