"""How far the backward passes of the two streams go, by observers that know nothing of the engines."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from raptor_hf.grad_sample import engine_gradients
from raptor_hf.moe import attach_adapters, stream_parameters
from tests import families
from tests.helpers import collate, stock_dispatch, tiny_model, tiny_records

PROTECTED, BLOCKS, RANK, HIDDEN = 1, 4, 3, 20
RECORDS = tiny_records(5, seed=8, shortest=4)
OWNERS = torch.tensor([int(stock_dispatch(tiny_model(), r)[PROTECTED].sum(0).argmax()) for r in RECORDS])
FAST = ["functorch", "hooks"]


def adapted():
    model = attach_adapters(tiny_model(), LoraConfig(r=RANK, lora_alpha=5), PROTECTED)
    families.shake(model)
    return model


class Passing(torch.autograd.Function):
    """The identity, whose backward pass is noted: it runs if and only if a gradient comes down this way."""

    generate_vmap_rule = True
    seen: set[int] = set()

    @staticmethod
    def forward(value, block):
        return value.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.block = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        Passing.seen.add(ctx.block)
        return grad, None


def reached(model, parameters, owner, mode) -> set[int]:
    """Blocks through whose attention a gradient came back; nothing trained lies in the residual stream itself."""
    handles = [
        model.encoder.block[i]
        .layer[0]
        .SelfAttention.o.register_forward_hook(lambda _module, _args, output, i=i: Passing.apply(output, i))
        for i in range(BLOCKS)
    ]
    Passing.seen.clear()
    grads = engine_gradients(model, collate(RECORDS), parameters, mode=mode, owner=owner)
    for handle in handles:
        handle.remove()
    dense = {name: g if isinstance(g, torch.Tensor) else g.dense() for name, g in grads.items()}
    assert all(value.any() for value in dense.values()), "no gradient: a blind test"
    return set(Passing.seen)


@pytest.mark.parametrize("mode", FAST)
def test_the_expert_streams_backward_pass_stops_at_the_protected_layer(mode):
    model = adapted()
    streams = stream_parameters(model)
    assert reached(model, streams["shared"], None, mode) == set(range(BLOCKS)), "the observer sees what is reached"
    assert reached(model, streams["expert"], OWNERS, mode) == set(range(PROTECTED + 1, BLOCKS))


class Formed(TorchDispatchMode):
    """Whether a new tensor was made whose last two dimensions are those of an adapter beside the experts' hidden layer.

    No other tensor of the model has them; views of the adapters themselves are not new.
    """

    def __init__(self, model):
        super().__init__()
        self.old = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if (
                isinstance(value, torch.Tensor)
                and tuple(value.shape[-2:]) in {(HIDDEN, RANK), (RANK, HIDDEN)}
                and value.untyped_storage().data_ptr() not in self.old
            ):
                self.shapes.add(tuple(value.shape))
        return result


def formed(model, parameters, owner, mode) -> set[tuple[int, ...]]:
    with Formed(model) as seen:
        engine_gradients(model, collate(RECORDS), parameters, mode=mode, owner=owner)
    return seen.shapes


@pytest.mark.parametrize("mode", FAST)
def test_the_shared_stream_forms_no_gradient_of_an_expert(mode):
    model = adapted()
    streams = stream_parameters(model)
    assert any(tuple(p.shape[-2:]) == (HIDDEN, RANK) for p in streams["expert"].values())
    assert formed(model, streams["expert"], OWNERS, mode), "the observer sees an expert's gradient"
    assert not formed(model, streams["shared"], None, mode)
    assert all(p.grad is None for p in model.parameters())
    # no gradient of the loss arrives at an expert's adapter by a way around the engine either
    touched = []
    handles = [p.register_hook(lambda grad: touched.append(1)) for p in streams["expert"].values()]
    engine_gradients(model, collate(RECORDS), streams["shared"], mode=mode)
    for handle in handles:
        handle.remove()
    assert not touched
