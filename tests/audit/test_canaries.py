"""Gradient canaries through the real trainer."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy import stats

from raptor_hf import PrivacyConfigError, RaptorTrainer
from raptor_hf.audit.canaries import CanaryTrainer, Observer, draw_canaries, log_likelihood_ratio
from raptor_hf.audit.directions import Directions
from raptor_hf.audit.measured import measure, repetition
from raptor_hf.audit.verdict import CanaryResult, bound_run, one_run_markdown
from raptor_hf.streams import Stream
from tests.audit.canary_runs import CANDIDATE_OWNERS, CANDIDATES, EMPTY, canary_run, observed_run
from tests.helpers import collate, tiny_model
from tests.trainer.build import assert_refused, make_config
from tests.trainer.mutations import broken_by

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_the_public_names_and_that_they_load_the_trainer_on_first_use():
    import raptor_hf.audit as public

    assert public.CanaryTrainer is CanaryTrainer and public.Observer is Observer
    assert public.draw_canaries is draw_canaries
    assert public.CanaryResult is CanaryResult and public.bound_run is bound_run
    assert all(hasattr(public, name) for name in public.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Canary'"):
        _ = public.Canary
    code = "import raptor_hf.audit, sys; assert 'raptor_hf.trainer' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- Directions ----


def stream(owned: bool = True) -> Stream:
    parameters = {"a": torch.nn.Parameter(torch.zeros(3, 5)), "b": torch.nn.Parameter(torch.zeros(4, 2, 6))}
    return Stream("expert", parameters, 1.0, 1.0, 2.0, 4 if owned else None, frozenset({"b"} if owned else ()))


@pytest.mark.parametrize("kind", ["random", "dirac"])
@pytest.mark.parametrize("owned", [True, False])
def test_directions_are_orthonormal_and_read_back_in_the_owners_slice(kind, owned):
    one, count = stream(owned), 12
    directions = Directions(one, count, kind=kind)
    rows = [torch.cat([part.flatten() for part in directions.parts(i, 2.0).values()]) for i in range(count)]
    assert torch.allclose(torch.stack(rows) @ torch.stack(rows).T, 4.0 * torch.eye(count), atol=1e-5)
    owners = np.arange(count) % 4
    for i in (0, 5):
        parts = directions.parts(i, 1.0)
        values = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in one.parameters.items()}
        values["a"] += parts["a"]
        if owned:
            values["b"][owners[i]] += parts["b"]
        else:
            values["b"] += parts["b"]
        seen = directions.project(values, owners)
        same = seen[owners == owners[i]] if owned else seen
        assert seen[i] == pytest.approx(1.0, abs=1e-5) and np.abs(np.sort(same)[:-1]).max() < 1e-5


def test_more_canaries_than_dimensions_are_refused():
    assert_refused(lambda: Directions(stream(), 28), PrivacyConfigError, "12 random directions")


# ---- Coins, fillers, marks ----


def test_coins_are_fair_and_fillers_keep_the_number_of_records():
    sizes, coins = set(), []
    for _ in range(20):
        drawn = draw_canaries(CANDIDATES, CANDIDATE_OWNERS, [0, 2, 3], 60, lone=6)
        sizes.add(len(drawn.training_set([{"input_ids": [1], "labels": 0}])))
        coins.append(drawn.included)
        assert drawn.lone.sum() == 6 and (drawn.owners[drawn.lone] == EMPTY).all()
        assert len(drawn.fillers) == (~drawn.included).sum()
    assert sizes == {61}
    assert stats.binomtest(int(np.sum(coins)), 1200, 0.5).pvalue > 1e-6
    assert len({coin.tobytes() for coin in coins}) == 20, "the same coins every time"


def test_an_excluded_canary_is_nowhere_among_the_records_and_no_filler_joins_a_lone_one():
    drawn = draw_canaries(CANDIDATES, CANDIDATE_OWNERS, [0, 2, 3], 60, lone=6)
    rows = [tuple(row["input_ids"]) for row in drawn.training_set([])]
    for record, there in zip(drawn.records, drawn.included, strict=True):
        assert (tuple(record["input_ids"]) in rows) == there
    owner_of = {tuple(c["input_ids"]): owner for c, owner in zip(CANDIDATES, CANDIDATE_OWNERS, strict=True)}
    assert EMPTY not in {owner_of[tuple(row["input_ids"])] for row in drawn.fillers}


def test_marks_do_not_depend_on_padding_or_neighbours():
    drawn = draw_canaries(CANDIDATES, CANDIDATE_OWNERS, [0, 2, 3], 10)
    real = {"input_ids": [5, 6], "attention_mask": [1, 1], "labels": 0}
    batch = collate([drawn.records[3], real, drawn.fillers[0], drawn.records[7]], width=40)
    assert drawn.marks(batch) == [3, -1, -2, 7]


def test_canaries_that_could_be_taken_for_others_are_refused():
    drawn = draw_canaries(CANDIDATES, CANDIDATE_OWNERS, [0, 2, 3], 10)
    assert_refused(lambda: drawn.training_set([drawn.records[0]]), PrivacyConfigError, "tokens of a canary")
    twice = [CANDIDATES[0]] * 40
    assert_refused(lambda: draw_canaries(twice, [0] * 40, [], 10), PrivacyConfigError, "same tokens")
    for _ in range(50):  # whatever the coins say: a refusal that hung on them would make them unfair
        assert_refused(lambda: draw_canaries(CANDIDATES[:19], [0] * 19, [], 10), PrivacyConfigError, "fewer canaries")
        assert len(draw_canaries(CANDIDATES[:20], [0] * 20, [], 10).records) == 10


# ---- What is observed ----


@pytest.mark.parametrize(
    ("mode", "kind", "changes"),
    [
        ("functorch", "random", {}),
        ("hooks", "dirac", {}),
        ("functorch", "random", {"clipping": "global", "expert_noise_multiplier": None}),
        ("functorch", "dirac", {"method": "matched_global", "expert_noise_multiplier": None}),
    ],
)
def test_without_noise_every_canary_is_seen_exactly(mode, kind, changes):
    """All records are drawn in every cycle: 1 in units of the clipping norm for a canary, 0 for one left out."""
    drawn = draw_canaries(CANDIDATES, CANDIDATE_OWNERS, [0, 2, 3], 40, lone=4)
    rows = drawn.training_set([])
    settings = dict(
        expected_batch_size=len(rows), per_device_train_batch_size=16, max_steps=2, grad_sample_mode=mode, lora_rank=4,
        shared_noise_multiplier=0.0, expert_noise_multiplier=0.0, learning_rate=0.05, expert_learning_rate=0.02,
        shared_max_grad_norm=0.5, expert_max_grad_norm=0.25, expert_denominator="batch",
    )  # fmt: skip
    trainer = CanaryTrainer(
        tiny_model(), make_config(**{**settings, **changes}), canaries=drawn, directions=kind,
        train_dataset=Dataset.from_list(rows), data_collator=collate,
    )  # fmt: skip
    observer = Observer(trainer)
    trainer.add_callback(observer)
    trainer.train()
    assert set(observer.seen) == ({"shared"} if changes else {"shared", "expert"})
    for rows in observer.seen.values():
        for row in rows:
            assert np.abs(row - drawn.included).max() < 2e-3


def test_only_the_gradients_are_replaced():
    """Everything that draws, clips, adds noise, steps and accounts is the trainer's own."""
    own = {name for name in vars(CanaryTrainer) if callable(getattr(RaptorTrainer, name, None))}
    assert own - {"__doc__", "__module__"} == {"__init__", "record_gradients"}


