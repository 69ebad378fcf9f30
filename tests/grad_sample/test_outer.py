"""Gradients that are formed and those that are kept as factors say the same; modules that are called several times."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from raptor_hf.grad_sample import ENGINES, engine_gradients, per_sample_gradients
from raptor_hf.grad_sample.hooks import _Tape
from raptor_hf.grad_sample.outer import OuterProducts, cheap_to_form, outer_products
from raptor_hf.moe import attach_adapters, stream_parameters
from raptor_hf.privacy.clipping import clip_and_sum
from tests import families
from tests.helpers import collate, tiny_model, tiny_records

RECORDS = tiny_records(5, seed=3)


def factors(tokens: int, p: int, q: int, dtype=torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(4, tokens, size, generator=generator, dtype=dtype) for size in (p, q))


def by_hand(parts) -> torch.Tensor:
    """(b, p, q), one product of two numbers at a time."""
    return sum(torch.einsum("btp,btq->bpq", left.double(), right.double()) for left, right in parts)


@pytest.mark.parametrize("lengths", [(50,), (1,), (50, 1), (1, 50, 2), (60, 50)])
def test_calls_of_a_module_add_up_however_they_are_kept(lengths):
    parts = [factors(tokens, 16, 16, seed=i) for i, tokens in enumerate(lengths)]
    ways = {cheap_to_form(tokens, 16, 16) for tokens in lengths}
    assert ways == {tokens > 10 for tokens in lengths}
    tape = _Tape(4)
    for left, right in parts:
        tape.note("w", left, right)
    found = tape.gradients("w", torch.zeros(16, 16, dtype=torch.float64), of_expert=False)
    assert isinstance(found, torch.Tensor) == any(ways)
    expected = by_hand(parts)
    dense = found if isinstance(found, torch.Tensor) else found.dense()
    assert float((dense - expected).abs().max()) <= 1e-12
    sums, norms = clip_and_sum({"w": found}, 5.0)
    exact = expected.flatten(1).norm(dim=1)
    assert torch.allclose(norms, exact, rtol=1e-9) and float(exact.max()) > 5.0
    scaled = (expected * (5.0 * (1 - 1e-6) / exact).clamp(max=1.0)[:, None, None]).sum(0)
    assert float((sums["w"] - scaled).abs().max()) <= 1e-8


@pytest.mark.parametrize("lengths", [(50,), (50, 7)])
def test_a_bias_is_the_sum_over_tokens(lengths):
    parts = [factors(tokens, 6, 1, seed=i)[0] for i, tokens in enumerate(lengths)]
    tape = _Tape(4)
    for left in parts:
        tape.note("b", left, None)
    found = tape.gradients("b", torch.zeros(6, dtype=torch.float64), of_expert=False)
    assert isinstance(found, torch.Tensor)
    assert float((found - sum(left.sum(1) for left in parts)).abs().max()) <= 1e-13


def test_a_module_that_was_not_called_has_zero():
    found = _Tape(4).gradients("w", torch.zeros(3, 2), of_expert=False)
    assert found.shape == (4, 3, 2) and not found.dense().any() and not found.norms().any()
    sums, _ = clip_and_sum({"w": found}, 1.0)
    assert not sums["w"].any()


@pytest.mark.parametrize("tokens", [2, 60])
def test_formed_and_kept_agree_in_single_precision(tokens):
    left, right = factors(tokens, 24, 20, torch.float32)
    kept = OuterProducts(4, torch.Size([24, 20]), [(left, right)])
    formed = outer_products(left, right)
    exact = by_hand([(left, right)])
    for value in (formed, kept.dense()):
        assert float((value.double() - exact).abs().max()) <= 1e-5 * float(exact.abs().max())
    assert bool((kept.norms() >= exact.flatten(1).norm(dim=1) * (1 - 1e-9)).all())
    assert torch.allclose(kept.norms(), exact.flatten(1).norm(dim=1), rtol=1e-3)


def test_one_record_more_changes_the_sum_by_its_own_part_alone():
    """In float64: the others' contributions are rounded as before, whether gradients are formed or not."""
    for tokens in (2, 60):
        left, right = factors(tokens, 24, 20, torch.float32)
        for make in (lambda a, b: outer_products(a, b), lambda a, b: OuterProducts(len(a), (24, 20), [(a, b)])):
            whole, _ = clip_and_sum({"w": make(left, right)}, 0.5)
            fewer, _ = clip_and_sum({"w": make(left[:3], right[:3])}, 0.5)
            alone, _ = clip_and_sum({"w": make(left[3:], right[3:])}, 0.5)
            gap = (whole["w"] - fewer["w"] - alone["w"]).abs().max()
            assert float(gap) <= 1e-14, tokens
            assert float((whole["w"] - fewer["w"]).norm()) <= 0.5


@pytest.mark.parametrize("mode", sorted(ENGINES))
def test_an_attention_layer_that_is_called_twice(mode, exact_norms):
    model = attach_adapters(tiny_model(torch.float64), LoraConfig(r=3, lora_alpha=5), 3)
    layer = model.encoder.block[1].layer[0]
    once = layer.forward
    layer.forward = lambda hidden, *args, **kwargs: once(once(hidden, *args, **kwargs)[0], *args, **kwargs)
    model.double()
    families.shake(model)
    parameters = stream_parameters(model)["shared"]
    found = per_sample_gradients(model, collate(RECORDS), parameters, mode=mode)
    for i, record in enumerate(RECORDS):
        expected = torch.autograd.grad(model(**collate([record])).loss, list(parameters.values()))
        for name, value in zip(parameters, expected, strict=True):
            assert float((found[name][i] - value).abs().max()) <= 1e-12 * max(1.0, float(value.abs().max())), name


def test_short_records_are_kept_as_factors(exact_norms):
    """The tiny model meets both ways: which is taken is a matter of shapes, not of values."""
    model = attach_adapters(tiny_model(), LoraConfig(r=8), 3)
    parameters = stream_parameters(model)["shared"]
    short = tiny_records(3, seed=1, longest=1)
    for records, kept in ((short, True), (tiny_records(3, seed=1, longest=12, shortest=12), False)):
        found = engine_gradients(model, collate(records), parameters, mode="hooks")
        assert any(isinstance(value, OuterProducts) for value in found.values()) == kept
