"""ScienceQA from a file and from a dataset of invented problems; prompts by hand; accuracy by one pass a choice."""

from __future__ import annotations

import json
import re
from itertools import chain

import datasets
import numpy as np
import pytest
import torch

from raptor_hf.data import CompletionCollator, MultimodalCollator, Question, ScienceQADataset, load_scienceqa
from raptor_hf.data.scienceqa import letter_accuracy
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.models.deepseek_vl2.image_processing import DeepseekVL2ImageProcessor, tile_resolutions
from raptor_hf.models.deepseek_vl2.processing import DeepseekVL2Processor
from tests.data.test_choices import by_hand
from tests.families import build
from tests.models.deepseek_vl2.words import drawn, tiny_tokenizer

COLOURS = ("red", "green", "blue")


def problems():
    """Invented, in the form of the published file; every third has an image."""
    found = {}
    for i in range(12):
        found[str(i + 1)] = {
            "question": f"Which colour has thing {i}?",
            "choices": list(COLOURS[: 2 + i % 2]),
            "answer": i % 2,
            "hint": f"Thing {i} is seen by day." if i % 2 else "",
            "image": "image.png" if i % 3 == 0 else None,
            "lecture": "Things have colours." if i % 4 == 0 else "",
            "solution": "Look.",
            "subject": "art",
            "split": ("train", "train", "val", "test")[i % 4],
        }
    return found


def write(folder):
    found = problems()
    for i, (key, row) in enumerate(found.items()):
        if row["image"] is not None:
            path = folder / "images" / row["split"] / key / "image.png"
            path.parent.mkdir(parents=True)
            drawn(20 + i, 14, seed=i).save(path)
    (folder / "problems.json").write_text(json.dumps(found))
    return folder / "problems.json"


def write_dataset(folder):
    """As on the Hub: the same problems in three files of the three splits, images inside."""
    features = datasets.Features(
        image=datasets.Image(), question=datasets.Value("string"), choices=datasets.List(datasets.Value("string")),
        answer=datasets.Value("int8"), hint=datasets.Value("string"), lecture=datasets.Value("string"),
    )  # fmt: skip
    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        rows = []
        for i, row in enumerate(problems().values()):
            if row["split"] == split:
                picture = drawn(20 + i, 14, seed=i) if row["image"] else None
                rows.append({**{key: row[key] for key in features if key != "image"}, "image": picture})
        datasets.Dataset.from_list(rows, features=features).to_parquet(folder / f"{name}.parquet")
    return folder


def content(questions):
    return [(q.question, q.choices, q.answer, q.hint, q.lecture, _pixels(q)) for q in questions]


def _pixels(question):
    return None if question.open_image is None else np.asarray(question.open_image().convert("RGB")).tobytes()


@pytest.mark.parametrize("source", ["file", "dataset"])
@pytest.mark.parametrize("which", ["all", "image", "text"])
@pytest.mark.parametrize("images", [True, False])
def test_loading(source, which, images, tmp_path):
    if source == "file":
        found = load_scienceqa(problems_file=write(tmp_path), which=which, images=images)
    else:
        found = load_scienceqa(dataset_name=str(write_dataset(tmp_path)), which=which, images=images)
    names = {"train": "train", "val": "validation", "test": "test"}
    expected = {name: [] for name in names.values()}
    for i, row in enumerate(problems().values()):
        if which == "all" or (which == "image") == bool(row["image"]):
            pixels = np.asarray(drawn(20 + i, 14, seed=i)).tobytes() if images and row["image"] else None
            expected[names[row["split"]]].append(
                (row["question"], tuple(row["choices"]), row["answer"], row["hint"], row["lecture"], pixels)
            )
    assert {split: content(questions) for split, questions in found.items()} == {
        split: questions for split, questions in expected.items() if questions
    }


def test_images_in_another_folder(tmp_path):
    path = write(tmp_path)
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    with pytest.raises(PrivacyConfigError, match="image_root") as refusal:
        load_scienceqa(problems_file=path)
    # the path of an image has the number of its question, which is a record
    told, numbers = str(refusal.value).replace(str(tmp_path), ""), json.loads(path.read_text())
    assert not [number for number in numbers if re.search(rf"\b{number}\b", told)]
    for options in (dict(image_root=tmp_path / "elsewhere"), dict(images=False), dict(which="text")):
        load_scienceqa(problems_file=path, **options)


@pytest.mark.parametrize(
    "options", [{}, dict(problems_file="a", dataset_name="b"), dict(problems_file="a", which="images")]
)
def test_options_that_name_no_questions_are_refused(options):
    with pytest.raises(PrivacyConfigError, match="Set one of the first two"):
        load_scienceqa(**options)


def test_files_that_are_no_problems_are_refused(tmp_path):
    path = tmp_path / "problems.json"
    with pytest.raises(PrivacyConfigError, match="no such file"):
        load_scienceqa(problems_file=path)
    for text in ("{", "[]", '{"1": {}}', '{"1": {"split": "dev"}}', '{"1": 3}'):
        path.write_text(text)
        with pytest.raises(PrivacyConfigError, match="published JSON"):
            load_scienceqa(problems_file=path)
    row = {"question": "?", "choices": ["a", "b"], "answer": 0, "split": "train"}
    changes = (dict(answer=2), dict(answer=-1), dict(answer=None), dict(choices=["a"]), dict(choices=["a"] * 11))
    for wrong in (*changes, dict(answer="A"), dict(choices=None)):
        path.write_text(json.dumps({"1": {**row, **wrong}}))
        with pytest.raises(PrivacyConfigError, match="no answer to learn"):
            load_scienceqa(problems_file=path)
    path.write_text(json.dumps({"1": {key: value for key, value in row.items() if key != "question"}}))
    with pytest.raises(PrivacyConfigError, match="no answer to learn"):
        load_scienceqa(problems_file=path)


