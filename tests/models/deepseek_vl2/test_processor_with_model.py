"""Processor, collator and model together: counts, batches, silent records, generation, the Auto classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoProcessor

from raptor_hf.checks import check_model
from raptor_hf.data import MultimodalCollator, encode_multimodal
from raptor_hf.grad_sample import per_sample_gradients
from raptor_hf.models import DeepseekVL2ForConditionalGeneration, DeepseekVL2ImageProcessor, DeepseekVL2Processor
from raptor_hf.models.deepseek_vl2.image_processing import tile_resolutions
from raptor_hf.moe import attach_adapters, owner_map, stream_parameters
from tests.families import shake, spread
from tests.models.deepseek_vl2.build import KINDS, PATCH, PIXELS, config_of
from tests.models.deepseek_vl2.words import drawn, tiny_tokenizer

IMAGES = DeepseekVL2ImageProcessor(tile_resolutions(PIXELS, 4), patch_size=PATCH, downsample_ratio=2)
PROCESSOR = DeepseekVL2Processor(IMAGES, tiny_tokenizer(bos_token="<s>", eos_token="</s>"))
COLLATE = MultimodalCollator(PROCESSOR)


def built(kind="tiny"):
    config = config_of(kind, vocab_size=len(PROCESSOR.tokenizer))
    config.image_token_id = PROCESSOR.image_token_id
    model = DeepseekVL2ForConditionalGeneration._from_config(config, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return spread(model).eval()


def record(text, answer, *images, end=True):
    return encode_multimodal(PROCESSOR, PROCESSOR.prompt(text), answer, images, end=end)


ONE, WIDE = drawn(14, 14), drawn(40, 13, seed=3)
RECORDS = [record("<image>\nWhat?", "A", ONE), record("Alone?", "B"), record("<image>or<image>?", "C", WIDE, ONE)]
SILENT = [
    {**RECORDS[0], "labels": [-100] * len(RECORDS[0]["labels"])},
    {"input_ids": [], "attention_mask": [], "labels": [], "images": []},
]


def test_the_model_expects_as_many_tokens_as_the_processor_gives():
    config = config_of()
    for size in np.random.default_rng(0).integers(1, 90, (200, 2)).tolist():
        (wide, high), = IMAGES.crops([size])  # fmt: skip
        ids = PROCESSOR.token_ids("<image>", [(wide, high)])
        assert ids.count(PROCESSOR.image_token_id) == config.image_tokens(wide, high)


def test_each_record_of_a_batch_is_as_it_is_alone():
    model = built()
    batch = COLLATE(RECORDS)
    with torch.no_grad():
        together = model(**batch).logits
        for row, item in enumerate(RECORDS):
            alone = model(**COLLATE([item])).logits[0]
            torch.testing.assert_close(together[row, : len(alone)], alone, atol=2e-5, rtol=1e-4)
        # and it is an image that is seen: another one of the same size gives other logits, for its record only
        other = [{**RECORDS[0], "images": [drawn(14, 14, seed=9)]}, *RECORDS[1:]]
        changed = model(**COLLATE(other)).logits
    torch.testing.assert_close(changed[1:], together[1:], atol=2e-5, rtol=1e-4)
    assert (changed[0, -1] - together[0, -1]).abs().max() > 1e-2


@pytest.mark.parametrize("mode", ["functorch", "hooks", "reference"])
def test_records_without_a_supervised_token_contribute_nothing(mode):
    model = built()
    attach_adapters(model, LoraConfig(r=2, lora_alpha=3), "last")
    shake(model)
    batch = COLLATE([RECORDS[2], *SILENT, RECORDS[1]])
    owners = owner_map(model, [RECORDS[2], *SILENT, RECORDS[1]], 2, data_collator=COLLATE)
    for stream, parameters in stream_parameters(model).items():
        owner = owners if stream == "expert" else None
        grads = per_sample_gradients(model, batch, parameters, mode=mode, owner=owner)
        sizes = sum(g.double().flatten(1).pow(2).sum(1) for g in grads.values())
        assert sizes[1] == 0 and sizes[2] == 0 and (sizes[[0, 3]] > 1e-12).all(), stream


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
@pytest.mark.parametrize("some", [RECORDS, [RECORDS[1]] * 3], ids=["images", "text alone"])
def test_the_checks_before_training_pass(mode, some):
    report = check_model(built(), records=some, collate=COLLATE, mode=mode)
    assert report.errors == ()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_generation_from_what_the_processor_gives(kind):
    model = built(kind)
    batch = PROCESSOR([[ONE]], [PROCESSOR.prompt("<image>\nWhat?")])
    with torch.no_grad():
        out = model.generate(**batch, max_new_tokens=3, do_sample=False, eos_token_id=None)
        ids = batch["input_ids"]
        for _ in range(3):
            logits = model(**{**batch, "input_ids": ids, "attention_mask": torch.ones_like(ids)}).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(out, ids)


def test_the_auto_classes(tmp_path):
    built().save_pretrained(tmp_path)
    PROCESSOR.save_pretrained(tmp_path)
    loaded, model = AutoProcessor.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, DeepseekVL2Processor) and loaded.to_dict() == PROCESSOR.to_dict()
    assert model.config.image_token_id == loaded.image_token_id
