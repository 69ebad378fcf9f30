"""Configurations and weights under the original names: loaded, computed with, saved back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from raptor_hf.errors import UnsupportedModelError
from raptor_hf.models.deepseek_vl2 import DeepseekVL2Config, DeepseekVL2ForConditionalGeneration
from tests.models.deepseek_vl2 import oracle
from tests.models.deepseek_vl2.build import ITEMS, KINDS, build, collate, config_of, image_tokens, inputs, values_of

NATIVE = {"tiny": "DeepseekOcr2TextModel", "small": "DeepseekV2Model", "full": "DeepseekV3Model"}


def write(folder, kind, state):
    (folder / "config.json").write_text(json.dumps(values_of(kind)))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder, **options):
    model, info = DeepseekVL2ForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **options
    )
    model.set_experts_implementation("eager")
    return model.eval(), info


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_values_survive_loading_and_saving(kind, tmp_path):
    state = oracle.random_state(kind)
    unused = {"vision.attn_pool.latent": torch.ones(1, 1, 8), "vision.attn_pool.q.weight": torch.ones(8, 8)}
    (tmp_path / "one").mkdir()
    write(tmp_path / "one", kind, {**state, **unused})
    model, info = load(tmp_path / "one")
    assert not any(info.values()), info
    assert type(model.language.model).__name__ == NATIVE[kind]
    model.save_pretrained(tmp_path / "two")
    saved = load_file(tmp_path / "two" / "model.safetensors")
    assert set(saved) == set(state)
    assert all(torch.equal(saved[name], value) for name, value in state.items())
    again, info = load(tmp_path / "two")
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(again(**inputs(collate(ITEMS))).logits, model(**inputs(collate(ITEMS))).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_experts_stand_where_the_native_block_reads_them(kind, tmp_path):
    state = oracle.random_state(kind)
    write(tmp_path, kind, state)
    experts = load(tmp_path)[0].language.model.layers[1].mlp.experts
    for e in range(4):
        name = f"language.model.layers.1.mlp.experts.{e}"
        both = torch.cat([state[f"{name}.gate_proj.weight"], state[f"{name}.up_proj.weight"]])
        assert torch.equal(experts.gate_up_proj[e], both)
        assert torch.equal(experts.down_proj[e], state[f"{name}.down_proj.weight"])


@pytest.mark.parametrize("auto", [AutoModelForImageTextToText, AutoModelForCausalLM])
def test_auto_classes(auto, tmp_path):
    write(tmp_path, "tiny", oracle.random_state("tiny"))
    assert type(auto.from_pretrained(tmp_path)) is DeepseekVL2ForConditionalGeneration
    assert type(AutoConfig.from_pretrained(tmp_path)) is DeepseekVL2Config


@pytest.mark.parametrize("kind", KINDS)
def test_configurations_keep_their_original_keys(kind, tmp_path):
    config = config_of(kind)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    for key, value in values_of(kind).items():
        if isinstance(value, dict):
            assert {name: saved[key].get(name, "missing") for name in value} == value
        else:
            assert saved[key] == value
    again = DeepseekVL2Config.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert again.language_config.to_dict() == config.language_config.to_dict()


def test_a_changed_vocabulary_is_saved(tmp_path):
    model = build()
    model.resize_token_embeddings(60)
    assert model.language.lm_head.weight.shape[0] == model.config.vocab_size == 60
    model.save_pretrained(tmp_path)
    assert load(tmp_path)[0].config.language_config.vocab_size == 60


def test_missing_keys_have_the_original_defaults():
    """A minimal file, as those of the checkpoints: SigLIP-SO400M, and DeepSeek-VL2-Tiny's language model."""
    config = DeepseekVL2Config.from_dict(
        {
            "language_config": {
                "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_size": 1280,
                "intermediate_size": 6848, "kv_lora_rank": None, "max_position_embeddings": 4096,
                "moe_intermediate_size": 896, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
                "num_attention_heads": 10, "num_experts_per_tok": 6, "num_hidden_layers": 12,
                "num_key_value_heads": 10, "q_lora_rank": None, "topk_group": 1, "topk_method": "greedy",
                "use_mla": False, "v_head_dim": 0, "vocab_size": 129280,
            },
            "vision_config": {"layers": 27, "mlp_ratio": 3.7362, "model_name": "siglip_so400m_patch14_384"},
            "projector_config": {"n_embed": 1280},
        }
    )  # fmt: skip
    assert (config.vision_config.grid, config.side, config.image_token_id) == (27, 14, 128815)
    assert config.image_tokens(1, 1) == 14 * 15 + 1 + 14 * 15 and config.image_tokens(3, 2) == 211 + 28 * 43
    with torch.device("meta"):
        model = DeepseekVL2ForConditionalGeneration(config)
    assert sum(p.numel() for p in model.parameters()) == 3_355_263_088
    assert model.vision.blocks[0].mlp.fc1.weight.shape == (4304, 1152)
    assert model.projector.layers[0].weight.shape == (1280, 4608)
    assert DeepseekVL2Config().to_dict()["language_config"] == {**config.to_dict()["language_config"], "n_group": None,
                                                                "topk_group": None}  # fmt: skip


def test_placeholders_by_hand():
    config = config_of()
    for wide in range(1, 4):
        for high in range(1, 4):
            assert config.image_tokens(wide, high) == image_tokens(wide, high)


@pytest.mark.parametrize(
    "change",
    [
        {"language_config": {"norm_topk_prob": True}},
        {"language_config": {"scoring_func": "sigmoid"}},
        {"language_config": {"topk_method": "noaux_tc"}},
        {"language_config": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}},
        {"language_config": {"n_routed_experts": None}},
        {"language_config": {"n_shared_experts": None}},
        {"language_config": {"moe_layer_freq": 2}},
        {"language_config": {"use_mla": True}},
        {"vision_config": {"width": {"clip-l-14-224": {"width": 1024}}}},
        {"vision_config": {"class_token": True}},
        {"vision_config": {"heads": 3}},
        {"projector_config": {"projector_type": "linear"}},
        {"projector_config": {"token_pooling": True}},
        {"projector_config": {"n_embed": 20}},
        {"tile_tag": "1D"},
    ],
    ids=str,
)
def test_what_the_port_does_not_compute_is_refused(change):
    values = values_of()
    for key, value in change.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    with pytest.raises(UnsupportedModelError) as refusal:
        DeepseekVL2Config.from_dict(values)
    assert refusal.value.why and refusal.value.instead


def test_the_spelling_of_early_checkpoints():
    assert config_of(topk_method="gready").language_config.topk_method == "greedy"


def test_another_language_model_is_refused():
    from transformers import LlamaConfig

    with pytest.raises(UnsupportedModelError, match="LlamaConfig"):
        DeepseekVL2Config(language_config=LlamaConfig())