def test_the_likelihood_ratio_is_that_of_a_subsampled_gaussian():
    seen, sigma, p = np.array([[0.3, 2.0], [-1.0, 1.5]]), 0.7, 0.2
    norm = stats.norm(0, sigma).pdf
    expected = np.log(((1 - p) * norm(seen) + p * norm(seen - 1)) / norm(seen)).sum(0)
    assert np.allclose(log_likelihood_ratio(seen, sigma, p), expected)
    assert np.isfinite(log_likelihood_ratio(seen, sigma, 1.0)).all()
    assert np.isfinite(log_likelihood_ratio(np.full((1, 1), 300.0), 0.01, 0.1)).all()


def test_repeated_noise_is_told_from_fresh_noise():
    rng = np.random.default_rng(8)
    one, two = rng.normal(size=(10, 50)), rng.normal(size=(12, 50))
    assert repetition(one, two) > 1e-6 and repetition(one, two + 0.5 * np.vstack([one, one[:2]])) < 1e-6
    assert repetition(np.zeros((0, 50)), two) == 1.0
    pvalues = [repetition(rng.normal(size=(5, 40)), rng.normal(size=(5, 40))) for _ in range(300)]
    assert stats.kstest(pvalues, "uniform").pvalue > 1e-6


@pytest.mark.parametrize("sigma", [0.5, 4.0])
def test_noise_and_shift_are_measured(sigma):
    rng = np.random.default_rng(7)
    included = rng.random(300) < 0.5
    drawn = rng.random((20, 300)) < 0.3
    noise = rng.normal(size=(20, 300))

    def found(noise_factor: float, shift: float):
        return measure(noise * sigma * noise_factor + shift * drawn * included, included, sigma, 0.3)

    true = found(1.0, 1.0)
    assert not true.alarming and true.noise == pytest.approx(1, abs=0.05)
    assert true.shift == pytest.approx(1, abs=6 * sigma / (0.3 * (20 * 75) ** 0.5))
    assert found(0.85, 1.0).noise_tail < 1e-6
    assert found(1.0, 1.0 + 12 * sigma).shift_tail < 1e-6
    assert not found(1.2, 0.5).alarming, "more noise, or less of a record, breaks no promise"


