"""Noise and draws of the real trainer: every deviation is the one that the accounting assumes.

A correct trainer fails one of these tests less than once in 1e6 runs; see `audits.py` for the statistics.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raptor_hf import stream_parameters
from tests.trainer import audits
from tests.trainer.build import fix_draws, make_trainer, norm, perturb_adapters, run


def test_t1_noise_and_draws():
    audits.t1()


def test_t2_exact_algebra():
    audits.t2()


def test_t3_worst_case_canary():
    audits.t3(repeats=20)


def test_an_expert_without_any_record_gets_the_same_noise():
    """Experts 1 and 2 own nobody in the whole data set, and cannot be told from the others by their noise."""
    assert set(audits.owners(audits.T1_RECORDS)) == {0, 3}
    found = audits.released(audits.noise_run(draws=[(range(24), range(24))] * 6))
    audits.check_scale(found)
    empty = np.concatenate([value for key, value in found.items() if key[3] in (1, 2)])
    assert empty.std() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("secure_mode", [False, True])
def test_deviation_with_dropout_and_secure_mode(secure_mode):
    audits.check_scale(audits.released(audits.noise_run(4, secure_mode=secure_mode)))


def test_every_trainable_tensor_gets_noise():
    trainer = make_trainer(4, expected_batch_size=2)
    fix_draws(trainer, [([], [])])
    update = run(trainer)[0]
    streams = stream_parameters(trainer.model)
    trainable = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert {*streams["shared"], *streams["expert"]} == trainable == {*update["shared"], *update["expert"]}
    for stream in update.values():
        for value in stream.values():
            assert (value != 0).float().mean() > 0.95


def test_the_same_seed_gives_other_noise_and_other_draws():
    trainers = [make_trainer(16, seed=42, data_seed=42) for _ in range(2)]
    assert all(torch.equal(p, q) for p, q in zip(*(t.model.parameters() for t in trainers), strict=True))
    sizes = [audits.draws_of(t, 40) for t in trainers]
    assert any(not np.array_equal(a[0], b[0]) for a, b in zip(*sizes, strict=True))
    updates = [run(fix_draws(t, [([], [])]))[0]["shared"] for t in trainers]
    assert norm({n: updates[0][n] - updates[1][n] for n in updates[0]}) > norm(updates[0])


def test_noise_follows_the_micro_batches_only_once():
    """One record a micro-batch or all in one: the noise is added once a cycle."""
    for size in (1, 24):
        updates = audits.noise_run(draws=[(range(12), range(12))] * 3, per_device_train_batch_size=size)
        audits.check_scale(audits.released(updates))


def test_the_record_count_never_shows_in_the_scale():
    """The noisy gradient of 1 record and of 24 have the same noise and the same divisor."""
    for drawn in ([0], range(24)):
        audits.check_scale(audits.released(audits.noise_run(draws=[(drawn, drawn)] * 4)))


def test_a_seed_for_debugging_reproduces_the_run_and_says_not_private():
    updates, trainers = [], []
    for _ in range(2):
        with pytest.warns(UserWarning, match="NOT private"):
            trainer = make_trainer(8, insecure_noise_seed=3)
        perturb_adapters(trainer.model)
        updates.append(run(trainer))
        trainers.append(trainer)
    for one, two in zip(*updates, strict=True):
        for stream in one:
            assert all(torch.equal(one[stream][n], two[stream][n]) for n in one[stream])
    assert trainers[0].privacy_statement().verdict.startswith("NOT PRIVATE")


def test_the_subtraction_attack_finds_nothing():
    """With the code, the config, the seed and two released adapters, the noise cannot be drawn again.

    The attacker replays the same trainer on the same draws and subtracts its noise: with noise from `args.seed` the
    difference would be the gradient alone; here it is noise of sqrt(2) times the deviation.
    """
    draws = [(range(24), range(24))] * 4
    victim, attacker = (audits.released(audits.noise_run(draws=draws)) for _ in range(2))
    left = {key: (value - attacker[key]) / 2**0.5 for key, value in victim.items()}
    audits.check_scale(left)
