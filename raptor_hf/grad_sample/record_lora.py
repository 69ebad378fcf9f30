"""LoRA of a linear layer under `torch.func.vmap`, with a gradient for every record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from raptor_hf.grad_sample.outer import outer_products
from raptor_hf.moe.lora import LoraLinear

__all__ = ["RecordLora", "lora_by_record"]


def _rows(value: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """(.., d) with a vmapped dimension of `size` at `dim` -> (size, N, d)."""
    value = value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
    return value.reshape(size, -1, value.shape[-1])


class RecordLora(torch.autograd.Function):
    """base + s B A x of every record, in one product for all; each record's gradients of A and B in one for all.

    Args (of the vmapped function): base (b, N, out), x (b, N, in). a_rows (b, r, in) and b_rows (b, out, r): what is
        differentiated; every row has the values of `a` (r, in) and `b` (out, r), which alone are read.
    """

    @staticmethod
    def forward(base, x, a_rows, b_rows, a, b, scaling):
        wide = x.to(a.dtype)
        inner = scaling * F.linear(wide, a)
        if base.dtype == inner.dtype == b.dtype:
            out = torch.empty(base.shape, dtype=base.dtype, device=base.device)  # no view: models may clamp it in place
            torch.addmm(base.flatten(0, -2), inner.flatten(0, -2), b.mT, out=out.view(-1, out.shape[-1]))
        else:
            out = base + F.linear(inner, b).to(base.dtype)
        return out, inner

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, x, _, _, a, b, ctx.scaling = inputs
        _, inner = output
        ctx.mark_non_differentiable(inner)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, inner, a, b)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, _inner: None) -> Any:
        x, inner, a, b = ctx.saved_tensors
        grad, wide = grad_out.to(b.dtype), x.to(a.dtype)
        back = ctx.scaling * (grad @ b)
        grad_a, grad_b = outer_products(back, wide), outer_products(grad, inner)
        grad_x = (back @ a).to(x.dtype) if ctx.needs_input_grad[1] else None
        return grad_out, grad_x, grad_a.to(a.dtype), grad_b.to(b.dtype), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size, (base, *_) = info.batch_size, args
        flat = [_rows(value, dim, size) for value, dim in zip(args[:4], in_dims[:4], strict=True)]
        out, inner = RecordLora.apply(*flat, *args[4:])
        shape = (size, *base.shape) if in_dims[0] is None else base.movedim(in_dims[0], 0).shape
        return (out.view(shape), inner), (0, 0)


@contextmanager
def lora_by_record(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """`RecordLora` in every LoRA layer both of whose adapters are in `parameters`."""
    undo = []
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear) and {f"{path}.lora_A", f"{path}.lora_B"} <= parameters.keys():
            values = (parameters[f"{path}.lora_A"].detach(), parameters[f"{path}.lora_B"].detach())

            def run(base, x, a_rows, b_rows, scaling, values=values):
                return RecordLora.apply(base, x, a_rows, b_rows, *values, scaling)[0]

            module.taped = run
            undo.append(partial(setattr, module, "taped", None))
    try:
        yield
    finally:
        for step in undo:
            step()
