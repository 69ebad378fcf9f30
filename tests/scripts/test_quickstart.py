"""The main job, end to end, on a slice; the whole of it is marked slow."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from raptor_hf import PrivacyStatement, SwitchTransformersForSequenceClassification, load_adapter
from raptor_hf.assets import tiny_switch_path
from raptor_hf.scripts import quickstart

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _check_outputs(folder):
    statement = PrivacyStatement.from_json((folder / "privacy.json").read_text())
    assert statement.private and statement.epsilon_spent <= statement.target_epsilon
    assert statement.recompute().upper == pytest.approx(statement.epsilon_spent, rel=1e-6)
    assert (folder / "routing_table.png").stat().st_size > 5_000
    weights = load_file(folder / "adapter_model.safetensors")
    assert any("experts.expert_7.wo" in key for key in weights) and all("router" not in key for key in weights)
    return statement


def _base():
    return SwitchTransformersForSequenceClassification.from_pretrained(
        tiny_switch_path(), num_labels=2, dtype=torch.float32
    )


def test_a_slice_of_the_quickstart(tmp_path, capsys):
    arguments = ["--train-size", "240", "--public-size", "200", "--batch-size", "60", "--epochs", "1"]
    assert quickstart.main(["--output-dir", str(tmp_path), *arguments]) == 0
    statement = _check_outputs(tmp_path)
    assert statement.shared.steps_taken == statement.expert.steps_taken == 4
    assert statement.dataset_size == 240 and statement.disjointness
    printed = capsys.readouterr().out
    for word in ("accuracy", "epsilon spent", "delta", "noise multiplier", "cycles", "time"):
        assert word in printed
    # what was saved: the same predictions by this package and by stock PEFT, from a fresh base
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    batch = tokenizer(["a warm , funny film", "dull and far too long"], padding=True, return_tensors="pt")
    ours = load_adapter(_base(), tmp_path).eval()
    theirs = peft.PeftModel.from_pretrained(_base(), str(tmp_path)).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch).logits, theirs(**batch).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_the_whole_quickstart(tmp_path, capsys):
    assert quickstart.main(["--output-dir", str(tmp_path)]) == 0
    statement = _check_outputs(tmp_path)
    assert statement.epsilon_spent > 7.9 and statement.dataset_size == 7_500
    row = next(line for line in capsys.readouterr().out.splitlines() if "accuracy" in line)
    assert float(row.split("%")[0].split()[-1]) > 65


def test_pretraining_facts_of_the_bundled_model():
    facts = json.loads((tiny_switch_path() / "pretraining.json").read_text())
    assert max(facts["held_out_owner_entropy_over_log_E"]) >= 0.8
    assert sum(path.stat().st_size for path in tiny_switch_path().iterdir()) < 10 * 2**20
