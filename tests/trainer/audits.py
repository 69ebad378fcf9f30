"""Three audits of the trainer, from outside: what it releases is compared with what the mechanism says.

T1: statistics of the noise and of the draws. T2: exact algebra without noise, against stock libraries.
T3: a worst-case record (canary) must not be told from its absence better than the noise allows.

Each raises `AssertionError` when the trainer is wrong. A correct trainer fails one of them less than once in 1e6 runs.
"""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from safetensors.torch import load_file
from scipy import stats

from raptor_hf.moe.adapter_io import save_adapter
from tests.helpers import EXPERTS, tiny_records
from tests.trainer.build import fix_draws, make_trainer, perturb_adapters, run, values
from tests.trainer.oracle import HandTrainer, load_peft, owners, record_gradient, size

ALARM = 1e-9  # of one test; an audit makes a few hundred
Z = 6.8  # two-sided tail of 1e-11: for thousands of correlations

# ---- T1: noise and draws ----

RATE, EXPERT_RATE, LOUD = 1e-6, 3e-6, 1e4
NORMS, SIGMAS, BATCH = (0.5, 0.25), (LOUD, 0.7 * LOUD), 8
# two owners of four have records: experts 1 and 2 are always empty
OWNED_BY = tiny_records(40, seed=5)
T1_RECORDS = [record for record, owner in zip(OWNED_BY, owners(OWNED_BY), strict=True) if owner in (0, 3)][:24]


def noise_run(cycles: int = 8, draws=None, seed: int = 42, **changes) -> list[dict]:
    """Updates of a run whose noise drowns the gradients, while the parameters hardly move."""
    settings = dict(
        learning_rate=RATE, expert_learning_rate=EXPERT_RATE, shared_noise_multiplier=SIGMAS[0],
        expert_noise_multiplier=SIGMAS[1], shared_max_grad_norm=NORMS[0], expert_max_grad_norm=NORMS[1],
        expected_batch_size=BATCH, per_device_train_batch_size=24, max_steps=cycles, seed=seed, lora_rank=8,
    )  # fmt: skip
    trainer = make_trainer(T1_RECORDS, **{**settings, **changes})
    if draws is not None:
        fix_draws(trainer, draws)
    return run(trainer)


def expected_std(stream: str) -> float:
    if stream == "shared":
        return RATE * SIGMAS[0] * NORMS[0] / BATCH
    return EXPERT_RATE * SIGMAS[1] * NORMS[1] * EXPERTS / BATCH


def released(updates: list[dict]) -> dict[tuple, np.ndarray]:
    """(cycle, stream, tensor, expert) -> what was released there, over the standard deviation that is due."""
    found = {}
    for cycle, update in enumerate(updates):
        for name, value in update["shared"].items():
            found[cycle, "shared", name, None] = (value / expected_std("shared")).flatten().numpy()
        for name, value in update["expert"].items():
            for expert in range(EXPERTS):
                found[cycle, "expert", name, expert] = (value[expert] / expected_std("expert")).flatten().numpy()
    return found


def check_scale(found: dict[tuple, np.ndarray]) -> None:
    """Every tensor of every expert, over all cycles, has the variance that is due; so has every single cycle."""
    for part in (lambda key: key[2:], lambda key: (key[0], key[1], key[3])):
        pooled: dict[tuple, list] = {}
        for key, value in found.items():
            pooled.setdefault(part(key), []).append(value)
        for key, chunks in pooled.items():
            flat = np.concatenate(chunks)
            tail = stats.chi2(len(flat)).cdf((flat**2).sum())
            assert ALARM < tail < 1 - ALARM, f"{key}: {flat.std():.3f} times the standard deviation that is due"
            assert abs(flat.mean()) * len(flat) ** 0.5 < Z, f"{key}: the noise is not centred"
    for stream in ("shared", "expert"):
        flat = np.concatenate([value for key, value in found.items() if key[1] == stream])
        assert stats.kstest(flat, "norm").pvalue > ALARM, f"{stream}: not Gaussian"


