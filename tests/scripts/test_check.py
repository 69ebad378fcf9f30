"""`raptor-hf check`: the findings as a table, and an exit code that a script can use."""

from __future__ import annotations

import json

import pytest
import torch

from raptor_hf import cli
from raptor_hf.assets import tiny_switch_path
from raptor_hf.scripts import check
from tests.helpers import tiny_model


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def saved(tmp_path):
    """Saves a model with the bundled tokenizer; returns the folder."""
    from transformers import AutoTokenizer

    def save(**config):
        model = tiny_model(vocab_size=8000, **config)
        model.save_pretrained(tmp_path / "model")
        AutoTokenizer.from_pretrained(tiny_switch_path()).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize("engine", ["functorch", "hooks"])
def test_a_good_model_gives_zero(saved, tmp_path, engine, capsys):
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(["a good film", "bad", "it is fine, I think"])]
    data = write(tmp_path / "data.jsonl", rows)
    assert cli.main(["check", saved(), "--data", data, "--engine", engine]) == 0
    printed = capsys.readouterr().out
    assert "nothing found" in printed and "first 3 records" in printed and "sparse block 3: 4 experts" in printed
    assert "good film" not in printed


def test_an_error_gives_one_and_says_what_to_do(saved, capsys):
    path = saved(output_router_logits=True)
    assert check.main([path]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "error" in printed and "output_router_logits" in printed and "frozen router" in printed


def test_a_warning_gives_zero(saved, capsys):
    assert check.main([saved(router_jitter_noise=0.1)]) == 0
    printed = capsys.readouterr().out
    assert "warning" in printed and "jitter" in printed


def test_the_bundled_model(capsys):
    assert check.main(["tiny-switch"]) == 0
    assert "nothing found" in capsys.readouterr().out or "warning" in capsys.readouterr().out


def test_made_up_records_fit_the_vocabulary():
    records = check._made_up(13)
    assert len(records) == 3 and len({len(r["input_ids"]) for r in records}) == 3
    assert all(0 <= token < 13 for r in records for token in r["input_ids"])
    assert torch.tensor([r["labels"] for r in records]).unique().numel() == 2


def configuration(path, **settings):
    path.write_text("\n".join(f"{name}: {value}" for name, value in settings.items()))
    return str(path)


def test_a_configuration_file_gives_model_and_data(saved, tmp_path, capsys):
    data = write(tmp_path / "data.jsonl", [{"text": "a good film", "label": 0}, {"text": "bad", "label": 1}])
    settings = dict(output_dir=tmp_path / "out", model_name_or_path=saved(), train_file=data, grad_sample_mode="hooks")
    path = configuration(tmp_path / "c.yaml", target_epsilon=1, **settings)
    assert cli.main(["check", path]) == 2
    assert "class_names" in capsys.readouterr().err  # training would refuse it too
    settings["class_names"] = "[bad, good]"
    path = configuration(tmp_path / "c.yaml", target_epsilon=1, **settings)
    assert cli.main(["check", path]) == 0
    printed = capsys.readouterr().out
    assert "first 2 records" in printed and "hooks engine" in printed
    path = configuration(tmp_path / "c.yaml", target_epsilon=-1, **settings)
    assert cli.main(["check", path]) == 2
    assert "target_epsilon" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["no/such-model", "{}/empty", "{}/none.yaml"])
def test_a_model_that_is_not_there_is_a_message(model, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert cli.main(["check", model.format(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "Give " in printed and "Traceback" not in printed


def test_data_that_are_not_there_are_a_message(tmp_path, capsys):
    assert cli.main(["check", "tiny-switch", "--data", str(tmp_path / "missing.csv")]) == 2
    assert "no such file" in capsys.readouterr().err
    path = configuration(tmp_path / "c.yaml", output_dir=tmp_path, target_epsilon=1, dataset_name="no/such-data")
    assert cli.main(["check", path]) == 2
    assert "no/such-data" in capsys.readouterr().err
