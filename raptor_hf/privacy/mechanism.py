"""The Gaussian mechanism: a clipped sum that knows its sensitivity, and its one noisy release."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch

from raptor_hf.privacy.clipping import RecordGradients, clip_and_sum, clip_and_sum_jointly
from raptor_hf.privacy.noise import NoiseSource
from raptor_hf.validate import finite, positive

__all__ = ["ClippedSum", "UnclippedSum", "release"]


class ClippedSum:
    """The sum of clipped per-sample gradients of one logical batch, built up micro-batch by micro-batch.

    The clipping norm is given once, here. The noise takes its scale from `sensitivity` and from nowhere else, so
    that the bound that was enforced and the bound that is paid for cannot differ.

    Args:
        shapes: name -> shape of the released tensor. In `owned` tensors the first dimension counts the owners.
        max_norm: C. num_owners: E for an expert stream; None for a stream every record contributes to as a whole.
        owned: names of the tensors that add up by owner; default, with `num_owners`: all.

    Attributes:
        sensitivity: L2 change of the sum when one record is added or removed: C.

    After an exception in `add`, discard it: part of that micro-batch may be in the sums, and to add it again would
    count it twice.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        max_norm: float,
        *,
        num_owners: int | None = None,
        owned: Collection[str] | None = None,
        device: torch.device | str = "cpu",
    ):
        self.owned = frozenset(shapes if owned is None else owned) if num_owners is not None else frozenset()
        self.sensitivity = positive("max_norm", max_norm)
        self.num_owners = num_owners
        # float64: one record more must not change how the others' contributions are rounded
        self.sums = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}

    def add(
        self,
        grads: Mapping[str, torch.Tensor] | Mapping[str, RecordGradients],
        owner: torch.Tensor | None = None,
    ) -> None:
        """Clip and add a micro-batch: per-sample gradients (b, *shape), with `owner` (b,) in an expert stream."""
        if (owner is None) != (self.num_owners is None):
            raise ValueError(
                "Owners were given to a stream without owners, or missing in one with them. The sum's sensitivity "
                "would be wrong. Pass `owner` exactly when `num_owners` was set."
            )
        if set(grads) != set(self.sums):
            raise ValueError(
                f"Gradients of {sorted(set(grads) ^ set(self.sums))[:3]} are missing or unexpected. The norm must run "
                "over all tensors of the stream. Pass exactly the stream's tensors."
            )
        for name, value in grads.items():
            wanted = self.sums[name].shape[1:] if name in self.owned else self.sums[name].shape
            if value.shape[1:] != wanted:
                raise ValueError(
                    f"Gradients of `{name}` have the shape {tuple(value.shape[1:])} a record, and the sum "
                    f"{tuple(wanted)}. Repeated to fit, they would be longer than they were clipped to. Pass one "
                    "gradient of the whole tensor a record."
                )
        if owner is None:
            clip_and_sum(grads, self.sensitivity, into=self.sums)
        else:
            clip_and_sum_jointly(grads, owner, self.num_owners or 0, self.sensitivity, self.owned, into=self.sums)

    def reduce(self, all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Sum over processes; `all_reduce` maps a tensor to its sum over all of them."""
        self.sums = {name: all_reduce(value) for name, value in self.sums.items()}


class UnclippedSum:
    """The sum of gradients that nothing bounds, for methods without privacy: no noise would be enough for it.

    Args:
        shapes: name -> shape.
    """

    sensitivity = math.inf

    def __init__(self, shapes: Mapping[str, torch.Size], *, device: torch.device | str = "cpu"):
        self.sums = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}

    def add(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Add a micro-batch's summed gradients, name -> (*shape)."""
        for name, value in sums.items():
            self.sums[name].add_(value)

    def reduce(self, all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `ClippedSum.reduce`."""
        self.sums = {name: all_reduce(value) for name, value in self.sums.items()}


def release(
    clipped: ClippedSum | UnclippedSum,
    noise_multiplier: float,
    denominator: float | Mapping[str, float],
    noise: NoiseSource,
) -> dict[str, torch.Tensor]:
    """(sum + N(0, (sigma * sensitivity)^2 I)) / denominator: the noisy gradient of one stream (Eqs. 7 and 9).

    Args:
        noise_multiplier: sigma >= 0. denominator: a public constant, B for the shared stream and B / E for an
            expert; never a realised count. By name where tensors of one mechanism have denominators of their own.

    Returns:
        name -> tensor of the sums' shapes, float32 (float64 when sigma is 0).

    Formal guarantees:
        One Gaussian mechanism of noise multiplier sigma over add/remove of one record (given Poisson sampling of
        the batch, a subsampled one). Every coordinate gets noise: also those of an owner without records, also when
        the batch was empty. Sum, noise and quotient are float64, and the result is rounded once, so that the float32
        numbers that can come out are the same with and without a record.
    """
    if finite("noise_multiplier", noise_multiplier) < 0:
        raise ValueError(f"`noise_multiplier={noise_multiplier}` was given. It cannot be negative. Pass a value >= 0.")
    if noise_multiplier and not math.isfinite(clipped.sensitivity):
        raise ValueError("Noise was asked for on a sum without a bound. It would protect nothing. Clip the gradients.")
    scale = noise_multiplier * clipped.sensitivity if noise_multiplier else 0.0
    divisors = denominator if isinstance(denominator, Mapping) else dict.fromkeys(clipped.sums, denominator)
    released = {
        name: (value + noise.normal(value.shape, scale, device=value.device)) / positive("denominator", divisors[name])
        for name, value in clipped.sums.items()
    }
    return {name: value.float() for name, value in released.items()} if scale > 0 else released
