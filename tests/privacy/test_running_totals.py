"""Clipped gradients that are added to a total in place, against a loop over single numbers written here."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raptor_hf.privacy import clipping
from raptor_hf.privacy.clipping import clip_and_sum, clip_and_sum_by_owner, clip_and_sum_jointly, clip_factors
from raptor_hf.privacy.mechanism import ClippedSum

SHAPES = {"a": (3, 4), "b": (7,), "c": (2, 2, 2), "scalar": ()}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ULP = 2.0**-52


def random_grads(size: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(size, *shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for name, shape in SHAPES.items()
    }


def totals(**changes) -> dict[str, torch.Tensor]:
    """Totals that something was added to before."""
    generator = torch.Generator().manual_seed(99)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in {**SHAPES, **changes}.items()}


def numbers(value: torch.Tensor) -> list[float]:
    """Its entries as Python's float64 numbers, which hold those of all narrower types."""
    return value.flatten().tolist()


def loop(grads: dict, factors: list[float], start: dict) -> dict[str, list[float]]:
    """start + sum_i factor_i g_i, one number at a time, correctly rounded but for the products (half an ulp each)."""
    return {
        name: [
            math.fsum([begin, *(f * g for f, g in zip(factors, column, strict=True) if f)])
            for begin, column in zip(
                numbers(start[name]), zip(*(numbers(row) for row in value), strict=True), strict=True
            )
        ]
        for name, value in grads.items()
    }


def assert_equal_in_float64(found: dict, expected: dict, terms: int) -> None:
    """To the rounding of float64: a product or sum in float32 would be 5e8 times further off."""
    for name, value in found.items():
        assert value.dtype == torch.float64
        for one, other in zip(numbers(value), expected[name], strict=True):
            assert abs(one - other) <= 4 * terms * ULP * max(1.0, abs(other)), name


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [0.37, 100.0])
def test_products_and_sums_are_float64(dtype, size, bound, autocast):
    grads, into = random_grads(size, dtype=dtype), totals()
    expected = loop(grads, clip_factors(grads, bound)[0].tolist(), into)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found, norms = clip_and_sum(grads, bound, into=into)
    assert all(found[name] is value for name, value in into.items())
    assert_equal_in_float64(into, expected, size + 1)
    exact = [math.sqrt(math.fsum(x * x for g in grads.values() for x in numbers(g[i]))) for i in range(size)]
    assert norms.tolist() == pytest.approx(exact, rel=1e-14)


def test_one_record_at_a_time_adds_up_to_all_at_once():
    """As the reference engine gives them, and one of them not finite."""
    grads = random_grads(9, scale=0.5)
    grads["c"][4, 1, 0, 1] = float("inf")
    whole, single = ({name: torch.zeros(s, dtype=torch.float64) for name, s in SHAPES.items()} for _ in range(2))
    clip_and_sum(grads, 0.8, into=whole)
    for i in range(9):
        clip_and_sum({name: g[i : i + 1] for name, g in grads.items()}, 0.8, into=single)
    factors = clip_factors(grads, 0.8)[0].tolist()
    assert factors[4] == 0 and all(f for i, f in enumerate(factors) if i != 4)
    expected = loop(grads, factors, {name: torch.zeros(s, dtype=torch.float64) for name, s in SHAPES.items()})
    assert_equal_in_float64(whole, expected, 10)
    assert_equal_in_float64(single, expected, 10)


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_is_silenced_leaves_the_total_to_the_last_bit(value, size):
    """Not finite, or too long to be clipped with the digits of a float32 factor; and no record at all."""
    grads, into = random_grads(size), totals()
    if size:
        grads["b"].fill_(value)
    before = {name: t.clone() for name, t in into.items()}
    clip_and_sum(grads, 1.0, into=into)
    assert all(torch.equal(into[name], before[name]) for name in into)


@pytest.mark.parametrize("size", [1, 4])
def test_a_silenced_record_does_not_silence_its_neighbours(size):
    grads, into = random_grads(size + 1), totals()
    grads["a"][size] = float("nan")
    expected = loop({n: g[:size] for n, g in grads.items()}, clip_factors(grads, 0.5)[0].tolist()[:size], into)
    clip_and_sum(grads, 0.5, into=into)
    assert_equal_in_float64(into, expected, size + 1)


