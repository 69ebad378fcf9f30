"""LoRA layers under vmap: every record's gradient is that of the written-out formula, one record at a time."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from raptor_hf.grad_sample import per_sample_gradients, record_lora
from raptor_hf.grad_sample.record_lora import lora_by_record
from raptor_hf.moe import attach_adapters, stream_parameters
from raptor_hf.moe.lora import LoraLinear
from tests.helpers import collate, tiny_model, tiny_records

FLOAT64 = torch.float64
RECORDS, IN, OUT, RANK, SCALING = 5, 6, 7, 3, 1.7
# of one record: with and without dimensions in front of its tokens'
SHAPES = {"engine": (1, 4), "tokens": (4,), "vector": (), "several": (2, 3), "one token": (1, 1), "none": (1, 0)}


class Pair(nn.Module):
    """Two layers, the first called `calls` times, so that gradients also pass through a layer to its inputs."""

    def __init__(self, calls: int = 1, dtype=FLOAT64):
        super().__init__()
        self.calls = calls
        generator = torch.Generator().manual_seed(0)
        self.one = LoraLinear(nn.Linear(IN, OUT), RANK, SCALING)
        self.two = LoraLinear(nn.Linear(OUT, IN, bias=False), RANK, SCALING)
        for name, parameter in self.named_parameters():
            value = torch.randn(parameter.shape, generator=generator, dtype=FLOAT64) * 0.5
            parameter.data = value.to(dtype if "base_layer" in name else torch.promote_types(dtype, torch.float32))

    def forward(self, x):
        for call in range(self.calls):
            x = torch.tanh(self.two(torch.sin(self.one(x)))) if call == 0 else torch.tanh(self.two(self.one(x)))
        return x


def formula(values: dict[str, torch.Tensor], x: torch.Tensor, calls: int) -> torch.Tensor:
    def layer(name, x):
        weight, bias = values[f"{name}.base_layer.weight"], values.get(f"{name}.base_layer.bias", 0.0)
        full = weight + SCALING * values[f"{name}.lora_B"] @ values[f"{name}.lora_A"]
        return torch.einsum("...i,oi->...o", x, full) + bias

    for call in range(calls):
        inner = layer("one", x)
        x = torch.tanh(layer("two", torch.sin(inner) if call == 0 else inner))
    return x


def by_vmap(model, names, x, weights, in_dims=(0, 0)):
    parameters = dict(model.named_parameters())
    rows = {name: parameters[name].detach().expand(RECORDS, *parameters[name].shape).requires_grad_() for name in names}

    def loss(values, x, weight):
        return (functional_call(model, values, (x,)) * weight).sum()

    with lora_by_record(model, {name: parameters[name] for name in names}):
        losses = vmap(loss, in_dims=(0, *in_dims))(rows, x, weights)
    return losses, torch.autograd.grad(losses.sum(), list(rows.values()))


def one_by_one(model, names, xs, weights):
    losses, rows = [], []
    for x, weight in zip(xs, weights, strict=True):
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        leaves = [values[name].requires_grad_() for name in names]
        losses.append((formula(values, x, model.calls) * weight).sum())
        rows.append(torch.autograd.grad(losses[-1], leaves))
    return torch.stack(losses), [torch.stack(group) for group in zip(*rows, strict=True)]


def close(found, expected, tolerance=1e-12):
    for value, wanted in zip(found, expected, strict=True):
        assert value.shape == wanted.shape
        scale = max(1.0, float(wanted.detach().abs().max()))
        assert float((value - wanted).detach().abs().max()) <= tolerance * scale


@pytest.fixture
def calls(monkeypatch):
    """What goes the fused way."""
    seen = []
    rule = record_lora.RecordLora.vmap

    def counted(info, in_dims, *args):
        seen.append(info.batch_size)
        return rule(info, in_dims, *args)

    monkeypatch.setattr(record_lora.RecordLora, "vmap", staticmethod(counted))
    return seen


ALL = ["one.lora_A", "one.lora_B", "two.lora_A", "two.lora_B"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("times", [1, 3])
def test_every_records_gradient(shape, times, calls):
    model = Pair(times)
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(RECORDS, *SHAPES[shape], IN, generator=generator, dtype=FLOAT64) for _ in range(2))
    losses, found = by_vmap(model, ALL, x, weights)
    expected_losses, expected = one_by_one(model, ALL, x, weights)
    close([losses, *found], [expected_losses, *expected])
    assert calls == [RECORDS] * 2 * times
    assert shape == "none" or all(float(value.abs().max()) > 1e-3 for value in found)


@pytest.mark.parametrize("which", ["x", "weight"])
def test_what_is_the_same_for_all_records(which, calls):
    model = Pair()
    generator = torch.Generator().manual_seed(1)
    own, common = (torch.randn(n, 1, 4, IN, generator=generator, dtype=FLOAT64) for n in (RECORDS, 1))
    x, weights = (common[0], own) if which == "x" else (own, common[0])
    _, found = by_vmap(model, ALL, x, weights, in_dims=(None, 0) if which == "x" else (0, None))
    _, expected = one_by_one(model, ALL, *(t.expand(RECORDS, 1, 4, IN) for t in (x, weights)))
    close(found, expected)
    assert len(calls) == 2


@pytest.mark.parametrize("names", [["one.lora_B"], ["one.lora_A", "two.lora_B"], ["two.lora_A", "two.lora_B"]])
def test_a_layer_of_which_one_adapter_is_wanted_goes_the_ordinary_way(names, calls):
    model = Pair()
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(RECORDS, 1, 4, IN, generator=generator, dtype=FLOAT64) for _ in range(2))
    _, found = by_vmap(model, names, x, weights)
    close(found, one_by_one(model, names, x, weights)[1])
    assert len(calls) == (names[0] == "two.lora_A")


def test_a_record_that_is_not_finite_harms_no_other():
    model = Pair()
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(RECORDS, 1, 4, IN, generator=generator, dtype=FLOAT64) for _ in range(2))
    _, expected = by_vmap(model, ALL, x, weights)
    x[2, 0, 1, 3] = float("nan")
    weights[3, 0, 0, 0] = float("inf")
    _, found = by_vmap(model, ALL, x, weights)
    for value, wanted in zip(found, expected, strict=True):
        assert not value[2].isfinite().all() and not value[3].isfinite().all()
        assert torch.equal(value[[0, 1, 4]], wanted[[0, 1, 4]])


def test_a_half_precision_base():
    model = Pair(dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(RECORDS, 1, 4, IN, generator=generator, dtype=FLOAT64) for _ in range(2))
    _, found = by_vmap(model, ALL, x.bfloat16(), weights.bfloat16())
    exact = Pair()
    for parameter, value in zip(exact.parameters(), model.parameters(), strict=True):
        parameter.data = value.data.double()
    _, expected = one_by_one(exact, ALL, x, weights)
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == torch.float32
        assert float((value - wanted).norm()) <= 0.05 * float(wanted.norm())


def test_layers_are_as_before_even_after_an_error():
    model = Pair()
    with pytest.raises(KeyError), lora_by_record(model, dict(model.named_parameters())):
        assert model.one.taped is not None and model.two.taped is not None
        raise KeyError
    assert model.one.taped is None and model.two.taped is None


def test_the_engine_takes_the_fused_way(calls):
    model = attach_adapters(tiny_model(), LoraConfig(r=2), "last")
    per_sample_gradients(model, collate(tiny_records(6)), stream_parameters(model)["shared"], mode="functorch")
    assert calls == [6] * 16


def test_a_loss_that_is_not_a_scalar_is_refused():
    model = attach_adapters(tiny_model(), LoraConfig(r=2), "last")
    with pytest.raises(ValueError, match="scalar"):
        per_sample_gradients(
            model,
            collate(tiny_records(6)),
            stream_parameters(model)["shared"],
            loss_fn=lambda forward, record: forward(**record).logits[0],
        )


def test_a_loss_without_parameters_has_gradient_zero():
    model = attach_adapters(tiny_model(), LoraConfig(r=2), "last")
    for name, parameters in stream_parameters(model).items():
        owner = torch.tensor([0, 1, 2, 3, 0, 1]) if name == "expert" else None
        found = per_sample_gradients(
            model,
            collate(tiny_records(6)),
            parameters,
            owner=owner,
            loss_fn=lambda forward, record: record["labels"].sum() * 1.0,
        )
        for key, value in found.items():
            assert value.shape == (6, *(parameters[key].shape[owner is not None :]))
            assert not value.any()


def test_checkpointing_is_refused():
    """Its second forward pass would run outside of the vmap."""
    model = attach_adapters(tiny_model(), LoraConfig(r=2), "last")
    parameters = stream_parameters(model)["shared"]

    def recomputed(forward, record):
        return checkpoint(lambda: forward(**record).loss, use_reentrant=False)

    with pytest.raises(RuntimeError, match="recompute"):
        per_sample_gradients(model, collate(tiny_records(6)), parameters, loss_fn=recomputed)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(RuntimeError):
        per_sample_gradients(model, collate(tiny_records(6)), parameters)
