"""Streams, engines, owners and adapters of a model that reads images, against the stock model with W + s B A."""

from __future__ import annotations

import re

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel

from raptor_hf.checks import check_model
from raptor_hf.config import RaptorConfig
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.grad_sample import ENGINES, model_loss, per_sample_gradients, residual_weighted, summed_gradients
from raptor_hf.models.deepseek_vl2 import DeepseekVL2ForConditionalGeneration
from raptor_hf.moe import attach_adapters, find_moe_layout, load_adapter, owner_map, stream_parameters
from raptor_hf.moe.adapter_io import check_loaded
from raptor_hf.trainer import RaptorTrainer
from tests.families import StockLora, adapt, every_parameter
from tests.models.deepseek_vl2.build import EXPERTS, ITEMS, KINDS, TOP_K, build, collate, inputs, record

FLOAT64 = torch.float64
RANK, ALPHA = 2, 3
VISION = ("vision.", "projector.", "image_newline", "view_seperator")
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


class Stock(StockLora):
    """The loss of one record with images, without padding."""

    def loss(self, item, weighted=False):
        logits = self.logits(collate([item], dtype=FLOAT64))[0]
        terms = [-logits[t - 1].log_softmax(-1)[label] for t, label in enumerate(item["labels"]) if label != -100]
        loss = sum(terms) / len(terms)
        return loss * (1 - torch.exp(-loss.detach())) if weighted else loss


def adapted(kind="tiny", dtype=torch.float32, layer="last", **lora):
    return adapt(build(kind, dtype), layer=layer, rank=RANK, alpha=ALPHA, **lora)


def compare(found, expected, tolerance=1e-12):
    assert set(found) == set(expected)
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        scale = max(1.0, float(expected[name].abs().max()))
        assert float((value - expected[name]).abs().max()) <= tolerance * scale, name
    assert max(float(value.abs().max()) for value in found.values()) > 1e-3


def brute_owners(kind, items, block, rule="gate"):
    """A stock model, one record at a time, its experts' own arguments counted by loops."""
    model, owners = build(kind), []
    experts = model.language.model.layers[block].mlp.experts
    for item in items:
        seen = []
        handle = experts.register_forward_pre_hook(lambda _m, args, seen=seen: seen.append(args[1:]))
        with torch.no_grad():
            model(**inputs(collate([item])))
        handle.remove()
        index, gate = seen[0]
        total = [0.0] * EXPERTS
        for t in range(index.shape[0]):
            for k in range(TOP_K):
                total[int(index[t, k])] += 1.0 if rule == "vote" else float(gate[t, k] / gate[t].sum())
        owners.append(max(range(EXPERTS), key=lambda e: (round(total[e], 9), -e)))
    return owners


# ------------------------------------------------------------------ roles


@ALL_KINDS
def test_roles_and_trainables(kind):
    model = build(kind)
    layout = find_moe_layout(model)
    assert [layer.name for layer in layout.sparse_layers] == [f"language.model.layers.{i}.mlp" for i in (1, 2)]
    assert {(layer.num_experts, layer.top_k) for layer in layout.sparse_layers} == {(EXPERTS, TOP_K)}
    assert layout.head == "language.lm_head" and not layout.trains_head
    attach_adapters(model, LoraConfig(r=RANK), "last")
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if {"experts", "expert_adapters"} & set(parts):
            role = "expert"
        elif "gate" in parts:
            role = "router"
        else:
            role = "head" if "lm_head" in parts else "shared"
        assert layout.role(name) == role, name
        assert parameter.requires_grad == ("lora_" in name), name
    attention = {"tiny": 4, "small": 4, "full": 4}[kind]  # q, k, v, o; or q, kv_a, kv_b, o
    streams = stream_parameters(model)
    assert len(streams["shared"]) == 3 * attention * 2
    assert not any(name.startswith(VISION) for name in every_parameter(model))
    assert all(".layers.2.mlp.expert_adapters." in name for name in streams["expert"]) and len(streams["expert"]) == 4


def test_the_first_layer_is_dense():
    layout = find_moe_layout(build())
    assert layout.role("language.model.layers.0.mlp.gate_proj.weight") == "shared"
    assert layout.role("language.model.layers.1.mlp.shared_experts.gate_proj.weight") == "shared"
    assert layout.role("vision.blocks.0.mlp.fc1.weight") == "shared"


