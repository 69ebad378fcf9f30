"""A sequence classifier on the encoder of Switch Transformers, which `transformers` lacks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, SwitchTransformersConfig
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersPreTrainedModel,
    SwitchTransformersStack,
)

__all__ = ["SwitchTransformersForSequenceClassification"]


class SwitchTransformersForSequenceClassification(SwitchTransformersPreTrainedModel):
    """Switch encoder, mean over a record's non-padding tokens, linear head `score` (with bias).

    Loads full Switch checkpoints (`google/switch-base-8` and the like: the decoder and the LM head are left
    out, `score` is newly initialised) as well as encoder-only ones. The head is called `score` because Switch's
    *routers* own a module named `classifier`.

    Example:
        >>> model = SwitchTransformersForSequenceClassification.from_pretrained("google/switch-base-8", num_labels=2)
    """

    _tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}
    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"^lm_head\."]
    # the loss is per record and never divided by a count of the whole batch
    accepts_loss_kwargs = False

    def __init__(self, config: SwitchTransformersConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        encoder_config = copy.deepcopy(config)
        encoder_config.use_cache = False
        encoder_config.is_encoder_decoder = False
        self.encoder = SwitchTransformersStack(encoder_config)
        self.score = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        # Switch's default for a Linear is std = initializer_factor = 1.0, which saturates a fresh head.
        head = getattr(self, "score", None)
        if head is not None and module is head:
            init.normal_(head.weight, mean=0.0, std=0.02)
            init.zeros_(head.bias)
            return
        super()._init_weights(module)
        if isinstance(module, SwitchTransformersForSequenceClassification):
            init.normal_(module.shared.weight, mean=0.0, std=self.config.initializer_factor)

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def set_input_embeddings(self, new_embeddings: nn.Module) -> None:
        self.shared = new_embeddings
        self.encoder.set_input_embeddings(new_embeddings)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput | tuple[torch.Tensor, ...]:
        """Args: input_ids (B, T) int64; attention_mask (B, T), 1 on real tokens; labels (B,) int64, or float for
        regression and multi-label. Returns logits (B, num_labels) and, with labels, the mean loss."""
        hidden = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        ).last_hidden_state
        if attention_mask is None:
            pooled = hidden.mean(1)
        else:
            mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1.0)
        logits = self.score(pooled.to(self.score.weight.dtype))  # a trained head is fp32 on a bf16 encoder
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, logits=logits, pooled_logits=logits, config=self.config)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return SequenceClassifierOutput(loss=loss, logits=logits)


# exist_ok: without it, registering a class of one's own on a native config is silently ignored
AutoModelForSequenceClassification.register(
    SwitchTransformersConfig, SwitchTransformersForSequenceClassification, exist_ok=True
)
