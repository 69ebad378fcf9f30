"""The release of one stream: exact algebra without noise, exact scale with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from raptor_hf.privacy.mechanism import ClippedSum, release
from raptor_hf.privacy.noise import EntropySource, NoiseSource

ALARM = 1e-8
SHAPES = {"a": torch.Size((4, 5, 6)), "b": torch.Size((4, 7))}


def grads_of(size: int, seed: int = 0, scale: float = 5.0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(size, *s[1:], generator=generator, dtype=torch.float64) * scale for n, s in SHAPES.items()}


def clipped_rows(grads: dict, bound: float) -> dict:
    size = len(next(iter(grads.values())))
    norms = [math.sqrt(sum(float((g[i] ** 2).sum()) for g in grads.values())) for i in range(size)]
    return {n: torch.stack([g[i] * min(1.0, bound / norms[i]) for i in range(size)]) for n, g in grads.items()}


def assert_scale(values: torch.Tensor, std: float) -> None:
    flat = values.double().flatten() / std
    tail = stats.chi2(len(flat)).cdf(float((flat**2).sum()))
    assert ALARM < tail < 1 - ALARM
    assert abs(float(flat.mean())) * len(flat) ** 0.5 < 6


def test_shared_stream_without_noise_is_the_clipped_sum_over_the_denominator():
    total = ClippedSum({n: s[1:] for n, s in SHAPES.items()}, 0.7)
    grads = grads_of(9)
    for start in (0, 4, 5):  # micro-batches of 4, 1, 4 records
        stop = {0: 4, 4: 5, 5: 9}[start]
        total.add({n: g[start:stop] for n, g in grads.items()})
    released = release(total, 0.0, 64, NoiseSource())
    rows = clipped_rows(grads, 0.7)
    for name in SHAPES:
        expected = rows[name].sum(0) / 64
        assert (released[name] - expected).abs().max() < 2e-6 * 9 / 64


def test_expert_stream_without_noise_is_each_owners_clipped_sum():
    total = ClippedSum(SHAPES, 0.7, num_owners=4)
    grads, owner = grads_of(9), torch.tensor([0, 3, 3, 0, 0, 1, 3, 1, 0])
    total.add({n: g[:5] for n, g in grads.items()}, owner[:5])
    total.add({n: g[5:] for n, g in grads.items()}, owner[5:])
    released = release(total, 0.0, 16.0, NoiseSource())
    rows = clipped_rows(grads, 0.7)
    for name in SHAPES:
        for e in range(4):
            expected = rows[name][owner == e].sum(0) / 16
            assert (released[name][e] - expected).abs().max() < 2e-6
        assert torch.equal(released[name][2], torch.zeros_like(released[name][2]))


@pytest.mark.parametrize("secure_mode", [False, True])
@pytest.mark.parametrize(("sigma", "bound", "denominator"), [(0.7, 0.1, 1000), (3.0, 2.0, 12.5), (50.0, 1e-3, 1)])
def test_noise_scale_of_an_empty_batch(sigma, bound, denominator, secure_mode):
    """Nothing was added, so the release is noise alone: of every tensor and every owner the same."""
    shapes = {"a": torch.Size((4, 60, 60)), "b": torch.Size((4, 5_000))}
    total = ClippedSum(shapes, bound, num_owners=4)
    released = release(total, sigma, denominator, NoiseSource(secure_mode=secure_mode))
    for name, shape in shapes.items():
        assert released[name].shape == shape
        for e in range(4):
            assert_scale(released[name][e], sigma * bound / denominator)
    assert abs(np.corrcoef(released["a"].flatten(1)[:, :3_600].numpy())[0, 1:]).max() * 60 < 6
    assert abs(np.corrcoef(released["a"][0].flatten(), released["b"][0][:3_600])[0, 1]) * 60 < 6


def test_noise_does_not_depend_on_what_was_added():
    shapes = {"a": torch.Size((3, 8_000))}
    total = ClippedSum(shapes, 1.0, num_owners=3)
    total.add({"a": torch.full((2, 8_000), 1e3)}, torch.tensor([0, 2]))
    sums = total.sums["a"].clone()
    released = release(total, 2.0, 10, NoiseSource())["a"]
    for e in range(3):
        assert_scale(released[e] - sums[e] / 10, 2.0 / 10)


def test_two_releases_of_one_sum_have_independent_noise():
    total = ClippedSum({"a": torch.Size((10_000,))}, 1.0)
    source = NoiseSource()
    one, other = (release(total, 1.0, 1, source)["a"].double() for _ in range(2))
    assert abs(np.corrcoef(one, other)[0, 1]) * 100 < 6
    assert_scale(one - other, math.sqrt(2))


def test_a_release_does_not_change_the_sum():
    total = ClippedSum({"a": torch.Size((3,))}, 1.0)
    total.add({"a": torch.ones(2, 3) * 0.1})
    before = total.sums["a"].clone()
    release(total, 1.0, 5, NoiseSource())
    assert torch.equal(total.sums["a"], before)


def test_sensitivity_is_the_bound_that_clips():
    total = ClippedSum({"a": torch.Size((3,))}, 0.25)
    assert total.sensitivity == 0.25
    total.add({"a": torch.full((1, 3), 1e6)})
    assert 0.2499 < float(total.sums["a"].double().norm()) <= 0.25


def test_an_empty_micro_batch_adds_nothing():
    total = ClippedSum(SHAPES, 1.0, num_owners=4)
    total.add(grads_of(0), torch.zeros(0, dtype=torch.long))
    assert all(not s.any() for s in total.sums.values())
    assert {n: s.shape for n, s in total.sums.items()} == SHAPES


def test_half_precision_micro_batches_add_up_in_float64():
    total = ClippedSum({"a": torch.Size((1,))}, 1.0)
    for _ in range(600):
        total.add({"a": torch.ones(1, 1, dtype=torch.bfloat16)})
    assert total.sums["a"].dtype == torch.float64
    assert total.sums["a"].item() == pytest.approx(600, rel=1e-5)


def test_the_sum_keeps_the_widest_type_it_was_given():
    total = ClippedSum({"a": torch.Size((1,))}, 1.0)
    total.add({"a": torch.tensor([[1e-12]], dtype=torch.float64)})
    total.add({"a": torch.tensor([[0.5]], dtype=torch.float32)})
    assert total.sums["a"].dtype == torch.float64
    assert total.sums["a"].item() - 0.5 == pytest.approx(1e-12, rel=1e-3)


def test_types_do_not_follow_the_default_type():
    torch.set_default_dtype(torch.bfloat16)
    try:
        total = ClippedSum({"a": torch.Size((2,))}, 1.0)
        released = release(total, 1.0, 2, NoiseSource())
    finally:
        torch.set_default_dtype(torch.float32)
    assert total.sums["a"].dtype == torch.float64 and released["a"].dtype == torch.float32


def test_owners_are_given_exactly_to_a_stream_with_owners():
    with pytest.raises(ValueError, match="Owners"):
        ClippedSum({n: s[1:] for n, s in SHAPES.items()}, 1.0).add(grads_of(2), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="Owners"):
        ClippedSum(SHAPES, 1.0, num_owners=4).add(grads_of(2))


@pytest.mark.parametrize("owner", [[0, 4], [-1, 0], [0], [0, 1, 2]])
def test_owners_that_do_not_fit_are_refused_and_nothing_is_added(owner):
    total = ClippedSum(SHAPES, 1.0, num_owners=4)
    with pytest.raises(ValueError, match="owner"):
        total.add(grads_of(2), torch.tensor(owner))
    assert all(not s.any() for s in total.sums.values())


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["a", "c"]])
def test_missing_or_unexpected_tensors_are_refused(names):
    total = ClippedSum({n: s[1:] for n, s in SHAPES.items()}, 1.0)
    with pytest.raises(ValueError, match=r"missing or unexpected"):
        total.add({n: torch.ones(2, 3) for n in names})


def test_reduce_sums_over_processes():
    total = ClippedSum({"a": torch.Size((2,))}, 1.0)
    total.add({"a": torch.tensor([[0.1, 0.2]])})
    total.reduce(lambda tensor: tensor * 3)
    assert total.sums["a"].tolist() == pytest.approx([0.3, 0.6])


@pytest.mark.parametrize("sigma", [-0.1, float("nan"), float("inf")])
def test_an_impossible_noise_multiplier_is_refused(sigma):
    with pytest.raises(ValueError, match="noise_multiplier"):
        release(ClippedSum({"a": torch.Size((2,))}, 1.0), sigma, 1, NoiseSource())


@pytest.mark.parametrize("denominator", [0, -1, float("nan"), float("inf")])
def test_an_impossible_denominator_is_refused(denominator):
    with pytest.raises(ValueError, match="denominator"):
        release(ClippedSum({"a": torch.Size((2,))}, 1.0), 1.0, denominator, NoiseSource())


def test_neighbouring_datasets_with_the_same_noise():
    """One record more moves the release of one owner alone, by at most C / denominator."""
    grads, owner = grads_of(6, scale=50.0), torch.tensor([1, 0, 1, 3, 3, 1])
    released = []
    for size in (5, 6):
        total = ClippedSum(SHAPES, 0.4, num_owners=4)
        total.add({n: g[:size] for n, g in grads.items()}, owner[:size])
        released.append(release(total, 1.3, 8, NoiseSource(EntropySource(5))))
    for e in range(4):
        moved = math.sqrt(sum(float((released[1][n][e] - released[0][n][e]).square().sum()) for n in SHAPES))
        if e == owner[5]:
            assert 0.99 * 0.4 / 8 < moved <= 0.4 / 8
        else:
            assert moved == 0.0


def _on_noise_grid(released, scale, denominator):
    """Share of coordinates that scaled float32 noise alone could have given: an attacker's test for "no record here".

    The float32 z nearest to the value that would have been drawn, and its neighbours, are scaled and divided again.
    """
    value = released.numpy()
    nearest = (value.astype(np.float64) * denominator / scale).astype(np.float32)
    candidates = [nearest]
    for _ in range(3):
        candidates = [candidates[0], *candidates]
        candidates[0] = np.nextafter(candidates[0], np.float32(-np.inf))
        candidates.append(np.nextafter(candidates[-1], np.float32(np.inf)))
    hit = np.zeros(value.shape, dtype=bool)
    for z in candidates:
        hit |= (z * np.float32(scale)) / np.float32(denominator) == value
    return hit.mean()


@pytest.mark.parametrize("secure_mode", [False, True])
@pytest.mark.parametrize(("sigma", "denominator"), [(5.27, 125.0), (16.52, 125.0), (1.0, 2.0)])
def test_released_numbers_do_not_tell_whether_there_was_a_record(sigma, denominator, secure_mode):
    """Noise rounded to float32 before it is scaled reaches only some floats; a record moves others into view."""
    shares = []
    for records in (0, 1):
        total = ClippedSum({"a": torch.Size((60_000,))}, 1.0)
        if records:
            total.add({"a": torch.randn(1, 60_000)})
        released = release(total, sigma, denominator, NoiseSource(secure_mode=secure_mode))["a"]
        assert released.dtype == torch.float32
        shares.append(_on_noise_grid(released, sigma, denominator))
    # six standard errors of the difference of two shares
    assert abs(shares[0] - shares[1]) < 6 * (0.5 / 60_000) ** 0.5, shares


def test_one_record_more_moves_the_sum_by_no_more_than_the_bound_whatever_the_rounding():
    """In a float32 sum of many records, one more changes how all the others are rounded."""
    torch.manual_seed(0)
    grads, extra = torch.randn(20_000, 64), torch.randn(1, 64) * 10
    sums = []
    for with_extra in (False, True):
        total = ClippedSum({"a": torch.Size((64,))}, 1.0)
        for part in (torch.cat([extra, grads]) if with_extra else grads).split(500):
            total.add({"a": part})
        sums.append(total.sums["a"])
    assert (sums[1] - sums[0]).norm() <= total.sensitivity


@pytest.mark.parametrize("shape", [(1, 4), (1, 1, 4), (1, 50, 1)])
@pytest.mark.parametrize("owners", [None, 3])
def test_gradients_that_would_be_repeated_to_fit_are_refused(owners, shape):
    """One record's gradient, spread over 50 rows by broadcasting, would be 7 times as long as it was clipped to."""
    total = ClippedSum({"w": torch.Size([50, 4] if owners is None else [owners, 50, 4])}, 1.0, num_owners=owners)
    owner = None if owners is None else torch.tensor([1])
    with pytest.raises(ValueError, match="have the shape"):
        total.add({"w": torch.ones(shape)}, owner)
    assert float(total.sums["w"].norm()) == 0
    total.add({"w": torch.ones(1, 50, 4)}, owner)
    assert float(total.sums["w"].norm()) == pytest.approx(1.0, abs=1e-5)
