"""Adapters: no effect before training, PEFT's own reading of what was saved, and what is trainable."""

from __future__ import annotations

import copy
import json
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import SwitchTransformersEncoderModel

from raptor_hf.errors import PrivacyConfigError, UnsupportedModelError
from raptor_hf.moe import attach_adapters, load_adapter, stream_parameters
from raptor_hf.moe.lora import adapters_disabled
from tests.helpers import EXPERTS, collate, tiny_config, tiny_model, tiny_records

BATCH = collate(tiny_records(6), 15)
ATTENTION = {f"encoder.block.{b}.layer.0.SelfAttention.{p}" for b in range(4) for p in "qkvo"}


def lora(**changes) -> LoraConfig:
    return LoraConfig(**{"r": 3, "lora_alpha": 5, **changes})


def trained(block=3, seed=1, dtype=torch.float32, **changes):
    """An adapted model with every trainable moved away from its start."""
    model = attach_adapters(tiny_model(dtype), lora(**changes), block)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**BATCH).logits


def trainable(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("capacity", [64, 2])
@pytest.mark.parametrize("block", [1, 3, "first", "last"])
def test_fresh_adapters_change_nothing(block, capacity):
    expected = logits(tiny_model(expert_capacity=capacity))
    model = attach_adapters(tiny_model(expert_capacity=capacity), lora(), block)
    assert float((logits(model) - expected).abs().max()) < 1e-6
    with adapters_disabled(model):
        once = logits(model)
    assert torch.equal(logits(model), once), "B starts at zero, so the update is exactly zero"


def test_a_is_random_and_b_is_zero():
    streams = stream_parameters(attach_adapters(tiny_model(), lora(), 3))
    for name, parameter in {**streams["shared"], **streams["expert"]}.items():
        if "lora_B" in name:
            assert not parameter.any()
        if "lora_A" in name:
            assert parameter.std() > 0.05
    one = streams["expert"]["encoder.block.3.layer.1.mlp.expert_adapters.first.lora_A"]
    assert all(not torch.equal(one[0], one[e]) for e in range(1, EXPERTS))


def test_what_is_trainable():
    model = attach_adapters(tiny_model(), lora(), 3)
    streams = stream_parameters(model)
    shared = {f"{path}.lora_{kind}" for path in ATTENTION for kind in "AB"} | {"score.weight", "score.bias"}
    block = "encoder.block.3.layer.1.mlp.expert_adapters"
    expert = {f"{block}.{which}.lora_{kind}" for which in ("first", "second") for kind in "AB"}
    assert set(streams["shared"]) == shared and set(streams["expert"]) == expert
    assert trainable(model) == shared | expert
    assert all(p.dtype == torch.float32 for s in streams.values() for p in s.values())


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("targets", [None, ["q", "v"], ["wi"]], ids=str)
def test_stock_peft_reads_what_was_saved(block, targets, tmp_path):
    model = trained(block, target_modules=targets)
    model.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert float((logits(stock) - logits(model)).abs().max()) < 2e-5
    assert float((logits(model) - logits(tiny_model())).abs().max()) > 0.05
    wrapped = {n.split(".lora_A")[0] for n, _ in stock.named_parameters() if ".lora_A" in n}
    assert not any("router" in name for name in wrapped)
    assert all(f"block.{block}." in name for name in wrapped if ".experts." in name)


def test_each_experts_adapter_is_saved_under_its_own_name(tmp_path):
    model = trained()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    ours = stream_parameters(model)["expert"]
    for which, theirs in (("first", "wi"), ("second", "wo")):
        for expert in range(EXPERTS):
            for kind in ("lora_A", "lora_B"):
                key = f"base_model.model.encoder.block.3.layer.1.mlp.experts.expert_{expert}.{theirs}.{kind}.weight"
                stacked = ours[f"encoder.block.3.layer.1.mlp.expert_adapters.{which}.{kind}"]
                assert torch.equal(saved[key], stacked[expert])
    assert len(saved) == 2 * 16 + 4 * EXPERTS + 2
    assert not any(".base_layer." in key or "router" in key or "shared" in key for key in saved)


def test_loading_our_own_file_gives_the_same_bits(tmp_path):
    model = trained(1)
    model.save_pretrained(tmp_path)
    fresh = load_adapter(tiny_model(), tmp_path)
    assert torch.equal(logits(fresh), logits(model))
    assert fresh.raptor_adapters.layer == 1 and trainable(fresh) == trainable(model)
    other = load_adapter(attach_adapters(tiny_model(), lora(), 1), tmp_path)
    assert torch.equal(logits(other), logits(model))


def test_what_stock_peft_saves_again_can_be_loaded(tmp_path):
    """PEFT may shorten the list of targets when it saves."""
    model = trained()
    model.save_pretrained(tmp_path / "ours")
    PeftModel.from_pretrained(tiny_model(), tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert torch.equal(logits(load_adapter(tiny_model(), tmp_path / "theirs")), logits(model))


def test_a_file_for_another_layer_or_rank_is_refused(tmp_path):
    trained(3).save_pretrained(tmp_path)
    with pytest.raises(PrivacyConfigError, match="does not fit"):
        load_adapter(attach_adapters(tiny_model(), lora(), 1), tmp_path)
    with pytest.raises(PrivacyConfigError, match="does not fit"):
        load_adapter(attach_adapters(tiny_model(), lora(r=4), 3), tmp_path)


def test_a_file_with_a_tensor_missing_is_refused_and_nothing_is_loaded(tmp_path):
    trained(3).save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    saved = load_file(path)
    del saved["base_model.model.score.bias"]
    save_file(saved, path)
    model = attach_adapters(tiny_model(), lora(), 3)
    before = logits(model)
    with pytest.raises(PrivacyConfigError, match=r"score\.bias"):
        load_adapter(model, tmp_path)
    assert torch.equal(logits(model), before)


def test_an_adapter_without_experts_is_refused(tmp_path):
    from peft import get_peft_model

    get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q"])).save_pretrained(tmp_path)
    with pytest.raises(PrivacyConfigError, match="expert"):
        load_adapter(tiny_model(), tmp_path)


def test_saving_writes_no_base_weights_and_no_private_file(tmp_path):
    trained().save_pretrained(tmp_path)
    names = {p.name for p in tmp_path.iterdir()} - {"README.md"}
    assert names == {"adapter_model.safetensors", "adapter_config.json"}
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (3, 5, ["score"])


def test_a_copy_saves_itself(tmp_path):
    model = trained()
    other = copy.deepcopy(model)
    other.score.bias.data += 1
    other.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(saved["base_model.model.score.bias"], other.score.bias)


# ------------------------------------------------------------------ targets


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q"], {n for n in ATTENTION if n.endswith(".q")}),
        (["SelfAttention.q", "v"], {n for n in ATTENTION if n[-1] in "qv"}),
        (["encoder.block.0.layer.0.SelfAttention.q"], {"encoder.block.0.layer.0.SelfAttention.q"}),
        (r".*block\.[02]\..*SelfAttention\.[qk]", {n for n in ATTENTION if re.search(r"block\.[02].*[qk]$", n)}),
        (["wi", "wo"], {f"encoder.block.{b}.layer.1.mlp.{p}" for b in (0, 2) for p in ("wi", "wo")}),
    ],
    ids=["name", "suffixes", "path", "pattern", "feed forward"],
)
def test_targets_by_list_and_by_pattern(targets, expected):
    model = attach_adapters(tiny_model(), lora(target_modules=targets), 3)
    assert set(model.raptor_adapters.shared_targets) == expected
    names = {n.rsplit(".lora_", 1)[0] for n in stream_parameters(model)["shared"] if ".lora_" in n}
    assert names == expected


