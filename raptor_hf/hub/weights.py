"""What an adapter file trains, read from its header alone: no base model, no unpickling."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raptor_hf.errors import Finding, ReleaseError
from raptor_hf.hub.contents import ADAPTER_CONFIG, WEIGHTS, error

__all__ = ["AdapterContents", "check_adapter", "read_contents", "read_header"]

PREFIX = "base_model.model."
_LORA = re.compile(r"^base_model\.model\.(?P<path>.+)\.lora_(?P<kind>[AB])\.weight$")
_HEAD = re.compile(r"^base_model\.model\.(?P<head>[A-Za-z]\w*)\.(?:weight|bias)$")
_BLOCK = re.compile(r"(?:^|\.)(?:block|blocks|layers|h)\.(\d+)\.")
_ROUTERS = frozenset({"router", "gate", "wg"})
_FLOATS = frozenset({"F32", "F16", "BF16", "F64"})
# Fields of `adapter_config.json` that say something; every other one must be at PEFT's default.
_MEANINGFUL = frozenset({
    "base_model_name_or_path", "revision", "r", "lora_alpha", "target_modules", "target_parameters",
    "modules_to_save", "inference_mode", "peft_version", "peft_type",
})  # fmt: skip
_AGAIN = "Make the release by `export_release`"


def read_header(data: bytes) -> tuple[dict[str, str], dict[str, tuple[str, tuple[int, ...]]]]:
    """(metadata, tensor -> (dtype, shape)) of a safetensors file; refuses hidden bytes.

    Raises:
        ReleaseError: the file is no safetensors file, or holds bytes that belong to no tensor.
    """
    try:
        (length,) = struct.unpack("<Q", data[:8])
        text = data[8 : 8 + length].decode("utf-8")
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
        tensors = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        extra = {key for entry in header.values() for key in entry} - {"dtype", "shape", "data_offsets"}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ReleaseError(f"`{WEIGHTS}` is no safetensors file ({problem})", "It cannot be read", _AGAIN) from problem
    ends = [0, *(stop for _, stop in spans)]
    whole = all(start == end for (start, _), end in zip(spans, ends, strict=False))
    if not whole or 8 + length + ends[-1] != len(data) or extra or text.rstrip(" ") != text.strip():
        raise ReleaseError(
            f"`{WEIGHTS}` holds bytes or fields that belong to no tensor", "Anything could be hidden there", _AGAIN
        )
    return metadata, tensors


@dataclass(frozen=True)
class AdapterContents:
    """What the file trains.

    Attributes:
        shared, experts: module paths with LoRA. head: name of the trained head. rank: of LoRA. num_outputs: rows of
            the head. layers: blocks whose routed experts carry adapters. num_experts: how many a layer.
        stacked: the experts' adapters stand in one tensor (PEFT's form for stacked expert parameters).
    """

    shared: tuple[str, ...]
    experts: tuple[str, ...]
    routers: tuple[str, ...]
    foreign: tuple[str, ...]
    head: str | None
    rank: int
    num_outputs: int | None
    layers: tuple[int, ...]
    num_experts: int | None
    stacked: bool
    unpaired: tuple[str, ...]


def _role(path: str) -> str:
    parts = path.split(".")
    if _ROUTERS & set(parts):
        return "router"
    return "expert" if "experts" in parts else "shared"


def read_contents(tensors: dict[str, tuple[str, tuple[int, ...]]], rank: int | None = None) -> AdapterContents:
    """Sort the tensors of an adapter by role. `rank`: of the configuration, needed for stacked experts alone."""
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    heads: dict[str, tuple[int, ...]] = {}
    foreign = []
    for name, (dtype, shape) in tensors.items():
        if (match := _LORA.match(name)) and dtype in _FLOATS and len(shape) == 2:
            pairs.setdefault(match["path"], {})[match["kind"]] = shape
        elif (match := _HEAD.match(name)) and dtype in _FLOATS:
            heads[match["head"]] = shape if name.endswith("weight") else heads.get(match["head"], shape)
        else:
            foreign.append(name)
    roles = {path: _role(path) for path in pairs}
    by_role = {role: tuple(sorted(p for p in pairs if roles[p] == role)) for role in ("shared", "expert", "router")}
    unpaired = [p for p, k in pairs.items() if set(k) != {"A", "B"} or k["A"][0] != k["B"][1]]
    ranks = {k["A"][0] for p, k in pairs.items() if roles[p] == "shared" and "A" in k}
    found_rank = ranks.pop() if len(ranks) == 1 else (rank or 0)
    stacked = any(path.endswith((".experts", ".experts.base_layer")) for path in by_role["expert"])
    experts = None
    if by_role["expert"]:
        if stacked:
            rows = {pairs[p]["A"][0] for p in by_role["expert"] if "A" in pairs[p]}
            experts = rows.pop() // found_rank if len(rows) == 1 and found_rank else None
        else:
            places = [path.rpartition(".")[0] for path in by_role["expert"]]
            counts = Counter(place.rpartition(".")[0] for place in set(places))  # of each layer's experts
            experts = next(iter(counts.values())) if len(set(counts.values())) == 1 else None
    blocks = {int(m.group(1)) if (m := _BLOCK.search(path)) else -1 for path in by_role["expert"]}
    head = next(iter(heads)) if len(heads) == 1 else None
    if len(heads) > 1:
        foreign += [f"{PREFIX}{name}.weight" for name in sorted(heads)]
    outputs = heads[head][0] if head else None
    return AdapterContents(
        by_role["shared"], by_role["expert"], by_role["router"], tuple(sorted(foreign)), head, found_rank, outputs,
        tuple(sorted(blocks)), experts, stacked, tuple(sorted(unpaired)),
    )  # fmt: skip


def check_adapter(weights: bytes, config: dict[str, Any], statement: Any = None) -> Iterator[Finding]:
    """Findings about weights and configuration: adapters on the declared roles only, nothing beside them."""
    try:
        metadata, tensors = read_header(weights)
    except ReleaseError as problem:
        yield Finding.of(problem)
        return
    if metadata not in ({}, {"format": "pt"}):
        yield error(
            f"`{WEIGHTS}` carries metadata: {sorted(set(metadata) - {'format'}) or metadata}",
            "Free text beside the tensors can hold paths, settings or records",
            _AGAIN,
        )
    rank = config.get("r")
    found = read_contents(tensors, rank if isinstance(rank, int) else None)
    for path in found.routers[:1]:
        yield error(
            f"The adapter trains the router `{path}`"
            + f" and {len(found.routers) - 1} more" * (len(found.routers) > 1),
            "Routers stay as the public base model has them; trained ones would break the parallel composition of the "
            "experts that the statement relies on",
            "Do not use this release; ask its author for an adapter without routers",
        )
    staged = statement is not None and _layers(statement) == list(found.layers)
    if (len(found.layers) > 1 or -1 in found.layers) and (
        statement is None or (statement.expert is not None and not staged)
    ):
        yield error(
            f"Experts of the blocks {list(found.layers)} carry adapters",
            "The statement accounts for the experts of one protected layer",
            "Do not rely on the statement",
        )
    for name in (*found.foreign, *found.unpaired)[:1]:
        yield error(
            f"`{WEIGHTS}` holds `{name}`, which is no half of a LoRA pair and no head",
            "Only adapters of the two streams and the trained head are released",
            _AGAIN,
        )
    yield from _check_config(config, found)
    if statement is not None:
        yield from _check_declared(found, statement)


def _check_config(config: dict[str, Any], found: AdapterContents) -> Iterator[Finding]:
    from peft import LoraConfig

    default = LoraConfig().to_dict()
    for key, value in config.items():
        if key in _MEANINGFUL:
            continue
        neutral = default.get(key)
        if value != neutral and value not in (None, False, [], {}):
            yield error(
                f"`{ADAPTER_CONFIG}` sets `{key}={value!r}`",
                "The training has no such option, so the adapter would be loaded as something that was not trained",
                _AGAIN,
            )
    if config.get("peft_type") not in ("LORA", None) or config.get("r") != found.rank:
        yield error(
            f"`{ADAPTER_CONFIG}` says {config.get('peft_type')} of rank {config.get('r')}",
            f"The weights are LoRA of rank {found.rank}",
            _AGAIN,
        )
    parameters = set(config.get("target_parameters") or [])
    named = set(config.get("target_modules") or []) | {p.removesuffix(".weight") for p in parameters if _is_weight(p)}
    expected = set(found.shared) | (set() if found.stacked else set(found.experts)) | set(found.routers)
    stacked = {path for path in parameters if not _is_weight(path)}
    places = tuple(path.removesuffix(".base_layer") + "." for path in found.experts) if found.stacked else ()
    fits = len(stacked) == len(places) and all(path.startswith(places) for path in stacked)
    heads = [found.head] if found.head else []
    if named != expected or not fits or (config.get("modules_to_save") or []) != heads:
        yield error(
            f"`{ADAPTER_CONFIG}` does not name exactly the modules that `{WEIGHTS}` has",
            "Loading would attach adapters elsewhere, or leave some out",
            _AGAIN,
        )


def _is_weight(path: str) -> bool:
    """A plain weight that PEFT must be told by its parameter's name; stacked experts have names of their own."""
    return path.endswith(".weight")


def _layers(statement: Any) -> list[int]:
    """The layers that a statement protects, in the order of the blocks."""
    return sorted(int(part) for part in str(statement.protected_layer).split(",") if part.strip().isdigit())


def _check_declared(found: AdapterContents, statement: Any) -> Iterator[Finding]:
    if statement.expert is None:  # all that is trained is in one stream: nothing composes in parallel
        return
    declared = (_layers(statement), statement.num_experts)
    actual = (list(found.layers), found.num_experts)
    if declared != actual:
        yield error(
            f"The statement protects the layers {declared[0]} with {declared[1]} experts",
            f"The weights train {actual[1]} experts of the layers {actual[0]}",
            "Do not rely on the statement: it belongs to another adapter",
        )
