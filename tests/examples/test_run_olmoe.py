"""The example script, both objectives, on a random model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "run_olmoe.py"


@pytest.mark.parametrize(("objective", "ownership"), [("classification", "vote"), ("completion", "gate")])
def test_run(objective, ownership, tmp_path, capsys):
    if objective == "completion":
        rows = [{"prompt": f"is film {i} good ?", "choices": [" yes", " no"], "answer": i % 2} for i in range(16)]
    else:
        rows = [{"text": f"film {i} is good", "label": ["neg", "pos"][i % 2]} for i in range(16)]
    records = tmp_path / "records.jsonl"
    records.write_text("\n".join(json.dumps(row) for row in rows))
    key = "prompt" if objective == "completion" else "text"
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(json.dumps({**row, key: f"so {row[key]}"}) for row in rows))
    result = runpy.run_path(str(SCRIPT))["main"](
        [
            "--model_name_or_path", "tiny-random", "--objective", objective, "--ownership", ownership,
            "--train_file", str(records), "--validation_file", str(held_out), "--max_seq_length", "12",
            "--class_names", "neg", "pos",
            "--shared_noise_multiplier", "1", "--expert_noise_multiplier", "1", "--max_steps", "1",
            "--output_dir", str(tmp_path / "out"), "--use_cpu", "--report_to", "none", "--disable_tqdm", "True",
        ]
    )  # fmt: skip
    assert 0 <= result["eval_accuracy"] <= 1 and result["eval_loss"] > 0
    assert "differentially private" in capsys.readouterr().out
    keys = set(load_file(tmp_path / "out" / "adapter_model.safetensors"))
    assert any(".layers.1.mlp.experts.base_layer.lora_A" in key for key in keys)
    assert ("base_model.model.score.weight" in keys) == (objective == "classification")
    assert json.loads((tmp_path / "out" / "privacy.json").read_text())["ownership"] == ownership
