"""Opacus on the shared stream's work: LoRA (stock PEFT) on attention plus the head, experts frozen.

Only the shared stream can be compared: on the routed experts of a Switch layer Opacus keeps one gradient row for every
routed *token* instead of every record, and clips tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import peft
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from torch import nn

__all__ = ["opacus_variants"]


def _peft_model(base: nn.Module, rank: int) -> nn.Module:
    config = peft.LoraConfig(
        r=rank, lora_alpha=rank, target_modules=["q", "k", "v", "o"], modules_to_save=["score"], lora_dropout=0.0
    )
    return peft.get_peft_model(copy.deepcopy(base), config).train()


def opacus_variants(base: nn.Module, batch: dict[str, torch.Tensor], rank: int) -> dict[str, Callable[[], None]]:
    """variant -> one micro-batch: per-sample gradients, clipping at 1, clipped sum, without noise."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}

    def losses(model: nn.Module) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")

    hooked = GradSampleModule(_peft_model(base, rank), loss_reduction="sum", strict=False)

    def hooks() -> None:
        losses(hooked).sum().backward()
        samples = [p.grad_sample for p in hooked.parameters() if p.requires_grad]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in samples]).norm(dim=0)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for sample in samples:
            torch.einsum("i,i...", factors, sample)
        hooked.zero_grad(set_to_none=True)
        for parameter in hooked.parameters():
            if parameter.requires_grad:
                parameter.grad_sample = None

    ghosted = GradSampleModuleFastGradientClipping(
        _peft_model(base, rank), loss_reduction="sum", strict=False, max_grad_norm=1.0, use_ghost_clipping=True
    )

    def ghost() -> None:
        per_record = losses(ghosted)
        per_record.sum().backward(retain_graph=True)
        ghosted.zero_grad(set_to_none=True)
        factors = ghosted.get_clipping_coef()
        ghosted.disable_hooks()
        (factors * per_record).sum().backward()
        ghosted.enable_hooks()
        ghosted.zero_grad(set_to_none=True)

    return {"opacus hooks": hooks, "opacus ghost": ghost}
