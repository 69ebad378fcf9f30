"""What the benchmarks run: models of random weights (the bundled one has its own), records, and their adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForSequenceClassification, OlmoeConfig, SwitchTransformersConfig

from raptor_hf import SwitchTransformersForSequenceClassification, attach_adapters, stream_parameters
from raptor_hf.assets import tiny_switch_path

__all__ = ["JOBS", "Job", "Records", "attach", "olmoe", "share_weights", "switch"]


def bundled() -> nn.Module:
    return SwitchTransformersForSequenceClassification.from_pretrained(
        tiny_switch_path(), num_labels=2, dtype=torch.float32
    )


def switch(width: int, *, blocks: int, experts: int = 8, capacity: int = 64, vocabulary: int = 1000) -> nn.Module:
    """A Switch encoder with a classifier: every second block sparse, feed-forward layers four times as wide."""
    config = SwitchTransformersConfig(
        vocab_size=vocabulary, d_model=width, d_kv=min(64, width // 2), d_ff=4 * width, num_heads=max(2, width // 64),
        num_layers=blocks, num_sparse_encoder_layers=blocks // 2, num_decoder_layers=2, num_sparse_decoder_layers=1,
        num_experts=experts, expert_capacity=capacity, dropout_rate=0.0, router_jitter_noise=0.0, num_labels=2,
        pad_token_id=0,
    )  # fmt: skip
    return SwitchTransformersForSequenceClassification(config)


def olmoe(hidden: int, *, layers: int, experts: int, top_k: int) -> nn.Module:
    """An OLMoE decoder with a classifier."""
    config = OlmoeConfig(
        vocab_size=1000, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64), num_key_value_heads=max(2, hidden // 64), num_experts=experts,
        num_experts_per_tok=top_k, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


@dataclass(frozen=True)
class Job:
    """A model, and the micro-batch that it is given.

    Attributes:
        make: () -> the base model. records, tokens: b and T of a micro-batch. rank: of raptor's adapters.
        monolithic_rank: of LoRA on all experts of all layers (the paper's counts: a quarter of raptor's rank).
        repeats: how often at most (the large ones are slow).
    """

    name: str
    make: Callable[[], nn.Module]
    records: int
    tokens: int
    rank: int
    repeats: int = 99

    @property
    def monolithic_rank(self) -> int:
        return max(1, self.rank // 4)

    @property
    def label(self) -> str:
        return f"{self.name} (b={self.records}, T={self.tokens}, r={self.rank})"


JOBS: dict[str, Job] = {
    job.name: job
    for job in (
        Job("bundled-switch", bundled, 64, 32, 16),
        Job("switch-768x4", partial(switch, 768, blocks=4), 8, 128, 128),
        Job("switch-768x12", partial(switch, 768, blocks=12, vocabulary=32128), 8, 128, 128, repeats=2),
        Job("olmoe-256x4", partial(olmoe, 256, layers=4, experts=16, top_k=4), 4, 32, 16),
        Job("smoke-switch", partial(switch, 16, blocks=2, experts=4), 3, 8, 4),
        Job("smoke-olmoe", partial(olmoe, 16, layers=2, experts=4, top_k=2), 3, 8, 4),
    )
}


@dataclass(frozen=True)
class Records:
    """A micro-batch of random records without padding, and their owners (b,)."""

    batch: dict[str, torch.Tensor]
    owner: torch.Tensor

    @classmethod
    def draw(cls, model: nn.Module, count: int, tokens: int, device: torch.device | str = "cpu") -> Records:
        experts = model.config.num_experts
        batch = {
            "input_ids": torch.randint(3, model.config.vocab_size, (count, tokens)),
            "attention_mask": torch.ones(count, tokens, dtype=torch.long),
            "labels": torch.randint(0, 2, (count,)),
        }
        return cls({k: v.to(device) for k, v in batch.items()}, torch.randint(0, experts, (count,)).to(device))

    def __len__(self) -> int:
        return self.owner.shape[0]


def share_weights(model: nn.Module) -> nn.Module:
    """A copy that shares all weights but the head's, which is trained."""
    return copy.deepcopy(model, {id(p): p for name, p in model.named_parameters() if not name.startswith("score")})


def attach(
    base: nn.Module, rank: int, *, monolithic: bool = False, targets: list[str] | None = None
) -> tuple[nn.Module, Mapping[str, Mapping[str, nn.Parameter]]]:
    """Raptor's adapters on a copy of `base` (on the experts of the last sparse layer, or of all), in training mode."""
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
    model = attach_adapters(share_weights(base), config, "last", all_layers=monolithic)
    return model.train(), stream_parameters(model)
