"""The drop-in script runs on local files, and differs from a plain script only as the docs say."""

import csv
import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_run_glue_on_local_files(tmp_path, monkeypatch, capsys):
    for name, count in (("train", 24), ("test", 8)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as handle:
            writer = csv.writer(handle)
            writer.writerow(["sentence", "label"])
            writer.writerows([f"{'fine' if i % 2 else 'poor'} film {name} {i}", i % 2] for i in range(count))
    arguments = {
        "model_name_or_path": "tiny-switch",
        "train_file": tmp_path / "train.csv",
        "validation_file": tmp_path / "test.csv",
        "output_dir": tmp_path / "out",
        "target_epsilon": 4,
        "expected_batch_size": 8,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "lora_rank": 2,
        "save_strategy": "no",
    }
    flags = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
    monkeypatch.setattr(sys, "argv", ["run_glue.py", *flags, "--do_train", "--do_eval"])
    with pytest.raises(SystemExit, match="--class_names"):
        runpy.run_path(str(ROOT / "examples" / "run_glue.py"), run_name="__main__")
    flags += ["--class_names", "0", "1"]
    monkeypatch.setattr(sys, "argv", ["run_glue.py", *flags, "--do_train", "--do_eval"])
    runpy.run_path(str(ROOT / "examples" / "run_glue.py"), run_name="__main__")
    assert "differentially private" in capsys.readouterr().out
    assert 0 <= json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_accuracy"] <= 1
    assert json.loads((tmp_path / "out" / "privacy.json").read_text())["epsilon_spent"] <= 4


def test_the_documented_diff_is_the_script():
    script = (ROOT / "examples" / "run_glue.py").read_text().splitlines()
    blocks = (ROOT / "docs" / "drop-in.md").read_text().split("```diff\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    for line in lines:
        kept = line[1:] in script
        assert kept is not line.startswith("-"), line
    assert sum(line.startswith("+") for line in lines) == 4
