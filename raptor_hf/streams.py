"""One stream of a cycle: micro-batches -> per-sample gradients -> clipped sum -> noise -> `.grad`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from raptor_hf.distributed import broadcast, is_main, reduce_to_main
from raptor_hf.grad_sample import LossFn, engine_gradients
from raptor_hf.privacy.mechanism import ClippedSum, release
from raptor_hf.privacy.noise import EntropySource, NoiseSource

__all__ = ["Stream", "noisy_gradients", "secret_masks", "sum_gradients"]


@dataclass(frozen=True)
class Stream:
    """The constants of one stream; all public.

    Attributes:
        name: "shared" or "expert". parameters: its trainables. max_norm: C. noise_multiplier: sigma.
        denominator: B, or D_e for the experts. num_owners: E for the expert stream.
    """

    name: str
    parameters: Mapping[str, nn.Parameter] = field(repr=False)
    max_norm: float
    noise_multiplier: float
    denominator: float
    num_owners: int | None = None


@contextmanager
def secret_masks(entropy: EntropySource, device: torch.device) -> Iterator[None]:
    """Dropout and augmentation from secret randomness; the global generators (torch's, Python's, NumPy's) are
    afterwards what they were before.

    A record's mask depends on its place in the batch. From a generator that anybody can seed (`args.seed`), one
    record more would change its neighbours' masks, and with them the sum by more than the clipping norm; and how far
    the generator has advanced (`rng_state.pth` in a checkpoint) would tell the realised batch sizes.
    """
    kind = device.type if device.type in ("cuda", "xpu") else "cpu"
    forked = {} if kind == "cpu" else {"device_type": kind}
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([] if kind == "cpu" else [device], **forked):
        torch.manual_seed(int.from_bytes(entropy.bytes(8), "little", signed=True))
        random.seed(entropy.bytes(32))
        np.random.seed(np.frombuffer(entropy.bytes(32), dtype=np.uint32))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def sum_gradients(
    model: nn.Module,
    stream: Stream,
    micro_batches: Iterable[tuple[Mapping[str, torch.Tensor], torch.Tensor | None]],
    *,
    mode: str,
    loss_fn: LossFn,
) -> ClippedSum:
    """Clipped sum over a logical batch (before noise: private). An empty batch gives zeros.

    Args:
        micro_batches: pairs of a collated batch and, for the expert stream, its records' owners (b,).
        mode, loss_fn: see `per_sample_gradients`.
    """
    device = next(iter(stream.parameters.values())).device
    shapes = {name: p.shape for name, p in stream.parameters.items()}
    total = ClippedSum(shapes, stream.max_norm, num_owners=stream.num_owners, device=device)
    for batch, owner in micro_batches:
        grads = engine_gradients(model, batch, stream.parameters, mode=mode, loss_fn=loss_fn, owner=owner)
        total.add(grads, owner)
    return total


def noisy_gradients(stream: Stream, clipped: ClippedSum, noise: NoiseSource) -> None:
    """Release the stream's noisy gradient (Eqs. 7, 9) into `.grad` of its parameters.

    With several processes: the main one adds their sums up and adds the noise, once; all get what it released.
    """
    reduce_to_main(clipped)
    if is_main():
        released = release(clipped, stream.noise_multiplier, stream.denominator, noise)
        for name, parameter in stream.parameters.items():
            parameter.grad = released[name].to(parameter.dtype)
    else:
        for parameter in stream.parameters.values():
            parameter.grad = torch.empty_like(parameter)
    broadcast({name: parameter.grad for name, parameter in stream.parameters.items()})
