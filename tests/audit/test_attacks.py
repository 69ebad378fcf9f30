"""Loss, calibrated loss, RMIA and LiRA: loops by definition, and populations whose AUC is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from raptor_hf.audit import (
    auc,
    auc_interval,
    calibrated_loss_attack,
    lira_leave_one_out,
    lira_offline,
    lira_online,
    loss_attack,
    rmia_attack,
)
from raptor_hf.errors import PrivacyConfigError

SHIFT, SPREAD = 1.2, 0.7


def coins(rng: np.random.Generator, models: int, records: int) -> np.ndarray:
    """(K, n) bool: each record in exactly half of the models, at random."""
    return np.argsort(rng.random((models, records)), axis=0) < models // 2


def population(models: int, records: int, seed: int = 0, shift: float = SHIFT) -> tuple[np.ndarray, np.ndarray]:
    """Scores N(difficulty_i + shift * in, SPREAD^2) with difficulties far more spread than the shift."""
    rng = np.random.default_rng(seed)
    mask = coins(rng, models, records)
    difficulty = 5 * rng.normal(size=records)
    return difficulty + shift * mask + SPREAD * rng.normal(size=mask.shape), mask


def theory(distance: float) -> float:
    """AUC of the best test between two normals `distance` standard deviations apart."""
    return float(stats.norm.cdf(distance / math.sqrt(2)))


# --- Thresholds on the loss ---


def test_a_lower_loss_is_a_higher_score():
    assert loss_attack(np.array([0.1, 2.0])).tolist() == [-0.1, -2.0]


def test_loss_attack_reaches_the_area_of_two_normals():
    rng = np.random.default_rng(0)
    member = np.arange(40_000) < 20_000
    loss = rng.normal(size=40_000) - 0.8 * member
    low, high = auc_interval(loss_attack(loss), member, 0.9999)
    assert low < theory(0.8) < high
    assert high - low < 0.025


def test_calibration_removes_the_difficulty_of_records():
    """The base model's loss is the difficulty: what is left is the shift over the spread."""
    rng = np.random.default_rng(1)
    member = np.arange(40_000) < 20_000
    difficulty = 4 * rng.normal(size=40_000)
    loss = difficulty - member + rng.normal(size=40_000)
    scores = calibrated_loss_attack(loss, difficulty)
    low, high = auc_interval(scores, member, 0.9999)
    assert low < theory(1.0) < high
    assert auc(loss_attack(loss), member) == pytest.approx(theory(1 / math.sqrt(17)), abs=0.015)


def test_shapes_that_differ_are_refused():
    with pytest.raises(PrivacyConfigError, match="base_loss"):
        calibrated_loss_attack(np.zeros(3), np.zeros(4))


# --- LiRA ---


def test_online_is_the_ratio_of_two_fits():
    """One record, by the definition of the normal density."""
    shadows = np.array([[1.0], [2.0], [4.0], [-1.0], [0.0], [-3.0]])
    mask = np.array([[True]] * 3 + [[False]] * 3)
    for variance in ("record", "pooled"):
        found = lira_online(np.array([1.5]), shadows, mask, variance=variance)
        fits = [stats.norm(np.mean(x), np.std(x, ddof=1)) for x in (shadows[:3, 0], shadows[3:, 0])]
        assert found[0] == pytest.approx(fits[0].logpdf(1.5) - fits[1].logpdf(1.5))
        offline = lira_offline(np.array([1.5]), shadows, mask, variance=variance)
        assert offline[0] == pytest.approx(-math.log(1 - fits[1].cdf(1.5)))


def test_pooled_variance_is_that_within_records():
    """Records of means -100 and 100: their distance says nothing about the spread of either."""
    shadows = np.array([[101.0, -99.0], [99.0, -101.0], [103.0, -97.0], [97.0, -103.0]])
    mask = np.array([[True, True], [True, True], [False, False], [False, False]])
    target = np.array([100.5, -99.5])
    # squared deviations 1 (in) and 9 (out) of four scores about two means
    std_in, std_out = math.sqrt(4 / (4 - 2)), math.sqrt(36 / (4 - 2))
    expected = stats.norm.logpdf(0.5, 0, std_in) - stats.norm.logpdf(0.5, 0, std_out)
    assert lira_online(target, shadows, mask, variance="pooled") == pytest.approx([expected] * 2)
    offline = lira_offline(target, shadows, mask, variance="pooled")
    assert offline == pytest.approx([-stats.norm.logsf(0.5 / std_out)] * 2)


