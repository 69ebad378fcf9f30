"""Clipping against a float64 loop, and the bound that nothing may exceed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raptor_hf.privacy.clipping import clip_and_sum, clip_and_sum_by_owner, clip_factors

SHAPES = {"a": (3, 4), "b": (7,), "c": (2, 2, 2)}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random_grads(size: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(size, *shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for name, shape in SHAPES.items()
    }


def loop_norm(grads: dict, row: int) -> float:
    return math.sqrt(sum(float(x) ** 2 for g in grads.values() for x in g[row].double().flatten()))


def loop_clip(grads: dict, row: int, bound: float) -> dict:
    factor = min(1.0, bound / loop_norm(grads, row))
    return {name: g[row].double() * factor for name, g in grads.items()}


def total_norm(tensors: dict) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def distance(one: dict, other: dict) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [0.3, 5.0, 100.0])
def test_sum_equals_the_loop(dtype, bound):
    grads = random_grads(6, dtype=dtype)
    sums, norms = clip_and_sum(grads, bound)
    rows = [loop_clip(grads, i, bound) for i in range(6)]
    expected = {name: sum(row[name] for row in rows) for name in grads}
    assert distance(sums, expected) < 1e-5
    assert norms.dtype == torch.float64
    assert norms.tolist() == pytest.approx([loop_norm(grads, i) for i in range(6)], rel=1e-6)


def test_it_is_a_sum_and_one_norm_over_all_tensors():
    """Two tensors of norm 3 and 4: the record's norm is 5, and clipping at 1 leaves .6 and .8."""
    grads = {"a": torch.tensor([[3.0, 0.0]] * 2), "b": torch.tensor([[4.0]] * 2)}
    sums, norms = clip_and_sum(grads, 1.0)
    assert norms.tolist() == [5.0, 5.0]
    assert sums["a"].tolist() == pytest.approx([1.2, 0.0], rel=1e-5)
    assert sums["b"].tolist() == pytest.approx([1.6], rel=1e-5)


def test_a_small_record_is_left_as_it_is():
    grads = random_grads(1, scale=1e-3)
    sums, _ = clip_and_sum(grads, 1.0)
    for name, value in grads.items():
        assert torch.equal(sums[name], value[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e4, 1e30, 3e37])
@pytest.mark.parametrize("bound", [1e-3, 1.0, 7.3])
def test_one_record_never_exceeds_the_bound(dtype, scale, bound):
    for seed in range(5):
        sums, _ = clip_and_sum(random_grads(1, seed, scale, dtype), bound)
        assert total_norm(sums) <= bound


@given(
    values=st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=4, max_size=4),
    bound=st.floats(1e-3, 1e3),
)
def test_no_float32_record_exceeds_the_bound(values, bound):
    sums, _ = clip_and_sum({"a": torch.tensor([values[:2]]), "b": torch.tensor([values[2:]])}, bound)
    assert total_norm(sums) <= bound


@pytest.mark.parametrize("value", [3e38, 1e38, 1e37])
def test_a_record_near_the_largest_float32_does_not_exceed_the_bound(value):
    """Its factor is a subnormal float32, which has few digits."""
    for size in (100_000, 300_000):
        sums, _ = clip_and_sum({"a": torch.full((1, size), value)}, 1.0)
        assert total_norm(sums) <= 1.0


def test_a_norm_just_above_and_at_the_bound():
    for over in (0.0, 1e-16, 1e-12, 1e-9, 1e-6):
        grads = {"a": torch.tensor([[0.6, 0.8]], dtype=torch.float64) * (1 + over)}
        assert total_norm(clip_and_sum(grads, 1.0)[0]) <= 1.0 + 1e-15


def test_many_tiny_entries_count():
    """Squares summed in float32 would miss most of them."""
    grads = {"a": torch.cat([torch.ones(1, 1), torch.full((1, 4_000_000), 1e-4)], 1)}
    sums, norms = clip_and_sum(grads, 1.0)
    assert norms.item() == pytest.approx(math.sqrt(1.04), rel=1e-6)
    assert total_norm(sums) <= 1.0