def test_a_dataset_that_is_not_there_or_has_other_images_is_refused(tmp_path):
    with pytest.raises(PrivacyConfigError, match="problems_file"):
        load_scienceqa(dataset_name=str(tmp_path / "nothing"))
    row = {"question": "?", "choices": ["a", "b"], "answer": 0, "image": "1.png"}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(PrivacyConfigError, match="not of images"):
        load_scienceqa(dataset_name=str(tmp_path))


QUESTION = Question("Which?", ("red", "blue"), 1, "By day.", "Colours.", lambda: drawn(20, 14))


def test_the_text_of_a_question():
    end = "Question: Which?\nChoices:\nA. red\nB. blue\nAnswer with the letter of the right choice."
    assert QUESTION.text() == "Context: By day.\n" + end
    assert QUESTION.text(hint=False) == end
    assert QUESTION.text(lecture=True, image_token="<i>") == "<i>\nLecture: Colours.\nContext: By day.\n" + end
    assert Question("Which?", ("red", "blue"), 0).text(lecture=True, image_token="<i>") == end


def test_records_of_a_text_model():
    tokenizer = tiny_tokenizer(bos_token="<s>", eos_token="</s>")
    data = ScienceQADataset([QUESTION, Question("Why?", ("a", "b", "c"), 2)], tokenizer, hint=False)
    for index, letter in enumerate("BC"):
        prompt = tokenizer(data.questions[index].text(hint=False) + "\nAnswer:")["input_ids"]
        answer = tokenizer(f" {letter}", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        ids = prompt + answer
        labels = [-100] * len(prompt) + answer
        assert data[index] == {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}
        choices = data.choices(index)
        assert len(choices) == len(data.questions[index].choices)
        assert choices["ABC".index(letter)]["input_ids"] == ids[:-1]
    assert len(data) == 2
    short = ScienceQADataset([QUESTION], tokenizer, max_length=9)
    assert len(short[0]["input_ids"]) == 9 and short[0]["input_ids"][-1] == tokenizer.eos_token_id


def test_records_of_a_vision_language_model():
    images = DeepseekVL2ImageProcessor(tile_resolutions(12), patch_size=4, downsample_ratio=2)
    processor = DeepseekVL2Processor(images, tiny_tokenizer(bos_token="<s>", eos_token="</s>"))
    data = ScienceQADataset([QUESTION, Question("Why?", ("a", "b"), 0)], processor, lecture=True)
    whole = processor.token_ids(
        processor.prompt(QUESTION.text(lecture=True, image_token="<image>")) + "B", images.crops([(20, 14)])
    )
    record = data[0]
    assert record["input_ids"] == [*whole, processor.tokenizer.eos_token_id]
    assert [label for label in record["labels"] if label != -100] == record["input_ids"][-2:]
    assert np.array_equal(np.asarray(record["images"][0]), np.asarray(QUESTION.open_image()))
    assert [choice["input_ids"][-1] for choice in data.choices(0)] == processor.token_ids("AB", begin=False)
    assert data.choices(0)[1]["input_ids"] == whole and data[1]["images"] == []
    batch = MultimodalCollator(processor)([data[0], data[1], *data.choices(0)])
    assert batch["spatial_crop"][:, 0].tolist() == [[2, 2], [0, 0], [2, 2], [2, 2]]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_accuracy_against_one_pass_a_choice(batch_size, tmp_path):
    """Batches, rows that letters share and the order of questions change nothing."""
    tokenizer = tiny_tokenizer([str(problems())], bos_token="<s>", eos_token="</s>")
    model = build("olmoe", head="lm", vocab_size=len(tokenizer), max_position_embeddings=256)
    questions = list(chain(*load_scienceqa(problems_file=write(tmp_path), images=False).values()))
    data = ScienceQADataset(questions * 5, tokenizer)
    found = [[by_hand(model, record) for record in data.choices(i)] for i in range(len(questions))]
    best = [int(np.argmax(values)) for values in found]
    assert min(abs(a - b) for values in found for a in values for b in values if a != b) > 1e-3
    expected = np.mean([choice == question.answer for choice, question in zip(best, questions, strict=True)])
    collate = CompletionCollator(0)
    assert letter_accuracy(model, data, collate, batch_size=batch_size) == pytest.approx(expected)
    # against answers that are all right, and all wrong
    for shift, value in ((0, 1.0), (1, 0.0)):
        asked = [
            Question(q.question, q.choices, (b + shift) % len(q.choices), q.hint, q.lecture)
            for q, b in zip(questions, best, strict=True)
        ]
        assert letter_accuracy(model, ScienceQADataset(asked, tokenizer), collate, batch_size=batch_size) == value
    assert 0 < expected < 1 and torch.is_grad_enabled()
