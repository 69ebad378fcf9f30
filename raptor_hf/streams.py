"""One mechanism of a cycle: micro-batches -> per-sample gradients -> clipped sum -> noise -> `.grad`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from raptor_hf.distributed import broadcast, is_main, reduce_to_main
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.grad_sample import LossFn, engine_gradients, model_loss, summed_gradients
from raptor_hf.grad_sample.batches import cut, one_row_a_record
from raptor_hf.privacy.mechanism import ClippedSum, UnclippedSum, release
from raptor_hf.privacy.noise import EntropySource, NoiseSource

__all__ = ["Stream", "noisy_gradients", "secret_masks", "stream_gradients", "sum_gradients"]


@dataclass(frozen=True)
class Stream:
    """The constants of one stream, or of the one block of a method without streams; all public.

    Attributes:
        name: "shared" or "expert": whose draw it uses, and which counter of the ledger. parameters: its trainables.
        max_norm: C; None for a method that clips nothing. noise_multiplier: sigma.
        denominator: B, or D_e for the experts. num_owners: E where records train their owner's experts only.
        owned: names of the parameters that add up by owner.
        owned_denominator: D_e, where the owned parameters are a part of the block.
    """

    name: str
    parameters: Mapping[str, nn.Parameter] = field(repr=False)
    max_norm: float | None
    noise_multiplier: float
    denominator: float
    num_owners: int | None = None
    owned: frozenset[str] = field(default=frozenset(), repr=False)
    owned_denominator: float | None = None

    def __post_init__(self) -> None:
        if (self.num_owners is None) != (not self.owned):
            raise ValueError(
                f"The stream `{self.name}` was given owners without owned parameters, or the reverse. Gradients of an "
                "owner would be added to every expert. Name the parameters that add up by owner in `owned`."
            )

    @property
    def denominators(self) -> dict[str, float]:
        """Parameter -> its public denominator."""
        owned = self.denominator if self.owned_denominator is None else self.owned_denominator
        return {name: owned if name in self.owned else self.denominator for name in self.parameters}


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


def stream_gradients(
    model: nn.Module,
    stream: Stream,
    batch: Mapping[str, torch.Tensor],
    owner: torch.Tensor | None,
    *,
    mode: str,
    owned_loss: LossFn,
) -> dict[str, Any]:
    """Per-sample gradients of one micro-batch, as `engine_gradients` gives them, for all tensors of the stream.

    Args:
        owner: (b,) where the stream has owners. mode: engine. owned_loss: the loss that trains the owner's experts
            (Eq. 22); everything else is trained by the model's own.
    """
    grads: dict[str, Any] = {}
    parts = (
        ({n: p for n, p in stream.parameters.items() if n not in stream.owned}, model_loss, None),
        ({n: p for n, p in stream.parameters.items() if n in stream.owned}, owned_loss, owner),
    )
    for parameters, loss_fn, owners in parts:
        if parameters:
            grads |= engine_gradients(model, batch, parameters, mode=mode, loss_fn=loss_fn, owner=owners)
    return grads


def sum_gradients(
    model: nn.Module,
    stream: Stream,
    micro_batches: Iterable[tuple[Mapping[str, torch.Tensor], torch.Tensor | None]],
    gradients: Callable[[Stream, Mapping[str, torch.Tensor], torch.Tensor | None], Mapping[str, Any]],
    most: int | None = None,
) -> ClippedSum | UnclippedSum:
    """Clipped sum over a logical batch (before noise: private). An empty batch gives zeros.

    Args:
        micro_batches: pairs of a collated batch and, where the stream has owners, its records' owners (b,).
        gradients: (stream, batch, owner) -> per-sample gradients of every tensor of the stream.
        most: records whose gradients may be held at once; a micro-batch of more is cut, which changes no sum.
    """
    device = next(iter(stream.parameters.values())).device
    shapes = {name: p.shape for name, p in stream.parameters.items()}
    if stream.max_norm is None:
        plain = UnclippedSum(shapes, device=device)
        for batch, _ in micro_batches:
            plain.add(summed_gradients(model, batch, stream.parameters))
        return plain
    total = ClippedSum(shapes, stream.max_norm, num_owners=stream.num_owners, owned=stream.owned, device=device)
    for micro_batch, owners in micro_batches:
        parts = [(micro_batch, owners)] if most is None else cut(micro_batch, owners, most)
        for batch, owner in parts:
            found, (_, size) = gradients(stream, batch, owner), one_row_a_record(batch)
            if wrong := [name for name, value in found.items() if value.shape[0] != size]:
                # without the numbers: a realised batch size is private
                raise PrivacyConfigError(
                    f"Gradients of `{wrong[0]}` were given that are not one for each record",
                    "Each row is clipped on its own: a record with several, or one of several records, is not bounded",
                    "Return exactly one gradient a record from `record_gradients`",
                )
            total.add(found, owner)
    return total


def noisy_gradients(stream: Stream, clipped: ClippedSum | UnclippedSum, noise: NoiseSource) -> None:
    """Release the stream's noisy gradient (Eqs. 7, 9) into `.grad` of its parameters.

    With several processes: the main one adds their sums up and adds the noise, once; all get what it released.
    """
    reduce_to_main(clipped)
    if is_main():
        released = release(clipped, stream.noise_multiplier, stream.denominators, noise)
        for name, parameter in stream.parameters.items():
            parameter.grad = released[name].to(parameter.dtype)
    else:
        for parameter in stream.parameters.values():
            parameter.grad = torch.empty_like(parameter)
    broadcast({name: parameter.grad for name, parameter in stream.parameters.items()})
