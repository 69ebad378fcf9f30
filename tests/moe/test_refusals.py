"""Families that are refused, with a reason, and families that structure alone tells."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SwitchTransformersForConditionalGeneration,
)

from raptor_hf.config import RaptorConfig
from raptor_hf.errors import UnsupportedModelError
from raptor_hf.moe import MoEFamily, find_moe_layout, register_moe_layout
from raptor_hf.moe import layout as layouts
from raptor_hf.moe.families import FUSED, REFUSED, STRUCTURE, SWITCH
from raptor_hf.moe.fused import fused_family
from raptor_hf.moe.table import families_table, readme_table
from raptor_hf.trainer import RaptorTrainer
from tests.families import build
from tests.helpers import tiny_config

DOCS = Path(__file__).resolve().parents[2] / "docs"


class Bare(nn.Module):
    """A model of which the configuration alone is real."""

    def __init__(self, config):
        super().__init__()
        self.config = config


# what a model of the type needs to be sparse, or to be built at all, beyond its defaults
_EXPERTS = dict(num_experts=2, top_k_experts=1, moe_intermediate_size=8)
SPARSE: dict[str, dict] = {
    "gemma4_text": dict(enable_moe_block=True, **_EXPERTS),
    "diffusion_gemma_text": _EXPERTS,
    "dbrx": dict(attn_config={"rope_theta": 10_000.0}),
    "vitpose_backbone": dict(num_experts=2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_families_refused_by_name(name):
    """A real model of every refused type, without memory, is refused with the reason in the table."""
    config = AutoConfig.for_model(name, **SPARSE.get(name, {}))
    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    made = next(
        c for n, c in vars(module).items()
        if inspect.isclass(c) and c.__module__ == module.__name__ and issubclass(c, PreTrainedModel)
        and "PreTrained" not in n and getattr(c, "config_class", None) is type(config)
    )  # fmt: skip
    with torch.device("meta"):
        model = made(config)
    with pytest.raises(UnsupportedModelError) as refusal:
        find_moe_layout(model)
    error = refusal.value
    assert name in error.given and error.why == REFUSED[name][0] and "families" in error.instead


def test_the_refusals_also_stop_a_trainer(tmp_path):
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "jetmoe", vocab_size=50, hidden_size=8, num_hidden_layers=1, num_key_value_heads=1, kv_channels=4,
            intermediate_size=8, num_local_experts=2, num_experts_per_tok=1,
        )
    )  # fmt: skip
    args = RaptorConfig(output_dir=str(tmp_path), max_steps=1, target_epsilon=8.0, use_cpu=True, report_to=[])
    with pytest.raises(UnsupportedModelError) as refusal:
        RaptorTrainer(model, args, train_dataset=[{"input_ids": [1], "labels": [1]}] * 64)
    assert refusal.value.why == REFUSED["jetmoe"][0]


# ------------------------------------------------------------------ nothing is left out

KNOWN = {*FUSED, *STRUCTURE, *REFUSED, *SWITCH.model_types}
# Folders of `transformers` that speak of experts and have none of their own.
NO_EXPERTS = {
    "bamba": "its code always builds dense layers",
    "gemma3n": "a router of predictions for the next layer, without experts",
    "gemma4_unified": "it only passes a flag on",
    "granite_docling": "a router of images by how dense their text is, without experts",
    "kimi_k25": "its language model is DeepSeek-V3's",
}
WORDS = re.compile(r"num_(?:local_)?experts|n_routed_experts|moe_num_experts|router", re.IGNORECASE)


def folders():
    """Folder -> (does it decorate experts, does it speak of experts, the model types that it configures)."""
    found = {}
    for folder in sorted((Path(transformers.__file__).parent / "models").iterdir()):
        code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py"))
        settings = "".join(path.read_text(encoding="utf-8") for path in folder.glob("configuration_*.py"))
        types = set(re.findall(r'^    model_type(?:: str)? = "([^"]+)"', settings, re.M))
        found[folder.name] = ("@use_experts_implementation" in code, bool(WORDS.search(code)), types)
    return found


def test_every_decorated_family_of_transformers_is_in_the_tables():
    decorated = {name: types for name, (yes, _, types) in folders().items() if yes}
    assert len(decorated) > 50
    assert {name for name, types in decorated.items() if not types & KNOWN} == set()


def test_every_other_family_with_experts_is_refused():
    speaking = {name: types for name, (yes, words, types) in folders().items() if words and not yes}
    assert {name for name, types in speaking.items() if not types & KNOWN} == set(NO_EXPERTS)
    assert {"dbrx", "jetmoe", "llama4", "nllb_moe", "longcat_flash", "doge", "step3p7"} <= set(speaking)


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


@pytest.mark.parametrize("sparse", [0, 1])
def test_switch_with_a_decoder_is_refused(sparse):
    model = SwitchTransformersForConditionalGeneration(tiny_config(num_sparse_decoder_layers=sparse))
    with pytest.raises(UnsupportedModelError, match=r"with a decoder.*SequenceClassification"):
        find_moe_layout(model)


def test_a_model_of_several_media_is_refused():
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig())
    with pytest.raises(UnsupportedModelError, match=r"several media.*qwen3_vl_moe_text"):
        find_moe_layout(model)


def test_quantized_experts_are_refused():
    """As GPT-OSS's checkpoints are loaded where nothing else is said: packed bytes, in a class of their own."""
    model = build("gpt_oss")
    experts = nn.Module()
    experts.down_proj = nn.Parameter(torch.zeros(4, 16, 6, dtype=torch.uint8), requires_grad=False)
    model.model.layers[1].mlp.experts = experts
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.experts.*quantized.*dequantize=True"):
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


def test_the_table_in_the_readme_is_the_codes():
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert text.split("<!-- families: ")[1].split("-->\n")[1].startswith(readme_table() + "\n")


def test_the_table_in_the_docs_is_the_codes():
    assert (DOCS / "families.md").read_text(encoding="utf-8") == families_table()
    assert all(f"| `{name}` |" in families_table() for name in REFUSED)
