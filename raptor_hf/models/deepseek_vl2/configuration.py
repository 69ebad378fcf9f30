"""Configuration of DeepSeek-VL2 under the key names of the original checkpoints' `config.json`."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig

from raptor_hf.errors import UnsupportedModelError
from raptor_hf.models.deepseek_vl2.text_config import TINY, original_text_values, text_config

__all__ = ["DeepseekVL2Config", "DeepseekVL2ProjectorConfig", "DeepseekVL2VisionConfig"]

# `<image>` in the tokenizer of the checkpoints with this vocabulary (Tiny and the full model).
_IMAGE_TOKEN = {129280: 128815}


class DeepseekVL2VisionConfig(PreTrainedConfig):
    """The vision tower: SigLIP-SO400M at 384 pixels, by default.

    Attributes: width: of the hidden states. mlp_ratio: the MLP is `int(width * mlp_ratio)` wide. The rest of the
    original keys (`model_name`, `global_pool`, ...) is kept and has no effect.
    """

    model_type = "vision"
    base_config_key = "vision_config"

    image_size: int = 384
    patch_size: int = 14
    width: int = 1152
    layers: int = 27
    heads: int = 16
    mlp_ratio: float = 3.7362

    @property
    def grid(self) -> int:
        """Patches along one side of a view."""
        return self.image_size // self.patch_size


class DeepseekVL2ProjectorConfig(PreTrainedConfig):
    """From the vision tower to the language model: r x r patches become one token, through an MLP of `depth` layers."""

    model_type = "mlp_projector"
    base_config_key = "projector_config"

    projector_type: str = "downsample_mlp_gelu"
    input_dim: int = 1152
    n_embed: int = 2048
    depth: int = 2
    mlp_ratio: int | float = 1
    downsample_ratio: int = 2
    token_pooling: bool = False


class DeepseekVL2Config(PreTrainedConfig):
    """Configuration of `DeepseekVL2ForConditionalGeneration`. Original `config.json` files load, and are saved back.

    Without arguments it is that of DeepSeek-VL2-Tiny.

    Attributes:
        language_config: native configuration of the language model (see `text_config`); original keys are taken too.
        vision_config, projector_config: of the vision tower and of what joins the two.
        tile_tag: "2D": the tokens of an image's tiles stand row by row over the whole image, each row ended by
            `image_newline`. global_view_pos: "head": the view of the whole image comes before its tiles.
        candidate_resolutions: (width, height) in pixels that a processor may cut images to.
        image_token_id: id of the placeholder that stands for one image token in `input_ids`.

    Raises:
        UnsupportedModelError: another architecture (DeepSeek-OCR has the same `model_type`), or options that the
            three sizes of DeepSeek-VL2 do not have.
    """

    model_type = "deepseek_vl_v2"
    sub_configs: ClassVar[dict[str, type]] = {  # type: ignore[assignment]
        "language_config": DeepseekOcr2TextConfig,
        "vision_config": DeepseekVL2VisionConfig,
        "projector_config": DeepseekVL2ProjectorConfig,
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    # keys or None when given, configurations afterwards
    language_config: Any = None
    vision_config: Any = None
    projector_config: Any = None
    tile_tag: str = "2D"
    global_view_pos: str = "head"
    candidate_resolutions: list | tuple = ((384, 384),)
    image_token_id: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        vision, projector = self.vision_config or {}, self.projector_config
        if projector is None:
            projector = {"n_embed": TINY["hidden_size"]} if self.language_config is None else {}
        if isinstance(vision, dict) and not isinstance(vision.get("width", 0), int):
            raise UnsupportedModelError(
                f"A vision tower with `width={vision['width']!r}` was given",
                "This is not DeepSeek-VL2: DeepSeek-OCR checkpoints have the same `model_type`, with other towers",
                "Use a DeepSeek-VL2 checkpoint",
            )
        self.language_config = text_config(self.language_config)
        self.vision_config = _sub(DeepseekVL2VisionConfig, vision)
        self.projector_config = _sub(DeepseekVL2ProjectorConfig, projector)
        self.candidate_resolutions = tuple(tuple(int(side) for side in pair) for pair in self.candidate_resolutions)
        self.tie_word_embeddings = self.language_config.tie_word_embeddings
        if self.image_token_id is None:
            self.image_token_id = _IMAGE_TOKEN.get(self.language_config.vocab_size)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = kwargs.pop(name, None)
            setattr(self, name, getattr(self.language_config, name, None) if value is None else value)
        super().__post_init__(**kwargs)
        _check(self)

    # what callers of language models look for on the configuration itself

    @property
    def vocab_size(self) -> int:
        return self.language_config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.language_config.max_position_embeddings

    @property
    def use_cache(self) -> bool:
        return self.language_config.use_cache

    @use_cache.setter
    def use_cache(self, value: bool) -> None:
        self.language_config.use_cache = value

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The language model's configuration."""
        return self.language_config

    @property
    def side(self) -> int:
        """Image tokens along one side of a view: the grid of patches, rounded up to whole r x r squares."""
        return -(-self.vision_config.grid // self.projector_config.downsample_ratio)

    def image_tokens(self, wide: int, high: int) -> int:
        """Placeholders of one image that is cut to `wide` x `high` tiles: s(s + 1) + 1 + high s (wide s + 1)."""
        side = self.side
        return side * (side + 1) + 1 + high * side * (wide * side + 1)

    def to_dict(self) -> dict[str, Any]:
        """As usual, with the original keys alone in the three parts."""
        values = super().to_dict()
        values["language_config"] = original_text_values(self.language_config)
        common = PreTrainedConfig().to_dict()
        for part in self.sub_configs:
            values[part] = {k: v for k, v in values[part].items() if k == "model_type" or k not in common}
        return values


def _sub(kind: type[PreTrainedConfig], values: dict | PreTrainedConfig) -> PreTrainedConfig:
    if isinstance(values, PreTrainedConfig):
        return values
    return kind(**{key: value for key, value in values.items() if key != "model_type"})


def _check(config: DeepseekVL2Config) -> None:
    vision, projector, text = config.vision_config, config.projector_config, config.language_config
    bad = None
    if config.tile_tag != "2D" or config.global_view_pos not in ("head", "tail"):
        bad = f"`tile_tag={config.tile_tag!r}` and `global_view_pos={config.global_view_pos!r}`"
    elif projector.projector_type != "downsample_mlp_gelu" or projector.depth < 2 or projector.token_pooling:
        bad = (
            f"`projector_type={projector.projector_type!r}`, `depth={projector.depth}` and "
            f"`token_pooling={projector.token_pooling}`"
        )
    elif getattr(vision, "class_token", False):
        bad = "`class_token=True` in the vision tower"
    elif vision.width % vision.heads:
        bad = f"`width={vision.width}` in the vision tower, which is no multiple of `heads={vision.heads}`"
    elif projector.input_dim != vision.width or projector.n_embed != text.hidden_size:
        bad = (
            f"`projector_config` from {projector.input_dim} to {projector.n_embed}, between a tower of width "
            f"{vision.width} and a language model of width {text.hidden_size},"
        )
    if bad is not None:
        raise UnsupportedModelError(
            f"A configuration with {bad} was given",
            "No DeepSeek-VL2 has it, and the port does not compute it",
            "Use the `config.json` of DeepSeek-VL2-Tiny, Small or the full one",
        )