def test_shared_experts_can_carry_adapters(tmp_path):
    names = ["q_proj", *(f"shared_experts.{kind}_proj" for kind in ("gate", "up", "down"))]
    model = adapted(target_modules=names)
    assert len(model.raptor_adapters.shared_targets) == 3 + 2 * 3
    model.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(build(), tmp_path).eval()
    check_loaded(stock, tmp_path)
    batch = inputs(collate(ITEMS))
    with torch.no_grad():
        assert float((stock(**batch).logits - model(**batch).logits).abs().max()) <= 1e-5


@pytest.mark.parametrize("mode", sorted(ENGINES))
def test_adapters_on_the_vision_tower_are_refused(mode):
    model = attach_adapters(build(), LoraConfig(r=RANK, target_modules=["q_proj", "attn.qkv"]), "last")
    with pytest.raises(PrivacyConfigError, match=r"vision\.blocks\.0\.attn\.qkv.* is trainable"):
        per_sample_gradients(model, collate(ITEMS), stream_parameters(model)["shared"], mode=mode)
    found = check_model(model, records=ITEMS[:3], collate=collate, raise_on_error=False).errors
    assert any("vision" in finding.what for finding in found)


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("mode", sorted(ENGINES))
@ALL_KINDS
def test_gradients_of_both_streams(kind, mode, float64):
    """Every record's own gradient, in one padded batch of records with two images, one, none."""
    model = adapted(kind, FLOAT64)
    oracle = Stock(build(kind, FLOAT64), every_parameter(model), ALPHA / RANK)
    batch = collate(ITEMS, 45, 7, FLOAT64)
    for stream, parameters in stream_parameters(model).items():
        owner = [0, 1, 2, 3, 0, 1] if stream == "expert" else None
        found = per_sample_gradients(
            model, batch, parameters, mode=mode, owner=None if owner is None else torch.tensor(owner),
            loss_fn=residual_weighted(model_loss) if owner else None,
        )  # fmt: skip
        compare(found, oracle.gradients(ITEMS, list(parameters), owner, weighted=stream == "expert"))


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_text_only_batches(mode, float64):
    """With zero images, and with no image inputs at all: the same gradients."""
    model = adapted(dtype=FLOAT64)
    items = [record([], 10), record([], 11)]
    oracle = Stock(build(dtype=FLOAT64), every_parameter(model), ALPHA / RANK)
    batch = collate(items, dtype=FLOAT64)
    parameters = stream_parameters(model)["shared"]
    expected = oracle.gradients(items, list(parameters))
    compare(per_sample_gradients(model, batch, parameters, mode=mode), expected)
    text = {key: value for key, value in batch.items() if key not in ("pixel_values", "spatial_crop")}
    compare(per_sample_gradients(model, text, parameters, mode=mode), expected)


@ALL_KINDS
def test_record_0_does_not_move_with_its_neighbours(kind, float64):
    """Train mode, both streams, both engines: others, none, more padding, more views."""
    model = adapted(kind, FLOAT64).train()

    def values(items, width=0, views=0):
        batch, found = collate(items, width, views, FLOAT64), []
        for stream, parameters in stream_parameters(model).items():
            owner = torch.zeros(len(items), dtype=torch.long) if stream == "expert" else None
            for mode in ("functorch", "hooks"):
                grads = per_sample_gradients(model, batch, parameters, mode=mode, owner=owner)
                found += [value[0] for value in grads.values()]
        return [model(**inputs(batch)).logits[0, : len(items[0]["input_ids"])], *found]

    base = values(ITEMS)
    for changed in (values([ITEMS[0], *ITEMS[:2]]), values(ITEMS[:1]), values([ITEMS[0], ITEMS[4]], 60, 9)):
        assert max(float((a - b).detach().abs().max()) for a, b in zip(base, changed, strict=True)) < 1e-12


def test_image_tokens_are_bit_for_bit_the_same_among_other_records():
    model = build().requires_grad_(False)
    for item in ITEMS[:5]:
        length = len(item["input_ids"])
        alone = model.frozen_inputs(collate([item]))["image_embeds"][0]
        for row, others in ((0, [item, ITEMS[4]]), (2, [ITEMS[1], ITEMS[2], item]), (1, [ITEMS[5], item])):
            found = model.frozen_inputs(collate(others, 80, 8))["image_embeds"][row]
            assert torch.equal(found[:length], alone) and not found[length:].any()
        marked = torch.tensor(item["input_ids"]) == model.config.image_token_id
        assert not alone[~marked].any() and bool(alone[marked].any()) == bool(item["spatial_crop"])


