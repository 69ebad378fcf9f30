"""Which of a model's parameters are the owners' adapters: shared by the engines."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raptor_hf.moe.block import sparse_blocks

__all__ = ["protected_block", "refuse_experts"]


def protected_block(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> tuple[str, list[str]]:
    """The path of the block whose expert adapters `parameters` are, and their names in kernel order."""
    for path, block in sparse_blocks(model).items():
        names = [f"{path}.{name}" for name in block.owner_parameters()]
        if names and set(names) == set(parameters):
            return path, names
    raise ValueError(
        f"`owner` was given with parameters {sorted(parameters)[:2]}. They are not the adapters of one layer's "
        'experts. Pass `stream_parameters(model)["expert"]`, or leave `owner` out.'
    )


def refuse_experts(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """The kernel treats expert adapters as constants: without an owner their gradient would be a silent zero."""
    for path, block in sparse_blocks(model).items():
        for name in block.owner_parameters():
            if f"{path}.{name}" in parameters:
                raise ValueError(
                    f"Gradients of the expert adapter `{path}.{name}` were asked for without owners. This engine "
                    'differentiates the owner\'s adapters only. Pass `owner`, or use `mode="reference"`.'
                )
