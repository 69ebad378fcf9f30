"""Experiments that show what structure cannot: does a record's value move when its neighbours change?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from raptor_hf.errors import Finding, RaptorError, UnsupportedModelError
from raptor_hf.grad_sample import per_sample_gradients
from raptor_hf.grad_sample.losses import IGNORED
from raptor_hf.moe.layout import MoELayout
from raptor_hf.moe.lora import attach_adapters, resolve_layer, stream_parameters
from raptor_hf.moe.routing import model_inputs

__all__ = ["probe", "probe_collator", "probe_model"]

Batch = dict[str, torch.Tensor]

# Relative differences above these are leaks. The same shapes run the same kernels, so that a row that is independent
# of the others comes out the same but for a few roundings; other widths add in another order.
_SAME_SHAPE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.02}
_OTHER_SHAPE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.1}
_MORE_PADDING = 5
_PROBE_LORA = SimpleNamespace(lora_rank=2, lora_alpha=2.0, shared_target_modules=None)


def probe(
    model: nn.Module,
    layout: MoELayout,
    records: list,
    collate: Callable[[list], Mapping[str, Any]] | None,
    *,
    mode: str,
    label_names: Sequence[str],
) -> list[Finding]:
    """Probe a collator, then a model with its batches. See `check_model`."""
    if collate is None:
        from transformers import default_data_collator

        collate = default_data_collator
    findings = probe_collator(collate, records)
    if findings:
        return findings
    if getattr(model, "raptor_adapters", None) is None:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what is switched off in the copy
            model = attach_adapters(copy.deepcopy(model), _PROBE_LORA, resolve_layer(layout, "last"))
    device = next(model.parameters()).device
    batch = {key: value.to(device) for key, value in collate(records).items()}
    return probe_model(model, batch, mode=mode, label_names=label_names)


# ---- Collators ----


def probe_collator(collate: Callable[[list], Mapping[str, Any]], records: list) -> list[Finding]:
    """Records collated alone and together must give the same rows, up to padding on the right."""
    with torch.random.fork_rng(devices=[]):
        together = collate(copy.deepcopy(records))
        alone = [collate([copy.deepcopy(record)]) for record in records]
    for key, value in together.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != len(records):
            what = f"The data collator does not make one row of `{key}` a record"
            why = "Packing or dropping records would clip several people as one, or not at all"
            return [Finding(what, why, "Use a collator that pads and stacks, e.g. `DataCollatorWithPadding`")]
        for row, single in zip(value, alone, strict=True):
            if key not in single or not _padded(row, single[key][0]):
                return [
                    Finding(
                        f"The data collator makes other rows of `{key}` for records together than for each alone",
                        "It mixes, cuts, reorders or randomises them: what a record contributes would depend on which "
                        "others were drawn with it, and clipping would not bound it",
                        "Use a collator that only pads on the right and stacks, e.g. `DataCollatorWithPadding`; do "
                        "anything else before training, record by record",
                    )
                ]
    return []


def _padded(row: torch.Tensor, alone: torch.Tensor) -> bool:
    """Is `row` equal to `alone`, but for one constant at the ends of its dimensions?"""
    if row.dim() != alone.dim() or any(a > b for a, b in zip(alone.shape, row.shape, strict=True)):
        return False
    kept = row[tuple(slice(0, size) for size in alone.shape)]
    if not torch.equal(kept, alone):
        return False
    rest = torch.ones_like(row, dtype=torch.bool)
    rest[tuple(slice(0, size) for size in alone.shape)] = False
    return bool(torch.unique(row[rest]).numel() <= 1)


# ---- Models ----


def probe_model(
    model: nn.Module, batch: Batch, *, mode: str = "functorch", label_names: Sequence[str] = ("labels",)
) -> list[Finding]:
    """Record 0's logits and per-sample gradients, in train mode without dropout, among three sets of neighbours.

    Args:
        model: with adapters. batch: at most three records are needed; with one, only padding and buffers are probed.

    Returns:
        Findings: values that move with the neighbours or with padding, buffers and parameters that a forward pass
        changes.
    """
    findings: list[Finding] = []
    batch, speaks = _with_labels(batch, label_names)
    wide, tokens = _more_padding(model, batch, label_names)
    alone = {key: value[:1, :tokens] if _has_tokens(batch, key) else value[:1] for key, value in batch.items()}
    variants = {
        "neighbours": (_other_neighbours(wide, label_names), _SAME_SHAPE),
        "padding": (alone, _OTHER_SHAPE),
    }
    dtypes = {p.dtype for p in model.parameters()}
    dtype = next(d for d in (torch.bfloat16, torch.float32, torch.float64) if d in dtypes)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    with _train_mode(model), torch.random.fork_rng():
        try:
            before, reached = _values(model, wide, tokens, mode)
            if speaks and not reached:
                findings.append(_UNREACHED)
            for name, (changed, tolerance) in variants.items():
                after, _ = _values(model, changed, tokens, mode)
                moved = [what for what in before if not _close(before[what], after[what], tolerance[dtype])]
                if moved:
                    findings.append(_leak(moved, name))
        except RaptorError as error:
            findings.append(Finding.of(error))
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
            findings.append(
                Finding(
                    f'The engine `grad_sample_mode="{mode}"` fails on the model ({type(error).__name__})',
                    "Without per-sample gradients nothing can be clipped",
                    'Try another engine; `per_sample_gradients(model, batch, parameters, mode="...")` shows the error',
                    kind=UnsupportedModelError,
                )
            )
        finally:
            changed_buffers = [
                name for name, value in model.named_buffers() if not torch.equal(value, buffers[name].to(value.device))
            ]
            for name, value in model.named_buffers():
                value.copy_(buffers[name])
    if changed_buffers:
        findings.append(
            Finding(
                f"A forward pass changes the buffer `{changed_buffers[0]}`",
                "It carries what it saw of private records into the model, without clipping or noise, and from one "
                "record's computation into the next",
                "Freeze it, or use a model without running statistics",
                kind=UnsupportedModelError,
            )
        )
    written = [name for name, parameter in model.named_parameters() if parameter._version != versions[name]]
    if written:
        findings.append(
            Finding(
                f"A forward pass writes to the parameter `{written[0]}`",
                "What it writes depends on private records, is neither clipped nor noisy, and is trained on and saved",
                "Leave `max_norm` out of `nn.Embedding`, and use no other layer that changes its own weights",
                kind=UnsupportedModelError,
            )
        )
    return findings


_UNREACHED = Finding(
    "No gradient reaches the adapters of the shared stream",
    "They would be trained on noise alone, and the budget spent for nothing",
    "Switch reentrant checkpointing off (`model.gradient_checkpointing_disable()`, then "
    '`activation_checkpointing=True` with `grad_sample_mode="hooks"`), and look for layers that detach',
    kind=UnsupportedModelError,
)


def _leak(moved: list[str], name: str) -> Finding:
    others = "other records" if name == "neighbours" else "the amount of padding (or the number of records)"
    return Finding(
        f"A record's {' and '.join(moved)} change{'s' if len(moved) == 1 else ''} with {others} in its batch",
        "Adding or removing one record would change what its neighbours contribute, by more than the clipping norm; "
        "and its owner would depend on them",
        "Use a model that computes each record on its own: no expert capacity shared over a batch, no batch "
        "statistics, padding masked everywhere, no chance besides dropout",
        kind=UnsupportedModelError,
    )


def _values(model: nn.Module, batch: Batch, tokens: int, mode: str) -> tuple[dict[str, torch.Tensor], bool]:
    """Record 0's logits and its gradients in both streams; does any gradient reach the shared stream's adapters?"""
    plan = model.raptor_adapters
    layout, reached = plan.layout, "shared" not in plan.trains
    owned = plan.weights == "adapters" and len(plan.expert_layers) == 1
    torch.manual_seed(0)
    with torch.no_grad():
        logits = model(**model_inputs(model, batch)).logits[0]
    found = {"logits": logits[:tokens] if logits.dim() > 1 else logits}
    size = next(iter(batch.values())).shape[0]
    for stream, parameters in stream_parameters(model).items():
        if not parameters:
            continue
        owner = torch.zeros(size, dtype=torch.long, device=logits.device) if stream == "expert" and owned else None
        torch.manual_seed(0)
        grads = per_sample_gradients(model, batch, parameters, mode=mode, owner=owner)
        reached |= any(bool(g.any()) for name, g in grads.items() if layout.role(name) == "shared")
        found[f"gradient ({stream} stream)"] = torch.cat([g[0].detach().flatten() for g in grads.values()])
    return found, reached


def _with_labels(batch: Batch, label_names: Sequence[str]) -> tuple[Batch, bool]:
    """The batch with labels for records that have none, so that a gradient can be looked at; has any record one now?

    Whether training is refused must not hang on the first records of a private set being supervised.
    """
    changed, speaks = dict(batch), False
    for name in label_names:
        labels, ids = batch.get(name), batch.get("input_ids")
        if labels is None or labels.is_floating_point():
            speaks |= labels is not None
        elif labels.dim() == 2 and ids is not None and labels.shape == ids.shape:
            silent = (labels == IGNORED).all(1, keepdim=True)
            mask = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(silent)
            changed[name] = torch.where(silent & mask, ids, labels)
            speaks |= bool((changed[name][:, 1:] != IGNORED).any())
        else:
            changed[name] = labels.masked_fill(labels == IGNORED, 0)
            speaks = True
    return changed, speaks


def _close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    one, other = one.double(), other.double()
    if bool((one.isnan() != other.isnan()).any()):
        return False
    one, other = one.nan_to_num(), other.nan_to_num()
    return float((one - other).norm()) <= tolerance * max(float(one.norm()), float(other.norm())) + 1e-12


def _has_tokens(batch: Batch, key: str) -> bool:
    """Does dimension 1 of an entry count tokens?"""
    ids = batch.get("input_ids")
    return ids is not None and batch[key].dim() >= 2 and batch[key].shape[1] == ids.shape[1]


def _more_padding(model: nn.Module, batch: Batch, label_names: Sequence[str]) -> tuple[Batch, int]:
    """The batch with more padding on the right, and how many tokens record 0 has."""
    mask = batch.get("attention_mask")
    if mask is None or "input_ids" not in batch or mask.shape != batch["input_ids"].shape:
        return dict(batch), batch["input_ids"].shape[1] if "input_ids" in batch else 0
    width = mask.shape[1] + _MORE_PADDING
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and width > limit:
        width = max(limit, mask.shape[1])
    pad = getattr(model.config, "pad_token_id", None) or 0
    wide = {}
    for key, value in batch.items():
        fill = pad if key == "input_ids" else -100 if key in label_names else 0
        if _has_tokens(batch, key):
            extra = value.new_full((value.shape[0], width - value.shape[1], *value.shape[2:]), fill)
            value = torch.cat([value, extra], dim=1)
        wide[key] = value
    return wide, max(1, int(mask[0].sum()))


def _other_neighbours(batch: Batch, label_names: Sequence[str]) -> Batch:
    """Records 1, 2, ... become copies of record 0's first token, without padding; other inputs become zero."""
    changed = {}
    for key, value in batch.items():
        value = value.clone()
        if key == "input_ids":
            value[1:] = value[0, 0]
        elif key == "attention_mask":
            value[1:] = 1
        elif key not in label_names:
            value[1:] = 0
        changed[key] = value
    return changed


@contextmanager
def _train_mode(model: nn.Module) -> Iterator[None]:
    """Train mode with every dropout the identity, gradients as they were."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    attention = F.scaled_dot_product_attention

    def same(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return x

    def undropped(query, key, value, attn_mask=None, dropout_p=0.0, **kwargs):  # type: ignore[no-untyped-def]
        return attention(query, key, value, attn_mask=attn_mask, **kwargs)

    patch = partial(mock.patch.object, F)
    try:
        with patch("dropout", same), patch("scaled_dot_product_attention", undropped):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
