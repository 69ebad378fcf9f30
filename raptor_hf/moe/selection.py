"""Choosing the protected layer on a public corpus (Eq. 4, App. F): no private data, no privacy spent."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.moe.layout import MoELayout, find_moe_layout
from raptor_hf.moe.lora import adapters_disabled
from raptor_hf.moe.ownership import _argmax_lowest, owner_distribution, owner_scores
from raptor_hf.moe.routing import iterate_batches, model_inputs, routing_of, token_mask

__all__ = ["LayerSelection", "all_among", "check_disjoint", "distribution_statistics", "routing_table", "select_layer"]

_MIN_MARGIN = 0.05  # nats
_MIN_RECORDS = 1_000
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class LayerSelection:
    """The layer with the largest owner entropy.

    Attributes:
        layer: block index. margin: its entropy minus the runner-up's, in nats (inf with one sparse layer).
        table: rows of `routing_table`. records: size of the public corpus.
    """

    layer: int
    margin: float
    table: list[dict[str, Any]]
    records: int


def distribution_statistics(counts: Iterable[float]) -> dict[str, float]:
    """Entropy H (nats), H / log E, deficit log E - H, chi2(q || uniform) and CV of an owner distribution."""
    values = torch.as_tensor(list(counts), dtype=torch.float64)
    q = values / values.sum()
    experts = len(q)
    entropy = float(-(q[q > 0] * q[q > 0].log()).sum())
    return {
        "entropy": entropy,
        "normalised_entropy": entropy / math.log(experts) if experts > 1 else 1.0,
        "deficit": math.log(experts) - entropy,
        "chi2": float(experts * ((q - 1 / experts) ** 2).sum()),
        "cv": float(q.std(correction=0) / q.mean()),
    }


def routing_table(
    model: nn.Module,
    public_dataset: Iterable,
    *,
    rule: str = "gate",
    data_collator: Callable[[list], Mapping[str, Any]] | None = None,
    batch_size: int = 32,
    layout: MoELayout | None = None,
) -> list[dict[str, Any]]:
    """One row a sparse layer: `block`, `entropy`, `normalised_entropy`, `deficit`, `chi2`, `cv`, `counts`.

    Args:
        public_dataset: public, unlabelled, format-matched records (or ready batches).
    """
    layout = layout or find_moe_layout(model)
    owners: dict[int, list[torch.Tensor]] = {layer.index: [] for layer in layout.sparse_layers}
    with adapters_disabled(model):
        for raw in iterate_batches(public_dataset, data_collator, batch_size):
            batch = model_inputs(model, raw)
            mask = token_mask(batch)
            for index, routing in routing_of(model, layout, batch).items():
                experts = layout.layer(index).num_experts
                owners[index].append(_argmax_lowest(owner_scores(routing, mask, experts, rule)))
    table = []
    for layer in layout.sparse_layers:
        if not owners[layer.index]:
            raise PrivacyConfigError(
                "`public_dataset` has no records",
                "The owner distribution of the layers cannot be estimated from nothing",
                'Pass public records, or set `protected_layer="last"`',
            )
        mine = torch.cat(owners[layer.index])
        q = owner_distribution(mine, layer.num_experts)
        counts = torch.bincount(mine, minlength=layer.num_experts).tolist()
        table.append({"block": layer.index, **distribution_statistics(q), "counts": counts})
    return table


def select_layer(model: nn.Module, public_dataset: Iterable, **options: Any) -> LayerSelection:
    """l* = argmax_l H(q^(l)) on public records (Eq. 4). Options are those of `routing_table`.

    Warns when the margin between the two best layers is under 0.05 nats and the corpus is small.
    """
    table = routing_table(model, public_dataset, **options)
    records = sum(table[0]["counts"])
    ranked = sorted(table, key=lambda row: (-row["entropy"], row["block"]))
    margin = ranked[0]["entropy"] - ranked[1]["entropy"] if len(ranked) > 1 else math.inf
    if records < _MIN_RECORDS and margin < _MIN_MARGIN:
        warnings.warn(
            f"The two best layers differ by {margin:.3f} nats on {records} public records: too few to tell them "
            f"apart. Use at least {_MIN_RECORDS} public records, or name the layer in `protected_layer`.",
            stacklevel=2,
        )
    return LayerSelection(ranked[0]["block"], margin, table, records)


def _contents(dataset: Iterable[Mapping[str, Any]]) -> list[tuple[dict[str, str], tuple | None]]:
    """Of every record: its text columns, white space normalised, and its token ids without padding."""
    found = []
    for record in dataset:
        text = {key: _SPACE.sub(" ", value).strip() for key, value in record.items() if isinstance(value, str)}
        ids = None
        if "input_ids" in record:
            ids = torch.as_tensor(record["input_ids"]).flatten()
            mask = record.get("attention_mask")
            if mask is not None:
                ids = ids[torch.as_tensor(mask).flatten().bool()]
            ids = tuple(ids.tolist())
        found.append((text, ids))
    return found


def _fingerprints(contents: list[tuple[dict[str, str], tuple | None]], columns: set[str]) -> set[tuple]:
    """What the records say: their token ids, and the text of `columns` (of all text columns when none is named)."""
    found: set[tuple] = set()
    for text, ids in contents:
        said = tuple(value for key, value in sorted(text.items()) if not columns or key in columns)
        if said:
            found.add(("text", *said))
        if ids is not None:
            found.add(("ids", *ids))
    return found


def all_among(some: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]]) -> bool:
    """Do all of `some` stand in `records` (same text after normalising white space, or same token ids)?"""
    one, other = _contents(some), _contents(records)
    common = {key for text, _ in one for key in text} & {key for text, _ in other for key in text}
    found = _fingerprints(one, common)
    return bool(found) and found <= _fingerprints(other, common)


def check_disjoint(public_dataset: Iterable[Mapping[str, Any]], private_dataset: Iterable[Mapping[str, Any]]) -> str:
    """Refuse a public corpus that shares a record with the private set; return how that was checked.

    Raises:
        PrivacyConfigError: at least one record stands in both. The number of shared records is not told: it is
            a private count.
    """
    one, other = _contents(public_dataset), _contents(private_dataset)
    # a label written as text, which an unlabelled corpus lacks, must not hide that the rest is the same
    common = {key for text, _ in one for key in text} & {key for text, _ in other for key in text}
    public, private = _fingerprints(one, common), _fingerprints(other, common)
    if public & private:
        raise PrivacyConfigError(
            "`public_dataset` shares at least one record with `train_dataset`",
            "The layer would be chosen with the help of private records, outside the accounting",
            "Remove the training records from the public corpus",
        )
    kinds = sorted({key[0] for key in public} & {key[0] for key in private})
    if not kinds:
        raise PrivacyConfigError(
            "`public_dataset` and `train_dataset` have no column in common (token ids or text)",
            "Whether they share records cannot be checked",
            "Prepare both in the same way",
        )
    return (
        f"exact match of {' and '.join({'ids': 'token ids', 'text': 'white-space-normalised text'}[k] for k in kinds)}"
    )