def test_the_vision_tower_sees_one_record_at_a_time_and_no_padding():
    model, seen = build().requires_grad_(False), []
    model.vision.register_forward_pre_hook(lambda _m, args: seen.append(len(args[0])))
    model.frozen_inputs(collate(ITEMS, views=9))
    assert seen == [len(item["pixel_values"]) for item in ITEMS if item["spatial_crop"]]


def test_frozen_inputs_compute_what_the_images_do():
    model = build().requires_grad_(False)
    batch = collate(ITEMS)
    frozen = model.frozen_inputs(batch)
    assert set(frozen) == {"input_ids", "attention_mask", "labels", "image_embeds"}
    assert frozen["image_embeds"].shape == (6, batch["input_ids"].shape[1], 16)
    assert torch.equal(model(**inputs(frozen)).logits, model(**inputs(batch)).logits)
    assert model.frozen_inputs(frozen)["image_embeds"] is frozen["image_embeds"]


def test_no_gradient_reaches_the_vision_part():
    model = adapted()
    model(**collate(ITEMS)).loss.backward()
    assert all(p.grad is None for name, p in model.named_parameters() if name.startswith(VISION))
    assert all(p.grad is not None for p in every_parameter(model).values())


@ALL_KINDS
def test_methods_without_owners(kind, float64):
    """All experts' adapters at once, record by record; and the sum that the methods without clipping take."""
    model = adapted(kind, FLOAT64)
    batch, parameters = collate(ITEMS, dtype=FLOAT64), every_parameter(model)
    expected = Stock(build(kind, FLOAT64), parameters, ALPHA / RANK).gradients(ITEMS, list(parameters))
    for mode in ("functorch", "hooks"):
        compare(per_sample_gradients(model, batch, parameters, mode=mode), expected)
    compare(summed_gradients(model, batch, parameters), {name: value.sum(0) for name, value in expected.items()})


# ------------------------------------------------------------------ records


def changed(item, **values):
    return {**item, **values}


def broken():
    two, one, none = ITEMS[1], ITEMS[0], ITEMS[2]
    ids = one["input_ids"]
    cut = changed(one, input_ids=ids[:8], attention_mask=[1] * 8, labels=[-100] * 8)
    return {
        "cut": ([none, cut], "placeholders in `input_ids` are not as many"),
        # together the counts are right: 13 + 30 = 30 + 13
        "swapped": (
            [changed(one, spatial_crop=two["spatial_crop"], pixel_values=two["pixel_values"]),
             changed(two, spatial_crop=one["spatial_crop"], pixel_values=one["pixel_values"])],
            "placeholders in `input_ids` are not as many",
        ),
        "without image": ([none, one, changed(one, spatial_crop=[], pixel_values=[])], "are not as many"),
        "without placeholder": ([changed(none, spatial_crop=[[1, 1]], pixel_values=one["pixel_values"])],
                                "are not as many"),
        "too few views": ([changed(one, spatial_crop=[[3, 3]])], "fewer views in `pixel_values`"),
        "half a crop": ([changed(one, spatial_crop=[[1, 0]])], "crop in `spatial_crop` .* one direction only"),
    }  # fmt: skip


@pytest.mark.parametrize("case", broken())
def test_placeholders_are_counted_record_by_record(case):
    items, message = broken()[case]
    model = build().requires_grad_(False)
    for call in (lambda batch: model(**inputs(batch)), model.frozen_inputs):
        with pytest.raises(ValueError, match=message) as refusal:
            call(collate(items))
        assert all(refusal.value.args[0].count(part.rstrip(".")) for part in (refusal.value.why, refusal.value.instead))
        tells_no_number(refusal.value)


def tells_no_number(error):
    """Which record, how many were drawn and what they hold is private; a rule or a shape is not."""
    assert not re.search(r"\d", error.given), error.given


def test_one_of_two_inputs_is_refused():
    batch = inputs(collate(ITEMS))
    for name in ("pixel_values", "spatial_crop"):
        with pytest.raises(PrivacyConfigError, match="Only one of"):
            build()(**{key: value for key, value in batch.items() if key != name})
    with pytest.raises(PrivacyConfigError, match="`pixel_values` was given with another number of rows") as refusal:
        build()(**{**batch, "input_ids": batch["input_ids"][:3], "attention_mask": batch["attention_mask"][:3]})
    tells_no_number(refusal.value)
    for name in ("spatial_crop", "pixel_values"):
        with pytest.raises(PrivacyConfigError, match=f"`{name}` was given with another number of rows") as refusal:
            build()(**{**batch, name: batch[name][:3]})
        tells_no_number(refusal.value)