@pytest.mark.parametrize("chunk", [1, 3, 5, 2**16])
@pytest.mark.parametrize("size", [1, 4])
def test_totals_by_owner(monkeypatch, size, chunk):
    monkeypatch.setattr(clipping, "_CHUNK", chunk)
    grads, owner = random_grads(size), torch.tensor([2, 0, 2, 3])[:size]
    wanted = {"a": (5, 3, 4), "scalar": (5,)}
    into = totals(**wanted)
    factors = clip_factors(grads, 0.7)[0].tolist()
    expected = loop({n: g for n, g in grads.items() if n not in wanted}, factors, into)
    for name in wanted:
        rows = []
        for e in range(5):
            mine = [i for i in range(size) if int(owner[i]) == e]
            if mine:
                rows += loop({name: grads[name][mine]}, [factors[i] for i in mine], {name: into[name][e]})[name]
            else:
                rows += numbers(into[name][e])
        expected[name] = rows
    clip_and_sum_jointly(grads, owner, 5, 0.7, set(wanted), into=into)
    assert_equal_in_float64(into, expected, size + 1)


def test_tensors_without_elements():
    grads = {"a": torch.ones(2, 0, 3), "b": torch.full((2, 1), 2.0)}
    sums, norms = clip_and_sum(grads, 1.0)
    assert sums["a"].shape == (0, 3) and norms.tolist() == [2.0, 2.0]
    owned, _ = clip_and_sum_by_owner(grads, torch.tensor([1, 1]), 3, 1.0)
    assert owned["a"].shape == (3, 0, 3) and owned["b"].flatten().tolist() == pytest.approx([0, 2, 0], rel=1e-5)


@pytest.mark.parametrize("wrong", [
    {"a": torch.zeros(3, 4)}, {"a": torch.zeros(3, 4, dtype=torch.float64).to(torch.float16)},
    {"a": torch.zeros(5, 3, 4, dtype=torch.float64)}, {"a": torch.zeros(12, dtype=torch.float64)},
    {"b": torch.zeros(2, 7, dtype=torch.float64)}, {"c": torch.zeros(2, 2, 2, dtype=torch.float64).mT},
    {"b": torch.zeros(1, dtype=torch.float64).expand(7)}, {"b": None},
])  # fmt: skip
def test_totals_that_would_round_or_repeat_are_refused_and_nothing_is_added(wrong):
    into = {**totals(), **wrong}
    into = {name: value for name, value in into.items() if value is not None}
    before = {name: t.clone() for name, t in into.items()}
    with pytest.raises(ValueError, match="total"):
        clip_and_sum(random_grads(1), 1.0, into=into)
    assert all(torch.equal(into[name], before[name]) for name in into)


def test_owners_that_do_not_fit_leave_the_totals():
    into = totals(a=(5, 3, 4))
    before = {name: t.clone() for name, t in into.items()}
    with pytest.raises(ValueError, match="owner"):
        clip_and_sum_jointly(random_grads(2), torch.tensor([0, 5]), 5, 1.0, {"a"}, into=into)
    with pytest.raises(ValueError, match="total"):
        clip_and_sum_jointly(random_grads(2), torch.tensor([0, 1]), 4, 1.0, {"a"}, into=into)
    assert all(torch.equal(into[name], before[name]) for name in into)


@given(st.integers(0, 2**31), st.floats(-6, 6), st.floats(0.01, 10), st.integers(1, 4))
def test_a_record_moves_a_total_by_at_most_the_bound(seed, exponent, bound, size):
    grads, into = random_grads(size, seed % 1000, 10.0**exponent), totals()
    less = {name: t.clone() for name, t in into.items()}
    clip_and_sum(grads, bound, into=into)
    clip_and_sum({n: g[: size - 1] for n, g in grads.items()}, bound, into=less)
    moved = math.sqrt(math.fsum(x * x for n in into for x in numbers(into[n] - less[n])))
    assert moved <= bound


def test_a_clipped_sum_keeps_its_tensors():
    """Added to in place: what a run holds of its sums is one float64 tensor a parameter."""
    total = ClippedSum({name: torch.Size(shape) for name, shape in SHAPES.items()}, 1.0)
    before = {name: value.data_ptr() for name, value in total.sums.items()}
    grads = random_grads(1)
    for _ in range(3):
        total.add(grads)
    assert {name: value.data_ptr() for name, value in total.sums.items()} == before
    factors = clip_factors(grads, 1.0)[0].tolist()
    start = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    repeated = {name: g.expand(3, *g.shape[1:]) for name, g in grads.items()}
    assert_equal_in_float64(total.sums, loop(repeated, factors * 3, start), 4)