def test_settings_may_come_from_a_config_object():
    config = SimpleNamespace(lora_rank=2, lora_alpha=4, shared_target_modules=["q"])
    plan = attach_adapters(tiny_model(), config, 3).raptor_adapters
    assert (plan.rank, plan.alpha, plan.scaling, len(plan.shared_targets)) == (2, 4.0, 2.0, 4)


@pytest.mark.parametrize("targets", [["classifier"], ["q", "router.classifier"], ".*router.*", ".*"], ids=str)
def test_no_target_may_reach_a_router(targets):
    with pytest.raises(PrivacyConfigError, match="router"):
        attach_adapters(tiny_model(), lora(target_modules=targets), 3)


@pytest.mark.parametrize("targets", [["query"], ["q", "query"], "quer.*", "all-linear", []], ids=str)
def test_targets_that_do_not_exist_are_refused(targets):
    config = SimpleNamespace(lora_rank=2, lora_alpha=4, shared_target_modules=targets)
    with pytest.raises(UnsupportedModelError, match="shared_target_modules"):
        attach_adapters(tiny_model(), config, 3)


@pytest.mark.parametrize("targets", [["score"], ["expert_0.wi"]], ids=str)
def test_targets_without_a_shared_layer_are_refused(targets):
    with pytest.raises(UnsupportedModelError, match="no shared linear"):
        attach_adapters(tiny_model(), lora(target_modules=targets), 3)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "option",
    [
        {"lora_dropout": 0.1}, {"use_dora": True}, {"use_rslora": True}, {"bias": "all"}, {"lora_bias": True},
        {"rank_pattern": {"q": 4}}, {"alpha_pattern": {"q": 4}}, {"exclude_modules": ["q"]},
        {"layers_to_transform": [0], "layers_pattern": "block"}, {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"}, {"target_parameters": ["x"]}, {"trainable_token_indices": [1]},
    ],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_an_option_that_would_be_ignored_is_refused(option):
    with pytest.raises(PrivacyConfigError, match=next(iter(option))):
        attach_adapters(tiny_model(), lora(target_modules=["q", "v"], **option), 3)


def test_neutral_options_are_accepted():
    attach_adapters(tiny_model(), lora(exclude_modules=[], target_modules=["q"]), 3)


def test_a_second_set_of_adapters_is_refused():
    model = attach_adapters(tiny_model(), lora(), 3)
    with pytest.raises(PrivacyConfigError, match="already"):
        attach_adapters(model, lora(), 1)


@pytest.mark.parametrize("change", [{"lora_rank": 0}, {"lora_rank": 1.5}, {"lora_alpha": 0}, {"lora_alpha": -1}])
def test_impossible_ranks_and_scales_are_refused(change):
    config = SimpleNamespace(**{"lora_rank": 2, "lora_alpha": 4, "shared_target_modules": None, **change})
    with pytest.raises(PrivacyConfigError, match=next(iter(change))):
        attach_adapters(tiny_model(), config, 3)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UnsupportedModelError, match="score"):
        attach_adapters(SwitchTransformersEncoderModel(tiny_config()), lora(), 3)