# ------------------------------------------------------------------ owners


@ALL_KINDS
def test_owners_equal_brute_force(kind):
    items = [record(crops, seed, words=6) for seed, crops in enumerate([[(1, 1)], [], [(2, 1)], [], [(1, 2)]] * 4)]
    spread_out = set()
    for block in (1, 2):
        for rule in ("gate", "vote"):
            expected = brute_owners(kind, items, block, rule)
            for model, size in ((build(kind), 20), (adapted(kind), 7)):
                found = owner_map(model, items, block, rule=rule, data_collator=collate, batch_size=size)
                assert found.tolist() == expected
            spread_out |= set(expected)
    assert len(spread_out) >= 3


def test_owners_in_bfloat16_run_the_vision_tower_once_a_record():
    """Rounding makes most owners uncertain there: those are computed again alone, from the same image tokens."""
    model, seen, alone = build(dtype=torch.bfloat16).train(), [], []
    model.vision.register_forward_pre_hook(lambda *_: seen.append(model.training))
    model.language.model.register_forward_pre_hook(
        lambda _m, _a, kwargs: alone.append(len(kwargs["inputs_embeds"])), with_kwargs=True
    )
    found = owner_map(model, ITEMS, 2, data_collator=collate, batch_size=len(ITEMS))
    assert alone[0] == len(ITEMS) and alone.count(1) >= 1, "no record was uncertain"
    assert len(seen) == sum(bool(item["spatial_crop"]) for item in ITEMS) and not any(seen)
    assert found.tolist() == [int(owner_map(model, [item], 2, data_collator=collate)) for item in ITEMS]
    assert model.training


# ------------------------------------------------------------------ training


@ALL_KINDS
def test_preflight_passes(kind):
    for mode in ("functorch", "hooks"):
        report = check_model(build(kind), records=ITEMS[:3], collate=collate, mode=mode, raise_on_error=False)
        assert not report.errors, report.errors


def test_images_that_leak_into_other_records_are_found(monkeypatch):
    """The probe changes the neighbours' images: a port that mixes them must not pass."""
    right = DeepseekVL2ForConditionalGeneration._image_embeds

    def mixing(self, *args):
        found = right(self, *args)
        return found + 0.1 * found.mean((0, 1))

    monkeypatch.setattr(DeepseekVL2ForConditionalGeneration, "_image_embeds", mixing)
    found = check_model(build(), records=ITEMS[:3], collate=collate, raise_on_error=False).errors
    assert any("with other records in its batch" in finding.what for finding in found), found


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_one_cycle_moves_exactly_the_trainables(mode, tmp_path):
    model = build()
    args = RaptorConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, shared_noise_multiplier=1.0,
        expert_noise_multiplier=1.0, lora_rank=RANK, learning_rate=1e-2, report_to="none", save_strategy="no",
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, grad_sample_mode=mode, protected_layer="last",
    )  # fmt: skip
    trainer = RaptorTrainer(
        model,
        args,
        data_collator=collate,
        train_dataset=Dataset.from_list(ITEMS * 2),
        eval_dataset=[record([(1, 1)], 50), record([], 51)],
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    trainable = set(every_parameter(model))
    assert moved <= trainable and {name for name in trainable if "lora_B" in name} <= moved
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.privacy_statement().protected_layer == 2


# ------------------------------------------------------------------ adapters


@pytest.mark.parametrize("layer", ["first", "last"])
@ALL_KINDS
def test_stock_peft_reads_what_was_saved(kind, layer, tmp_path):
    model = adapted(kind, layer=layer)
    model.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(build(kind), tmp_path).eval()
    check_loaded(stock, tmp_path)
    batch = inputs(collate(ITEMS))
    with torch.no_grad():
        expected, base = model.eval()(**batch).logits, build(kind)(**batch).logits
        assert float((base - expected).abs().max()) > 1e-2
        tolerance = 1e-5 * max(1.0, float(expected.abs().max()))
        assert float((stock(**batch).logits - expected).abs().max()) <= tolerance
        assert float((stock.merge_and_unload()(**batch).logits - expected).abs().max()) <= tolerance
        assert torch.equal(load_adapter(build(kind), tmp_path)(**batch).logits, expected)
