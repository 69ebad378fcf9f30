"""The `hooks` engine: one batched forward and backward pass that notes what each record contributes (book-keeping).

In the shared stream every LoRA layer and the head note, in the backward pass, the inputs and output gradients of
which their per-sample gradients are the outer products. What is held of a tensor until the clip, for all records of the
micro-batch, is one of two forms: of a (p, q) weight over T tokens either its gradients, p q numbers a record, formed at
once in one product as of a pass without privacy; or their factors, T (p + q) numbers, from which norms and clipped sum
come without any gradient. Gradients are held where they are the smaller form, and up to three times the larger, as
they then cost less to compute with (`cheap_to_form`). In the expert stream the kernel gives the owner's gradients, and
these are held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from raptor_hf.errors import UnsupportedModelError
from raptor_hf.grad_sample.expert_outer import ExpertOuterProducts, NotedPairs
from raptor_hf.grad_sample.losses import LossFn
from raptor_hf.grad_sample.outer import OuterProducts, cheap_to_form, outer_products
from raptor_hf.grad_sample.owners import adapted_blocks, frozen, protected_block
from raptor_hf.grad_sample.record_losses import record_losses
from raptor_hf.moe.block import kernel_mode
from raptor_hf.moe.experts import AllAdapters, OwnerAdapters
from raptor_hf.moe.lora import LoraLinear
from raptor_hf.moe.pair_gradients import PairParts
from raptor_hf.moe.pairs import PairRecords, Spans
from raptor_hf.privacy.clipping import RecordGradients

__all__ = ["hooks_gradients"]


class _Tape:
    """What the modules noted. A gradient that is cheap to form is formed as soon as its factors are known.

    Attributes: parameter name -> formed gradients (b, *shape), parts of `OuterProducts`, pairs of
        `ExpertOuterProducts`.
    """

    def __init__(self, records: int):
        self.records = records
        self.formed: dict[str, torch.Tensor] = {}
        self.parts: dict[str, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}
        self.pairs: dict[str, list[NotedPairs]] = {}

    def note(self, name: str, left: torch.Tensor, right: torch.Tensor | None) -> None:
        """left (b, ..., p) and right (b, ..., q) of one call of a module."""
        self._check_rows(name, left.shape[0])
        shape = (self.records, -1)
        left = left.detach().reshape(*shape, left.shape[-1])
        right = None if right is None else right.detach().reshape(*shape, right.shape[-1])
        if right is None or cheap_to_form(left.shape[1], left.shape[2], right.shape[2]):
            formed = outer_products(left, right)
            self.formed[name] = self.formed[name] + formed if name in self.formed else formed
        else:
            self.parts.setdefault(name, []).append((left, right))

    def note_pairs(self, names: list[str], parts: list[PairParts], spans: Spans, of: torch.Tensor, rows: int) -> None:
        """The factors of a block's adapters `names` (empty: not wanted) in one of its calls."""
        call = PairRecords(spans, of)
        for name, part in zip(names, parts, strict=True):
            if name:
                self._check_rows(name, rows)
                self.pairs.setdefault(name, []).append((part, call))

    def gradients(self, name: str, parameter: torch.Tensor, *, of_expert: bool) -> torch.Tensor | RecordGradients:
        """Everything noted for a parameter, as `ClippedSum.add` takes it."""
        settings: dict[str, Any] = {"device": parameter.device, "dtype": parameter.dtype}
        if of_expert:
            return ExpertOuterProducts(self.records, parameter.shape, self.pairs.get(name, []), **settings)
        parts = OuterProducts(self.records, parameter.shape, self.parts.get(name, []), **settings)
        if name not in self.formed:
            return parts
        # calls of one module that differ in their number of tokens may have been noted in both ways
        return self.formed[name] + parts.dense() if name in self.parts else self.formed[name]

    def _check_rows(self, name: str, rows: int) -> None:
        if rows != self.records:
            raise UnsupportedModelError(
                # without the numbers: a realised batch size is private
                f"The module of `{name}` was called with another number of rows than there are records",
                "Which record a row belongs to cannot be told, and clipping rows would not bound a record",
                'Leave it out of `shared_target_modules`, or use `grad_sample_mode="functorch"`',
            )


