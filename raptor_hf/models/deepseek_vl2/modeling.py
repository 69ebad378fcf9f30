"""DeepSeek-VL2 on the native DeepSeek language models of `transformers`.

Shapes: b records of T tokens, V views of S x S pixels a record (zeros where it has fewer), I images a record, H the
width of the language model. Everything that is computed of a record's images comes from its own views: the vision
tower runs record by record, and each record's placeholders are counted against its own crops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2TextConfig, DeepseekOcr2TextModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2Model
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3Model

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.models.deepseek_vl2.configuration import DeepseekVL2Config
from raptor_hf.models.deepseek_vl2.vision import DeepseekVL2Projector, DeepseekVL2VisionTower

__all__ = ["DeepseekVL2ForConditionalGeneration"]

_TEXT_MODELS = {
    DeepseekOcr2TextConfig: DeepseekOcr2TextModel,
    DeepseekV2Config: DeepseekV2Model,
    DeepseekV3Config: DeepseekV3Model,
}
_FROZEN = ("vision.", "projector.", "image_newline", "view_seperator")
_IMAGES = ("pixel_values", "spatial_crop", "image_embeds")


class _Language(nn.Module):
    """Holds the language model and its head under the original names, `language.model` and `language.lm_head`."""

    def __init__(self, config: Any):
        super().__init__()
        self.model = _TEXT_MODELS[type(config)](config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class DeepseekVL2ForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """Vision tower, projector, and a DeepSeek language model with its head; original checkpoints load.

    Views of a record, in `pixel_values`: for each image the global view, then its tiles row by row. Placeholders of an
    image in `input_ids`: `config.image_tokens(wide, high)` times `config.image_token_id`, in a row or not.

    Example:
        >>> model = DeepseekVL2ForConditionalGeneration.from_pretrained("deepseek-ai/deepseek-vl2-tiny")
    """

    config_class = DeepseekVL2Config
    base_model_prefix = ""
    main_input_name = "input_ids"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = [
        "DeepseekOcr2TextDecoderLayer",
        "DeepseekV2DecoderLayer",
        "DeepseekV3DecoderLayer",
        "DeepseekVL2VisionBlock",
    ]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _tied_weights_keys = {"language.lm_head.weight": "language.model.embed_tokens.weight"}
    # the pooling head of SigLIP, which the original model holds and never uses
    _keys_to_ignore_on_load_unexpected = [r"^vision\.attn_pool\."]
    # the loss is per record and never divided by a count of the whole batch
    accepts_loss_kwargs = False

    def __init__(self, config: DeepseekVL2Config):
        super().__init__(config)
        self.vision = DeepseekVL2VisionTower(config.vision_config)
        self.projector = DeepseekVL2Projector(config.projector_config)
        width = config.projector_config.n_embed
        self.image_newline = nn.Parameter(torch.empty(width))
        self.view_seperator = nn.Parameter(torch.empty(width))  # spelt as in the checkpoints
        self.language = _Language(config.language_config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DeepseekVL2VisionTower):
            init.normal_(module.pos_embed, std=0.02)
        elif isinstance(module, DeepseekVL2ForConditionalGeneration):
            for parameter in (module.image_newline, module.view_seperator):
                init.normal_(parameter, std=parameter.shape[0] ** -0.5)

    def get_input_embeddings(self) -> nn.Module:
        return self.language.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.language.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.language.lm_head = new_embeddings

    def get_decoder(self) -> nn.Module:
        return self.language.model

    def set_experts_implementation(self, experts_implementation: Any) -> None:
        """Of the language model; on a class outside `transformers` the inherited method would do nothing."""
        self.language.model.set_experts_implementation(experts_implementation)

    # ------------------------------------------------------------------ images

    def _image_features(self, pixel_values: torch.Tensor, crops: list[tuple[int, int]]) -> torch.Tensor:
        """The image tokens (n, H) of one record, in the order of its placeholders.

        Args:
            pixel_values: (V, 3, S, S) of this record. crops: (tiles wide, tiles high) of each of its images.
        """
        used = sum(1 + wide * high for wide, high in crops)
        views = self.projector(self.vision(pixel_values[:used].to(self.vision.pos_embed)))  # (used, side, side, H)
        parts, first = [], 0
        for wide, high in crops:
            tiles = views[first + 1 : first + 1 + wide * high].unflatten(0, (high, wide))
            mosaic = tiles.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)  # (high side, wide side, H)
            separator = self.view_seperator[None].to(views)
            ordered = [self._with_newlines(views[first]), separator, self._with_newlines(mosaic)]
            parts += ordered if self.config.global_view_pos == "head" else ordered[::-1]
            first += 1 + wide * high
        return torch.cat(parts)

    def _with_newlines(self, grid: torch.Tensor) -> torch.Tensor:
        """(rows, columns, H) -> (rows (columns + 1), H): each row ends with `image_newline`."""
        return torch.cat([grid, self.image_newline.to(grid).expand(len(grid), 1, -1)], dim=1).flatten(0, 1)

    def _image_embeds(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None, spatial_crop: torch.Tensor | None
    ) -> torch.Tensor:
        """(b, T, H): the image tokens at the placeholders, zero elsewhere. Record by record."""
        marked = self._placeholders(input_ids)
        rows = []
        for record, images in enumerate(self._crops(marked, pixel_values, spatial_crop)):
            row = self.image_newline.new_zeros(input_ids.shape[1], self.image_newline.shape[0])
            if images:
                assert pixel_values is not None
                features = self._image_features(pixel_values[record], images).to(row)
                row = row.masked_scatter(marked[record, :, None], features)
            rows.append(row)
        return torch.stack(rows)

    def _placeholders(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(b, T) bool."""
        token = self.config.image_token_id
        return torch.zeros_like(input_ids, dtype=torch.bool) if token is None else input_ids == token

    def _crops(
        self, marked: torch.Tensor, pixel_values: torch.Tensor | None, spatial_crop: torch.Tensor | None
    ) -> list[list[tuple[int, int]]]:
        """The crops of each record's images, after a check of views and placeholders, record by record.

        Raises:
            PrivacyConfigError: a record has another number of placeholders than its crops ask for, or too few views.
                The message tells neither which record, nor any number of it.
        """
        if (pixel_values is None) != (spatial_crop is None):
            raise PrivacyConfigError(
                "Only one of `pixel_values` and `spatial_crop` was given",
                "Which views belong to which record's images cannot be told",
                "Pass both, or neither for text alone",
            )
        rows = [[] for _ in marked] if spatial_crop is None else spatial_crop.tolist()
        # no message here has a number: which record it is, how many were drawn and what they hold is private
        given = {"pixel_values": pixel_values, "spatial_crop": spatial_crop}
        wrong = [name for name, value in given.items() if value is not None and len(value) != len(marked)]
        if wrong:
            raise PrivacyConfigError(
                f"`{wrong[0]}` was given with another number of rows than `input_ids`",
                "Images would be put into other records than their own",
                "Pass `pixel_values` (b, V, 3, S, S) and `spatial_crop` (b, I, 2), one row a record",
            )
        found: list[list[tuple[int, int]]] = []
        views = 0 if pixel_values is None else pixel_values.shape[1]
        for row, count in zip(rows, marked.sum(-1).tolist(), strict=True):
            images = [(int(wide), int(high)) for wide, high in row if (wide, high) != (0, 0)]
            if any(wide < 1 or high < 1 for wide, high in images):
                raise PrivacyConfigError(
                    "A record was given with a crop in `spatial_crop` that has tiles in one direction only, or fewer "
                    "than none",
                    "An image has at least one tile in each direction; (0, 0) means no image",
                    "Take `spatial_crop` from the processor as it is",
                )
            if sum(1 + wide * high for wide, high in images) > views:
                raise PrivacyConfigError(
                    "A record was given with fewer views in `pixel_values` than its crops in `spatial_crop` make",
                    "Views of nobody, or of another record, would take their place",
                    "Pad `pixel_values` with zeros to the most views of a record, and cut none",
                )
            if sum(self.config.image_tokens(wide, high) for wide, high in images) != count:
                raise PrivacyConfigError(
                    "A record was given whose image placeholders in `input_ids` are not as many as its images make "
                    "tokens",
                    "Image tokens put at other positions than their own would shift, also into other records",
                    "Truncate no record inside an image; the number is `config.image_tokens(wide, high)` for each",
                )
            found.append(images)
        return found

    def frozen_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`embed_images`, of a model whose image tokens depend on nothing trainable.

        For per-sample gradient engines, which cannot follow control flow over crops.

        Raises:
            PrivacyConfigError: see `forward`; or the vision tower or projector is trainable.
        """
        if "image_embeds" in batch or "input_ids" not in batch:
            return dict(batch)
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and name.startswith(_FROZEN):
                raise PrivacyConfigError(
                    f"`{name}` is trainable",
                    "Image tokens are computed once, without gradient: it would be trained on noise alone, and budget "
                    "be spent for nothing",
                    "Leave vision tower and projector out of `shared_target_modules`, and freeze them",
                )
        return self.embed_images(batch)

    def embed_images(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch with `image_embeds` (b, T, H) in the place of its images, without gradient.

        Record by record: a record's row is a function of that record and of the weights alone.
        """
        if "image_embeds" in batch or "input_ids" not in batch:
            return dict(batch)
        rest = {key: value for key, value in batch.items() if key not in _IMAGES}
        with torch.no_grad():
            embeds = self._image_embeds(batch["input_ids"], batch.get("pixel_values"), batch.get("spatial_crop"))
        return {**rest, "image_embeds": embeds}

    # ------------------------------------------------------------------ text

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        spatial_crop: torch.LongTensor | None = None,
        image_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast | tuple:
        """Next-token logits, and with labels their mean cross entropy.

        Args:
            input_ids: (b, T) int64. attention_mask: (b, T), 1 on real tokens, padded on the right in training.
            labels: (b, T) int64, -100 where not supervised.
            pixel_values: (b, V, 3, S, S); spatial_crop: (b, I, 2) int64, (tiles wide, tiles high) of each image,
                (0, 0) for none. Neither: text alone.
            image_embeds: (b, T, H), from `frozen_inputs`, instead of these two.
            logits_to_keep: of the last so many positions alone (0: all).
            **kwargs: for the language model: the cache, ...

        Raises:
            PrivacyConfigError: a record's placeholders or views are not those that its crops ask for.
        """
        if inputs_embeds is None:
            if input_ids is None:
                raise ValueError("Pass `input_ids` or `inputs_embeds`.")
            inputs_embeds = self.get_input_embeddings()(input_ids)
            if image_embeds is None and not _goes_on(kwargs):
                image_embeds = self._image_embeds(input_ids, pixel_values, spatial_crop)
            if image_embeds is not None:
                marked = self._placeholders(input_ids).unsqueeze(-1)
                inputs_embeds = torch.where(marked, image_embeds.to(inputs_embeds), inputs_embeds)
        outputs = self.language.model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.language.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        passed = {key: value for key, value in outputs.items() if key in ("cache", "past_key_values")}
        found = MoeCausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions, **passed
        )
        return found.to_tuple() if return_dict is False else found

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As usual; after the first step the images are in the cache and are not read again."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if _goes_on(inputs):
            inputs = {key: value for key, value in inputs.items() if key not in _IMAGES}
        return inputs


def _goes_on(kwargs: Mapping[str, Any]) -> bool:
    """Does a cache hold the tokens before, images among them?"""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    return cache is not None and cache.get_seq_length() > 0


# exist_ok: a later transformers may have the type itself; this package's class is what its engines know
AutoConfig.register(DeepseekVL2Config.model_type, DeepseekVL2Config, exist_ok=True)
AutoModelForImageTextToText.register(DeepseekVL2Config, DeepseekVL2ForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(DeepseekVL2Config, DeepseekVL2ForConditionalGeneration, exist_ok=True)
