"""Token ids of texts with images against a tokenizer called by hand; saving, loading, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.models.deepseek_vl2.image_processing import DeepseekVL2ImageProcessor, tile_resolutions
from raptor_hf.models.deepseek_vl2.processing import DeepseekVL2Processor
from tests.models.deepseek_vl2.words import TEXT, drawn, tiny_tokenizer

SPECIAL = dict(bos_token="<s>", eos_token="</s>")
SIDE = 12  # 3 x 3 patches of 4 pixels, 2 x 2 features


def processor(**special):
    images = DeepseekVL2ImageProcessor(tile_resolutions(SIDE), patch_size=4, downsample_ratio=2)
    return DeepseekVL2Processor(images, tiny_tokenizer(**(special or SPECIAL)))


def placeholders(wide, high, h=2):
    return h * (h + 1) + 1 + (high * h) * (wide * h + 1)


def test_ids_of_text_and_images():
    made = processor()
    text = "one<image>two <image>\nthree"
    ids = made.token_ids(text, [(1, 1), (2, 3)])
    plain = tiny_tokenizer(**SPECIAL)
    image = plain.vocab_size  # the first token that was added
    assert made.image_token_id == image != made.tokenizer.pad_token_id
    pieces = [plain(piece, add_special_tokens=False)["input_ids"] for piece in ("one", "two ", "\nthree")]
    expected = [plain.bos_token_id, *pieces[0], *[image] * placeholders(1, 1), *pieces[1]]
    assert ids == [*expected, *[image] * placeholders(2, 3), *pieces[2]]
    assert made.token_ids(text, [(1, 1), (2, 3)], begin=False) == ids[1:]
    assert made.token_ids("", begin=False) == [] and made.token_ids("") == [plain.bos_token_id]


def test_a_tokenizer_without_special_tokens():
    made = processor(unk_token="?")
    ids = made.token_ids("one", begin=True)
    assert ids == tiny_tokenizer(unk_token="?")("one")["input_ids"]
    assert made.tokenizer.pad_token_id is not None and made.tokenizer.padding_side == "right"


def test_a_tokenizer_that_adds_special_tokens_by_itself():
    """One beginning, before the first piece; no ending inside."""
    expected = processor().token_ids("one<image>two", [(1, 1)])
    tokenizer = tiny_tokenizer(**SPECIAL)
    ids = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    assert tokenizer("one")["input_ids"][0] == ids[0][1] and tokenizer("one")["input_ids"][-1] == ids[1][1]
    made = DeepseekVL2Processor(processor().image_processor, tokenizer)
    assert made.token_ids("one<image>two", [(1, 1)]) == expected


def test_tokens_that_the_tokenizer_has_are_not_added_again():
    first = processor().tokenizer
    size = len(first)
    again = DeepseekVL2Processor(DeepseekVL2ImageProcessor([(12, 12)]), first)
    assert len(first) == size and again.image_token_id == processor().image_token_id


def test_chat_format():
    made = processor()
    assert made.prompt(" <image>\nWhich? ") == "<|User|>: <image>\nWhich?\n\n<|Assistant|>:"
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "Sure?"},
    ]
    text = "Be brief.\n\n<|User|>: <image>\nWhich?\n\n<|Assistant|>: B</s><|User|>: Sure?\n\n"
    assert made.apply_chat_template(talk) == text
    assert made.apply_chat_template(talk, add_generation_prompt=True) == text + "<|Assistant|>:"
    image = drawn(30, 12)
    talk[1]["content"][0]["image"] = image
    batch = made.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=True)
    same = made(image, text + "<|Assistant|>:")
    assert all(torch.equal(batch[key], same[key]) for key in same) and set(batch) == set(same)
    ids = same["input_ids"][0].tolist()
    roles = made.tokenizer.convert_tokens_to_ids(["<|User|>", "<|Assistant|>"])
    assert [ids.count(role) for role in roles] == [2, 2] and ids[0] == made.tokenizer.bos_token_id
    with pytest.raises(Exception, match="Roles are"):
        made.apply_chat_template([{"role": "robot", "content": "?"}])


def test_a_batch():
    made = processor()
    images = [[drawn(30, 12), drawn(12, 12)], [], [drawn(5, 40)]]
    texts = ["a<image>b<image>", "only text", "<image>"]
    batch = made(images, texts)
    alone = [made(some or None, text) for some, text in zip(images, texts, strict=True)]
    views = [made.image_processor.views(some)[0] for some in images]
    assert batch["pixel_values"].shape == (3, max(len(v) for v in views), 3, SIDE, SIDE)
    assert batch["spatial_crop"].shape == (3, 2, 2)
    for row, (one, view) in enumerate(zip(alone, views, strict=True)):
        length = one["input_ids"].shape[1]
        assert torch.equal(batch["input_ids"][row, :length], one["input_ids"][0])
        assert (batch["input_ids"][row, length:] == made.tokenizer.pad_token_id).all()
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (batch["input_ids"].shape[1] - length)
        assert torch.equal(batch["pixel_values"][row, : len(view)], view)
        assert not batch["pixel_values"][row, len(view) :].any()
        crops = batch["spatial_crop"][row]
        assert (batch["input_ids"][row] == made.image_token_id).sum() == sum(
            placeholders(*crop) for crop in crops.tolist() if crop != [0, 0]
        )
    assert batch["spatial_crop"][1].tolist() == [[0, 0], [0, 0]]
    assert set(batch) == set(made.model_input_names)


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (None, "<image>"),
        ([drawn(9, 9)], "none"),
        ([drawn(9, 9)], "<image><image>"),
        ([[drawn(9, 9)], [drawn(9, 9)]], ["<image><image>", "none"]),
    ],
)
def test_another_number_of_images_is_refused(images, text):
    with pytest.raises(PrivacyConfigError, match="and nowhere else") as caught:
        processor()(images, text)
    assert caught.value.given and "another picture" in caught.value.why


@pytest.mark.parametrize("images", [[drawn(9, 9), drawn(9, 9)], [[drawn(9, 9)]], [drawn(9, 9), [drawn(9, 9)]]])
def test_images_of_unknown_records_are_refused(images):
    with pytest.raises(PrivacyConfigError, match="one list of images for each text") as caught:
        processor()(images, ["<image>", "<image>"])
    assert not any(letter.isdigit() for letter in str(caught.value))  # how many there are is the records' affair


def test_what_it_cannot_do_is_refused():
    made = processor()
    for kwargs in (dict(text=None), dict(text="a", videos=[1]), dict(text="a", return_tensors="np")):
        with pytest.raises(PrivacyConfigError, match="text and images"):
            made(**kwargs)
    with pytest.raises(PrivacyConfigError, match="tokenizer"):
        DeepseekVL2Processor()
    with pytest.raises(PrivacyConfigError, match="sft_format"):
        DeepseekVL2Processor(tokenizer=tiny_tokenizer(), sft_format="plain")
    with pytest.raises(PrivacyConfigError, match="taken for images"):
        DeepseekVL2Processor(tokenizer=tiny_tokenizer(pad_token="<image>"))


def test_saved_and_loaded(tmp_path):
    made = processor()
    made.save_pretrained(tmp_path / "inside")
    loaded = DeepseekVL2Processor.from_pretrained(tmp_path, subfolder="inside")
    made.save_pretrained(tmp_path)
    assert loaded.to_dict() == made.to_dict() and len(loaded.tokenizer) == len(made.tokenizer)
    loaded = DeepseekVL2Processor.from_pretrained(tmp_path)
    assert loaded.to_dict() == made.to_dict() and loaded.chat_template == made.chat_template
    assert len(loaded.tokenizer) == len(made.tokenizer) and loaded.tokenizer.padding_side == "right"
    text = [made.prompt("<image>\n" + words) for words in TEXT[:2]]
    images = [[drawn(30, 12)], [drawn(12, 60, mode="L")]]
    one, two = made(images, text), loaded(images, text)
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_the_published_layout(tmp_path):
    """Settings of images unnested in `processor_config.json`, none of ours, and no `preprocessor_config.json`."""
    tiny_tokenizer(**SPECIAL, pad_token="<｜▁pad▁｜>").save_pretrained(tmp_path)
    published = {
        "add_special_token": False, "candidate_resolutions": [[384, 384], [384, 768], [768, 384]],
        "downsample_ratio": 2, "ignore_id": -100, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "image_token": "<image>", "mask_prompt": False, "normalize": True, "pad_token": "<｜▁pad▁｜>",
        "patch_size": 14, "processor_class": "DeepseekVLV2Processor", "sft_format": "deepseek",
    }  # fmt: skip
    (tmp_path / "processor_config.json").write_text(json.dumps(published))
    loaded = DeepseekVL2Processor.from_pretrained(tmp_path)
    assert loaded.image_processor.candidate_resolutions == [(384, 384), (384, 768), (768, 384)]
    assert loaded.image_processor.num_image_tokens((1, 1)) == 14 * 15 + 1 + 14 * 15
    batch = loaded(drawn(700, 300), loaded.prompt("<image>\nWhat?"))
    assert batch["spatial_crop"].tolist() == [[[2, 1]]] and batch["pixel_values"].shape == (1, 3, 3, 384, 384)
    np.testing.assert_allclose(batch["pixel_values"][0, 0, :, 0, 0], 127 / 127.5 - 1, atol=1e-6)
    (tmp_path / "processor_config.json").write_text(json.dumps({**published, "sft_format": "plain"}))
    with pytest.raises(PrivacyConfigError, match="sft_format"):
        DeepseekVL2Processor.from_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"patch_size": 14}))
    with pytest.raises(PrivacyConfigError, match="candidate_resolutions"):
        DeepseekVL2Processor.from_pretrained(tmp_path)
