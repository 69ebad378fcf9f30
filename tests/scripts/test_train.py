"""`raptor-hf train`: YAML and flags to a trained, saved adapter, from local files."""

import csv
import json
import shlex

import pytest
from transformers import pipeline

from raptor_hf import PrivacyConfigError, cli, load_release
from raptor_hf.data import DataArguments, load_task
from raptor_hf.scripts import train
from tests.trainer.build import assert_refused

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

GOOD, BAD = "a moving , funny and clever film", "dull , noisy and far too long"


def _write(path, rows, fields=("text", "label"), delimiter=","):
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle, delimiter=delimiter)
        writer.writerow(fields)
        writer.writerows(rows)


@pytest.fixture
def files(tmp_path):
    rows = [(f"{GOOD if i % 2 else BAD} number {i}", "pos" if i % 2 else "neg") for i in range(40)]
    _write(tmp_path / "train.csv", rows)
    _write(tmp_path / "test.csv", [(f"again, {text}", label) for text, label in rows[:10]])
    _write(tmp_path / "public.tsv", [(f"the plot of film {i} is simple", "neg") for i in range(30)], delimiter="\t")
    (tmp_path / "config.yaml").write_text(
        f"""
train_file: {tmp_path}/train.csv
validation_file: {tmp_path}/test.csv
public_file: {tmp_path}/public.tsv
class_names: [neg, pos]
output_dir: {tmp_path}/out
max_seq_length: 32
target_epsilon: 2
expected_batch_size: 10
per_device_train_batch_size: 4
num_train_epochs: 1
learning_rate: 1e-3
lora_rank: 4
save_strategy: no
"""
    )
    return tmp_path


def test_trains_from_files_and_the_command_line_wins(files, capsys):
    assert train.main([str(files / "config.yaml"), "--target_epsilon", "3", "--max_steps", "2"]) == 0
    statement = json.loads((files / "out" / "privacy.json").read_text())
    assert statement["target_epsilon"] == 3 and statement["shared"]["steps_taken"] == 2
    assert json.loads((files / "out" / "adapter_config.json").read_text())["r"] == 4
    assert "epsilon spent" in capsys.readouterr().out


def test_the_release_of_a_run_has_the_names_of_the_classes(files, capsys):
    """The command that the run prints, as it stands."""
    assert train.main([str(files / "config.yaml"), "--max_steps", "1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("to publish"))
    command = shlex.split(line.partition(": ")[2].replace("RELEASE", str(files / "release")))
    assert command[0] == "raptor-hf" and cli.main(command[1:]) == 0
    assert "The head's outputs, in order: `neg`, `pos`." in (files / "release" / "README.md").read_text()
    classify = pipeline("text-classification", model=load_release(files / "release"), tokenizer=str(files / "release"))
    assert classify([GOOD])[0]["label"] in ("neg", "pos")


def test_a_trained_model_names_its_outputs(files):
    """What `push_to_hub` and `export_release(trainer)` publish, and pipelines of the trainer's model show."""
    task = load_task(DataArguments(train_file=str(files / "train.csv"), class_names=["neg", "pos", "mixed"]))
    model, _ = train.load_model(train.ModelArguments(), **task.head)
    assert model.config.id2label == {0: "neg", 1: "pos", 2: "mixed"} and model.config.label2id["mixed"] == 2
    assert model.score.out_features == 3  # of records that have two


def test_classes_that_nobody_declared_are_refused(files):
    text = (files / "config.yaml").read_text().replace("class_names: [neg, pos]\n", "")
    (files / "config.yaml").write_text(text)
    message = assert_refused(
        lambda: train.main([str(files / "config.yaml")]), PrivacyConfigError, "class_names", "ClassLabel", "published"
    )
    assert "pos" not in message.replace("positive", "") and not (files / "out").exists()


def test_a_bare_no_of_yaml_is_no_name(files):
    text = (files / "config.yaml").read_text().replace("[neg, pos]", "[no, yes]")
    (files / "config.yaml").write_text(text)
    assert_refused(lambda: train.main([str(files / "config.yaml")]), PrivacyConfigError, "class_names", "quotes")


def test_noise_in_the_place_of_the_budget_of_the_file(files):
    """Both would be refused; `none` takes the file's budget away."""
    noise = ["--shared_noise_multiplier", "2", "--expert_noise_multiplier", "9", "--max_steps", "1"]
    with pytest.raises(PrivacyConfigError, match="could contradict"):
        train.main([str(files / "config.yaml"), *noise])
    assert train.main([str(files / "config.yaml"), *noise, "--target_epsilon", "none"]) == 0
    statement = json.loads((files / "out" / "privacy.json").read_text())
    assert statement["target_epsilon"] is None and statement["shared"]["noise_multiplier"] == 2


def test_unknown_key_is_an_error(files):
    with (files / "config.yaml").open("a") as handle:
        handle.write("target_epsilonn: 1\n")
    with pytest.raises(PrivacyConfigError, match="target_epsilonn"):
        train.main([str(files / "config.yaml")])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text_column", "sentence"], "sentence"),
        (["--train_file", "records.parquet"], "parquet"),
        (["--dataset_name", "rotten_tomatoes_demo", "--label_column", "stars"], "stars"),
    ],
)
def test_bad_data_is_an_error(files, flags, message):
    with pytest.raises(PrivacyConfigError, match=message):
        train.main([str(files / "config.yaml"), *flags])


def test_public_file_that_shares_a_record_is_refused(files):
    _write(files / "public.tsv", [(f"{BAD}  number 0", "neg"), ("the plot", "neg")], delimiter="\t")
    with pytest.raises(PrivacyConfigError, match="shares at least one record"):
        train.main([str(files / "config.yaml")])