@pytest.mark.parametrize("attack", ["online", "offline"])
def test_many_shadows_reach_the_area_of_the_best_test(attack):
    """With 256 models the fits are nearly exact; leave-one-out then has the AUC of two known normals."""
    scores, mask = population(256, 150)
    found = lira_leave_one_out(scores, mask, attack=attack, variance="pooled")
    assert auc(found, mask) == pytest.approx(theory(SHIFT / SPREAD), abs=0.01)
    assert auc(scores, mask) < 0.6  # the raw scores mostly tell the difficulty


def test_few_shadows_lose_what_the_noise_of_their_means_costs():
    """Offline, 2c models: z = target - mean of c or c - 1 others. For members the mean is of c, else of c - 1."""
    models, records = 8, 40_000
    scores, mask = population(models, records, seed=3)
    found = lira_leave_one_out(scores, mask, attack="offline", variance="pooled")
    c = models // 2
    deviation = SPREAD * math.sqrt((1 + 1 / c) + (1 + 1 / (c - 1)))
    expected = stats.norm.cdf(SHIFT / deviation)
    assert auc(found[0], mask[0]) == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("models", [8, 64])
@pytest.mark.parametrize("attack", ["online", "offline"])
@pytest.mark.parametrize("variance", ["record", "pooled", "auto"])
def test_null_scores_give_half(models, attack, variance):
    """No shift: the attack finds nothing. Deviation of the AUC of 2,000 records: about .013."""
    scores, mask = population(models, 2000, seed=4, shift=0.0)
    found = lira_leave_one_out(scores, mask, attack=attack, variance=variance)
    assert np.isfinite(found).all()
    assert auc(found[0], mask[0]) == pytest.approx(0.5, abs=0.06)


def test_complementary_halves_bias_the_auc_unless_the_partner_is_left_out():
    """Nothing to find. Deviation of the mean of eight AUCs of 20,000 records: about .0025."""
    rng = np.random.default_rng(6)
    halves = np.argsort(rng.random((4, 20_000)), axis=1) < 10_000
    mask = np.stack([halves, ~halves], axis=1).reshape(8, -1)
    scores = rng.normal(size=mask.shape)
    found = lira_leave_one_out(scores, mask)
    assert np.mean([auc(found[k], mask[k]) for k in range(8)]) == pytest.approx(0.4755, abs=0.012)
    apart = []
    for k in range(8):
        others = np.arange(8) // 2 != k // 2
        apart.append(auc(lira_online(scores[k], scores[others], mask[others]), mask[k]))
    assert np.mean(apart) == pytest.approx(0.5, abs=0.012)


def test_constant_scores_give_exactly_half():
    mask = coins(np.random.default_rng(0), 8, 50)
    for attack in ("online", "offline"):
        for variance in ("record", "pooled"):
            found = lira_leave_one_out(np.full(mask.shape, 3.25), mask, attack=attack, variance=variance)
            assert auc(found, mask) == 0.5


def test_variance_by_the_number_of_shadows():
    for models, same in ((62, "pooled"), (63, "record")):
        scores, mask = population(models, 20)
        target = scores[0]
        for attack in (lira_online, lira_offline):
            auto = attack(target, scores, mask)
            np.testing.assert_array_equal(auto, attack(target, scores, mask, variance=same))
            other = "record" if same == "pooled" else "pooled"
            assert not np.allclose(auto, attack(target, scores, mask, variance=other))


def test_the_model_attacked_is_not_its_own_shadow():
    scores, mask = population(10, 30)
    found = lira_leave_one_out(scores, mask)
    for k in (0, 7):
        others = [i for i in range(10) if i != k]
        np.testing.assert_array_equal(found[k], lira_online(scores[k], scores[others], mask[others]))


def test_far_targets_keep_their_order():
    """Beyond 40 deviations a plain probability is 0; the logarithm still tells the records apart."""
    shadows = np.array([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]])
    mask = np.zeros((3, 2), dtype=bool)
    low, high = lira_offline(np.array([50.0, 60.0]), shadows, mask, variance="record")
    assert 0 < low < high < math.inf


