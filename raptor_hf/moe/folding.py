"""Autograd functions that work under `torch.func.vmap`: the vmapped dimension is folded into their first one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["FoldedFunction", "OnceDifferentiable", "fold", "no_autocast", "unfold"]


def no_autocast(function: Callable) -> Callable:
    """Run a kernel in its inputs' own types: its buffers have them, and its backward pass has no autocast rules."""

    @functools.wraps(function)
    def plain(x, *args):
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args)

    # `torch.func` asks for it in every call
    plain.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return plain


def fold(value: Any, dim: int | None, size: int) -> Any:
    """(R, ..) with a vmapped dimension of `size` at `dim` -> (size * R, ..); unbatched values are repeated."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
    return value.reshape(size * value.shape[1], *value.shape[2:])


def unfold(value: torch.Tensor, size: int) -> torch.Tensor:
    return value.reshape(size, value.shape[0] // size, *value.shape[1:])


class FoldedFunction(torch.autograd.Function):
    """A function of tensors with a records dimension first, whose outputs have one too.

    One call serves all of the vmapped dimension: the records of (size, R, ..) are those of (size * R, ..).
    """

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        out = cls.apply(*(fold(value, dim, size) for value, dim in zip(args, in_dims, strict=True)))
        if isinstance(out, torch.Tensor):
            return unfold(out, size), 0
        return tuple(unfold(value, size) for value in out), (0,) * len(out)


class OnceDifferentiable(FoldedFunction):
    """The backward pass of a `FoldedFunction`: it has none of its own."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("This kernel is differentiable once; second derivatives are not defined.")