def test_a_refusal_leaves_the_model_as_it_was():
    model = tiny_model()
    before = trainable(model), [name for name, _ in model.named_modules()]
    for config, block in ((lora(), 2), (lora(target_modules=["classifier"]), 3), (lora(use_dora=True), 3)):
        with pytest.raises(ValueError, match=r"\w"):
            attach_adapters(model, config, block)
    assert (trainable(model), [name for name, _ in model.named_modules()]) == before


def test_a_trainable_router_is_refused():
    model = attach_adapters(tiny_model(), lora(), 3)
    model.get_submodule("encoder.block.1.layer.1.mlp.router.classifier").weight.requires_grad_(True)
    with pytest.raises(PrivacyConfigError, match="router"):
        stream_parameters(model)


def test_streams_of_a_model_without_adapters_are_refused():
    with pytest.raises(PrivacyConfigError, match="attach_adapters"):
        stream_parameters(tiny_model())


def test_what_would_mix_records_is_switched_off_and_said():
    model = tiny_model(dropout_rate=0.3, router_jitter_noise=0.01)
    with pytest.warns(UserWarning, match=r"jitter \(0\.01\) and dropout inside the routed experts \(0\.3\)"):
        attach_adapters(model, lora(), 3)
    for block in (1, 3):
        mlp = model.get_submodule(f"encoder.block.{block}.layer.1.mlp")
        assert mlp.router.jitter_noise == 0
        assert all(expert.dropout.p == 0 for expert in mlp.experts.values())
    assert model.encoder.dropout.p == 0.3, "other dropout stays"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach_adapters(tiny_model(), lora(), 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_base_types_work(dtype, tmp_path):
    expected = logits(tiny_model(dtype))
    model = trained(dtype=dtype)
    assert logits(model).isfinite().all()
    fresh = attach_adapters(tiny_model(dtype), lora(), 3)
    assert float((logits(fresh) - expected).abs().max()) < (0.1 if dtype == torch.bfloat16 else 1e-6)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_adapter(tiny_model(dtype), tmp_path)), logits(model))


def test_adapters_disabled_gives_the_base_model_and_is_undone():
    model = trained()
    model.score.load_state_dict(tiny_model().score.state_dict())
    full = logits(model)
    with adapters_disabled(model):
        assert float((logits(model) - logits(tiny_model())).abs().max()) < 1e-6
    assert torch.equal(logits(model), full)
    with pytest.raises(KeyError), adapters_disabled(model):
        raise KeyError
    assert torch.equal(logits(model), full)