# ---- Verdicts ----


def test_the_true_trainer_passes_and_the_result_survives_a_file(tmp_path):
    result = canary_run()
    result.save(tmp_path / "run.npz")
    read = CanaryResult.load(tmp_path / "run.npz")
    assert read.claims == result.claims and np.array_equal(read.included, result.included)
    found = bound_run(read, 0.99)
    assert found == bound_run(result, 0.99)
    assert found["holds"] and found["claimed_epsilon"] == result.claims["joint"]
    assert {row["name"] for row in found["bounds"]} == {"joint", "shared", "expert", "final", "lone"}
    text = one_run_markdown({"runs": [{"name": "raptor", **found}], "canaries": 200, "confidence": 0.99})
    assert "No bound exceeds its claim" in text and "both streams" in text


def test_a_trainer_that_does_not_clip_is_caught_by_the_bound():
    with broken_by("No clipping"):
        found = bound_run(canary_run(), 0.95)
    joint = next(row for row in found["bounds"] if row["name"] == "joint")
    assert joint["epsilon"] > joint["claim"] and found["exceeded"] and not found["holds"]


def test_a_trainer_with_too_little_noise_is_caught():
    with broken_by("Noise divided by the batch size twice"):
        found = bound_run(canary_run(), 0.95)
    assert found["exceeded"] and not found["holds"]
    assert all(row["noise_tail"] < 1e-6 for row in found["measured"])


def test_noise_without_the_clipping_norm_is_measured():
    """Its standard deviation is sigma, and sigma C is stated."""
    with broken_by("Noise without the clipping norm in its scale"):
        result, trainer, _ = observed_run()
    found = bound_run(result, 0.95)
    assert not found["holds"] and "too little noise" in found["verdict"]
    measured = {row["name"]: row for row in found["measured"]}
    for stream, norm in (("shared", trainer.args.shared_max_grad_norm), ("expert", trainer.args.expert_max_grad_norm)):
        assert measured[stream]["noise_tail"] < 1e-6 and norm > 1
        assert measured[stream]["noise"] == pytest.approx(1 / norm, rel=0.15)


def test_what_is_observed_has_the_stated_noise_and_rate():
    result, trainer, observer = observed_run()
    for name, rows in observer.seen.items():
        seen = np.stack(rows)
        sigma = observer.streams[name].noise_multiplier
        out = seen[:, ~result.included].std()
        assert out == pytest.approx(sigma, rel=0.15)
    assert trainer.ledger.shared_steps == len(rows)
