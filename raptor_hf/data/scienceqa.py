"""ScienceQA (Lu et al., 2022): multiple-choice questions, some with an image; answered by the letter of a choice.

Questions come from the published `problems.json` with its folder of images, or from a dataset with the columns of
`derek-thomas/ScienceQA` on the Hub. One question is one record.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image
from torch import nn

from raptor_hf.data.choices import choice_log_likelihoods
from raptor_hf.data.completion import encode_completion
from raptor_hf.data.multimodal import encode_multimodal
from raptor_hf.data.tasks import load_splits
from raptor_hf.errors import PrivacyConfigError

__all__ = ["Question", "ScienceQADataset", "letter_accuracy", "load_scienceqa"]

LETTERS = "ABCDEFGHIJ"
_SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
_FIELDS = ("question", "choices", "answer")

# (split, the problem's fields, what opens its image)
Row = tuple[str, Mapping[str, Any], Callable[[], Image.Image] | None]


@dataclass(frozen=True)
class Question:
    """One problem.

    Attributes:
        answer: index of the right choice. hint: text that belongs to the question; may be empty. lecture: what a
            textbook says about the topic; may be empty. open_image: opens the image; None without one.
    """

    question: str
    choices: tuple[str, ...]
    answer: int
    hint: str = ""
    lecture: str = ""
    open_image: Callable[[], Image.Image] | None = None

    def text(self, *, hint: bool = True, lecture: bool = False, image_token: str = "") -> str:
        """The question with lettered choices, one part a line; with the image token first where there is an image."""
        parts = [image_token] if image_token and self.open_image is not None else []
        parts += [f"Lecture: {self.lecture}"] if lecture and self.lecture else []
        parts += [f"Context: {self.hint}"] if hint and self.hint else []
        parts += [f"Question: {self.question}", "Choices:"]
        parts += [f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=False)]
        return "\n".join([*parts, "Answer with the letter of the right choice."])


def load_scienceqa(
    *,
    problems_file: str | Path | None = None,
    image_root: str | Path | None = None,
    dataset_name: str | None = None,
    images: bool = True,
    which: str = "all",
) -> dict[str, list[Question]]:
    """The questions of each split: "train", "validation", "test" (those that are there).

    Args:
        problems_file: the published `problems.json`; its images are `image_root/<split>/<id>/image.png`.
        image_root: default: the folder `images` beside the file.
        dataset_name: instead of a file: id on the Hub, or a local folder that `datasets.load_dataset` reads.
        images: open the images. False: all questions are text alone, also those that were asked about an image.
        which: "all" questions, those with "image", or those of "text" alone.

    Raises:
        PrivacyConfigError: neither source or both, a file that is missing, or a problem that is not of this form.
    """
    if (problems_file is None) == (dataset_name is None) or which not in ("all", "image", "text"):
        raise PrivacyConfigError(
            f"`problems_file={problems_file}`, `dataset_name={dataset_name}` and `which={which!r}` were given",
            "Which questions are meant cannot be told",
            "Set one of the first two, and `which` to 'all', 'image' or 'text'",
        )
    images = images and which != "text"
    if problems_file is None:
        rows = _from_dataset(str(dataset_name))
    else:
        rows = _from_file(Path(problems_file), image_root, images)
    found: dict[str, list[Question]] = {}
    for split, row, open_image in rows:
        if which == "all" or (which == "image") == (row.get("image") is not None):
            found.setdefault(split, []).append(_question(row, open_image if images else None))
    return found


def _question(row: Mapping[str, Any], open_image: Callable[[], Image.Image] | None) -> Question:
    choices = tuple(str(choice) for choice in row.get("choices") or ())
    answer = row.get("answer")
    known = all(field in row for field in _FIELDS) and 1 < len(choices) <= len(LETTERS)
    if not known or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise PrivacyConfigError(
            "A problem was given without a question, its choices and the index of the right one",
            "It is not of the form of ScienceQA, and has no answer to learn",
            f"Give `question`, 2 to {len(LETTERS)} `choices`, and `answer`",
        )
    text = {key: str(row.get(key) or "").strip() for key in ("question", "hint", "lecture")}
    return Question(text["question"], choices, answer, text["hint"], text["lecture"], open_image)


def _from_file(path: Path, image_root: str | Path | None, images: bool) -> Iterator[Row]:
    if not path.is_file():
        raise PrivacyConfigError(f"`problems_file={path}` was given", "There is no such file", "Give the path of one")
    try:
        problems = json.loads(path.read_text(encoding="utf-8"))
        rows = [(str(key), row, _SPLITS[row["split"]]) for key, row in problems.items()]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise PrivacyConfigError(
            f"`problems_file={path}` was given",
            "It is not the published JSON: an object of problems by id, each with its `split`",
            "Take `problems.json` as published, or give a dataset (`dataset_name`)",
        ) from error
    root = Path(image_root) if image_root is not None else path.parent / "images"
    for key, row, split in rows:
        name, open_image = row.get("image"), None
        if name is not None and images:
            picture = root / row["split"] / key / name
            if not picture.is_file():
                # not the path: it has the number of a problem
                raise PrivacyConfigError(
                    f"`image_root={root}` was given, and the image of at least one question is not in it",
                    "A question about an image would be asked without it",
                    "Set `image_root` to the folder of the images, or leave images out (`images=False`)",
                )
            open_image = _Open(picture)
        yield split, row, open_image


@dataclass(frozen=True)
class _Open:
    """Opens an image file. Its bytes are read at once: a thousand records must not be a thousand open files."""

    path: Path

    def __call__(self) -> Image.Image:
        return Image.open(io.BytesIO(self.path.read_bytes()))


@dataclass(frozen=True)
class _Decode:
    """Opens the image of one row of a dataset."""

    rows: datasets.Dataset
    index: int

    def __call__(self) -> Image.Image:
        return self.rows[self.index]["image"]


def _from_dataset(name: str) -> Iterator[Row]:
    for split, rows in load_splits(name, instead="a local folder, or the published file (`problems_file`)").items():
        pictures = "image" in rows.column_names and isinstance(rows.features["image"], datasets.Image)
        read = rows.cast_column("image", datasets.Image(decode=False)) if pictures else rows
        alone = rows.select_columns(["image"]) if pictures else rows
        for index, row in enumerate(read):
            if row.get("image") is not None and not pictures:
                raise PrivacyConfigError(
                    f"The dataset `{name}` has a column `image` that is not of images",
                    "Questions about an image would be asked without it",
                    "Cast the column to `datasets.Image`, or remove it",
                )
            yield _SPLITS.get(split, split), row, _Decode(alone, index) if row.get("image") is not None else None


class ScienceQADataset(torch.utils.data.Dataset):
    """Questions as records: the prompt is not supervised, the completion is the letter.

    With a processor that has an image processor, in its chat format and with `images` (for `MultimodalCollator`);
    with a tokenizer, text alone, "Answer:" behind it (for `CompletionCollator`). Token ids are made at once, images
    are opened when a record is asked for.

    Args:
        processing_class: tokenizer or processor. hint, lecture: put them into the prompt.
        max_length: longer records lose words from the start of the prompt.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        processing_class: Any,
        *,
        hint: bool = True,
        lecture: bool = False,
        max_length: int | None = None,
    ):
        self.questions = list(questions)
        self.processing_class = processing_class
        self.max_length, self.hint, self.lecture = max_length, hint, lecture
        self._with_images = hasattr(processing_class, "image_processor")
        self._rows = [self._encode(question, question.answer, self._images(question)) for question in self.questions]

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self._rows[index])
        return {**row, "images": self._images(self.questions[index])} if self._with_images else row

    def choices(self, index: int) -> list[dict[str, Any]]:
        """One record for each choice, with its letter as completion and nothing behind it."""
        question = self.questions[index]
        images = self._images(question)
        extra = {"images": images} if self._with_images else {}
        return [{**self._encode(question, place, images, end=False), **extra} for place in range(len(question.choices))]

    def _images(self, question: Question) -> list[Image.Image]:
        return [question.open_image()] if self._with_images and question.open_image is not None else []

    def _encode(
        self, question: Question, choice: int, images: list[Image.Image], *, end: bool = True
    ) -> dict[str, list[int]]:
        letter = LETTERS[choice]
        if not self._with_images:
            prompt = question.text(hint=self.hint, lecture=self.lecture) + "\nAnswer:"
            return encode_completion(self.processing_class, prompt, f" {letter}", max_length=self.max_length, end=end)
        processor = self.processing_class
        text = question.text(hint=self.hint, lecture=self.lecture, image_token=processor.image_token)
        record = encode_multimodal(
            processor, processor.prompt(text), letter, images, max_length=self.max_length, end=end
        )
        return {key: value for key, value in record.items() if key != "images"}


def letter_accuracy(
    model: nn.Module,
    dataset: ScienceQADataset,
    collate: Callable[[list], Mapping[str, torch.Tensor]],
    *,
    batch_size: int = 8,
) -> float:
    """Fraction of questions whose right letter is the likeliest among those of its choices.

    Args:
        collate: records -> batch. batch_size: questions in a forward pass.
    """
    right, step = 0, 16 * batch_size  # so many images in memory at a time, sorted by length among themselves
    for start in range(0, len(dataset), step):
        some = range(start, min(start + step, len(dataset)))
        scores = choice_log_likelihoods(model, [dataset.choices(i) for i in some], collate, batch_size=batch_size)
        for index, values in zip(some, scores, strict=True):
            right += max(range(len(values)), key=values.__getitem__) == dataset.questions[index].answer
    return right / len(dataset)