def check_independence(found: dict[tuple, np.ndarray], other: dict[tuple, np.ndarray]) -> None:
    """No two releases (tensors, experts, cycles, streams, runs) are correlated."""
    rows = [value for value in [*found.values(), *other.values()] if len(value) >= 64]
    matrix = np.stack([row[:64] for row in rows])
    worst = np.abs(np.corrcoef(matrix) - np.eye(len(matrix))).max()
    # of 64 pairs; Fisher's transform makes the correlation of independent values nearly normal
    assert np.arctanh(min(worst, 1 - 1e-9)) * (64 - 3) ** 0.5 < Z, f"correlation {worst:.3f} between two releases"


def check_draws(drawn: list[tuple[np.ndarray, np.ndarray]], n: int, p: float) -> None:
    """Sizes are Binomial(n, p); the draws of the two streams, and of successive cycles, are independent."""
    sizes = np.array([len(one) for pair in drawn for one in pair])
    law = stats.binom(n, p)
    spread = stats.chi2(len(sizes)).cdf(((sizes - law.mean()) ** 2).sum() / law.var())
    assert ALARM < spread < 1 - ALARM, f"batch sizes vary by {sizes.std():.2f}, not {law.std():.2f}"
    assert stats.binomtest(int(sizes.sum()), n * len(sizes), p).pvalue > ALARM, "wrong sampling rate"
    member = np.zeros((len(drawn), 2, n), dtype=int)
    for t, pair in enumerate(drawn):
        for s, one in enumerate(pair):
            assert len(np.unique(one)) == len(one) and (len(one) == 0 or (min(one) >= 0 and max(one) < n))
            member[t, s, one] = 1
    pairs = [(member[:, 0], member[:, 1])] + [(member[:-1, s], member[1:, s]) for s in (0, 1)]
    for one, two in pairs:
        both = int((one * two).sum())
        assert stats.binomtest(both, one.size, p * p).pvalue > ALARM, "two draws are not independent"
    for counts in member.sum((0, 1)):
        assert stats.binomtest(int(counts), 2 * len(drawn), p).pvalue > ALARM, (
            "a record is drawn too often or too rarely"
        )


def draws_of(trainer, cycles: int = 150) -> list[tuple[np.ndarray, np.ndarray]]:
    found: list[tuple[np.ndarray, np.ndarray]] = []
    while len(found) < cycles:
        iterator = iter(trainer.get_train_dataloader())
        for _ in range(len(trainer.get_train_dataloader())):
            for cycle in trainer.get_batch_samples(iterator, 1, trainer.args.device)[0]:
                found.append((cycle.shared, cycle.expert))
    return found


def t1(cycles: int = 5) -> None:
    """Noise on every tensor, also of empty experts and of empty draws; independent; Poisson draws."""
    both = [noise_run(cycles) for _ in range(2)]
    one, two = (released(updates) for updates in both)
    check_scale(one)
    check_independence(one, two)
    empty = released(noise_run(draws=[([], [])] * 12))
    check_scale(empty)
    trainer = make_trainer(T1_RECORDS, expected_batch_size=BATCH)
    check_draws(draws_of(trainer), len(T1_RECORDS), BATCH / len(T1_RECORDS))


# ---- T2: exact algebra ----

T2_RECORDS = tiny_records(16, seed=5)
T2_DRAWS = [(range(10), [1, 3, 7, 10, 12, 13]), ([2, 14], [0, 1, 2, 5, 7, 8, 9, 12])]


def t2() -> None:
    """Two cycles without noise are the formulas computed by hand."""
    norms, rates = (10.0, 0.05), (0.02, 0.5)
    trainer = make_trainer(
        T2_RECORDS, shared_noise_multiplier=0.0, expert_noise_multiplier=0.0, shared_max_grad_norm=norms[0],
        expert_max_grad_norm=norms[1], learning_rate=rates[0], expert_learning_rate=rates[1], expected_batch_size=BATCH,
    )  # fmt: skip
    perturb_adapters(trainer.model)
    with tempfile.TemporaryDirectory() as start, tempfile.TemporaryDirectory() as end:
        save_adapter(trainer.model, start)
        hand = HandTrainer(start, T2_RECORDS, batch=BATCH, norms=norms, rates=rates)
        first = hand.state()
        fix_draws(trainer, T2_DRAWS).train()
        save_adapter(trainer.model, end)
        found = load_file(f"{end}/adapter_model.safetensors")
    for draw in T2_DRAWS:
        hand.cycle(*draw)
    for name, value in hand.state().items():
        moved, error = (value - first[name]).abs().max(), (found[name] - value).abs().max()
        assert error <= 1e-3 * moved + 1e-6, f"{name}: off by {error:.2e}, moved by {moved:.2e}"


