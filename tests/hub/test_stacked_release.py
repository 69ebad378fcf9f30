"""Releases of families whose experts are stacked: stock PEFT reads them, whatever carries adapters."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel

from raptor_hf.config import RaptorConfig
from raptor_hf.hub import export_release, load_release, verify_release
from raptor_hf.moe.adapter_io import check_loaded
from raptor_hf.trainer import RaptorTrainer
from tests.families import build, collate, records

ATTENTION, SHARED = "kv_b_proj", ["shared_experts.gate_proj", "shared_experts.down_proj"]


def release(tmp_path, head="score", targets=None, family="deepseek_v2"):
    model = build(family, head=head)
    args = RaptorConfig(
        output_dir=str(tmp_path / "out"), max_steps=1, shared_noise_multiplier=1.0, expert_noise_multiplier=1.0,
        use_cpu=True, report_to="none", lora_rank=2, learning_rate=0.1, disable_tqdm=True, save_strategy="no",
        shared_target_modules=targets,
    )  # fmt: skip
    items = records(8, causal=head == "lm")
    trainer = RaptorTrainer(model, args, data_collator=collate, train_dataset=items)
    trainer.train()
    with pytest.warns(UserWarning, match="Hub id"):
        export_release(trainer, tmp_path / "release")
    batch = {key: value for key, value in collate(items).items() if key != "labels"}
    with torch.no_grad():
        return batch, model.eval()(**batch).logits


@pytest.mark.parametrize("head", ["score", "lm"])
@pytest.mark.parametrize("targets", [None, [ATTENTION, *SHARED], SHARED], ids=["attention", "both", "shared experts"])
def test_stock_peft_reads_a_release(head, targets, tmp_path):
    batch, expected = release(tmp_path, head, targets)
    path = tmp_path / "release"
    assert not [finding for finding in verify_release(path).findings if finding.severity == "error"]
    stock = PeftModel.from_pretrained(build("deepseek_v2", head=head), path).eval()
    check_loaded(stock, path)
    with torch.no_grad():
        ours = load_release(path, base_model=build("deepseek_v2", head=head)).eval()(**batch).logits
        assert float((stock(**batch).logits - expected).abs().max()) <= 1e-5
        assert float((ours - expected).abs().max()) <= 1e-5
        assert float((build("deepseek_v2", head=head)(**batch).logits - expected).abs().max()) > 1e-3


def test_the_gate_of_a_shared_expert_is_no_router(tmp_path):
    """It weighs what the shared expert adds, and chooses nobody's experts."""
    batch, expected = release(tmp_path, targets=["q_proj", "shared_expert_gate"], family="qwen2_moe")
    path = tmp_path / "release"
    assert not [finding for finding in verify_release(path).findings if finding.severity == "error"]
    stock = PeftModel.from_pretrained(build("qwen2_moe"), path).eval()
    check_loaded(stock, path)
    with torch.no_grad():
        assert float((stock(**batch).logits - expected).abs().max()) <= 1e-5


@pytest.mark.parametrize(
    "change",
    [
        lambda names: [*names, "model.layers.1.mlp.gate.weight"],
        lambda names: ["experts.gate_up_proj", "experts.down_proj"],
        lambda names: [],
    ],
    ids=["a router", "all layers", "none"],
)
def test_other_parameters_than_the_weights_have_are_an_error(change, tmp_path):
    release(tmp_path)
    path = tmp_path / "release" / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_parameters"] = change(config["target_parameters"])
    path.write_text(json.dumps(config))
    errors = [f.what for f in verify_release(tmp_path / "release").findings if f.severity == "error"]
    assert any("does not name exactly" in what for what in errors)
