"""Poisson sampling: the law of the draws, against the binomial distribution. False alarms: under 1e-7 a test."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from scipy import stats

from raptor_hf.privacy.noise import EntropySource
from raptor_hf.privacy.sampling import CycleLoader, PoissonSampler

ALARM = 1e-8
N, P, CYCLES = 400, 0.15, 1_500


def indicators(draws, n=N) -> np.ndarray:
    table = np.zeros((len(draws), n), dtype=bool)
    for row, indices in zip(table, draws, strict=True):
        row[indices] = True
    return table


@pytest.fixture(scope="module")
def cycles():
    drawn = list(CycleLoader(PoissonSampler(N, P), CYCLES))
    return indicators([c.shared for c in drawn]), indicators([c.expert for c in drawn])


def assert_rate(hits: np.ndarray, rate: float) -> None:
    assert stats.binomtest(int(hits.sum()), hits.size, rate).pvalue > ALARM


def test_inclusion_rate_of_both_draws(cycles):
    for table in cycles:
        assert_rate(table, P)


@pytest.mark.parametrize("axis", [0, 1], ids=["records", "batch sizes"])
def test_counts_scatter_as_independent_coins(cycles, axis):
    """Of a fixed-size batch the sizes would not scatter at all; of a shuffle the records' counts too little."""
    for table in cycles:
        counts, trials = table.sum(axis), table.shape[axis]
        statistic = ((counts - trials * P) ** 2 / (trials * P * (1 - P))).sum()
        assert ALARM < stats.chi2(len(counts)).cdf(statistic) < 1 - ALARM


def test_the_two_draws_of_a_cycle_are_independent(cycles):
    shared, expert = cycles
    assert_rate(shared & expert, P * P)


def test_consecutive_cycles_are_independent(cycles):
    for table in cycles:
        assert_rate(table[1:] & table[:-1], P * P)
        assert_rate(table[:, 1:] & table[:, :-1], P * P)
    assert_rate(cycles[0][1:] & cycles[1][:-1], P * P)


def test_indices_ascend_and_are_int64():
    cycle = PoissonSampler(1_000, 0.3).draw()
    for draw in (cycle.shared, cycle.expert):
        assert draw.dtype == np.int64 and (np.diff(draw) > 0).all() and draw.min() >= 0 and draw.max() < 1_000


def test_empty_draws_are_kept():
    drawn = list(CycleLoader(PoissonSampler(5, 0.01), 400))
    assert len(drawn) == 400
    empty = sum(len(c.shared) == 0 for c in drawn)
    assert stats.binomtest(empty, 400, 0.99**5).pvalue > ALARM


def test_rate_one_takes_everything():
    cycle = PoissonSampler(7, 1.0).draw()
    assert cycle.shared.tolist() == cycle.expert.tolist() == list(range(7))


def test_nothing_caps_a_large_draw():
    assert len(PoissonSampler(30_000, 1.0).draw().shared) == 30_000


class Scripted(EntropySource):
    """Coins given by their 64-bit words."""

    def __init__(self, words):
        super().__init__()
        self.words = list(words)

    def bytes(self, count):
        taken, self.words = self.words[: count // 8], self.words[count // 8 :]
        return np.array(taken, dtype=np.uint64).tobytes()


def test_a_coin_is_compared_in_float64():
    step = 900_719_925_474_101
    rate = step / 2**53  # about 0.1; float32 does not tell it from its neighbours
    words = [(step - 1) << 11, step << 11, (step + 1) << 11]
    cycle = PoissonSampler(3, rate, entropy=Scripted(words * 2)).draw()
    assert cycle.shared.tolist() == cycle.expert.tolist() == [0]


def test_each_draw_has_coins_of_its_own():
    words = [0, 2**64 - 1, 2**64 - 1, 0]
    cycle = PoissonSampler(2, 0.5, entropy=Scripted(words)).draw()
    assert cycle.shared.tolist() == [0] and cycle.expert.tolist() == [1]


@pytest.mark.parametrize(("n", "world"), [(10, 3), (9, 3), (2, 5), (1, 1)])
def test_ranks_share_the_records_out_exactly_once(n, world):
    drawn = [PoissonSampler(n, 1.0, rank=rank, world_size=world).draw() for rank in range(world)]
    assert sorted(np.concatenate([c.shared for c in drawn])) == list(range(n))
    assert sorted(np.concatenate([c.expert for c in drawn])) == list(range(n))


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ValueError, match="rank"):
        PoissonSampler(10, 0.5, rank=2, world_size=2)


def test_no_global_seed_reaches_the_coins():
    drawn = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)
        random.seed(42)
        drawn.append(PoissonSampler(200, 0.5).draw())
    assert drawn[0].shared.tolist() != drawn[1].shared.tolist()
    assert drawn[0].expert.tolist() != drawn[1].expert.tolist()


def test_an_insecure_seed_reproduces():
    one, other = (PoissonSampler(200, 0.5, entropy=EntropySource(3)) for _ in range(2))
    first, again, later = one.draw(), other.draw(), one.draw()
    assert first.shared.tolist() == again.shared.tolist() and first.expert.tolist() == again.expert.tolist()
    assert first.shared.tolist() != later.shared.tolist() and first.shared.tolist() != first.expert.tolist()


def test_the_loader_has_a_public_length_and_fresh_coins_each_epoch():
    loader = CycleLoader(PoissonSampler(200, 0.5), 4)
    epochs = [[c.shared.tolist() for c in loader] for _ in range(2)]
    assert len(loader) == 4 and [len(e) for e in epochs] == [4, 4]
    assert not set(map(tuple, epochs[0])) & set(map(tuple, epochs[1]))


def test_a_cycle_does_not_print_its_records():
    cycle = PoissonSampler(3, 1.0).draw()
    assert "0" not in repr(cycle) and "shared" not in repr(cycle)


@pytest.mark.parametrize(
    ("n", "rate"), [(0, 0.5), (-1, 0.5), (2.5, 0.5), (5, 0.0), (5, -0.1), (5, 1.1), (5, float("nan"))]
)
def test_impossible_settings_are_refused(n, rate):
    with pytest.raises(ValueError, match=r"dataset_size|sample_rate"):
        PoissonSampler(n, rate)


@pytest.mark.parametrize("length", [0, -1, 1.5])
def test_an_epoch_has_at_least_one_cycle(length):
    with pytest.raises(ValueError, match="cycles_per_epoch"):
        CycleLoader(PoissonSampler(5, 0.5), length)
