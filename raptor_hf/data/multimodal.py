"""Prompts with images, and completions: records for supervised fine-tuning of vision-language models, and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raptor_hf.data.completion import IGNORED, CompletionCollator, encode_completion
from raptor_hf.errors import PrivacyConfigError

__all__ = ["MultimodalCollator", "encode_multimodal"]


@dataclass(frozen=True)
class _Tokens:
    """The tokenizer of one record: its prompt gets the placeholders of its images, its completion none."""

    processor: Any
    crops: Sequence[tuple[int, int]]

    @property
    def eos_token_id(self) -> int | None:
        return self.processor.tokenizer.eos_token_id

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        if add_special_tokens:
            return {"input_ids": self.processor.token_ids(text, self.crops)}
        return {"input_ids": self.processor.token_ids(text, begin=False)}


def encode_multimodal(
    processor: Any,
    prompt: str,
    completion: str,
    images: Sequence[Any] = (),
    *,
    max_length: int | None = None,
    end: bool = True,
) -> dict[str, Any]:
    """One record: `input_ids`, `attention_mask`, `labels` (-100 on the prompt and its images), and its `images`.

    The images stay as they are, and only their sizes are read: `MultimodalCollator` cuts them when a batch is made.

    Args:
        processor: of the model, e.g. `DeepseekVL2Processor`. prompt: formatted (`processor.prompt`), with the image
            token once for each image.
        max_length: longer records lose words from the start of the prompt, but no image and no role.
        end: close the completion with the end-of-sequence token.

    Raises:
        PrivacyConfigError: another number of images than the prompt has, an image in the completion, or more tokens
            than `max_length` for the images alone.
    """
    crops = processor.image_processor.crops_of(images)
    record: dict[str, Any] = encode_completion(
        _Tokens(processor, crops), prompt, completion, max_length=max_length, end=end, keep=processor.kept_ids
    )
    if max_length is not None and len(record["input_ids"]) > max_length:
        raise PrivacyConfigError(
            f"A record whose images alone take more than {max_length} tokens was given",
            "It cannot be cut inside an image: the model would see parts of it at wrong places",
            "Raise `max_length`, or give fewer or smaller images",
        )
    return {**record, "images": list(images)}


@dataclass
class MultimodalCollator:
    """Pads token rows on the right, cuts the images of each record into views, and stacks: one row a record.

    Each row is a function of its own record. `labels` are -100 on padding and on image tokens, whatever the record
    says. A record without tokens becomes one padding token; without a supervised token its loss and gradient are
    zero; without images its views are zeros (as many as the batch has).

    Attributes:
        processor: of the model, e.g. `DeepseekVL2Processor`.
        max_length: refuse longer records (the model's limit), images included.

    Raises:
        PrivacyConfigError: a record that has another number of image tokens than its images make, that is a packed row
            of several records, or that is too long. All records are looked at before the first update.

    Keep `remove_unused_columns=False` in the config: models have no argument `images`.
    """

    processor: Any
    max_length: int | None = None

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """`input_ids`, `attention_mask`, `labels` (b, T), `pixel_values` (b, V, 3, S, S), `spatial_crop` (b, I, 2)."""
        tokens = CompletionCollator(self.processor.tokenizer.pad_token_id, self.max_length)
        batch = tokens(records)
        viewed = [self._views(record) for record in records]
        image_token = self.processor.image_token_id
        batch["labels"] = batch["labels"].masked_fill(batch["input_ids"] == image_token, IGNORED)
        return {**batch, **self.processor.stack_views([v for v, _ in viewed], [c for _, c in viewed])}

    def _views(self, record: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        images = self.processor.image_processor
        views, crops = images.views(record.get("images") or [])
        expected = sum(images.num_image_tokens((wide, high)) for wide, high in crops.tolist())
        found = sum(int(token) == self.processor.image_token_id for token in record["input_ids"])
        if found != expected:
            raise PrivacyConfigError(
                "A record was given whose image tokens are not as many as its images make",
                "Image features would be put at the places of others, or words be taken for an image",
                "Make records with `encode_multimodal`, and set `remove_unused_columns=False`, so that `images` reach "
                "the collator",
            )
        return views, crops