def test_what_cannot_be_fitted_is_refused():
    scores, mask = population(6, 5)
    with pytest.raises(PrivacyConfigError, match="1 of 5 records have fewer than 1"):
        broken = mask.copy()
        broken[:, 2] = True
        lira_offline(scores[0], scores, broken)
    with pytest.raises(PrivacyConfigError, match="fewer than 2"):
        lira_online(scores[0], scores[:3], np.array([[True], [False], [False]]) | np.zeros(5, bool), variance="record")
    with pytest.raises(PrivacyConfigError, match="1 shadow scores"):
        lira_online(scores[0], np.where(np.arange(30).reshape(6, 5) == 3, np.nan, scores), mask)
    with pytest.raises(PrivacyConfigError, match="target"):
        lira_online(np.full(5, np.nan), scores, mask)
    with pytest.raises(PrivacyConfigError, match="int64"):
        lira_online(scores[0], scores, mask.astype(np.int64))
    with pytest.raises(PrivacyConfigError, match="attack"):
        lira_leave_one_out(scores, mask, attack="both")


# --- RMIA ---


def _rmia_by_definition(target, shadow, mask, others, others_shadow, gamma, a):
    found = []
    for i in range(len(target)):
        p_out = np.mean([math.exp(-shadow[k, i]) for k in range(len(mask)) if not mask[k, i]])
        ratio = math.exp(-target[i]) / (((1 + a) * p_out + 1 - a) / 2)
        wins = 0
        for j in range(len(others)):
            prior = np.mean(np.exp(-others_shadow[:, j]))
            wins += ratio / (math.exp(-others[j]) / (((1 + a) * prior + 1 - a) / 2)) >= gamma
        found.append(wins / len(others))
    return found


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("a", [0.0, 0.3, 1.0])
def test_rmia_is_the_share_of_population_records_beaten(gamma, a):
    rng = np.random.default_rng(0)
    shadow, mask = rng.exponential(size=(4, 12)), coins(rng, 4, 12)
    target, others, others_shadow = rng.exponential(size=12), rng.exponential(size=17), rng.exponential(size=(4, 17))
    found = rmia_attack(target, shadow, mask, others, others_shadow, gamma=gamma, offline_a=a)
    assert found.tolist() == _rmia_by_definition(target, shadow, mask, others, others_shadow, gamma, a)


def test_rmia_counts_a_ratio_of_exactly_gamma():
    zeros = np.zeros
    assert rmia_attack(zeros(1), zeros((1, 1)), zeros((1, 1), bool), zeros(3), zeros((1, 3)), gamma=1.0) == [1.0]


def test_rmia_removes_the_difficulty_of_records():
    rng = np.random.default_rng(1)
    n, m = 6000, 4000
    member = np.arange(n) < n // 2
    hard, hard_z = 5 + rng.normal(size=n), 5 + rng.normal(size=m)
    mask = np.zeros((1, n), dtype=bool)
    noise = 0.2
    target = hard - 0.2 * member + noise * rng.normal(size=n)
    target_z = hard_z + noise * rng.normal(size=m)
    found = rmia_attack(target, hard[None], mask, target_z, hard_z[None], gamma=1.0)
    assert auc(found, member) == pytest.approx(theory(1.0), abs=0.02)
    null = rmia_attack(hard + noise * rng.normal(size=n), hard[None], mask, target_z, hard_z[None], gamma=1.0)
    assert auc(null, member) == pytest.approx(0.5, abs=0.03)


def test_rmia_refuses_what_has_no_prior():
    zeros = np.zeros
    with pytest.raises(PrivacyConfigError, match="1 records were trained on by every"):
        rmia_attack(zeros(2), zeros((2, 2)), np.array([[True, True], [True, False]]), zeros(3), zeros((2, 3)))
    with pytest.raises(PrivacyConfigError, match="population"):
        rmia_attack(zeros(2), zeros((2, 2)), zeros((2, 2), bool), zeros(3), zeros((2, 4)))
    with pytest.raises(PrivacyConfigError, match="in_mask"):
        rmia_attack(zeros(3), zeros((2, 2)), zeros((2, 2), bool), zeros(3), zeros((2, 3)))
    with pytest.raises(PrivacyConfigError, match="gamma"):
        rmia_attack(zeros(2), zeros((2, 2)), zeros((2, 2), bool), zeros(3), zeros((2, 3)), gamma=0.0)
