"""Records with images: their labels, their batches, and what is refused before training."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from PIL import Image

from raptor_hf.binding import record_digests
from raptor_hf.checks import check_batch, check_collator
from raptor_hf.data import CompletionCollator, MultimodalCollator, encode_completion, encode_multimodal
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.models.deepseek_vl2.image_processing import DeepseekVL2ImageProcessor, tile_resolutions
from raptor_hf.models.deepseek_vl2.processing import DeepseekVL2Processor
from raptor_hf.probes import probe_collator
from tests.models.deepseek_vl2.words import drawn, tiny_tokenizer

SIDE = 12  # 2 x 2 features a view
IMAGES = DeepseekVL2ImageProcessor(tile_resolutions(SIDE), patch_size=4, downsample_ratio=2)
PROCESSOR = DeepseekVL2Processor(IMAGES, tiny_tokenizer(bos_token="<s>", eos_token="</s>"))
COLLATE = MultimodalCollator(PROCESSOR)
ONE, TWO = drawn(12, 12), drawn(30, 10, seed=1)
TOKEN, EOS = PROCESSOR.image_token_id, PROCESSOR.tokenizer.eos_token_id
EMPTY = {"input_ids": [], "attention_mask": [], "labels": [], "images": []}


def record(question="<image>\nWhat?", answer="A", images=(ONE,), **options):
    return encode_multimodal(PROCESSOR, PROCESSOR.prompt(question), answer, images, **options)


RECORDS = [record(), record("Text alone?", images=()), record("<image><image>", "B", (TWO, ONE)), EMPTY]


def words(text):
    return PROCESSOR.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_record():
    user, assistant, bos = (PROCESSOR.tokenizer.convert_tokens_to_ids(t) for t in ("<|User|>", "<|Assistant|>", "<s>"))
    prompt = [bos, user, *words(": "), *[TOKEN] * (2 * 3 + 1 + 2 * 3), *words("\nWhat?\n\n"), assistant, *words(":")]
    answer = [*words("A"), EOS]
    found = record()
    assert found["input_ids"] == prompt + answer and found["labels"] == [-100] * len(prompt) + answer
    assert found["attention_mask"] == [1] * len(prompt + answer) and found["images"] == [ONE]
    assert record(end=False)["input_ids"] == prompt + answer[:-1]


def test_images_as_arrays():
    arrays = record("<image><image>", "B", [np.asarray(TWO), np.asarray(ONE)])
    assert {**arrays, "images": None} == {**RECORDS[2], "images": None}
    one, two = COLLATE([arrays]), COLLATE([RECORDS[2]])
    assert all(torch.equal(one[key], two[key]) for key in two)


def test_text_alone_is_the_record_of_a_text_model():
    tokenizer = tiny_tokenizer(bos_token="<s>", eos_token="</s>")
    plain = encode_completion(tokenizer, "Which one?", " B")
    found = encode_multimodal(PROCESSOR, "Which one?", " B")
    bos = [] if plain["input_ids"][0] == tokenizer.bos_token_id else [tokenizer.bos_token_id]
    assert found["input_ids"] == bos + plain["input_ids"] and found["images"] == []
    assert found["labels"] == [-100] * len(bos) + plain["labels"]


@pytest.mark.parametrize("less", [1, 5, 9])
def test_a_long_record_loses_words_but_no_image_and_no_role(less):
    given = ("<image> one two three four five <image>\nWhich?", "A", (ONE, TWO))
    whole = record(*given)
    cut = record(*given, max_length=len(whole["labels"]) - less)
    assert len(cut["input_ids"]) == len(whole["input_ids"]) - less
    kept = [token for token in whole["input_ids"] if token not in PROCESSOR.kept_ids]
    assert [token for token in cut["input_ids"] if token not in PROCESSOR.kept_ids] == kept[less:]
    for ids in (cut["input_ids"], whole["input_ids"]):
        assert [ids.count(token) for token in sorted(PROCESSOR.kept_ids)] == [
            whole["input_ids"].count(token) for token in sorted(PROCESSOR.kept_ids)
        ]
    assert [label for label in cut["labels"] if label != -100] == [*words("A"), EOS]
    COLLATE([cut])
    with pytest.raises(PrivacyConfigError, match="inside an image"):
        record(max_length=10)


def test_a_batch():
    batch = COLLATE(copy.deepcopy(RECORDS))
    assert set(batch) == {"input_ids", "attention_mask", "labels", "pixel_values", "spatial_crop"}
    plain = CompletionCollator(PROCESSOR.tokenizer.pad_token_id)(RECORDS)
    assert all(torch.equal(batch[key], plain[key]) for key in plain)
    views = [IMAGES.views(r["images"])[0] for r in RECORDS]
    assert batch["pixel_values"].shape == (4, len(views[2]), 3, SIDE, SIDE) and len(views[2]) == 2 + 3 + 1
    for row, view in enumerate(views):
        assert torch.equal(batch["pixel_values"][row, : len(view)], view)
        assert not batch["pixel_values"][row, len(view) :].any()
    crops = [[[1, 1], [0, 0]], [[0, 0], [0, 0]], [[3, 1], [1, 1]], [[0, 0], [0, 0]]]
    assert batch["spatial_crop"].tolist() == crops
    # a record without tokens is one masked padding token
    assert batch["attention_mask"][3].sum() == 0 and (batch["labels"][3] == -100).all()
    check_batch(batch, 4, ["labels"])


def test_text_alone_has_no_views():
    batch = COLLATE([RECORDS[1], EMPTY])
    assert batch["pixel_values"].shape == (2, 0, 3, SIDE, SIDE) and batch["spatial_crop"].shape == (2, 0, 2)


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 3], [3, 2, 0], [1, 3, 1]])
def test_each_row_is_that_of_its_record_alone(order):
    some = [RECORDS[i] for i in order]
    assert probe_collator(COLLATE, some) == []
    check_collator(COLLATE, some, ["labels"])


def test_image_tokens_are_never_supervised():
    item = record()
    item["labels"] = list(item["input_ids"])  # as where prompts are supervised too
    labels = COLLATE([item])["labels"][0]
    ids = torch.tensor(item["input_ids"])
    assert (labels[ids == TOKEN] == -100).all() and torch.equal(labels[ids != TOKEN], ids[ids != TOKEN])


def without(item, key):
    return {name: value for name, value in item.items() if name != key}


@pytest.mark.parametrize(
    "item",
    [
        without(record(), "images"),
        {**record(), "images": []},
        {**record(), "images": [ONE, ONE]},
        {**record(), "images": [TWO]},
        {**RECORDS[1], "images": [ONE]},
        {**EMPTY, "images": [ONE]},
        {key: value[:12] if key != "images" else value for key, value in record().items()},
    ],
    ids=["unused column removed", "none", "two", "another size", "no placeholder", "no token", "cut"],
)
def test_other_images_than_placeholders_are_refused(item):
    with pytest.raises(PrivacyConfigError, match="remove_unused_columns") as caught:
        COLLATE([RECORDS[1], item])
    # what is said holds nothing of the record
    assert not any(character.isdigit() for character in str(caught.value))


def test_other_images_than_the_text_says_are_refused():
    for question, images in (("<image>", ()), ("none", (ONE,)), ("<image>", (ONE, TWO))):
        with pytest.raises(PrivacyConfigError, match="once for every image"):
            record(question, images=images)
    with pytest.raises(PrivacyConfigError, match="once for every image"):
        record(answer="<image>")


def test_too_long_and_packed_records_are_refused():
    most = len(RECORDS[0]["input_ids"])
    MultimodalCollator(PROCESSOR, max_length=most)([RECORDS[0]])
    with pytest.raises(PrivacyConfigError, match="Cut the records"):
        MultimodalCollator(PROCESSOR, max_length=most - 1)([RECORDS[0]])
    with pytest.raises(PrivacyConfigError, match="packed"):
        COLLATE([{**RECORDS[0], "seq_lengths": [3, 4]}])


def test_the_digest_of_records_with_images():
    """Equal for equal pixels, another object or not; different where one pixel is."""
    digest = record_digests(RECORDS)
    assert record_digests(copy.deepcopy(RECORDS)) == digest
    pixels = np.array(TWO)
    pixels[3, 4, 1] ^= 1
    changed = copy.deepcopy(RECORDS)
    changed[2]["images"][0] = Image.fromarray(pixels)
    other = record_digests(changed)
    assert [key for key in digest if other[key] != digest[key]] == ["images"]
