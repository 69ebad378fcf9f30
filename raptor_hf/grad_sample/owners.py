"""Which of a model's parameters the engines differentiate: adapters of experts, or nothing of the model's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from raptor_hf.moe.block import sparse_blocks

__all__ = ["adapted_blocks", "frozen", "protected_block"]


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


def adapted_blocks(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Path of every block of which `parameters` holds expert adapters -> name -> value of its four, in kernel order.

    A name that is not in `parameters` has the block's own value, detached.
    """
    found = {}
    for path, block in sparse_blocks(model).items():
        own = {f"{path}.{name}": value for name, value in block.owner_parameters().items()}
        if not own.keys().isdisjoint(parameters):
            found[path] = {name: parameters.get(name, value.detach()) for name, value in own.items()}
    return found


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires grad, so that the backward pass stops where something else does."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
