"""The processes' shares of the Poisson draw make up one Poisson draw, and the mean update is the single process's."""

import numpy as np

from raptor_hf.privacy.sampling import PoissonSampler

RECORDS, RATE, CYCLES, WORLD = 60, 0.3, 4_000, 3


def _updates(world):
    """(cycles, 2): sum of the drawn records' values over B, for a value that differs by record."""
    values = np.stack([np.ones(RECORDS), np.arange(RECORDS) / RECORDS], axis=1)
    samplers = [PoissonSampler(RECORDS, RATE, rank=rank, world_size=world) for rank in range(world)]
    draws = (np.concatenate([sampler.draw().shared for sampler in samplers]) for _ in range(CYCLES))
    return np.stack([values[drawn].sum(0) for drawn in draws]) / (RATE * RECORDS), values


def test_mean_and_variance_of_the_update_do_not_depend_on_the_number_of_processes():
    for world in (1, WORLD):
        updates, values = _updates(world)
        mean = values.sum(0) / RECORDS
        variance = RATE * (1 - RATE) * (values**2).sum(0) / (RATE * RECORDS) ** 2
        # six standard errors: a false alarm in about 1e-8 of all runs
        assert np.all(np.abs(updates.mean(0) - mean) < 6 * np.sqrt(variance / CYCLES))
        assert np.all(np.abs(updates.var(0) / variance - 1) < 6 * np.sqrt(2 / CYCLES) * 1.2)


def test_no_record_is_drawn_twice_or_by_a_wrong_process():
    samplers = [PoissonSampler(RECORDS, RATE, rank=rank, world_size=WORLD) for rank in range(WORLD)]
    for _ in range(200):
        shares = [sampler.draw().expert for sampler in samplers]
        assert all(np.all(share % WORLD == rank) for rank, share in enumerate(shares))
        assert len(np.unique(np.concatenate(shares))) == sum(map(len, shares))
