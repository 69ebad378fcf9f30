"""Text with images for DeepSeek-VL2: the chat format, and one placeholder token for each image feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoProcessor, BatchFeature
from transformers.processing_utils import ProcessorMixin

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.models.deepseek_vl2.configuration import DeepseekVL2Config
from raptor_hf.models.deepseek_vl2.image_processing import DeepseekVL2ImageProcessor, Size, stack_views

__all__ = ["CHAT_TEMPLATE", "DeepseekVL2Processor"]

USER, ASSISTANT = "<|User|>", "<|Assistant|>"
_PAD = "<｜▁pad▁｜>"  # of the published tokenizer
_SFT_FORMAT = "deepseek"

# "{role}: {text}" with a blank line behind the user's part and the end-of-sequence token behind the assistant's
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set content %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% endset %}"
    "{% if message['role'] == 'system' %}{{ content | trim + '\\n\\n' }}"
    "{% elif message['role'] == 'user' %}{{ '" + USER + ": ' + content | trim + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '" + ASSISTANT + ": ' + content | trim + eos_token }}"
    "{% else %}{{ raise_exception('Roles are system, user and assistant') }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + ":' }}{% endif %}"
)


class DeepseekVL2Processor(ProcessorMixin):
    """A tokenizer and an image processor behind one call.

    `from_pretrained` of this class loads published checkpoints too; `AutoProcessor` does where `save_pretrained` wrote
    the files (published ones name a class of their own code, and it would give their tokenizer alone).

    Tokens that the tokenizer lacks (`image_token`, the two roles, padding) are added to it: make the model's
    embeddings at least `len(processor.tokenizer)` rows. Padding is on the right.

    Args:
        image_processor: None: one for the published sizes. tokenizer: any.
        chat_template: None: the format of the published models. image_token: stands for one image in a text.
        sft_format: name of the chat format in published processors; only "deepseek" is known.
    """

    def __init__(
        self,
        image_processor: DeepseekVL2ImageProcessor | None = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        image_token: str = "<image>",
        sft_format: str = _SFT_FORMAT,
    ):
        if tokenizer is None:
            raise PrivacyConfigError("No tokenizer was given", "There is no text without one", "Pass `tokenizer`")
        if sft_format != _SFT_FORMAT:
            raise PrivacyConfigError(
                f"`sft_format={sft_format!r}` was given",
                "Prompts would have another form than those the model was trained on",
                f"Use {_SFT_FORMAT!r}, or pass a `chat_template` of your own",
            )
        known = tokenizer.get_vocab()
        tokenizer.add_tokens([t for t in (image_token, USER, ASSISTANT) if t not in known], special_tokens=True)
        if tokenizer.pad_token is None:
            tokenizer.add_special_tokens({"pad_token": _PAD})
        tokenizer.padding_side = "right"
        self.image_token, self.sft_format = image_token, sft_format
        self.image_token_id = int(tokenizer.convert_tokens_to_ids(image_token))
        if self.image_token_id == tokenizer.pad_token_id:
            raise PrivacyConfigError(
                f"The tokenizer pads with {image_token!r}",
                "Padding would be taken for images",
                "Give it a padding token of its own",
            )
        super().__init__(
            image_processor or DeepseekVL2ImageProcessor(), tokenizer, chat_template=chat_template or CHAT_TEMPLATE
        )

    @classmethod
    def _get_arguments_from_pretrained(
        cls, pretrained_model_name_or_path: Any, processor_dict: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        """The image processor from `processor_config.json`, where published checkpoints have its settings unnested."""
        settings = dict(processor_dict or {})
        if "image_processor" in settings:
            images = DeepseekVL2ImageProcessor.from_dict(dict(settings["image_processor"]))
        else:
            names = ("candidate_resolutions", "patch_size", "downsample_ratio", "image_mean", "image_std")
            missing = [name for name in names[:3] if name not in settings]
            if missing:
                raise PrivacyConfigError(
                    f"`{pretrained_model_name_or_path}` has no `{missing[0]}` in its `processor_config.json`",
                    "How an image is cut, and how many tokens stand for it, cannot be told",
                    "Load the processor of a DeepSeek-VL2 checkpoint, or make one from its parts",
                )
            given = {name: settings[name] for name in names if name in settings}
            images = DeepseekVL2ImageProcessor(**given, do_normalize=settings.get("normalize", True))
        return [images, cls._load_tokenizer_from_pretrained("tokenizer", pretrained_model_name_or_path, **kwargs)]

    # ---- Text ----

    @property
    def kept_ids(self) -> frozenset[int]:
        """Tokens that must stay when a long record is cut: of images, of roles, and the first one."""
        ids = {self.image_token_id, *self.tokenizer.convert_tokens_to_ids([USER, ASSISTANT])}
        return frozenset(ids | {self.tokenizer.bos_token_id} - {None})

    def prompt(self, text: str) -> str:
        """One question of the user in the chat format, up to where the answer begins."""
        return self.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)

    def token_ids(self, text: str, crops: Sequence[Size] = (), *, begin: bool = True) -> list[int]:
        """Token ids of one record: each `<image>` of the text becomes the placeholders of one image.

        Args:
            crops: tiles wide and high of each image (`image_processor.crops`).
            begin: start with the tokenizer's beginning-of-sequence token, if it has one.

        Raises:
            PrivacyConfigError: not as many images as `<image>` in the text.
        """
        parts = text.split(self.image_token)
        if len(parts) - 1 != len(crops):
            raise PrivacyConfigError(
                f"A text was given whose `{self.image_token}` are not as many as its images",
                "Each placeholder takes the features of one image: the record would be trained on another picture, or "
                "on none",
                f"Write `{self.image_token}` once for every image, and nowhere else",
            )
        ids = [] if not begin or self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        for place, part in enumerate(parts):
            if place:
                ids += [self.image_token_id] * self.image_processor.num_image_tokens(crops[place - 1])
            # piece by piece, as the published models were trained: no token spans an image
            ids += self.tokenizer(part, add_special_tokens=False)["input_ids"]
        return ids

    # ---- Records ----

    stack_views = staticmethod(stack_views)

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        videos: None = None,
        audio: None = None,
        *,
        add_special_tokens: bool = True,
        return_tensors: str | None = "pt",
    ) -> BatchFeature:
        """A batch for `model.forward` or `model.generate`: one row a text, padded on the right.

        Args:
            images: of a single text, an image or a list of them; of several texts, one list for each.
            text: formatted (see `prompt`, `apply_chat_template`), with an `<image>` for each image.
            add_special_tokens: begin each row with the beginning-of-sequence token.

        Returns:
            `input_ids`, `attention_mask` (b, T), `pixel_values` (b, V, 3, S, S), `spatial_crop` (b, I, 2).
        """
        if videos is not None or audio is not None or text is None or return_tensors != "pt":
            raise PrivacyConfigError(
                "No text, or video, sound or another kind of tensors than \"pt\" was asked for",
                "The model takes text and images, as torch tensors",
                "Pass `text`, `images` or both",
            )  # fmt: skip
        texts = [text] if isinstance(text, str) else list(text)
        viewed = [self.image_processor.views(some) for some in _per_text(images, len(texts))]
        crops = [[(wide, high) for wide, high in crop.tolist()] for _, crop in viewed]
        rows = [self.token_ids(t, c, begin=add_special_tokens) for t, c in zip(texts, crops, strict=True)]
        width = max([1, *(len(row) for row in rows)])
        pad = self.tokenizer.pad_token_id
        return BatchFeature(
            {
                "input_ids": torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
                "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
                **stack_views([values for values, _ in viewed], [crop for _, crop in viewed]),
            }
        )

    @property
    def model_input_names(self) -> list[str]:
        """What a batch consists of."""
        return ["input_ids", "attention_mask", "pixel_values", "spatial_crop"]


def _per_text(images: Any, texts: int) -> list[list[Any]]:
    """The images of each text."""
    if images is None:
        return [[] for _ in range(texts)]
    listed = list(images) if isinstance(images, (list, tuple)) else [images]
    if listed and all(isinstance(some, (list, tuple)) for some in listed):
        if len(listed) == texts:
            return [list(some) for some in listed]
    elif texts == 1 and not any(isinstance(some, (list, tuple)) for some in listed):
        return [listed]
    raise PrivacyConfigError(
        "`images` were given that are not one list for each text",
        "Which image belongs to which record cannot be told",
        "Give one list of images for each text",
    )


AutoProcessor.register(DeepseekVL2Config, DeepseekVL2Processor, exist_ok=True)
