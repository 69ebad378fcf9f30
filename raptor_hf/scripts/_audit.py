"""What the audit command and its workers share: settings of a cell, records, and a trainer for some of them."""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from raptor_hf.audit.folder import subfolder, write_text
from raptor_hf.audit.shadows import Cell
from raptor_hf.config import RaptorConfig
from raptor_hf.data import TextTask, load_task, tokenize_task
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.methods import METHODS
from raptor_hf.scripts import _config
from raptor_hf.scripts.train import TYPES, load_model, make_parser
from raptor_hf.validate import one_of

__all__ = ["cells_of", "check_cells", "read_settings", "records_digest", "setting_path", "write_cells"]

CELLS = "cells"
_BUDGET = ("target_epsilon", "shared_noise_multiplier", "expert_noise_multiplier")
# What an audit decides itself: nothing but its own results is written.
_FORCED: dict[str, Any] = {
    "save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "push_to_hub": False, "load_best_model_at_end": False, "resume_from_checkpoint": None, "do_train": True,
}  # fmt: skip


def read_settings(config: str, flags: Sequence[str]) -> dict[str, Any]:
    """The training configuration as a mapping, with the command line's flags over it.

    Raises:
        PrivacyConfigError: an unknown key or flag, or a value of the wrong type.
    """
    settings = dict(_config._read_yaml(Path(config)))
    parser = make_parser()
    # Checked by the train command's own parser before anything is kept.
    _config._set_defaults(parser, settings)
    given, unknown = parser.parse_known_args(list(flags))
    if unknown:
        _config._reject_argument(unknown[0], parser)
    return {**settings, **_only_given(parser, flags, given)}


def _only_given(parser: Any, flags: Sequence[str], given: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags that stand on the command line."""
    names = {flag.partition("=")[0] for flag in flags if flag.startswith("--")}
    found = {}
    for action in parser._actions:
        if names & set(action.option_strings):
            value = getattr(given, action.dest)
            found[action.dest] = getattr(value, "value", value)
    return found


def cells_of(settings: Mapping[str, Any], methods: Sequence[str], epsilons: Sequence[float]) -> list[Cell]:
    """One cell for each private method and budget, one for each method without privacy."""
    cells = []
    for method in methods or [str(settings.get("method", "raptor"))]:
        one_of("--methods", method, tuple(METHODS))
        private = METHODS[method].private
        if not private:
            cells.append(Cell(method, method, None, ()))
            continue
        budgets: Sequence[float | None] = epsilons or [None]
        for epsilon in budgets:
            name = method if epsilon is None else f"{method}-eps{epsilon:g}"
            cells.append(Cell(name, method, epsilon, ()))
    if len({cell.name for cell in cells}) != len(cells):
        raise PrivacyConfigError("A method or an epsilon was given twice", "It would be trained twice", "Give it once")
    return cells


def cell_settings(settings: Mapping[str, Any], cell: Cell, overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of one cell: the configuration, the cell's method and budget, and `METHOD.field=value` overrides."""
    found = {**settings, "method": cell.method, **_FORCED}
    found.pop("output_dir", None)
    if not METHODS[cell.method].private:
        for name in _BUDGET:
            found.pop(name, None)
    elif cell.epsilon is not None:
        for name in _BUDGET:
            found.pop(name, None)
        found["target_epsilon"] = cell.epsilon
    for text in overrides:
        target, equals, value = text.partition("=")
        method, dot, name = target.partition(".")
        if not (equals and dot):
            raise PrivacyConfigError(
                f"`--set {text}` was given", "It says no method, field and value", "Write `--set METHOD.field=value`"
            )
        if method in (cell.method, cell.name):
            found[name] = yaml.safe_load(value)
    return found


def setting_path(folder: Path, cell: str) -> Path:
    """Where the settings of a cell lie."""
    return folder / CELLS / f"{cell}.yaml"


def write_cells(folder: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Write each cell's settings as a training configuration."""
    subfolder(folder, CELLS)
    for name, settings in found.items():
        write_text(setting_path(folder, name), yaml.safe_dump(dict(settings), sort_keys=True))


def check_cells(found: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Any, Any, RaptorConfig]]:
    """The arguments of each cell; what the training command would refuse is refused here, before anything is kept."""
    with tempfile.TemporaryDirectory() as scratch:
        write_cells(Path(scratch), found)
        return {name: parse_cell(Path(scratch), name, output_dir=str(Path(scratch) / "unused")) for name in found}


def parse_cell(folder: Path, cell: str, *, output_dir: str, **more: Any) -> tuple[Any, Any, RaptorConfig]:
    """Model, data and training arguments of a cell."""
    flags = [f"--{name}={value}" for name, value in {"output_dir": output_dir, **more}.items()]
    model_args, data_args, args = _config.parse_dataclasses(
        TYPES, [str(setting_path(folder, cell)), *flags], prog="raptor-hf audit"
    )
    return model_args, data_args, args


def records_digest(records: Any) -> str:
    """SHA-256 of a dataset's rows, in their order."""
    total = hashlib.sha256()
    for row in records:
        total.update(json.dumps(row, sort_keys=True, default=str).encode())
    return total.hexdigest()


class Records:
    """The task of an audit, tokenized once a process.

    Attributes: task: the tokenized task. pool: (2N,) indices of the records under attack.
    """

    def __init__(self, model_args: Any, data_args: Any):
        self.model_args, self.data_args = model_args, data_args
        self.raw: TextTask = load_task(data_args)
        self._task: TextTask | None = None

    def task(self, tokenizer: Any) -> TextTask:
        if self._task is None:
            self._task = tokenize_task(self.raw, tokenizer, self.data_args.max_seq_length)
        return self._task

    def model(self) -> tuple[Any, Any]:
        """A fresh base model and its tokenizer."""
        return load_model(self.model_args, **self.raw.head)
