"""The ScienceQA script for two cycles on invented problems with drawn images, and on a text model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import OlmoeConfig, OlmoeForCausalLM

from raptor_hf import RaptorConfig, export_release
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.models.deepseek_vl2 import DeepseekVL2Processor
from raptor_hf.scripts._config import parse_dataclasses
from tests.models.deepseek_vl2.words import tiny_tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT, CONFIGS = EXAMPLES / "run_scienceqa.py", EXAMPLES / "configs"
COLOURS = {"red": (220, 20, 20), "green": (20, 200, 40), "blue": (10, 30, 230)}
SECRET = "zyzzyva"


@pytest.fixture
def problems(tmp_path):
    """24 questions about the colour of an image, or without one; a word that stands in training questions alone."""
    found = {}
    for i in range(24):
        split, name = ("train", "train", "val")[i % 3], list(COLOURS)[i % 3]
        row = {"question": f"Which colour is sheet {i}?", "choices": list(COLOURS), "answer": i % 3, "hint": "",
               "lecture": "", "image": None if i % 4 == 3 else "image.png", "split": split}  # fmt: skip
        row["hint"] = f"{SECRET} {SECRET}" if split == "train" else "Look."
        found[str(i)] = row
        if row["image"]:
            path = tmp_path / "images" / split / str(i) / "image.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (20 + 3 * i, 30), COLOURS[name]).save(path)
    (tmp_path / "problems.json").write_text(json.dumps(found))
    return tmp_path / "problems.json"


def run(problems, out, *arguments, config=None):
    return runpy.run_path(str(SCRIPT))["main"](
        [
            *([] if config is None else [str(config)]),
            "--problems_file", str(problems), "--output_dir", str(out), "--max_steps", "2",
            "--expected_batch_size", "6", "--per_device_train_batch_size", "4", "--lora_rank", "2",
            "--use_cpu", "--report_to", "none", "--disable_tqdm", "True", *arguments,
        ]
    )  # fmt: skip


@pytest.mark.parametrize("method", ["raptor", "monolithic_lora"])
@pytest.mark.parametrize("engine", ["functorch", "hooks"])
def test_with_images(method, engine, problems, tmp_path, capsys):
    out = tmp_path / "out"
    options = ("--method", method, "--grad_sample_mode", engine, "--target_epsilon", "4")
    result = run(problems, out, "--tiny_random", *options, "--eval_strategy", "steps", "--eval_steps", "1")
    assert set(result) == {"questions", "accuracy_before", "accuracy_by_chance", "accuracy"}
    assert result["questions"] == 8 and result["accuracy_by_chance"] == pytest.approx(1 / 3)
    assert all(result[key] * 8 == int(result[key] * 8) for key in ("accuracy", "accuracy_before"))
    printed = capsys.readouterr().out
    assert "differentially private" in printed and printed.count("'eval_loss'") == 2
    statement = json.loads((out / "privacy.json").read_text())
    assert 0 < statement["epsilon_spent"] <= 4 and statement["dataset_size"] == 16
    tensors = load_file(out / "adapter_model.safetensors")
    layers = {key.split(".layers.")[1].split(".")[0] for key in tensors if ".experts." in key}
    assert layers == ({"2"} if method == "raptor" else {"1", "2"})
    assert not any("vision" in key or "projector" in key for key in tensors)
    # neither stream stood still
    for part in (".experts.", ".self_attn."):
        assert any(tensors[key].abs().max() > 0 for key in tensors if part in key and "lora_B" in key)
    processor = DeepseekVL2Processor.from_pretrained(out)
    vocabulary = processor.tokenizer.get_vocab()
    assert SECRET not in (out / "tokenizer.json").read_text() and len(processor.tokenizer(SECRET)["input_ids"]) > 3
    assert any(word in vocabulary for word in ("colour", "Ġcolour"))


def test_resume_and_release(problems, tmp_path):
    """The same pictures, opened again, are the same training set; another picture is another one."""
    out = tmp_path / "out"
    every = ("--tiny_random", "--shared_noise_multiplier", "1", "--expert_noise_multiplier", "1", "--save_steps", "1",
             "--save_strategy", "steps")  # fmt: skip
    run(problems, out, *every)
    resume = (*every, "--resume_from_checkpoint", str(out / "checkpoint-1"))
    run(problems, out, *resume)
    with pytest.warns(UserWarning, match="not known by a Hub id"):
        export_release(out, tmp_path / "release")
    processor = DeepseekVL2Processor.from_pretrained(tmp_path / "release")
    assert processor.image_processor.image_size == 28
    Image.new("RGB", (20, 30), (1, 2, 3)).save(tmp_path / "images" / "train" / "0" / "image.png")
    with pytest.raises(PrivacyConfigError, match="differs in the column `images`"):
        run(problems, out, *resume)


def test_a_text_model(problems, tmp_path, capsys):
    """Any causal sparse model with its tokenizer; the adapter loads on it."""
    tokenizer = tiny_tokenizer(eos_token="</s>")
    base = OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_experts=4,
            num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=256,
            pad_token_id=None, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    config = tmp_path / "config.yaml"
    config.write_text("shared_noise_multiplier: 1\nexpert_noise_multiplier: 1\nimages: no\nmax_seq_length: 90\n")
    result = run(problems, tmp_path / "out", "--model_name_or_path", str(tmp_path / "base"), config=config)
    assert 0 <= result["accuracy"] <= 1 and "differentially private" in capsys.readouterr().out
    PeftModel.from_pretrained(OlmoeForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out")


def test_what_cannot_be_run(problems, tmp_path):
    for arguments in ((), ("--tiny_random", "--model_name_or_path", "x")):
        with pytest.raises(SystemExit, match="tiny_random"):
            run(problems, tmp_path / "out", "--target_epsilon", "4", *arguments)
    with pytest.raises(SystemExit, match="no questions"):
        run(problems, tmp_path / "out", "--target_epsilon", "4", "--tiny_random", "--evaluation_split", "test")
    with pytest.raises(PrivacyConfigError, match="target_epsilon"):
        run(problems, tmp_path / "out", "--target_epsilom", "4", "--tiny_random")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("scienceqa*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_have_no_unknown_setting(path, tmp_path):
    classes = (runpy.run_path(str(SCRIPT))["ScriptArguments"], RaptorConfig)
    flags = ["--output_dir", str(tmp_path), "--bf16", "False", "--use_cpu"]  # as no graphics card is needed to read it
    args, training_args = parse_dataclasses(classes, [str(path), *flags], prog="run_scienceqa.py")
    assert args.dataset_name and args.model_name_or_path and training_args.target_epsilon
