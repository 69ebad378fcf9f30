"""Deliberately broken variants of the private core, and which audit catches each.

    python -m tests.trainer.mutations            # the table: every audit on every variant, then on the true code
    python -m tests.trainer.mutations --seeds 20 # also the true code, 20 times in a row

A variant that no audit catches makes the command fail.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch

import raptor_hf.distributed as distributed
import raptor_hf.privacy.clipping as clipping
import raptor_hf.streams as streams
import raptor_hf.trainer as trainer_module
from raptor_hf.privacy.mechanism import ClippedSum, release
from raptor_hf.privacy.noise import NoiseSource
from raptor_hf.privacy.sampling import Cycle, PoissonSampler
from tests.trainer.audits import AUDITS

MUTATIONS: dict[str, Callable] = {}


def mutation(function: Callable) -> Callable:
    MUTATIONS[function.__doc__.strip().rstrip(".")] = function
    return function


def _release(noise_of: Callable, denominator_of: Callable = lambda d, *_: d):
    """A release with another noise or denominator."""

    def broken(clipped, noise_multiplier, denominator, noise):
        released = {}
        for name, value in clipped.sums.items():
            divisor = denominator_of(denominator[name], clipped)
            released[name] = (value + noise_of(value, noise_multiplier, clipped.sensitivity, divisor, noise)) / divisor
        return released

    return patch.object(streams, "release", broken)


def _scaled(factor: Callable):
    return _release(lambda v, sigma, c, d, noise: noise.normal(v.shape, factor(sigma, c, d)))


@mutation
def noise_over_b():
    """Noise divided by the batch size twice."""
    return _scaled(lambda sigma, c, d: sigma * c / d)


@mutation
def missing_norm():
    """Noise without the clipping norm in its scale."""
    return _scaled(lambda sigma, c, d: sigma)


@mutation
def half_noise():
    """Noise of half the scale."""
    return _scaled(lambda sigma, c, d: sigma * c / 2)


@mutation
def no_noise_on_empty():
    """No noise on an expert without records."""

    def noise_of(value, sigma, c, d, noise):
        drawn = noise.normal(value.shape, sigma * c)
        return (
            drawn * (value.flatten(1).abs().sum(1) > 0).view(-1, *[1] * (value.dim() - 1))
            if value.dim() == 3
            else drawn
        )

    return _release(noise_of)


@mutation
def no_noise_on_empty_draw():
    """No noise on an empty draw."""

    original = streams.noisy_gradients

    def broken(stream, clipped, noise):
        if not any(value.abs().sum() > 0 for value in clipped.sums.values()):
            for parameter in stream.parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            return
        original(stream, clipped, noise)

    return patch.object(trainer_module, "noisy_gradients", broken)


@mutation
def seeded_noise():
    """Noise from the global generator, seeded by `args.seed`."""
    return _release(lambda v, sigma, c, d, noise: torch.randn(v.shape) * sigma * c)


@mutation
def reused_noise():
    """The same noise at every step."""

    def broken(self, shape, device):
        generator = np.random.Generator(np.random.Philox(key=int(np.prod(shape))))
        return torch.from_numpy(generator.standard_normal(tuple(shape)).astype(np.float32))

    return patch.object(NoiseSource, "_standard_normal", broken)


@mutation
def same_noise_for_experts():
    """One expert's noise repeated for all experts."""

    def noise_of(value, sigma, c, d, noise):
        drawn = noise.normal(value.shape, sigma * c)
        return drawn[:1].expand_as(value) if value.dim() == 3 else drawn

    return _release(noise_of)


@mutation
def uniform_noise():
    """Noise of the right variance that is not Gaussian."""
    return _release(lambda v, sigma, c, d, noise: (torch.rand(v.shape) - 0.5) * 12**0.5 * sigma * c)


@mutation
def no_clip():
    """No clipping."""

    def broken(grads, max_norm):
        _, norms = clip_factors(grads, max_norm)
        return torch.ones_like(norms), norms

    clip_factors = clipping.clip_factors
    return patch.object(clipping, "clip_factors", broken)


@mutation
def inf_norm_clip():
    """Clipping by the largest entry instead of the Euclidean norm."""

    def broken(grads, max_norm):
        norms = torch.stack([value.flatten(1).abs().amax(1) for value in grads.values()]).amax(0).double()
        return (max_norm / norms.clamp_min(1e-30)).clamp(max=1.0), norms

    return patch.object(clipping, "clip_factors", broken)


@mutation
def clip_per_tensor():
    """Clipping every tensor for itself."""

    def broken(self, grads, owner=None):
        for name, value in grads.items():
            one = ClippedSum({name: self.sums[name].shape}, self.sensitivity, num_owners=self.num_owners)
            add(one, {name: value}, owner)
            self.sums[name] = self.sums[name] + one.sums[name]

    add = ClippedSum.add
    return patch.object(ClippedSum, "add", broken)


def _clip_whole(total: ClippedSum) -> None:
    length = sum(float((v.double() ** 2).sum()) for v in total.sums.values()) ** 0.5
    total.sums = {name: value * min(1.0, total.sensitivity / max(length, 1e-30)) for name, value in total.sums.items()}