def test_float16_squares_do_not_overflow():
    grads = {"a": torch.full((1, 100), 6e4, dtype=torch.float16)}
    sums, norms = clip_and_sum(grads, 1.0)
    assert norms.item() == pytest.approx(6e5, rel=1e-3)
    assert total_norm(sums) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_the_sum(dtype):
    grads = random_grads(1, scale=10.0, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        sums, _ = clip_and_sum(grads, 1.0)
        owned, _ = clip_and_sum_by_owner(grads, torch.tensor([0]), 2, 1.0)
    for found in (sums, owned):
        assert all(value.dtype == torch.float64 for value in found.values())
        assert total_norm(found) <= 1.0
    expected = loop_clip(grads, 0, 1.0)
    assert distance(sums, expected) < 1e-5


def test_large_tensors_are_scaled_in_chunks(monkeypatch):
    grads, owner = random_grads(5), torch.tensor([0, 2, 2, 0, 1])
    whole = clip_and_sum(grads, 1.0)[0], clip_and_sum_by_owner(grads, owner, 3, 1.0)[0]
    monkeypatch.setattr("raptor_hf.privacy.clipping._CHUNK", 10)
    assert distance(clip_and_sum(grads, 1.0)[0], whole[0]) <= 1e-15
    assert distance(clip_and_sum_by_owner(grads, owner, 3, 1.0)[0], whole[1]) <= 1e-15


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_record_that_is_not_finite_counts_as_exactly_zero(bad, dtype):
    grads = random_grads(4, dtype=dtype)
    clean = {name: torch.cat([g[:1], g[2:]]) for name, g in grads.items()}
    grads["a"][1, 2, 3] = bad
    sums, norms = clip_and_sum(grads, 1.0)
    expected, _ = clip_and_sum(clean, 1.0)
    assert distance(sums, expected) < 1e-6
    assert not norms[1].isfinite() and norms[[0, 2, 3]].isfinite().all()
    alone, _ = clip_and_sum({name: g[1:2] for name, g in grads.items()}, 1.0)
    assert all(torch.equal(value, torch.zeros_like(value)) for value in alone.values())


def test_a_float64_norm_that_overflows_counts_as_zero():
    sums, _ = clip_and_sum({"a": torch.full((1, 4), 1e200, dtype=torch.float64)}, 1.0)
    assert torch.equal(sums["a"], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("size", [0, 1])
def test_empty_and_single_batches(size):
    sums, norms = clip_and_sum(random_grads(size), 1.0)
    assert norms.shape == (size,)
    assert {name: tuple(s.shape) for name, s in sums.items()} == SHAPES
    owned, _ = clip_and_sum_by_owner(random_grads(size), torch.zeros(size, dtype=torch.long), 3, 1.0)
    assert {name: tuple(s.shape) for name, s in owned.items()} == {name: (3, *s) for name, s in SHAPES.items()}
    if size == 0:
        assert total_norm(sums) == total_norm(owned) == 0.0


def test_scalar_parameters():
    sums, norms = clip_and_sum({"a": torch.tensor([3.0, 0.1]), "b": torch.tensor([[4.0], [0.2]])}, 1.0)
    assert norms.tolist() == pytest.approx([5.0, math.sqrt(0.05)])
    assert sums["a"].shape == () and sums["a"].item() == pytest.approx(0.7, rel=1e-5)


def test_a_zero_record_stays_zero():
    sums, norms = clip_and_sum({"a": torch.zeros(2, 3)}, 1.0)
    assert norms.tolist() == [0.0, 0.0] and torch.equal(sums["a"], torch.zeros(3))


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_bound_is_refused(bound):
    with pytest.raises(ValueError, match="max_norm"):
        clip_and_sum(random_grads(2), bound)


def test_nothing_to_clip_is_refused():
    with pytest.raises(ValueError, match="No gradients"):
        clip_and_sum({}, 1.0)


def test_factors():
    grads = {"a": torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 0.0], [0.0, 0.0]])}
    factors, _ = clip_factors(grads, 1.0)
    assert factors.tolist() == pytest.approx([0.2, 1.0, 0.0, 1.0], rel=1e-5)
    assert factors.dtype == torch.float64 and factors[0] <= 0.2


