"""Tiny random models and records that the tests share. Nothing here calls the code under test but the model class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersLayerNorm,
    SwitchTransformersSparseMLP,
)

from raptor_hf.models import SwitchTransformersForSequenceClassification

VOCAB, EXPERTS, LABELS = 60, 4, 3
SPARSE = (1, 3)


def tiny_config(**changes) -> SwitchTransformersConfig:
    """Four encoder blocks, sparse at 1 and 3. Everything random is off, as in evaluation."""
    settings = dict(
        vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=20, num_heads=4, num_layers=4, num_sparse_encoder_layers=2,
        num_decoder_layers=2, num_sparse_decoder_layers=1, num_experts=EXPERTS, num_labels=LABELS, pad_token_id=0,
        dropout_rate=0.0, router_jitter_noise=0.0, expert_capacity=64,
    )  # fmt: skip
    return SwitchTransformersConfig(**{**settings, **changes})


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights under which tokens stay distinct, so that every expert is used and gradients are of ordinary size."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            value = noise * 0.3 + ("score" not in name)
        else:
            value = noise * (2.0 if "shared" in name else parameter.shape[-1] ** -0.5)
        parameter.data = value.to(parameter.dtype)
    return model


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> nn.Module:
    """A stock classifier in evaluation mode; equal arguments give equal weights.

    In float64, routers compute in float64 too; the norms do under the fixture `exact_norms`.
    """
    model = randomise(SwitchTransformersForSequenceClassification(tiny_config(**changes)), seed).to(dtype).eval()
    if dtype == torch.float64:
        float64_routers(model)
    return model


def float64_routers(model: nn.Module) -> None:
    """Make every router compute in float64; the shipped ones cast to float32."""
    for module in model.modules():
        if isinstance(module, SwitchTransformersSparseMLP):
            module.router.dtype = torch.float64


def exact_norm(self: SwitchTransformersLayerNorm, hidden: torch.Tensor) -> torch.Tensor:
    """The shipped norm without its cast to float32."""
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def tiny_records(count: int, seed: int = 0, longest: int = 12, shortest: int = 1) -> list[dict]:
    """Records without padding, of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        ids = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        label = int(torch.randint(0, LABELS, (), generator=generator))
        found.append({"input_ids": ids, "attention_mask": [1] * length, "labels": label})
    return found


def collate(records: Sequence[Mapping], width: int = 0, pad: int = 0) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest record, or to `width`, with token `pad`."""
    width = max([width, *(len(record["input_ids"]) for record in records)])
    rows = [(record["input_ids"], width - len(record["input_ids"])) for record in records]
    return {
        "input_ids": torch.tensor([ids + [pad] * missing for ids, missing in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * missing for ids, missing in rows]),
        "labels": torch.tensor([record["labels"] for record in records]),
    }


def stock_dispatch(model: nn.Module, record: Mapping, blocks: Iterable[int] = SPARSE) -> dict[int, torch.Tensor]:
    """Block -> one-hot (T, E) of where a *stock* model sends each token of one record; zero where it was dropped.

    Read off the shipped router's own output, one record at a time and without padding.
    """
    seen: dict[int, torch.Tensor] = {}
    handles = []
    for block in blocks:
        router = model.get_submodule(f"encoder.block.{block}.layer.1.mlp.router")
        handles.append(router.register_forward_hook(lambda _m, _a, out, block=block: seen.update({block: out[0][0]})))
    with torch.no_grad():
        model.eval()(input_ids=torch.tensor([record["input_ids"]]))
    for handle in handles:
        handle.remove()
    return seen


def brute_owner(counts: Sequence[float]) -> int:
    """The first index of the largest count, by a loop."""
    best = 0
    for index, count in enumerate(counts):
        if count > counts[best]:
            best = index
    return best


def assert_close(found: Mapping, expected: Mapping, tolerance: float) -> None:
    """The same names and shapes, and values that differ by at most `tolerance` of the larger of 1 and the largest."""
    assert set(found) == set(expected)
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        scale = max(1.0, float(expected[name].abs().max()))
        assert float((value - expected[name]).abs().max()) <= tolerance * scale, name


def record_by_record(
    count: int,
    names: Sequence[str],
    loss: Callable[[int], torch.Tensor],
    values: Callable[[str, int], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Name -> (count, *shape): gradients of `loss(i)` by `values(name, i)`, one ordinary backward pass a record."""
    rows: dict[str, list] = {name: [] for name in names}
    for i in range(count):
        at = [values(name, i) for name in names]
        for name, value, g in zip(names, at, torch.autograd.grad(loss(i), at, allow_unused=True), strict=True):
            rows[name].append(torch.zeros_like(value) if g is None else g)
    return {name: torch.stack(row) for name, row in rows.items()}
