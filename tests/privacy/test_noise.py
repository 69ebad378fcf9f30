"""Noise: its distribution, its independence, and that no global seed reaches it.

Every statistical threshold lies where a correct draw falls less than once in 1e7 runs.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from scipy import stats

from raptor_hf.privacy.noise import EntropySource, NoiseSource

ALARM = 1e-8


def assert_standard_normal(values) -> None:
    values = np.asarray(values, dtype=np.float64).ravel()
    n = len(values)
    tail = stats.chi2(n).cdf((values**2).sum())
    assert ALARM < tail < 1 - ALARM, "variance is not 1"
    assert abs(values.mean()) * n**0.5 < 6, "mean is not 0"
    assert stats.kstest(values, "norm").pvalue > ALARM, "not Gaussian"


def assert_uncorrelated(one, other) -> None:
    one, other = np.asarray(one, dtype=np.float64).ravel(), np.asarray(other, dtype=np.float64).ravel()
    assert abs(np.corrcoef(one, other)[0, 1]) * len(one) ** 0.5 < 6


@pytest.mark.parametrize("secure_mode", [False, True])
@pytest.mark.parametrize("std", [1e-3, 1.0, 250.0])
def test_standard_deviation_and_shape_of_the_law(std, secure_mode):
    noise = NoiseSource(secure_mode=secure_mode).normal((200, 200), std)
    assert noise.shape == (200, 200) and noise.dtype == torch.float64
    assert_standard_normal(noise.double() / std)


def test_every_draw_of_every_source_is_independent():
    sources = [NoiseSource(), NoiseSource(), NoiseSource(secure_mode=True)]
    shared = sources[0].entropy
    sources.append(NoiseSource(shared))
    draws = [source.normal((20_000,), 1.0) for source in sources for _ in range(3)]
    for one, other in itertools.combinations(draws, 2):
        assert_uncorrelated(one, other)


def test_entries_of_one_tensor_are_independent():
    noise = NoiseSource().normal((300, 300), 1.0)
    for lag in (1, 2, 4, 300):
        assert_uncorrelated(noise.flatten()[:-lag], noise.flatten()[lag:])
    assert len(noise.double().unique()) > 0.98 * noise.numel()


def test_no_global_seed_reaches_the_noise():
    draws = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)
        random.seed(42)
        draws.append((NoiseSource().normal((50,), 1.0), EntropySource().coins(50), EntropySource().bytes(16)))
    assert not torch.equal(draws[0][0], draws[1][0])
    assert not np.array_equal(draws[0][1], draws[1][1])
    assert draws[0][2] != draws[1][2]


def test_drawing_leaves_the_global_generators_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    NoiseSource().normal((50,), 1.0)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_an_insecure_seed_reproduces_and_says_so():
    one, other = (NoiseSource(EntropySource(7)) for _ in range(2))
    first = [one.normal((5,), 1.0) for _ in range(2)]
    again = [other.normal((5,), 1.0) for _ in range(2)]
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert one.entropy.secure is False and EntropySource().secure is True and NoiseSource().entropy.secure is True
    assert not torch.equal(NoiseSource(EntropySource(8)).normal((5,), 1.0), first[0])


def test_the_seed_zero_is_a_seed():
    assert EntropySource(0).secure is False
    assert EntropySource(0).bytes(8) == EntropySource(0).bytes(8)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 4)])
def test_any_shape(shape):
    assert NoiseSource().normal(shape, 2.0).shape == shape


def test_zero_noise_is_exactly_zero():
    assert torch.equal(NoiseSource().normal((4, 5), 0.0), torch.zeros(4, 5))


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_an_impossible_scale_is_refused(std):
    with pytest.raises(ValueError, match="std"):
        NoiseSource().normal((2,), std)


@pytest.mark.parametrize("seed", [-1, 1.5, "7", True])
def test_an_impossible_seed_is_refused(seed):
    with pytest.raises(ValueError, match="insecure_seed"):
        EntropySource(seed)


def test_noise_is_float64_whatever_the_default_type():
    torch.set_default_dtype(torch.bfloat16)
    try:
        noise = NoiseSource().normal((100, 100), 1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert noise.dtype == torch.float64
    assert_standard_normal(noise)


def test_secure_mode_adds_four_draws():
    class Counting(EntropySource):
        calls = 0

        def bytes(self, count):
            self.calls += 1
            return super().bytes(count)

    plain, secure = Counting(), Counting()
    NoiseSource(plain).normal((3,), 1.0)
    NoiseSource(secure, secure_mode=True).normal((3,), 1.0)
    assert (plain.calls, secure.calls) == (1, 4)


def test_the_key_has_128_bits():
    class Recording(EntropySource):
        counts = []

        def bytes(self, count):
            self.counts.append(count)
            return super().bytes(count)

    NoiseSource(Recording()).normal((3,), 1.0)
    assert Recording.counts == [16]


def test_coins_are_uniform_with_all_53_bits():
    coins = EntropySource().coins(20_000)
    assert coins.dtype == np.float64 and coins.min() >= 0 and coins.max() < 1
    assert stats.kstest(coins, "uniform").pvalue > ALARM
    scaled = coins * 2.0**53
    assert np.array_equal(scaled, np.floor(scaled)), "not on the 53-bit grid"
    # half of all coins are odd multiples of 2**-53; float32 coins would give none
    assert stats.binomtest(int((scaled % 2 == 1).sum()), len(coins), 0.5).pvalue > ALARM
