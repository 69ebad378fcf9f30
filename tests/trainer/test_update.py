"""One cycle is exactly the formulas of Algorithm 1, computed by hand with stock libraries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from raptor_hf import per_sample_gradients, stream_parameters
from tests.helpers import EXPERTS, collate, tiny_model, tiny_records
from tests.trainer.build import difference, fix_draws, make_trainer, norm, perturb_adapters, run
from tests.trainer.oracle import HandTrainer, owners

BATCH, NORMS, RATES = 8, (10.0, 0.02), (0.02, 0.5)
RECORDS = tiny_records(16, seed=5)
ENGINES = ["functorch", "hooks", "reference"]
FAST = ["functorch", "hooks"]
DRAWS = [([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 3, 10, 11, 12, 13]), ([2, 15, 14], [0, 1, 2, 4, 5, 6, 7, 8, 9, 14])]


def noiseless(records=RECORDS, draws=DRAWS, **changes):
    settings = dict(
        shared_noise_multiplier=0.0, expert_noise_multiplier=0.0, shared_max_grad_norm=NORMS[0],
        expert_max_grad_norm=NORMS[1], learning_rate=RATES[0], expert_learning_rate=RATES[1],
    )  # fmt: skip
    trainer = make_trainer(records, **{**settings, **changes})
    perturb_adapters(trainer.model)
    return fix_draws(trainer, draws)


def weights_file(trainer, folder) -> dict[str, torch.Tensor]:
    trainer.model.save_pretrained(folder)
    return load_file(f"{folder}/adapter_model.safetensors")


def assert_same(found: dict, expected: dict, start: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        moved = (value - start[name]).abs().max()
        error = (found[name] - value).abs().max()
        assert error <= 2e-4 * moved + 3e-7, f"{name}: off by {error:.2e}, moved by {moved:.2e}"


@pytest.mark.parametrize("cycles", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weighted", [True, False])
def test_cycles_equal_the_formulas(tmp_path, cycles, engine, weighted):
    trainer = noiseless(draws=DRAWS[:cycles], grad_sample_mode=engine, residual_weighting=weighted)
    start = weights_file(trainer, tmp_path / "start")
    hand = HandTrainer(tmp_path / "start", RECORDS, batch=BATCH, norms=NORMS, rates=RATES, weighted=weighted)
    for draw in DRAWS[:cycles]:
        hand.cycle(*draw)
    trainer.train()
    assert_same(weights_file(trainer, tmp_path / "end"), hand.state(), start)
    # the case at hand has records on both sides of each bound, and owners with and without records
    for stream, bound in zip(("shared", "expert"), NORMS, strict=True):
        assert min(hand.seen[stream]) < bound < max(hand.seen[stream])
    assert len(set(hand.owners)) > 1


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("gamma", [3.0, 0.5])
def test_cycles_equal_the_formulas_with_another_exponent_of_the_weight(tmp_path, engine, gamma):
    """w^gamma by hand (Eq. 22); a bound that no record meets, so that the weight is not clipped away."""
    norms = (10.0, 10.0)
    trainer = noiseless(grad_sample_mode=engine, residual_gamma=gamma, expert_max_grad_norm=norms[1])
    start = weights_file(trainer, tmp_path / "start")
    hand, plain = (
        HandTrainer(tmp_path / "start", RECORDS, batch=BATCH, norms=norms, rates=RATES, gamma=exponent)
        for exponent in (gamma, 1.0)
    )
    for draw in DRAWS:
        hand.cycle(*draw)
        plain.cycle(*draw)
    trainer.train()
    expected, other = hand.state(), plain.state()
    assert_same(weights_file(trainer, tmp_path / "end"), expected, start)
    experts = [name for name in start if ".experts." in name]
    gap = norm({name: expected[name] - other[name] for name in experts})
    moved = norm({name: expected[name] - start[name] for name in experts})
    assert gap > 0.1 * moved, "the exponent makes no difference here: a blind test"


@pytest.mark.parametrize("engine", FAST)
def test_the_expert_step_uses_the_updated_shared_parameters(tmp_path, engine):
    draws = [([0, 1, 2, 3], range(16))]
    alternating, still = (noiseless(draws=draws, learning_rate=lr, grad_sample_mode=engine) for lr in (5.0, 1e-9))
    first = weights_file(alternating, tmp_path / "start")
    hand = HandTrainer(tmp_path / "start", RECORDS, batch=BATCH, norms=NORMS, rates=(5.0, RATES[1]))
    hand.cycle(*draws[0])
    moved, unmoved = run(alternating)[0]["expert"], run(still)[0]["expert"]
    assert_same(weights_file(alternating, tmp_path / "end"), hand.state(), first)
    gap = norm({n: moved[n] - unmoved[n] for n in moved})
    assert gap > 0.05 * norm(moved), "the shared step made no difference to the expert step: a blind test"


@pytest.mark.parametrize("engine", FAST)
def test_the_micro_batch_size_and_the_padding_change_nothing(engine):
    updates = [run(noiseless(per_device_train_batch_size=size, grad_sample_mode=engine)) for size in (1, 3, 16)]
    for other in updates[1:]:
        for cycle, one in zip(other, updates[0], strict=True):
            for stream in ("shared", "expert"):
                gap = norm({n: cycle[stream][n] - one[stream][n] for n in one[stream]})
                assert gap < 1e-4 * norm(one[stream])


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("denominator, divisor", [("owners", BATCH / EXPERTS), ("batch", BATCH)])
def test_denominators_are_public_constants(denominator, divisor, engine):
    """A single clipped record moves its expert by exactly lr C / D_e, whatever the size of the draw."""
    settings = dict(
        expert_max_grad_norm=1e-3, shared_max_grad_norm=1e-3, expert_denominator=denominator, grad_sample_mode=engine
    )
    update = run(noiseless(draws=[([3], [3])], **settings))[0]
    assert norm(update["shared"]) == pytest.approx(RATES[0] * 1e-3 / BATCH, rel=1e-3)
    assert norm(update["expert"]) == pytest.approx(RATES[1] * 1e-3 / divisor, rel=1e-3)


@pytest.mark.parametrize("engine", FAST)
def test_an_empty_draw_without_noise_moves_nothing(engine):
    for draws, still in (([([], [1, 2])], "shared"), ([([1, 2], [])], "expert")):
        update = run(noiseless(draws=draws, grad_sample_mode=engine))[0]
        assert norm(update[still]) == 0
        assert all(norm(update[stream]) > 0 for stream in update if stream != still)


# ---- Neighbouring datasets: one record added, the same coins, no noise ----

EXTREME = {"input_ids": [7, 8, 9, 10, 11] * 2, "attention_mask": [1] * 10, "labels": 2}


def with_and_without(draw: tuple[list[int], list[int]], streams: tuple[str, ...], extra=EXTREME, **changes):
    """Updates of the same cycle on D and on D + {extra}, the extra record drawn by `streams` alone."""
    added = tuple(one + [16] * (name in streams) for name, one in zip(("shared", "expert"), draw, strict=True))
    small = dict(shared_max_grad_norm=0.05, expert_max_grad_norm=0.02, **changes)
    return run(noiseless(draws=[draw], **small))[0], run(noiseless([*RECORDS, extra], draws=[added], **small))[0]


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("draw", [([], []), (list(range(16)), list(range(16))), ([1, 5, 6], [2, 3])])
def test_a_record_moves_the_shared_update_by_at_most_the_sensitivity(draw, engine):
    one, two = with_and_without(draw, ("shared",), grad_sample_mode=engine)
    moved = norm(difference({"s": two["shared"]}, {"s": one["shared"]})["s"])
    bound = RATES[0] * 0.05 / BATCH
    assert 0.99 * bound < moved <= bound * (1 + 1e-3)  # the record is clipped, so the bound is met


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("draw", [([], []), (list(range(16)), list(range(16))), ([1, 5, 6], [2, 3])])
@pytest.mark.parametrize("extra", [RECORDS[1], RECORDS[7], RECORDS[13]])
def test_a_record_of_the_expert_stream_moves_one_expert_by_at_most_the_sensitivity(draw, extra, engine):
    one, two = with_and_without(draw, ("expert",), extra, grad_sample_mode=engine)
    assert norm(difference({"s": two["shared"]}, {"s": one["shared"]})["s"]) == 0
    change = difference({"e": two["expert"]}, {"e": one["expert"]})["e"]
    per_expert = [norm({n: t[e] for n, t in change.items()}) for e in range(EXPERTS)]
    owner = owners([extra])[0]
    bound = RATES[1] * EXPERTS * 0.02 / BATCH
    # a longer record pads its neighbours, which rounds their gradients differently: nothing more may move
    assert all(per_expert[e] < 1e-4 * bound for e in range(EXPERTS) if e != owner)
    assert 0.99 * bound < per_expert[owner] <= bound * (1 + 1e-3)


@pytest.mark.parametrize("engine", FAST)
def test_a_record_that_cannot_be_differentiated_moves_nothing(engine):
    """Non-finite gradients count as zero: no record can poison the sum, and none shows itself by doing so."""
    draw = ([0, 1, 2], [0, 1, 2])
    clean = run(noiseless(draws=[draw], grad_sample_mode=engine))[0]
    trainer = noiseless(draws=[([0, 1, 2, 5], [0, 1, 2, 5])], grad_sample_mode=engine)
    marked = RECORDS[5]["input_ids"][0]
    others = {token for i in (0, 1, 2) for token in RECORDS[i]["input_ids"]}
    assert marked not in others
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[marked] = float("inf")
    broken = run(trainer)[0]
    for stream in ("shared", "expert"):
        gap = norm({n: broken[stream][n] - clean[stream][n] for n in clean[stream]})
        assert np.isfinite(gap) and gap < 1e-4 * norm(clean[stream])


# ---- Dropout: masks are secret ----


@pytest.mark.parametrize("engine", FAST)
def test_dropout_masks_come_from_no_seed_that_others_know(engine):
    """A mask depends on a record's place in the batch: with a known seed, one record more would change all masks."""
    settings = dict(draws=[(range(16), range(16))], shared_max_grad_norm=0.05, seed=42, grad_sample_mode=engine)
    updates = [run(noiseless(model=tiny_model(dropout_rate=0.1), **settings))[0]["shared"] for _ in range(2)]
    assert norm({n: updates[0][n] - updates[1][n] for n in updates[0]}) > 0.1 * norm(updates[0])


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("drawn", [[], [1], range(16)])
def test_training_leaves_no_trace_of_a_draw_in_the_global_generator(drawn, engine):
    """A checkpoint keeps the generator's state: how far it advanced would tell the size of the draw."""
    trainer = noiseless(model=tiny_model(dropout_rate=0.1), draws=[(drawn, drawn)], grad_sample_mode=engine)
    states = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            states.append(torch.get_rng_state())

        on_step_end = on_step_begin

    trainer.add_callback(Watch())
    trainer.train()
    assert torch.equal(*states)


