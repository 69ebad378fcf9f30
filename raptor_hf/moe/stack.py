"""The constants of one sparse layer's experts, and their products with the tokens of one expert or of several.

Shapes: N tokens, H hidden, P first projection's outputs (2F with a gated activation), F the activation's outputs,
E experts, r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from raptor_hf.moe.grouped import Group, grouped_mm

__all__ = ["ExpertStack", "StackedLora"]


class StackedLora(torch.nn.Module):
    """LoRA of one projection for all E experts of a layer: `lora_A` (E, r, in) and `lora_B` (E, out, r), fp32.

    `A` starts Kaiming-uniform as in PEFT and `B` at zero, so that fresh adapters change nothing.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, rank: int, scaling: float):
        super().__init__()
        self.scaling = scaling
        self.lora_A = torch.nn.Parameter(torch.empty(num_experts, rank, in_features))
        self.lora_B = torch.nn.Parameter(torch.zeros(num_experts, out_features, rank))
        for expert in range(num_experts):
            torch.nn.init.kaiming_uniform_(self.lora_A.data[expert], a=5**0.5)


Weights: TypeAlias = "tuple[torch.Tensor, ...] | torch.Tensor"
"""E matrices, or one tensor (E, out, in)."""


@dataclass(frozen=True)
class ExpertStack:
    """The constants of one sparse layer's experts, as the kernel reads them.

    Attributes:
        first: E weights (P, H). second: E weights (H, F). activation: (.., P) -> (.., F), row by row.
        biases: (E, P) and (E, H), or None.
        adapters: `((A1, B1), (A2, B2))` stacked over experts as in `StackedLora`, or None.
        scaling: LoRA's alpha / r.
        grouped: the kernel takes the tokens of all experts together (`moe.grouped`); the weights are then tensors.
    """

    first: Weights
    second: Weights
    activation: Callable[[torch.Tensor], torch.Tensor]
    adapters: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    scaling: float = 1.0
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    grouped: bool = False

    @property
    def num_experts(self) -> int:
        return len(self.first)

    @property
    def widths(self) -> tuple[int, int]:
        """P and F."""
        return self.first[0].shape[0], self.second[0].shape[1]

    def project(self, which: int, group: int | Group, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x (N, in) -> W_e x + b_e + s B_e A_e x (N, out), in `out` if given (autograd then sees nothing of it)."""
        weight, bias = (self.first, self.second)[which], None if self.biases is None else self.biases[which]
        if isinstance(group, Group):
            assert isinstance(weight, torch.Tensor)
            value = grouped_mm(x, weight.mT, group, out)
            if bias is not None:
                value = torch.add(value, bias[group.experts], out=out)
        elif bias is None:
            value = torch.mm(x, weight[group].mT, out=out)
        else:
            value = torch.addmm(bias[group], x, weight[group].mT, out=out)
        return self._adapt(value, which, group, x, out, transposed=False)

    def project_transposed(self, which: int, group: int | Group, g: torch.Tensor) -> torch.Tensor:
        """g (N, out) -> g (W_e + s B_e A_e) (N, in): the gradient through `project`. Autograd sees nothing of it."""
        weight = (self.first, self.second)[which]
        value = grouped_mm(g, weight, group) if isinstance(group, Group) else torch.mm(g, weight[group])
        return self._adapt(value, which, group, g, value, transposed=True)

    def _adapt(
        self, value: torch.Tensor, which: int, group: int | Group, x: torch.Tensor, out: torch.Tensor | None,
        *, transposed: bool,
    ) -> torch.Tensor:  # fmt: skip
        """`value` + s (x A^T) B^T, or transposed s (x B) A."""
        if self.adapters is None:
            return value
        inner, outer = self.adapters[which] if not transposed else self.adapters[which][::-1]
        # (in, r) and (r, out) of every expert
        inner, outer = (inner, outer) if transposed else (inner.mT, outer.mT)
        x = x.to(inner.dtype)
        if isinstance(group, Group):
            update = grouped_mm(grouped_mm(x, inner, group), outer, group)
            return torch.add(value, update.to(value.dtype), alpha=self.scaling, out=out)
        short, outer = x @ inner[group], outer[group]
        if value.dtype == short.dtype == outer.dtype:
            return torch.addmm(value, short, outer, alpha=self.scaling, out=out)
        return torch.add(value, (self.scaling * (short @ outer)).to(value.dtype), out=out)
