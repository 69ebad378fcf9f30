"""Sequence classifiers of decoder families for which `transformers` has none: a linear head `score` on the last token.

They are `transformers`' own generic classifier on the family's model. The last token is the last one that is not
`config.pad_token_id`, found in each record on its own, so that padding does not move it.

Example:
    >>> model = OlmoeForSequenceClassification.from_pretrained("allenai/OLMoE-1B-7B-0924", num_labels=2)
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.aria.modeling_aria import AriaTextConfig, AriaTextPreTrainedModel
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import (
    DeepseekOcr2PreTrainedModel,
    DeepseekOcr2TextConfig,
    DeepseekOcr2TextModel,
)
from transformers.models.dots1.modeling_dots1 import Dots1Config, Dots1PreTrainedModel
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeConfig, Ernie4_5_MoePreTrainedModel
from transformers.models.flex_olmo.modeling_flex_olmo import FlexOlmoConfig, FlexOlmoPreTrainedModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoePreTrainedModel
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeConfig, GraniteMoePreTrainedModel
from transformers.models.granitemoeshared.modeling_granitemoeshared import (
    GraniteMoeSharedConfig,
    GraniteMoeSharedPreTrainedModel,
)
from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoePreTrainedModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoePreTrainedModel, Qwen3VLMoeTextConfig

__all__ = [
    "AriaTextForSequenceClassification",
    "DeepseekOcr2TextForSequenceClassification",
    "Dots1ForSequenceClassification",
    "Ernie4_5_MoeForSequenceClassification",
    "FlexOlmoForSequenceClassification",
    "Glm4MoeForSequenceClassification",
    "GraniteMoeForSequenceClassification",
    "GraniteMoeSharedForSequenceClassification",
    "OlmoeForSequenceClassification",
    "Qwen3VLMoeTextForSequenceClassification",
]


class _Classifier(GenericForSequenceClassification):
    """transformers' generic classifier, also in float64, which the default of its experts (`grouped_mm`) lacks."""

    @wraps(GenericForSequenceClassification.forward)  # whoever asks which inputs it takes gets the true answer
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # from now on, not for this call alone: checkpointed activations are computed again in the backward pass
        if self.dtype == torch.float64 and self.config._experts_implementation == "grouped_mm":
            self.set_experts_implementation("eager")
        return super().forward(*args, **kwargs)


def _classifier(
    name: str, family: str, pretrained: type[PreTrainedModel], config: type[PreTrainedConfig]
) -> type[PreTrainedModel]:
    """A class called `name`, registered with `AutoModelForSequenceClassification`."""
    body = {
        "__doc__": f"{family} with a linear head on a record's last token.",
        "__module__": __name__,
        "config_class": config,
        # the loss is per record and never divided by a count of the whole batch
        "accepts_loss_kwargs": False,
        # transformers reads the class's own file for the answer, and the experts are in the family's
        "_can_set_experts_implementation": classmethod(lambda _cls: pretrained._can_set_experts_implementation()),
    }
    made = type(name, (_Classifier, pretrained), body)
    # exist_ok: without it, registering a class of one's own on a native config is silently ignored
    AutoModelForSequenceClassification.register(config, made, exist_ok=True)
    return made


AriaTextForSequenceClassification = _classifier(
    "AriaTextForSequenceClassification", "Aria's language model", AriaTextPreTrainedModel, AriaTextConfig
)
# `transformers` builds this language model only as a part of others
AutoModel.register(DeepseekOcr2TextConfig, DeepseekOcr2TextModel, exist_ok=True)
DeepseekOcr2TextForSequenceClassification = _classifier(
    "DeepseekOcr2TextForSequenceClassification",
    "The language model of DeepSeek-OCR 2",
    DeepseekOcr2PreTrainedModel,
    DeepseekOcr2TextConfig,
)
Dots1ForSequenceClassification = _classifier(
    "Dots1ForSequenceClassification", "dots.llm1", Dots1PreTrainedModel, Dots1Config
)
Ernie4_5_MoeForSequenceClassification = _classifier(
    "Ernie4_5_MoeForSequenceClassification", "ERNIE 4.5 MoE", Ernie4_5_MoePreTrainedModel, Ernie4_5_MoeConfig
)
FlexOlmoForSequenceClassification = _classifier(
    "FlexOlmoForSequenceClassification", "FlexOlmo", FlexOlmoPreTrainedModel, FlexOlmoConfig
)
Glm4MoeForSequenceClassification = _classifier(
    "Glm4MoeForSequenceClassification", "GLM-4.5", Glm4MoePreTrainedModel, Glm4MoeConfig
)
GraniteMoeForSequenceClassification = _classifier(
    "GraniteMoeForSequenceClassification", "GraniteMoE", GraniteMoePreTrainedModel, GraniteMoeConfig
)
GraniteMoeSharedForSequenceClassification = _classifier(
    "GraniteMoeSharedForSequenceClassification",
    "GraniteMoE with shared experts",
    GraniteMoeSharedPreTrainedModel,
    GraniteMoeSharedConfig,
)
OlmoeForSequenceClassification = _classifier(
    "OlmoeForSequenceClassification", "OLMoE", OlmoePreTrainedModel, OlmoeConfig
)
Qwen3VLMoeTextForSequenceClassification = _classifier(
    "Qwen3VLMoeTextForSequenceClassification",
    "The language model of Qwen3-VL-MoE",
    Qwen3VLMoePreTrainedModel,
    Qwen3VLMoeTextConfig,
)