@mutation
def clip_after_sum():
    """Clipping the sum instead of the records."""

    def broken(*args, **kwargs):
        with no_clip():
            total = original(*args, **kwargs)
        _clip_whole(total)
        return total

    original = streams.sum_gradients
    return patch.object(trainer_module, "sum_gradients", broken)


@mutation
def realised_count():
    """Division by the realised number of records."""
    add, counts = ClippedSum.add, {}

    def counting(self, grads, owner=None):
        counts[id(self)] = counts.get(id(self), 0) + len(next(iter(grads.values())))
        add(self, grads, owner)

    def broken(clipped, sigma, denominator, noise):
        owners = clipped.num_owners or 1
        return release(clipped, sigma, max(1, counts.pop(id(clipped), 0)) / owners, noise)

    return [patch.object(ClippedSum, "add", counting), patch.object(streams, "release", broken)]


@mutation
def expert_denominator():
    """Experts divided by B instead of B / E."""
    return _release(
        lambda v, sigma, c, d, noise: noise.normal(v.shape, sigma * c),
        lambda d, clipped: d * (clipped.num_owners or 1),
    )


@mutation
def fixed_size():
    """Batches of fixed size."""

    def broken(self):
        size = round(len(self._records) * self.sample_rate)
        return np.sort(np.random.default_rng().choice(self._records, size, replace=False))

    return patch.object(PoissonSampler, "_draw", broken)


@mutation
def shuffled():
    """A shuffled pass over the data, cut into batches."""

    def broken(self):
        queue = self.__dict__.setdefault("_queue", [])
        size = round(len(self._records) * self.sample_rate)
        if len(queue) < size:
            queue.extend(np.random.default_rng().permutation(self._records).tolist())
        taken, queue[:] = queue[:size], queue[size:]
        return np.unique(np.array(taken, dtype=np.int64))

    return patch.object(PoissonSampler, "_draw", broken)


@mutation
def one_draw():
    """One draw for both streams."""

    def broken(self):
        drawn = self._draw()
        return Cycle(shared=drawn, expert=drawn)

    return patch.object(PoissonSampler, "draw", broken)


@mutation
def one_batch():
    """The shared stream's records used by the expert stream too."""

    def broken(self, model, inputs, num_items_in_batch=None):
        return step(self, model, Cycle(inputs.shared, inputs.shared), num_items_in_batch)

    step = trainer_module.RaptorTrainer.training_step
    return patch.object(trainer_module.RaptorTrainer, "training_step", broken)


@mutation
def truncated():
    """Draws cut at the expected batch size."""

    def broken(self):
        return draw(self)[: round(len(self._records) * self.sample_rate)]

    draw = PoissonSampler._draw
    return patch.object(PoissonSampler, "_draw", broken)


@mutation
def coins_of_one_cycle():
    """The same coins in every cycle."""

    def broken(self):
        if not hasattr(self, "_kept"):
            self._kept = draw(self)
        return self._kept

    draw = PoissonSampler.draw
    return patch.object(PoissonSampler, "draw", broken)


@mutation
def wrong_owner():
    """Records given to the next expert instead of their owner."""

    def broken(*args, **kwargs):
        return (original(*args, **kwargs) + 1) % 4

    original = distributed.owner_map
    return patch.object(distributed, "owner_map", broken)


@mutation
def weight_with_gradient():
    """A gradient through the residual weight."""

    def broken(loss_fn, gamma=1.0):
        def weighted(forward, record):
            loss = loss_fn(forward, record)
            return -torch.expm1(-loss) * loss

        return weighted

    return patch.object(trainer_module, "residual_weighted", broken)


@contextlib.contextmanager
def broken_by(name: str):
    """The variant called `name`, in force inside the context."""
    found = MUTATIONS[name]()
    with contextlib.ExitStack() as stack:
        for one in found if isinstance(found, list) else [found]:
            stack.enter_context(one)
        yield


def catches(audit: str) -> str:
    """What the audit says about the code as it is now: empty when it finds nothing."""
    try:
        AUDITS[audit]()
    except AssertionError as error:
        return str(error) or "caught"
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Which audit catches which broken variant of the private core.")
    parser.add_argument("--seeds", type=int, default=1, help="how often the true code is audited")
    seeds = parser.parse_args(argv).seeds
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    failures = 0
    print(f"{'variant':64s} {'T1':8s}{'T2':8s}{'T3':8s}")
    for name in [*MUTATIONS, *["the true code"] * seeds]:
        with (
            broken_by(name) if name in MUTATIONS else contextlib.nullcontext(),
            contextlib.redirect_stdout(open(os.devnull, "w")),
        ):
            found = {audit: bool(catches(audit)) for audit in AUDITS}
        failures += any(found.values()) != (name in MUTATIONS)
        print(f"{name:64s} " + "".join(f"{'caught' if hit else '-':8s}" for hit in found.values()), flush=True)
    print(f"{len(MUTATIONS)} variants, {failures} wrong verdicts")
    return failures


if __name__ == "__main__":
    sys.exit(main())
