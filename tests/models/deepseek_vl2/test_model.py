"""What training and serving ask of the class beside numbers: precision, checkpointing, counts, routing gaps."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig

from raptor_hf.grad_sample import per_sample_gradients
from raptor_hf.hub import export_release, load_release, verify_release
from raptor_hf.models.deepseek_vl2 import DeepseekVL2Config, DeepseekVL2ForConditionalGeneration
from raptor_hf.moe import attach_adapters, find_moe_layout, stream_parameters
from raptor_hf.privacy import PrivacyStatement, StreamStatement
from tests.models.deepseek_vl2.build import EXPERTS, ITEMS, KINDS, TOP_K, build, collate, config_of, inputs
from tests.models.deepseek_vl2.test_streams import adapted


def count(parameters):
    return sum(p.numel() for p in parameters)


def test_counts_of_tiny_at_rank_128():
    """By hand: q, k, v, o of 12 layers; gate_up (A of 1280, B of 2 x 896) and down of 64 experts of one layer."""
    with torch.device("meta"):
        model = attach_adapters(
            DeepseekVL2ForConditionalGeneration(DeepseekVL2Config()), LoraConfig(r=128, lora_alpha=128), "last"
        )
    streams = {name: count(parameters.values()) for name, parameters in stream_parameters(model).items()}
    assert streams["shared"] == 12 * 4 * 128 * (1280 + 1280) == 15_728_640
    assert streams["expert"] == 64 * 128 * (1280 + 2 * 896 + 896 + 1280) == 42_991_616
    assert model.raptor_adapters.layer == 11
    block = 4 * 1152 + 1152 * 3456 + 3456 + 1152 * 1152 + 1152 + 2 * 1152 * 4304 + 4304 + 1152
    assert count(model.vision.parameters()) == (3 * 14 * 14 + 1 + 27 * 27 + 2) * 1152 + 27 * block == 412_987_248


def test_each_part_starts_at_a_sensible_scale():
    """A fresh model: no parameter left as memory had it, none saturated."""
    torch.manual_seed(0)
    model = DeepseekVL2ForConditionalGeneration(build().config)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all() and float(parameter.detach().abs().max()) < 2, name
        if parameter.dim() > 1 or name in ("image_newline", "view_seperator"):
            assert float(parameter.detach().abs().max()) > 0, name


@pytest.mark.parametrize("kind", KINDS)
def test_gaps_are_those_of_the_scores_that_the_router_ranks(kind):
    """The distance of the last chosen from the first not chosen: it decides which owners are computed again alone."""
    model = build(kind)
    layer = find_moe_layout(model).sparse_layers[0]
    hidden = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    block = model.get_submodule(layer.name)
    routing = find_moe_layout(model).family.read_routing(block, hidden)
    ranked = hidden.double() @ block.gate.weight.double().T
    if kind == "full":
        ranked = ranked.sigmoid() + block.gate.e_score_correction_bias.double()
    order = ranked.sort(-1, descending=True)
    assert torch.allclose(routing.gap, order.values[..., TOP_K - 1] - order.values[..., TOP_K], atol=1e-5)
    assert torch.equal(routing.index.sort(-1).values, order.indices[..., :TOP_K].sort(-1).values)
    assert torch.allclose(routing.gate.sum(-1), torch.ones(3, 5).double())


@pytest.mark.parametrize("kind", KINDS)
def test_base_in_half_precision(kind):
    model = adapted(kind, torch.bfloat16)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    assert model(**inputs(collate(ITEMS))).logits.dtype == torch.bfloat16
    for mode in ("functorch", "hooks"):
        found = per_sample_gradients(model, collate(ITEMS), stream_parameters(model)["shared"], mode=mode)
        assert all(value.isfinite().all() and value.dtype == torch.float32 for value in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_no_gradient(kind):
    model = adapted(kind).train()
    expected = {
        stream: per_sample_gradients(
            model, collate(ITEMS), parameters, mode="hooks",
            owner=torch.zeros(6, dtype=torch.long) if stream == "expert" else None,
        )
        for stream, parameters in stream_parameters(model).items()
    }  # fmt: skip
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    runs = []
    model.language.model.layers[1].self_attn.register_forward_hook(lambda *_: runs.append(1))
    for stream, parameters in stream_parameters(model).items():
        owner = torch.zeros(6, dtype=torch.long) if stream == "expert" else None
        found = per_sample_gradients(model, collate(ITEMS), parameters, mode="hooks", owner=owner)
        for name, value in found.items():
            assert torch.allclose(value, expected[stream][name], atol=1e-5), name
    assert len(runs) == 3, "again in the shared stream's backward pass; nothing below the protected layer needs one"


def test_tied_embeddings(tmp_path):
    config = config_of(tie_word_embeddings=True)
    model = DeepseekVL2ForConditionalGeneration._from_config(config)
    assert config.tie_word_embeddings and model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    again = DeepseekVL2ForConditionalGeneration.from_pretrained(tmp_path)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    batch = inputs(collate(ITEMS))
    with torch.no_grad():
        assert torch.allclose(again.eval()(**batch).logits, model.eval()(**batch).logits, atol=1e-5)


def test_a_copy_computes_by_itself():
    model = adapted()
    expected = model(**inputs(collate(ITEMS))).logits
    other = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(other(**inputs(collate(ITEMS))).logits, expected)


class Trained:
    """As much of a trainer as a release needs."""

    processing_class = None

    def __init__(self):
        self.model = adapted()

    def privacy_statement(self):
        shared, expert = (StreamStatement(None, 0.5, 1.0, d, 1, 1) for d in (8.0, 8.0 / EXPERTS))
        return PrivacyStatement.build(
            method="raptor", shared=shared, expert=expert, delta=1e-3, dataset_size=16, expected_batch_size=8,
            num_experts=EXPERTS, protected_layer=2, ownership="gate",
        )  # fmt: skip


@pytest.mark.parametrize("merge", [False, True])
def test_a_release_is_verified_and_loads(merge, tmp_path):
    trained = Trained()
    build().save_pretrained(tmp_path / "base")
    folder = export_release(
        trained, tmp_path / "made", base_model="example/vl2", base_revision="a" * 40, license="apache-2.0"
    )
    assert not [finding for finding in verify_release(folder).findings if finding.severity == "error"]
    model = load_release(folder, tmp_path / "base", merge=merge, attn_implementation="eager")
    assert type(model) is DeepseekVL2ForConditionalGeneration
    model.set_experts_implementation("eager")
    with torch.no_grad():
        expected, found = (m.eval()(**inputs(collate(ITEMS))).logits for m in (trained.model, model))
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