class _TapedLora(torch.autograd.Function):
    """base + s B A x, with as few passes over tensors of the width of the layer as can be."""

    @staticmethod
    def forward(ctx, base, x, a, b, scaling, tape, name_a, name_b):
        ctx.tape, ctx.names, ctx.scaling = tape, (name_a, name_b), scaling
        wide = x.to(a.dtype)
        u = scaling * F.linear(wide, a)
        ctx.save_for_backward(wide, u, a, b)
        ctx.input_dtype = x.dtype
        if base.dtype == u.dtype == b.dtype:
            return torch.addmm(base.flatten(0, -2), u.flatten(0, -2), b.mT).view_as(base)
        return base + F.linear(u, b).to(base.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        x, u, a, b = ctx.saved_tensors
        grad = grad_out.to(b.dtype)
        v = ctx.scaling * (grad @ b)
        ctx.tape.note(ctx.names[0], v, x)
        ctx.tape.note(ctx.names[1], grad, u)
        grad_x = (v @ a).to(ctx.input_dtype) if ctx.needs_input_grad[1] else None
        return grad_out, grad_x, None, None, None, None, None, None


class _TapedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, tape, name_weight, name_bias):
        ctx.tape, ctx.names, ctx.input_dtype = tape, (name_weight, name_bias), x.dtype
        wide = x.to(weight.dtype)
        ctx.save_for_backward(wide, weight)
        return F.linear(wide, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        ctx.tape.note(ctx.names[0], grad, x)
        if ctx.names[1] is not None:
            ctx.tape.note(ctx.names[1], grad, None)
        return (grad @ weight).to(ctx.input_dtype), None, None, None, None, None


@contextmanager
def _taped(model: nn.Module, parameters: Mapping[str, torch.Tensor], tape: _Tape) -> Iterator[None]:
    """Let the modules that hold `parameters` note their parts on `tape`."""
    left, undo = set(parameters), []
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear) and {f"{path}.lora_A", f"{path}.lora_B"} <= left:
            names = (f"{path}.lora_A", f"{path}.lora_B")

            def run(base, x, a, b, scaling, names=names):
                return _TapedLora.apply(base, x, a, b, scaling, tape, *names)

            module.taped = run
            undo.append(partial(setattr, module, "taped", None))
            left -= set(names)
        elif isinstance(module, nn.Linear) and f"{path}.weight" in left:
            bias = None if module.bias is None else f"{path}.bias"

            def replace(layer, args, _output, path=path, bias=bias):
                return _TapedLinear.apply(args[0], layer.weight, layer.bias, tape, f"{path}.weight", bias)

            undo.append(module.register_forward_hook(replace).remove)
            left -= {f"{path}.weight", bias}
    try:
        if left:
            raise UnsupportedModelError(
                f"The trainable parameter `{min(left)}` is neither LoRA of a linear layer nor a linear head",
                "This engine has no rule for its per-sample gradient",
                'Freeze it, or use `grad_sample_mode="functorch"`',
            )
        yield
    finally:
        for step in undo:
            step()


def hooks_gradients(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    loss_fn: LossFn,
    owner: torch.Tensor | None,
) -> dict[str, Any]:
    """See `per_sample_gradients`. With `owner`: tensors (b, *shape[1:]). Without: `RecordGradients`."""
    records = next(iter(batch.values())).shape[0]
    if owner is None:
        return _shared_gradients(model, batch, parameters, loss_fn, _Tape(records))
    path, names = protected_block(model, parameters)
    owned = [parameters[name].detach().index_select(0, owner).requires_grad_() for name in names]
    a1, b1, a2, b2 = owned
    owners = {path: OwnerAdapters(owner, (a1, b1), (a2, b2))}
    with torch.enable_grad(), frozen(model), kernel_mode(model, owners):
        total = record_losses(model, batch, loss_fn).sum()
        grads = torch.autograd.grad(total, owned, allow_unused=True)
    return {
        name: torch.zeros_like(value) if g is None else g for name, value, g in zip(names, owned, grads, strict=True)
    }


def _shared_gradients(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    loss_fn: LossFn,
    tape: _Tape,
) -> dict[str, Any]:
    blocks = adapted_blocks(model, parameters)
    of_experts = {name for values in blocks.values() for name in values}
    wanted = {}
    for path, values in blocks.items():
        a1, b1, a2, b2 = values.values()
        names = [name if name in parameters else "" for name in values]
        wanted[path] = AllAdapters((a1, b1), (a2, b2), partial(tape.note_pairs, names))
    others = {name: value for name, value in parameters.items() if name not in of_experts}
    with torch.enable_grad(), _taped(model, others, tape), kernel_mode(model, wanted):
        total = record_losses(model, batch, loss_fn).sum()
        # runs the backward of every taped module and block; they note their parts and return no gradient
        torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {name: tape.gradients(name, p, of_expert=name in of_experts) for name, p in parameters.items()}
