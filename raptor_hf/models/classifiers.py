"""Sequence classifiers of decoder families for which `transformers` has none: a linear head `score` on the last token.

They are `transformers`' own generic classifier on the family's model. The last token is the last one that is not
`config.pad_token_id`, found in each record on its own, so that padding does not move it.
"""

from __future__ import annotations

from transformers import AutoModelForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification
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

__all__ = [
    "Dots1ForSequenceClassification",
    "Ernie4_5_MoeForSequenceClassification",
    "FlexOlmoForSequenceClassification",
    "Glm4MoeForSequenceClassification",
    "GraniteMoeForSequenceClassification",
    "GraniteMoeSharedForSequenceClassification",
    "OlmoeForSequenceClassification",
]


class OlmoeForSequenceClassification(GenericForSequenceClassification, OlmoePreTrainedModel):
    """OLMoE with a linear head on a record's last token.

    Example:
        >>> model = OlmoeForSequenceClassification.from_pretrained("allenai/OLMoE-1B-7B-0924", num_labels=2)
    """

    # the loss is per record and never divided by a count of the whole batch
    accepts_loss_kwargs = False


class FlexOlmoForSequenceClassification(GenericForSequenceClassification, FlexOlmoPreTrainedModel):
    """FlexOlmo with a linear head on a record's last token."""

    accepts_loss_kwargs = False


class Dots1ForSequenceClassification(GenericForSequenceClassification, Dots1PreTrainedModel):
    """dots.llm1 with a linear head on a record's last token."""

    accepts_loss_kwargs = False


class Ernie4_5_MoeForSequenceClassification(GenericForSequenceClassification, Ernie4_5_MoePreTrainedModel):
    """ERNIE 4.5 MoE with a linear head on a record's last token."""

    accepts_loss_kwargs = False


class Glm4MoeForSequenceClassification(GenericForSequenceClassification, Glm4MoePreTrainedModel):
    """GLM-4.5 with a linear head on a record's last token."""

    accepts_loss_kwargs = False


class GraniteMoeForSequenceClassification(GenericForSequenceClassification, GraniteMoePreTrainedModel):
    """GraniteMoE with a linear head on a record's last token."""

    accepts_loss_kwargs = False


class GraniteMoeSharedForSequenceClassification(GenericForSequenceClassification, GraniteMoeSharedPreTrainedModel):
    """GraniteMoE with shared experts, and a linear head on a record's last token."""

    accepts_loss_kwargs = False


for _config, _model in (
    (OlmoeConfig, OlmoeForSequenceClassification),
    (FlexOlmoConfig, FlexOlmoForSequenceClassification),
    (Dots1Config, Dots1ForSequenceClassification),
    (Ernie4_5_MoeConfig, Ernie4_5_MoeForSequenceClassification),
    (Glm4MoeConfig, Glm4MoeForSequenceClassification),
    (GraniteMoeConfig, GraniteMoeForSequenceClassification),
    (GraniteMoeSharedConfig, GraniteMoeSharedForSequenceClassification),
):
    # exist_ok: without it, registering a class of one's own on a native config is silently ignored
    AutoModelForSequenceClassification.register(_config, _model, exist_ok=True)
