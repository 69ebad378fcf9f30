"""One micro-batch of each stream, and one whole cycle, through raptor's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from jobs import Records
from torch import nn

from raptor_hf.grad_sample import engine_gradients
from raptor_hf.privacy.mechanism import ClippedSum
from raptor_hf.privacy.noise import NoiseSource
from raptor_hf.streams import Stream, noisy_gradients, sum_gradients

__all__ = ["SAME", "cycle", "noise_and_step", "passes"]

SAME = "same passes"
Streams = Mapping[str, Mapping[str, nn.Parameter]]


def passes(
    model: nn.Module, streams: Streams, records: Records, engines: Sequence[str], *, owners: bool = True
) -> dict[str, Callable[[], None]]:
    """ "stream/variant" -> one micro-batch: clipped sums without noise, or the same passes without privacy.

    "same passes" is a batched forward and backward pass for the stream's own parameters: no per-sample gradients, no
    clipping, no noise.
    """
    table: dict[str, Callable[[], None]] = {}
    for stream, parameters in streams.items():
        owner = records.owner if owners and stream == "expert" else None

        def same_passes(parameters=parameters) -> None:
            loss = model(**records.batch).loss * len(records)
            torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)

        def private(engine: str, parameters=parameters, owner=owner) -> None:
            grads = engine_gradients(model, records.batch, parameters, mode=engine, owner=owner)
            shapes = {name: p.shape for name, p in parameters.items()}
            count = None if owner is None else model.config.num_experts
            ClippedSum(shapes, 1.0, num_owners=count, device=records.owner.device).add(grads, owner)

        table[f"{stream}/{SAME}"] = same_passes
        for engine in engines:
            table[f"{stream}/{engine}"] = lambda engine=engine, private=private: private(engine)
    return table


def cycle(
    model: nn.Module,
    streams: Streams,
    records: Records,
    micro_batch: int,
    engine: str | None,
    *,
    owners: bool = True,
    autocast: torch.dtype | None = None,
) -> Callable[[], None]:
    """A whole cycle as the trainer runs it: for every stream, micro-batches, clipped sum, noise, and a step of AdamW.

    Args:
        engine: None: the same passes without clipping and noise. autocast: of the forward and backward passes.
    """
    optimizer = torch.optim.AdamW([p for group in streams.values() for p in group.values()], lr=1e-4)
    noise, device = NoiseSource(), records.owner.device
    context = nullcontext() if autocast is None else torch.autocast(device.type, autocast)

    def micro_batches(by_owner: bool):
        for start in range(0, len(records), micro_batch):
            part = slice(start, start + micro_batch)
            yield {k: v[part] for k, v in records.batch.items()}, records.owner[part] if by_owner else None

    def gradients(stream: Stream, batch, owner):
        return engine_gradients(model, batch, stream.parameters, mode=engine, owner=owner)

    def run() -> None:
        for name, parameters in streams.items():
            by_owner = owners and name == "expert"
            experts = model.config.num_experts if by_owner else None
            stream = Stream(
                name, parameters, None if engine is None else 1.0, 0.0 if engine is None else 1.0,
                len(records) / (experts or 1), experts, frozenset(parameters if by_owner else ()),
            )  # fmt: skip
            with context:
                total = sum_gradients(model, stream, micro_batches(by_owner), gradients)
            noisy_gradients(stream, total, noise)
            optimizer.step()
            optimizer.zero_grad()

    return run


def noise_and_step(streams: Streams) -> Callable[[], None]:
    """What a cycle does once, however large its batch: noise on both streams' sums, and their steps of AdamW."""
    optimizer = torch.optim.AdamW([p for group in streams.values() for p in group.values()], lr=1e-4)
    noise = NoiseSource()

    def run() -> None:
        for name, parameters in streams.items():
            device = next(iter(parameters.values())).device
            stream = Stream(name, parameters, 1.0, 1.0, 1.0)
            noisy_gradients(stream, ClippedSum({n: p.shape for n, p in parameters.items()}, 1.0, device=device), noise)
            optimizer.step()
            optimizer.zero_grad()

    return run
