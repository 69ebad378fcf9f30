"""A tiny tokenizer, images drawn on the spot, and what the processor should make of them, computed another way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = ["What is in the picture? A cat, a dog or a bird.", "Which letter is right? A. one B. two C. three", "User: yes"]


def tiny_tokenizer(texts: Sequence[str] = TEXT, **special: str) -> PreTrainedTokenizerFast:
    """Byte-level, so that it can write any text; with special tokens as named, e.g. `eos_token="</s>"`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(special.values()), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def drawn(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Noise with a line and a circle over it."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    pen = ImageDraw.Draw(image)
    pen.line((0, 0, width, height), fill=(250, 10, 20), width=3)
    pen.ellipse((width // 4, height // 4, 3 * width // 4, 3 * height // 4), outline=(5, 200, 90))
    if mode == "RGBA":
        image.putalpha(Image.fromarray(rng.integers(0, 256, (height, width), dtype=np.uint8)))
    return image if image.mode == mode else image.convert(mode)
