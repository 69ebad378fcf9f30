"""Generation with images: a prefill that reads them and cached steps that do not, against full passes."""

from __future__ import annotations

import pytest
import torch

from tests.models.deepseek_vl2.build import IMAGE, ITEMS, KINDS, PAD, build, collate, inputs, record
from tests.models.deepseek_vl2.test_streams import adapted

NEW = 4
GREEDY = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=PAD, eos_token_id=None)


@torch.no_grad()
def by_full_passes(model, item):
    """Greedy, the whole record through the model for every token."""
    ids = list(item["input_ids"])
    for _ in range(NEW):
        longer = {**item, "input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}
        ids.append(int(model(**inputs(collate([longer])), use_cache=False).logits[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("item", [0, 1, 2], ids=["one image", "two images", "text"])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_generation_is_what_full_passes_say(kind, item):
    model = build(kind)
    runs = []
    model.vision.register_forward_hook(lambda *_: runs.append(1))
    found = model.generate(**inputs(collate([ITEMS[item]])), **GREEDY)
    assert len(runs) == bool(ITEMS[item]["spatial_crop"]), "images are read in the first step alone"
    assert found[0].tolist() == by_full_passes(model, ITEMS[item])


def test_without_a_cache():
    model = build()
    found = model.generate(**inputs(collate([ITEMS[1]])), use_cache=False, **GREEDY)
    assert found[0].tolist() == by_full_passes(model, ITEMS[1])


def test_a_batch_padded_on_the_left():
    model = build()
    items = [record([(1, 1)], 3), record([], 4), record([(2, 1), (1, 1)], 5)]
    batch = inputs(collate(items))
    for key in ("input_ids", "attention_mask"):
        width = batch[key].shape[1]
        pairs = zip(batch[key], items, strict=True)
        batch[key] = torch.stack([row.roll(width - len(item["input_ids"])) for row, item in pairs])
    found = model.generate(**batch, **GREEDY)
    for row, item in zip(found, items, strict=True):
        assert row[-NEW:].tolist() == by_full_passes(model, item)[-NEW:]


def test_beams_take_their_images_along():
    model = build()
    found = model.generate(**inputs(collate([ITEMS[0], ITEMS[2]])), **{**GREEDY, "num_beams": 2})
    assert found.shape == (2, len(ITEMS[0]["input_ids"]) + NEW)


def test_with_adapters():
    model = adapted().eval()
    model.config.use_cache = True  # `attach_adapters` switches it off for training
    assert model.generate(**inputs(collate([ITEMS[1]])), **GREEDY)[0].tolist() == by_full_passes(model, ITEMS[1])


@torch.no_grad()
def test_cached_logits_and_the_last_positions_alone():
    model = build()
    batch = inputs(collate([ITEMS[0]]))
    whole = model(**batch).logits
    first = {**batch, "input_ids": batch["input_ids"][:, :-2], "attention_mask": batch["attention_mask"][:, :-2]}
    out = model(**first, use_cache=True)
    step = model(
        input_ids=batch["input_ids"][:, -2:],
        attention_mask=batch["attention_mask"],
        past_key_values=out.past_key_values,
    )
    assert torch.allclose(torch.cat([out.logits, step.logits], 1), whole, atol=1e-5)
    assert torch.equal(model(**batch, logits_to_keep=3).logits, whole[:, -3:])
    assert torch.equal(model(**batch, logits_to_keep=torch.tensor([1, 4])).logits, whole[:, [1, 4]])


@torch.no_grad()
def test_after_the_first_step_images_are_left_out():
    """A model may also write the token that stands for an image; it is then a word like any other."""
    model = build()
    batch = inputs(collate([ITEMS[0]]))
    cache = model(**batch, use_cache=True).past_key_values
    given = {**batch, "input_ids": torch.tensor([[IMAGE]]), "past_key_values": cache}
    assert model(**given).logits.shape == (1, 1, 50)
    given = {key: value for key, value in batch.items() if key != "input_ids"}
    prepared = model.prepare_inputs_for_generation(batch["input_ids"], **given, past_key_values=cache)
    assert not {"pixel_values", "spatial_crop"} & set(prepared)
    first = model.prepare_inputs_for_generation(batch["input_ids"], **given, is_first_iteration=True)
    assert {"pixel_values", "spatial_crop"} <= set(first)


@torch.no_grad()
def test_tuples_and_embeddings():
    model = build()
    batch = inputs(collate([ITEMS[2]]))
    whole = model(**batch).logits
    assert torch.equal(model(**batch, return_dict=False)[0], whole)
    embedded = model.get_input_embeddings()(batch["input_ids"])
    assert torch.equal(model(inputs_embeds=embedded, attention_mask=batch["attention_mask"]).logits, whole)
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(attention_mask=batch["attention_mask"])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_fused_attention_gives_the_same(kind):
    plain, fused = build(kind), build(kind)
    fused.set_attn_implementation("sdpa")
    assert fused.language.model.config._attn_implementation == "sdpa"
    batch = inputs(collate(ITEMS))
    mask = batch["attention_mask"].bool()
    assert torch.allclose(plain(**batch).logits[mask], fused(**batch).logits[mask], atol=2e-5)
