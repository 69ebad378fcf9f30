"""A sparse block whose routed experts can be differentiated per record.

`SparseBlock` takes the place of a family's own sparse block and keeps its sub-modules under their names, so that
parameter names, checkpoints and hooks stay valid. It has two ways to compute the same function:

* plain (default): ordinary PyTorch operations, differentiable in everything: evaluation, prediction, the
  reference engine, non-private training;
* kernel (inside `with kernel_mode(...)`): `routed_experts`, which has a rule for `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from raptor_hf.moe.experts import AllAdapters, OwnerAdapters, routed_experts
from raptor_hf.moe.grouped import runs_grouped
from raptor_hf.moe.stack import ExpertStack, StackedLora

__all__ = ["SparseBlock", "SwitchSparseBlock", "kernel_mode", "sparse_blocks"]

PROJECTIONS = ("first", "second")


class SparseBlock(nn.Module):
    """Base class. A family implements `route`, `weights` and `activation`.

    Attributes:
        expert_adapters: `ModuleDict` with the `StackedLora` of both projections, after `add_expert_adapters`.
    """

    num_experts: int

    def __init__(self) -> None:
        super().__init__()
        self.expert_adapters: nn.ModuleDict | None = None
        self.adapters_enabled = True
        self._kernel = False
        self._owner: OwnerAdapters | AllAdapters | None = None

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (B, T, H) -> expert index (B, T, K) in [0, E], E for "none", and gate weights (B, T, K)."""
        raise TypeError(f"{type(self).__name__} must implement `route`.")

    def weights(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The experts' weights: E of (P, H) and E of (H, F)."""
        raise TypeError(f"{type(self).__name__} must implement `weights`.")

    def biases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The experts' biases (E, P) and (E, H); None without any."""
        return None

    def activation(self, pre: torch.Tensor) -> torch.Tensor:
        raise TypeError(f"{type(self).__name__} must implement `activation`.")

    def extra(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """What always-active shared experts add; None without any."""
        return None

    def add_expert_adapters(self, rank: int, alpha: float) -> None:
        """Put fresh LoRA on both projections of every expert."""
        first, second = self.weights()
        self.expert_adapters = nn.ModuleDict(
            {
                name: StackedLora(len(weights), weights[0].shape[1], weights[0].shape[0], rank, alpha / rank)
                for name, weights in zip(PROJECTIONS, (first, second), strict=True)
            }
        ).to(first[0].device)

    def owner_parameters(self) -> dict[str, torch.Tensor]:
        """Name (relative to the block) -> stacked adapter tensor, in the order of `OwnerAdapters`."""
        if self.expert_adapters is None:
            return {}
        return {
            f"expert_adapters.{name}.{kind}": getattr(self.expert_adapters[name], kind)
            for name in PROJECTIONS
            for kind in ("lora_A", "lora_B")
        }

    def stacked_weights(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`weights` as two tensors (E, P, H) and (E, H, F), where they are that already; nothing is copied."""
        return None

    @property
    def experts_implementation(self) -> str | None:
        """What transformers' setting of that name is for these experts; None where it has no say."""
        return None

    def stack(self) -> ExpertStack:
        stacked, adapters, scaling = self.stacked_weights(), None, 1.0
        first, second = stacked or self.weights()
        if self.expert_adapters is not None and self.adapters_enabled:
            one, two = (self.expert_adapters[name] for name in PROJECTIONS)
            adapters, scaling = ((one.lora_A, one.lora_B), (two.lora_A, two.lora_B)), one.scaling
        operands = None if stacked is None else (*stacked, *(t for pair in adapters or () for t in pair))
        grouped = runs_grouped(operands, self.experts_implementation)
        return ExpertStack(first, second, self.activation, adapters, scaling, self.biases(), grouped)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        index, gate = self.route(hidden)
        if self._kernel:
            out = routed_experts(hidden, index, gate.to(hidden.dtype), self.stack(), self._owner)
        else:
            out = self._plain(hidden, index, gate)
        extra = self.extra(hidden)
        return out if extra is None else out + extra

    def _plain(self, hidden: torch.Tensor, index: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        stack = self.stack()
        flat, top_k = hidden.reshape(-1, hidden.shape[-1]), index.shape[-1]
        pairs, gates = index.reshape(-1), gate.reshape(-1)
        out = torch.zeros_like(flat)
        for expert in torch.unique(pairs).tolist():
            if expert == self.num_experts:
                continue
            chosen = (pairs == expert).nonzero().squeeze(-1)
            rows = chosen // top_k
            group = [(expert, 0, len(rows))]
            act = self.activation(stack.project(0, group, flat[rows]))
            value = stack.project(1, group, act) * gates[chosen].unsqueeze(-1)
            out = out.index_add(0, rows, value.to(out.dtype))
        return out.view_as(hidden)


class SwitchSparseBlock(SparseBlock):
    """Switch Transformers: top-1, one vote a token, capacity counted inside each record.

    Compared with the shipped block, router jitter and the dropout inside the experts are off: the first would
    randomise a record's owner, the second draws masks whose place in the random stream depends on the neighbours.
    """

    def __init__(self, shipped: nn.Module):
        super().__init__()
        self.router, self.experts = shipped.router, shipped.experts
        self.num_experts = self.router.num_experts
        self._act = self.experts["expert_0"].act

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        router = self.router
        # the shipped router calls `self.classifier.to(...)`, which crashes the interpreter under torch.func
        weight, bias = router.classifier.weight, router.classifier.bias
        logits = F.linear(
            hidden.to(router.dtype), weight.to(router.dtype), None if bias is None else bias.to(router.dtype)
        )
        probs = torch.softmax(logits, dim=-1).to(hidden.dtype)
        gate, index = probs.max(-1).values, torch.argmax(probs, dim=-1)
        chosen = index.unsqueeze(-1) == torch.arange(self.num_experts, device=index.device)
        place = (chosen.long().cumsum(-2) * chosen).sum(-1)
        index = torch.where(place <= router.expert_capacity, index, self.num_experts)
        return index.unsqueeze(-1), gate.unsqueeze(-1)

    def weights(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        experts = [self.experts[f"expert_{e}"] for e in range(self.num_experts)]
        return tuple(e.wi.weight for e in experts), tuple(e.wo.weight for e in experts)

    def activation(self, pre: torch.Tensor) -> torch.Tensor:
        return self._act(pre)


def sparse_blocks(model: nn.Module) -> dict[str, SparseBlock]:
    """Module path -> block, in network order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseBlock)}


@contextmanager
def kernel_mode(
    model: nn.Module, wanted: Mapping[str, OwnerAdapters] | Mapping[str, AllAdapters] | None = None
) -> Iterator[None]:
    """Route all sparse blocks of `model` through the vmappable kernel.

    Args:
        wanted: module path -> which adapters to differentiate in that block. Inside `torch.func` the tensors are
            those of the current transform, so enter this context inside the transformed function.
    """
    blocks = sparse_blocks(model)
    for name, block in blocks.items():
        block._kernel, block._owner = True, (wanted or {}).get(name)
    try:
        yield
    finally:
        for block in blocks.values():
            block._kernel, block._owner = False, None
