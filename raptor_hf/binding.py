"""What an owner map belongs to, and the private file that keeps it."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.utils import logging

from raptor_hf.config import RaptorConfig
from raptor_hf.distributed import check_same, from_main, sharded_owner_map, together
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.moe.lora import adapter_plan
from raptor_hf.state import PrivacyPlan, write_durably

__all__ = ["Binding", "base_model_digests", "establish_owners", "parameter_digests"]

logger = logging.get_logger(__name__)

# The owner map is private. The Hub's client never uploads what lies in a folder of this name.
PRIVATE_FOLDER = Path(".cache", "huggingface", "raptor_private")
OWNERS_FILE = "owner_map.npz"


# ---- Model and records ----


def parameter_digests(model: nn.Module, sample: int = 4096) -> dict[str, str]:
    """A hash of at most about `sample` evenly spaced elements of every frozen parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            flat = parameter.detach().flatten()
            some = flat[:: max(1, flat.numel() // sample)].contiguous().cpu().view(torch.uint8).numpy()
            head = f"{tuple(parameter.shape)} {parameter.dtype}".encode()
            found[name] = hashlib.blake2b(head + some.tobytes(), digest_size=16).hexdigest()
    return found


def _combined(digests: Iterable[tuple[str, str]]) -> str:
    return hashlib.blake2b("".join(f"{a}={b};" for a, b in digests).encode(), digest_size=16).hexdigest()


def base_model_digests(model: nn.Module) -> dict[str, str]:
    """Role (shared, router, expert) -> hash of the frozen parameters that have it."""
    layout = adapter_plan(model).layout
    by_role: dict[str, list[tuple[str, str]]] = {}
    for name, value in sorted(parameter_digests(model).items()):
        by_role.setdefault(layout.role(name), []).append((name, value))
    return {role: _combined(values) for role, values in by_role.items()}


def _image(value: Any) -> bool:
    return hasattr(value, "tobytes") and not isinstance(value, np.generic)


def _bytes(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield repr(key).encode()
            yield from _bytes(value[key])
    elif isinstance(value, torch.Tensor):
        yield from _bytes(value.detach().cpu().numpy())
    elif isinstance(value, np.ndarray):
        # a list and an array of the same numbers are the same record
        yield from _bytes(value.tolist())
    elif _image(value):
        yield value.tobytes()
    elif isinstance(value, np.generic):
        yield repr(value.item()).encode()
    elif isinstance(value, (list, tuple)) and any(hasattr(item, "__len__") or _image(item) for item in value):
        for item in value:
            yield from _bytes(item)
            yield b","
    else:
        yield repr(value).encode()


def record_digests(records: Any) -> dict[str, str]:
    """Column -> hash of its values in order. Private: anyone who guesses the records can confirm the guess."""
    columns: dict[str, Any] = {}
    for index in range(len(records)):
        for column, value in records[index].items():
            if column not in columns:
                columns[column] = hashlib.blake2b(digest_size=16)
            columns[column].update(f";{index}:".encode())
            for part in _bytes(value):
                columns[column].update(part)
    return {column: value.hexdigest() for column, value in sorted(columns.items())}


@dataclass(frozen=True)
class Binding:
    """What an owner map belongs to. Attributes: model, records: hashes; layer, rule: those of the map."""

    model: dict[str, str]
    records: dict[str, str]
    layer: int | str
    rule: str

    def check(self, saved: Binding) -> None:
        """Refuse to go on with another base model, data set, layer or rule; say which."""
        for what, ours, theirs, why in (
            ("base model", self.model, saved.model, "Adapters and owner map belong to the model they came from"),
            ("training set", self.records, saved.records, "The steps so far and those to come must be of one data set: "
             "the accounting composes them for it"),
        ):  # fmt: skip
            differ = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
            if differ:
                kind = "parameters of the role" if what == "base model" else "column"
                raise PrivacyConfigError(
                    f"The {what} is not that of the checkpoint: it differs in the {kind} "
                    + ", ".join(f"`{key}`" for key in differ),
                    why,
                    f"Go on with the same {what}, or start a new run in another `output_dir`",
                )
        for name, value in (("layer", self.layer), ("rule", self.rule)):
            if value != getattr(saved, name):
                raise PrivacyConfigError(
                    f"The owner map's {name} is {value!r}, and was {getattr(saved, name)!r} in the checkpoint",
                    "Owners are fixed for the whole run",
                    "Go on with the same, or start a new run in another `output_dir`",
                )


def bind(model: nn.Module, records: Any, rule: str) -> Binding:
    """The binding of this model and these records."""
    return Binding(base_model_digests(model), record_digests(records), adapter_plan(model).layers, rule)


# ---- The private file ----


def write_owners(output_dir: str | os.PathLike, owners: torch.Tensor | None, binding: Binding) -> None:
    """Keep the owner map and what it belongs to, readable by the owner of the file only."""
    folder = Path(output_dir) / PRIVATE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    buffer = io.BytesIO()
    stored = np.zeros(0, dtype=np.int64) if owners is None else owners.numpy()
    np.savez_compressed(buffer, owners=stored, binding=np.array(json.dumps(vars(binding))))
    write_durably(folder / OWNERS_FILE, buffer.getvalue())


def read_owners(folders: Iterable[str | os.PathLike]) -> tuple[torch.Tensor, Binding] | None:
    """The owner map kept in the first of the output folders that has one."""
    for folder in folders:
        path = Path(folder) / PRIVATE_FOLDER / OWNERS_FILE
        if path.is_file():
            with np.load(path, allow_pickle=False) as stored:
                return torch.from_numpy(stored["owners"]), Binding(**json.loads(str(stored["binding"])))
    return None


# ---- Owners ----


def establish_owners(
    args: RaptorConfig,
    model: nn.Module,
    records: Any,
    collate: Callable,
    saved: Mapping[str, Any] | None,
    folders: Iterable[str | os.PathLike],
    plan: PrivacyPlan,
    *,
    needed: bool,
) -> tuple[Binding, torch.Tensor | None]:
    """What the run is bound to, and its owner map: the one that was kept, or a new one, which is then kept.

    (n,), or (stages, n) with several protected layers.
    """
    with together("reading the training set"):
        binding = bind(model, records, args.ownership)
    # a record that stood elsewhere in another process's copy would have two coins, or none
    check_same("Arguments, training set or base model", lambda: f"{plan} {binding}")
    owners = from_main(lambda: restore_owners(saved, folders, binding), "restoring the owner map")
    if owners is None and needed:
        size = args.per_device_eval_batch_size
        maps = [
            sharded_owner_map(model, records, layer, rule=args.ownership, data_collator=collate, batch_size=size)
            for layer in adapter_plan(model).expert_layers
        ]
        owners = maps[0] if len(maps) == 1 else torch.stack(maps)
    from_main(lambda: write_owners(args.output_dir, owners, binding), "keeping the owner map")
    return binding, owners


def restore_owners(
    saved: Mapping[str, Any] | None, folders: Iterable[str | os.PathLike], binding: Binding
) -> torch.Tensor | None:
    """The owner map of the run that goes on, if one was kept; refuses another base model, data set, layer or rule."""
    if saved is None:
        return None
    kept = read_owners(folders)
    if kept is not None:
        binding.check(kept[1])
        return kept[0] if len(kept[0]) else None
    # moved without its private file
    model = saved.get("base_model", binding.model)
    binding.check(Binding(model, binding.records, binding.layer, binding.rule))
    logger.warning(
        f"`{PRIVATE_FOLDER / OWNERS_FILE}` is missing in the output folder. The owner map is computed again; whether "
        "the training set is the one of the checkpoint cannot be checked."
    )
    return None
