"""Classification tasks: which classes there are, and which of them a record has, is said by what is public."""

from __future__ import annotations

import json

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from raptor_hf import PrivacyConfigError
from raptor_hf.data import DataArguments, load_task
from tests.trainer.build import assert_refused

TWO = ["negative", "positive"]


@pytest.fixture
def write(tmp_path):
    """Writes labels as records of a JSON lines file; returns the path."""

    def write(name, labels):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{name} {i}", "label": x}) + "\n" for i, x in enumerate(labels)))
        return str(path)

    return write


@pytest.fixture
def folder(tmp_path):
    """Saves a data set with a schema, as on the Hub, from numbers of `names`; returns its folder."""

    def save(numbers, names):
        schema = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        rows = [{"text": f"train {i}", "label": number} for i, number in enumerate(numbers)]
        (tmp_path / "set").mkdir()
        Dataset.from_list(rows, features=schema).to_parquet(tmp_path / "set" / "train.parquet")
        return str(tmp_path / "set")

    return save


def labels(dataset):
    return list(dataset["labels"])


def test_a_schema_declares_the_classes(folder):
    task = load_task(DataArguments(dataset_name=folder([1, 0, 1], [*TWO, "mixed"])))
    assert task.labels == [*TWO, "mixed"] and labels(task.train) == [1, 0, 1]
    assert task.head == {
        "num_labels": 3, "id2label": {0: "negative", 1: "positive", 2: "mixed"},
        "label2id": {"negative": 0, "positive": 1, "mixed": 2},
    }  # fmt: skip


def test_the_demo_declares_its_classes():
    task = load_task(DataArguments(dataset_name="rotten_tomatoes_demo", max_train_samples=20))
    assert task.labels == TWO and set(labels(task.train)) == {0, 1}


@pytest.mark.parametrize(
    ("values", "names", "numbers"),
    [
        (["positive", "negative"], TWO, [1, 0]),
        ([1, 0], TWO, [1, 0]),  # numbers of classes
        ([3, 1], ["1", "2", "3"], [2, 0]),  # stars: the integers are names
        ([1, 0], ["1", "0"], [0, 1]),
        ([True, False], ["False", "True"], [1, 0]),
    ],
)
def test_a_user_declares_the_classes(write, values, names, numbers):
    task = load_task(DataArguments(train_file=write("train", values), class_names=names))
    assert task.labels == names and labels(task.train) == numbers


def test_one_record_does_not_change_the_head(write):
    """The neighbouring set has one record less, the only one of its class: the released head must not tell."""
    names = [*TWO, "rare"]
    heads = [
        load_task(DataArguments(train_file=write(f"set{i}", values), class_names=names)).head
        for i, values in enumerate((["positive", "negative", "rare"], ["positive", "negative"]))
    ]
    assert heads[0] == heads[1]
    for values in (["positive", "negative"], [0, 1, 2]):
        path = write("undeclared", values)
        message = assert_refused(lambda path=path: load_task(DataArguments(train_file=path)), PrivacyConfigError,
                                 "class_names", "published", "even in one record")  # fmt: skip
        assert "3" not in message and "2" not in message
        counted = load_task(DataArguments(train_file=path), undeclared=True)
        assert counted.labels == sorted(map(str, values))


@pytest.mark.parametrize("value", ["sick", None, "2"])
def test_a_label_that_is_no_class_is_refused_and_not_shown(write, value):
    arguments = DataArguments(train_file=write("train", ["negative", value]), class_names=TWO)
    message = assert_refused(lambda: load_task(arguments), PrivacyConfigError, "none of the classes")
    assert str(value) not in message.replace("2 declared", "").replace("none of", "")


@pytest.mark.parametrize("value", [2, -1, None])
def test_a_number_that_is_no_class_is_refused(write, value):
    arguments = DataArguments(train_file=write("train", [0, 1, value]), class_names=TWO)
    assert_refused(lambda: load_task(arguments), PrivacyConfigError, "none of the classes")


def test_other_splits_are_read_by_the_names_of_the_schema(folder, write):
    path = folder([0, 1], TWO[::-1])
    for values in (["negative", "positive"], [1, 0]):
        other = write("other", values)
        task = load_task(DataArguments(dataset_name=path, validation_file=other, public_file=other))
        assert labels(task.train) == [0, 1] and labels(task.evaluation) == labels(task.public) == [1, 0]


def test_public_records_keep_labels_of_the_same_classes(write):
    train = write("train", ["positive", "negative"])

    def public(values):
        return load_task(DataArguments(train_file=train, class_names=TWO, public_file=write("public", values))).public

    assert labels(public(["positive", "positive"])) == [1, 1]
    assert public(["sports", "politics"]).column_names == ["text"]


@pytest.mark.parametrize("names", [TWO[::-1], ["no", "yes"], ["negative"]])
def test_names_that_contradict_the_schema_are_refused(folder, names):
    arguments = DataArguments(dataset_name=folder([1, 0], TWO), class_names=names)
    assert_refused(lambda: load_task(arguments), PrivacyConfigError, "declares", "Leave `class_names` out")


def test_a_class_has_one_name(write):
    arguments = DataArguments(train_file=write("train", ["a", "b"]), class_names=["a", "b", "a"])
    assert_refused(lambda: load_task(arguments), PrivacyConfigError, "twice")