def test_gradients_are_not_changed():
    grads = random_grads(3, scale=9.0)
    grads["b"][1] = float("nan")
    before = {name: g.clone() for name, g in grads.items()}
    clip_and_sum(grads, 1.0)
    clip_and_sum_by_owner(grads, torch.tensor([0, 1, 1]), 2, 1.0)
    for name, g in grads.items():
        assert torch.equal(g.nan_to_num(), before[name].nan_to_num())


# ---------------------------------------------------------------- by owner


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_by_owner_equal_the_loop(dtype):
    grads, owner, bound = random_grads(8, dtype=dtype), torch.tensor([2, 0, 2, 2, 3, 0, 2, 3]), 2.0
    grads["b"][3, 1] = float("nan")
    sums, norms = clip_and_sum_by_owner(grads, owner, 5, bound)
    for e in range(5):
        members = [i for i in range(8) if owner[i] == e and i != 3]
        for name, shape in SHAPES.items():
            expected = sum((loop_clip(grads, i, bound)[name] for i in members), torch.zeros(shape, dtype=torch.float64))
            assert (sums[name][e].double() - expected).abs().max() < 1e-5
            if not members:
                assert torch.equal(sums[name][e], torch.zeros_like(sums[name][e]))
    assert norms.shape == (8,)


def test_adding_a_record_moves_its_owner_alone_and_by_at_most_the_bound():
    grads, owner = random_grads(7, scale=50.0), torch.tensor([0, 1, 1, 3, 0, 3, 1])
    before, _ = clip_and_sum_by_owner({n: g[:6] for n, g in grads.items()}, owner[:6], 4, 0.5)
    after, _ = clip_and_sum_by_owner(grads, owner, 4, 0.5)
    for e in range(4):
        moved = total_norm({n: after[n][e] - before[n][e] for n in grads})
        if e == owner[6]:
            assert 0.49 < moved <= 0.5
        else:
            assert moved == 0.0


def test_the_norm_is_not_split_among_owners():
    """Records of one owner are clipped one by one, not as a group."""
    grads = {"a": torch.tensor([[3.0], [3.0], [3.0]])}
    sums, _ = clip_and_sum_by_owner(grads, torch.tensor([1, 1, 0]), 2, 1.0)
    assert sums["a"].flatten().tolist() == pytest.approx([1.0, 2.0], rel=1e-5)


@pytest.mark.parametrize("owner", [[0], [0, 1], [[0, 1, 1]], [0, 1, 2], [0, -1, 1]])
def test_owners_that_do_not_fit_are_refused(owner):
    """A vector of another length would be broadcast, an owner outside the range would lose its record."""
    with pytest.raises(ValueError, match="owner"):
        clip_and_sum_by_owner(random_grads(3), torch.tensor(owner), 2, 1.0)


def test_tensors_of_different_batch_sizes_are_refused():
    with pytest.raises(ValueError, match="records"):
        clip_and_sum({"a": torch.ones(3, 2), "b": torch.ones(1, 2)}, 1.0)


@given(st.integers(0, 2**31), st.floats(-6, 6), st.floats(0.01, 10))
def test_neighbouring_batches_differ_by_at_most_the_bound(seed, exponent, bound):
    grads = random_grads(5, seed % 1000, 10.0**exponent)
    whole, _ = clip_and_sum(grads, bound)
    less, _ = clip_and_sum({n: g[:4] for n, g in grads.items()}, bound)
    assert total_norm({n: whole[n] - less[n] for n in grads}) <= bound * (1 + 1e-12)
