"""Gaussian noise from the operating system's entropy. Never from a global generator, never from `args.seed`."""

from __future__ import annotations

import os

import numpy as np
import torch

from raptor_hf.validate import finite, integer

__all__ = ["EntropySource", "NoiseSource"]


class EntropySource:
    """Where secret randomness comes from: the operating system, or (for debugging) a seed.

    Args:
        insecure_seed: makes every draw reproducible. Anyone who knows it can subtract the noise, so a run with it is
            not private; `secure` is False then and the privacy statement says so.
    """

    def __init__(self, insecure_seed: int | None = None):
        if insecure_seed is not None:
            integer("insecure_seed", insecure_seed)
        self.secure = insecure_seed is None
        self._insecure = None if insecure_seed is None else np.random.Generator(np.random.Philox(insecure_seed))

    def bytes(self, count: int) -> bytes:
        """`count` secret bytes."""
        return os.urandom(count) if self._insecure is None else self._insecure.bytes(count)

    def coins(self, count: int) -> np.ndarray:
        """(count,) float64 uniform on [0, 1) with all 53 bits: float32 coins would raise the sampling rate."""
        words = np.frombuffer(self.bytes(8 * count), dtype=np.uint64)
        return (words >> np.uint64(11)) * 2.0**-53


class NoiseSource:
    """Independent Gaussian noise, one fresh generator a tensor.

    On a CPU the generator is Philox with a 128-bit key from the operating system; on an accelerator it is the
    device's own Philox with a 64-bit key (the longest it takes). Neither is a cryptographic generator: see the
    sharp edges in docs/guarantee.md.

    Args:
        entropy: the source of the keys. secure_mode: add four Gaussians of half the scale, against attacks that
            invert a single generator's floating-point samples (Holohan & Braghin 2021). It costs four draws.

    Formal guarantees:
        Samples are float64. Noise that were rounded to float32 before it is scaled would reach only some of the
        float32 numbers, and a released coordinate outside them would prove that there was a record under the noise.
        Draws of different tensors, streams, steps and runs are independent given independent keys. Nothing drawn is
        kept, so nothing can be drawn again after a checkpoint is resumed.
    """

    def __init__(self, entropy: EntropySource | None = None, *, secure_mode: bool = False):
        self.entropy = entropy or EntropySource()
        self.secure_mode = secure_mode

    def normal(
        self, shape: torch.Size | tuple[int, ...], std: float, *, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """N(0, std^2), float64, of `shape` on `device`. `std` = 0 gives exact zeros."""
        if finite("std", std) < 0:
            raise ValueError(f"`std={std}` was given. A standard deviation cannot be negative. Pass a value >= 0.")
        if std == 0:
            return torch.zeros(shape, dtype=torch.float64, device=device)
        draws = 4 if self.secure_mode else 1
        noise = torch.zeros(shape, dtype=torch.float64, device=device)
        for _ in range(draws):
            noise += self._standard_normal(shape, torch.device(device))
        return noise.mul_(std / draws**0.5)

    def _standard_normal(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            key = np.frombuffer(self.entropy.bytes(16), dtype=np.uint64)
            generator = np.random.Generator(np.random.Philox(key=key))
            return torch.from_numpy(np.asarray(generator.standard_normal(tuple(shape))))
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(self.entropy.bytes(8), "little", signed=True))
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