# ---- T3: the canary ----


def t3(repeats: int = 30) -> None:
    """The canary's presence shifts each stream's release by C / denominator at most, against noise of sigma times that.

    Cycles with and without it alternate. It is alone in its expert, and not alone in the shared stream.
    """
    sigma, norms, batch = 0.8, (0.02, 0.01), 2
    all_records = tiny_records(30, seed=5)
    who = owners(all_records)
    canary = all_records[1]
    others = [record for record, owner in zip(all_records, who, strict=True) if owner != who[1]][:2]
    never_drawn = all_records[2:] * 2  # they make the rate small, so that the accountant has an epsilon for the run
    trainer = make_trainer(
        [canary, *others, *never_drawn], shared_noise_multiplier=sigma, expert_noise_multiplier=sigma,
        shared_max_grad_norm=norms[0], expert_max_grad_norm=norms[1], learning_rate=1e-3,
        expert_learning_rate=1e-3, expected_batch_size=batch,
    )  # fmt: skip
    perturb_adapters(trainer.model)
    names = {stream: list(tensors) for stream, tensors in values(trainer.model).items()}
    with tempfile.TemporaryDirectory() as start:
        save_adapter(trainer.model, start)
        model = load_peft(start)
    directions = {"shared": record_gradient(model, canary, None), "expert": record_gradient(model, canary, who[1])}
    assert all(size(direction) > 3 * bound for direction, bound in zip(directions.values(), norms, strict=True))
    fix_draws(trainer, [([0, 1, 2], [0, 1, 2]), ([1, 2], [1, 2])] * repeats)
    updates = run(trainer)
    for stream, bound, divisor in (("shared", norms[0], batch), ("expert", norms[1], batch / EXPERTS)):
        direction = _as_ours(directions[stream], names[stream], who[1] if stream == "expert" else None)
        length = sum(float((v**2).sum()) for v in direction.values()) ** 0.5
        seen = [
            -sum(float((update[stream][name] * v).sum()) for name, v in direction.items()) / length
            for update in updates
        ]
        seen = np.array(seen) / (1e-3 * bound / divisor)
        there, away = seen[0::2], seen[1::2]
        shift, error = there.mean() - away.mean(), sigma * (2 / repeats) ** 0.5
        assert abs(shift - 1) < 6.2 * error, f"{stream}: the canary moves the release by {shift:.2f} times C"
        spread = ((there - there.mean()) ** 2).sum() + ((away - away.mean()) ** 2).sum()
        tail = stats.chi2(2 * repeats - 2).cdf(spread / sigma**2)
        assert ALARM < tail < 1 - ALARM, f"{stream}: noise of {(spread / (2 * repeats)) ** 0.5:.2f}, not {sigma}"


def _as_ours(direction: dict, names: list[str], owner: int | None) -> dict[str, torch.Tensor]:
    """A gradient under PEFT's names as tensors of the trainer's names."""
    found = {}
    for name in names:
        if owner is None:
            module, kind = name.rsplit(".", 1)
            theirs = f"{module}.{kind}.default.weight" if "lora" in kind else f"{module}.modules_to_save.default.{kind}"
            found[name] = direction[f"base_model.model.{theirs}"].double()
        else:
            block, _, rest = name.partition(".expert_adapters.")
            projection, kind = rest.split(".")
            path = f"base_model.model.{block}.experts.expert_{owner}.{dict(first='wi', second='wo')[projection]}"
            value = direction[f"{path}.{kind}.default.weight"].double()
            found[name] = torch.zeros(EXPERTS, *value.shape, dtype=torch.float64)
            found[name][owner] = value
    return found


AUDITS = {"T1": t1, "T2": t2, "T3": t3}
