"""Roles and counts, on the real configuration of google/switch-base-8 without a single weight."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, SwitchTransformersConfig
from transformers import SwitchTransformersForConditionalGeneration as FullSwitch

from raptor_hf.errors import UnsupportedModelError
from raptor_hf.models import SwitchTransformersForSequenceClassification
from raptor_hf.moe import attach_adapters, find_moe_layout, stream_parameters
from raptor_hf.moe.lora import resolve_layer
from tests.helpers import SPARSE, tiny_config, tiny_model

ROLES = {"shared", "router", "expert", "head"}


def count(parameters) -> int:
    return sum(p.numel() for p in parameters)


@pytest.fixture(scope="module")
def base8():
    """switch-base-8 as an encoder classifier, on the meta device."""
    config = SwitchTransformersConfig(
        vocab_size=32128, d_model=768, d_ff=3072, d_kv=64, num_layers=12, num_heads=12, num_sparse_encoder_layers=6,
        num_decoder_layers=12, num_sparse_decoder_layers=6, num_experts=8, num_labels=2,
        dropout_rate=0.0, router_jitter_noise=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = SwitchTransformersForSequenceClassification(config)
        base = count(model.parameters())
        attach_adapters(model, LoraConfig(r=128, lora_alpha=128), "last")
    return model, base


def test_the_four_numbers_of_the_paper(base8):
    model, base = base8
    streams = stream_parameters(model)
    assert count(streams["shared"].values()) == 9_438_722
    assert count(streams["expert"].values()) == 7_864_320
    assert base == 307_846_272 + 768 * 2 + 2  # 307.85 M, the tied embedding once
    assert f"{base / 1e6:.2f}" == "307.85"
    assert count(p for p in model.parameters() if p.requires_grad) == 17_303_042


def test_sparse_layers_of_switch_base_8(base8):
    layout = find_moe_layout(base8[0])
    assert [layer.index for layer in layout.sparse_layers] == [1, 3, 5, 7, 9, 11]
    assert {(layer.num_experts, layer.top_k) for layer in layout.sparse_layers} == {(8, 1)}
    assert base8[0].raptor_adapters.layer == 11


def test_shared_tensors_of_switch_base_8(base8):
    """q, k, v, o of twelve layers, A and B each, and the head's weight and bias; wi and wo of one layer."""
    streams = stream_parameters(base8[0])
    assert len(streams["shared"]) == 12 * 4 * 2 + 2
    assert {tuple(p.shape) for p in streams["expert"].values()} == {
        (8, 128, 768), (8, 3072, 128), (8, 128, 3072), (8, 768, 128),
    }  # fmt: skip
    assert all(".block.11." in name for name in streams["expert"])


def expected_role(name: str) -> str:
    if name.startswith("score."):
        return "head"
    if ".router." in name:
        return "router"
    return "expert" if ".experts." in name or ".expert_adapters." in name else "shared"


@pytest.mark.parametrize("adapted", [False, True])
def test_every_parameter_has_one_role(adapted):
    model = tiny_model()
    layout = find_moe_layout(model)
    if adapted:
        attach_adapters(model, LoraConfig(r=2, lora_alpha=2), 3)
    roles = {name: layout.role(name) for name, _ in model.named_parameters()}
    assert roles == {name: expected_role(name) for name in roles}
    assert set(roles.values()) == ROLES


def test_counts_by_role_of_the_tiny_model():
    model = tiny_model()
    layout = find_moe_layout(model)
    sizes = dict.fromkeys(ROLES, 0)
    for name, parameter in model.named_parameters():
        sizes[layout.role(name)] += parameter.numel()
    assert sizes["router"] == 2 * 4 * 16
    assert sizes["expert"] == 2 * 4 * (2 * 16 * 20)
    assert sizes["head"] == 3 * 16 + 3
    assert sum(sizes.values()) == count(model.parameters())


def test_adapters_have_the_role_of_what_they_sit_on():
    layout = find_moe_layout(tiny_model())
    block = "encoder.block.1.layer.1.mlp"
    assert layout.role(f"base_model.model.{block}.experts.expert_0.wi.lora_A.default.weight") == "expert"
    assert layout.role(f"base_model.model.{block}.router.classifier.weight") == "router"
    assert layout.role("base_model.model.encoder.block.1.layer.0.SelfAttention.q.lora_A.default.weight") == "shared"
    assert layout.role("base_model.model.score.modules_to_save.default.weight") == "head"
    # block 11 must not be taken for block 1
    assert layout.role("encoder.block.11.layer.1.mlp.wi.weight") == "shared"


def test_layers_by_index_and_by_name():
    layout = find_moe_layout(tiny_model())
    assert [layer.index for layer in layout.sparse_layers] == list(SPARSE)
    assert resolve_layer(layout, "first") == 1 and resolve_layer(layout, "last") == 3
    assert resolve_layer(layout, 1) == 1 and resolve_layer(layout, "3") == 3
    assert layout.layer(3).name == "encoder.block.3.layer.1.mlp"


@pytest.mark.parametrize("block", [0, 2, 4, -1, "0", "-1"])
def test_a_block_that_is_not_sparse_is_refused(block):
    with pytest.raises(UnsupportedModelError, match="1, 3"):
        resolve_layer(find_moe_layout(tiny_model()), block)


def test_an_unknown_layer_name_is_refused():
    with pytest.raises(ValueError, match="middle"):
        resolve_layer(find_moe_layout(tiny_model()), "middle")


def test_a_dense_model_is_refused():
    bert = BertForSequenceClassification(
        BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    with pytest.raises(UnsupportedModelError, match="bert"):
        find_moe_layout(bert)
    with pytest.raises(UnsupportedModelError):
        find_moe_layout(nn.Linear(2, 2))


def test_a_dense_configuration_of_a_sparse_family_is_refused():
    config = tiny_config()
    config.encoder_sparse_step = 0
    with pytest.raises(UnsupportedModelError, match="no sparse layer"):
        find_moe_layout(SwitchTransformersForSequenceClassification(config))


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner, self.config = model, model.config


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_encoder_decoder_is_refused(wrapped):
    model = FullSwitch(tiny_config())
    with pytest.raises(UnsupportedModelError, match="decoder"):
        find_moe_layout(Wrapper(model) if wrapped else model)


def test_every_refusal_says_what_was_given_why_and_what_to_do():
    with pytest.raises(UnsupportedModelError) as refusal:
        find_moe_layout(nn.Linear(2, 2))
    error = refusal.value
    assert "Linear" in error.given and error.why and error.instead
    assert all(part in str(error) for part in (error.given, error.why, error.instead))