@pytest.mark.parametrize("engine", FAST)
def test_equal_records_get_masks_of_their_own(engine):
    """Twice the same record is not the same gradient twice: the masks differ within a micro-batch too."""
    model = noiseless(model=tiny_model(dropout_rate=0.5)).model.train()
    batch, parameters = collate([RECORDS[0]] * 2), stream_parameters(model)["shared"]
    rows = per_sample_gradients(model, batch, parameters, mode=engine)["score.weight"]
    assert not torch.allclose(rows[0], rows[1], rtol=1e-2)


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_is_the_same_up_to_rounding_and_keeps_the_bound(engine):
    exact = run(noiseless(draws=DRAWS[:1]))[0]
    rounded = run(noiseless(draws=DRAWS[:1], bf16=True, grad_sample_mode=engine))[0]
    for stream in exact:
        gap = norm({n: exact[stream][n] - rounded[stream][n] for n in exact[stream]})
        assert 0 < gap < 0.3 * norm(exact[stream])
    one = run(noiseless(draws=[([3], [1])], bf16=True, shared_max_grad_norm=0.01, grad_sample_mode=engine))[0]
    assert norm(one["shared"]) == pytest.approx(RATES[0] * 0.01 / BATCH, rel=2e-3)
    assert norm(one["expert"]) == pytest.approx(RATES[1] * NORMS[1] * EXPERTS / BATCH, rel=2e-3)
