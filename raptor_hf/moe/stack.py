"""The constants of one sparse layer's experts, and their products with the tokens of one expert or of several.

Shapes: N tokens, H hidden, P first projection's outputs (2F with a gated activation), F the activation's outputs,
E experts, r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from raptor_hf.moe.grouped import Group, Spans, grouped_mm

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

    def project(
        self, which: int, group: Spans | Group, x: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x (N, in) -> W_e x + b_e + s B_e A_e x (N, out), each row by its own expert.

        Autograd follows it for the tokens of one expert and without `out`, where the result is then written.
        """
        if not isinstance(group, Group):
            return self._each(self._project, which, group, x, 0, out)
        weight, bias = (self.first, self.second)[which], None if self.biases is None else self.biases[which]
        assert isinstance(weight, torch.Tensor)
        value = grouped_mm(x, weight.mT, group)
        if bias is not None:
            value += bias[group.experts]
        if self.adapters is not None:
            a, b = self.adapters[which]
            update = grouped_mm(grouped_mm(x.to(a.dtype), a.mT, group), b.mT, group)
            value.add_(update.to(value.dtype), alpha=self.scaling)
        return value if out is None else out.copy_(value)

    def project_transposed(self, which: int, group: Spans | Group, g: torch.Tensor) -> torch.Tensor:
        """g (N, out) -> g (W_e + s B_e A_e) (N, in): the gradient through `project`. Autograd does not follow it."""
        if not isinstance(group, Group):
            return self._each(self._project_transposed, which, group, g, 1, None)
        weight = (self.first, self.second)[which]
        assert isinstance(weight, torch.Tensor)
        value = grouped_mm(g, weight, group)
        if self.adapters is not None:
            a, b = self.adapters[which]
            update = grouped_mm(grouped_mm(g.to(b.dtype), b, group), a, group)
            value.add_(update.to(value.dtype), alpha=self.scaling)
        return value

    def _each(
        self, one: Callable[..., torch.Tensor], which: int, group: Spans, x: torch.Tensor, side: int,
        out: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """`one` expert after another; `side` of the weights is the width of the result."""
        if len(group) == 1:
            return one(which, group[0][0], x, out)
        if out is None:
            out = x.new_empty(len(x), (self.first, self.second)[which][0].shape[side])
        for expert, start, end in group:
            one(which, expert, x[start:end], out[start:end])
        return out

    def _project(self, which: int, expert: int, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        weight = (self.first, self.second)[which][expert]
        if self.biases is None:
            value = torch.mm(x, weight.mT, out=out)
        else:
            value = torch.addmm(self.biases[which][expert], x, weight.mT, out=out)
        if self.adapters is None:
            return value
        a, b = (t[expert] for t in self.adapters[which])
        return self._add_low_rank(value, x.to(a.dtype) @ a.mT, b.mT, out)

    def _project_transposed(self, which: int, expert: int, g: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        value = torch.mm(g, (self.first, self.second)[which][expert], out=out)
        if self.adapters is None:
            return value
        a, b = (t[expert] for t in self.adapters[which])
        return self._add_low_rank(value, g.to(b.dtype) @ b, a, value)

    def _add_low_rank(
        self, value: torch.Tensor, short: torch.Tensor, outer: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """value + s short outer; in one pass where no type differs."""
        if value.dtype == short.dtype == outer.dtype:
            return torch.addmm(value, short, outer, alpha=self.scaling, out=out)
        return torch.add(value, (self.scaling * (short @ outer)).to(value.dtype), out=out)
