"""Each way to tamper with a release is found, also by an attacker who has corrected all hashes."""

from __future__ import annotations

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from raptor_hf import ReleaseError, verify_release
from raptor_hf.hub.remote import open_release
from raptor_hf.hub.verify import verify_snapshot
from raptor_hf.hub.weights import read_contents, read_header
from tests.hub.build import copy, edit_json, problems, rehash
from tests.trainer.build import assert_refused

WEIGHTS, CONFIG, STATEMENT = "adapter_model.safetensors", "adapter_config.json", "privacy.json"


@pytest.fixture
def folder(release, tmp_path):
    return copy(release, tmp_path / "copy")


def found(folder, *words, hashes=True):
    """The errors are about `words`, with hashes corrected by the attacker when asked."""
    if hashes:
        rehash(folder)
    errors = problems(folder)
    assert errors, "nothing was found"
    assert any(all(word.lower() in text.lower() for word in words) for text in errors), errors


def change_weights(folder, change, metadata=None):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata=metadata or {"format": "pt"})


def test_a_true_release_passes_both_accountants(release):
    report = verify_release(release)
    assert report.ok and report.private and not report.findings
    assert set(report.epsilon) == {"prv", "pld"}
    claimed = report.statement.epsilon_spent
    assert report.epsilon["prv"].upper == pytest.approx(claimed, rel=1e-9)
    assert report.epsilon["pld"].upper == pytest.approx(claimed, rel=0.02)
    values = json.loads(report.to_json())
    assert values["ok"] is True and values["epsilon_claimed"] == claimed and values["digest"] == report.digest
    report.raise_on_error()


@pytest.mark.parametrize("name", ["adapter_model.bin", "training_args.bin", "optimizer.pt", "checkpoint-1/x.json"])
def test_an_added_file_is_found(folder, name):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps({"seed": 42}))
    found(folder, name, "is in the release", hashes=False)
    assert_refused(verify_release(folder).raise_on_error, ReleaseError, name)


def test_a_linked_folder_is_found(folder, tmp_path):
    (tmp_path / "other").mkdir()
    os.symlink(tmp_path / "other", folder / "runs")
    found(folder, "runs", hashes=False)


def test_a_pickle_under_an_allowed_name_is_found(folder):
    (folder / "tokenizer.model").write_bytes(pickle.dumps([1]))
    edit_json(folder / "release.json", lambda m: m["files"].update({"tokenizer.model": {}}))
    found(folder, "tokenizer.model", "pickle")
    (folder / "tokenizer.model").unlink()
    (folder / "vocab.json").write_bytes(pickle.dumps([1]))
    found(folder, "vocab.json", hashes=False)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, STATEMENT, "tokenizer.json"])
def test_a_changed_byte_is_found(folder, name):
    data = bytearray((folder / name).read_bytes())
    position = len(data) - 4 if name == WEIGHTS else data.index(b'"')
    data[position] ^= 1
    (folder / name).write_bytes(data)
    found(folder, name, "SHA-256", hashes=False)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, STATEMENT, "README.md", "release.json"])
def test_a_missing_file_is_found(folder, name):
    (folder / name).unlink()
    found(folder, name, "missing", hashes=False)


def test_an_empty_folder_and_nothing_at_all(tmp_path):
    assert not verify_release(tmp_path).ok
    assert_refused(lambda: verify_release(tmp_path / "no such thing"), ReleaseError, "no folder")


# ------------------------------------------------------------------ the claim


def lower(statement):
    statement["epsilon_spent"] *= 0.9
    statement["epsilon_planned"] *= 0.9


def test_a_lowered_epsilon_is_found_by_its_verdict(folder):
    edit_json(folder / STATEMENT, lower)
    found(folder, "statement begins")


def test_a_lowered_epsilon_with_its_verdict_is_found_by_both_accountants(folder):
    old = json.loads((folder / STATEMENT).read_text())

    def change(statement):
        lower(statement)
        statement["verdict"] = statement["verdict"].replace("1.491", "1.342")

    edit_json(folder / STATEMENT, change)
    (folder / "README.md").write_text((folder / "README.md").read_text().replace("1.491", "1.342"))
    rehash(folder)
    report = verify_release(folder)
    assert report.statement is not None, "the statement itself is consistent"
    claims = [f for f in report.errors if "claims an epsilon" in f.what]
    assert {word for f in claims for word in ("prv", "pld") if word in f.why} == {"prv", "pld"}
    assert not report.ok and len(claims) == 2 == len(report.errors), "only the accountants can see it"
    assert old["epsilon_spent"] > report.statement.epsilon_spent


def test_a_lowered_epsilon_at_another_delta_is_found(folder):
    def change(statement):
        statement["other_deltas"][0]["epsilon_spent"] *= 0.5

    edit_json(folder / STATEMENT, change)
    rehash(folder)
    assert any("1e-06" in f.what for f in verify_release(folder).errors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update(schema_version=2), ("schema version",)),
        (lambda s: s.update(owner_counts=[1, 2]), ("fields that differ",)),
        (lambda s: s.pop("expert"), ("fields that differ",)),
        (lambda s: s.update(delta="small"), ("delta",)),
        (lambda s: s.update(dataset_size=25), ("sample_rate",)),
        (lambda s: s.update(not_covered=s["not_covered"][1:]), ("no longer says",)),
        (lambda s: s["expert"].update(denominator=3.0), ("divides by 3",)),
        (lambda s: s.update(protected_layer=1), ("protects the layers [1]",)),
        (lambda s: s.update(num_experts=8), ("with 8 experts",)),
        (lambda s: s.update(base_model="other-org/base"), ("other-org/base",)),
        (lambda s: s.update(public_corpus="/home/alice/corpus"), ("local path", "/home/alice")),
    ],
    ids=range(11),
)
def test_a_changed_statement_is_found(folder, change, words):
    edit_json(folder / STATEMENT, change)
    found(folder, *words)


def test_a_limit_in_other_words_is_a_warning(folder):
    words = "in the words of another version"
    edit_json(folder / STATEMENT, lambda s: s.update(not_covered=[words, *s["not_covered"][1:]]))
    card = (folder / "README.md").read_text()
    line = next(line for line in card.splitlines() if line.startswith("- hyper-parameter search"))
    (folder / "README.md").write_text(card.replace(line, f"- {words}"))
    rehash(folder)
    report = verify_snapshot(open_release(folder), accountants=False)
    assert report.ok and [f.severity for f in report.findings] == ["warning"]
    assert "hyper-parameter search" in report.findings[0].what


def test_a_statement_that_is_no_object_is_found(folder):
    (folder / STATEMENT).write_text("[]")
    found(folder, "statement")


# ------------------------------------------------------------------ the weights


def test_an_adapter_on_a_router_is_found(folder):
    path = "encoder.block.3.layer.1.mlp.router.classifier"

    def change(tensors):
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.zeros(2, 16)
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.zeros(4, 2)

    change_weights(folder, change)
    edit_json(folder / CONFIG, lambda c: c["target_modules"].append(path))
    found(folder, "router", path)


def test_experts_of_a_second_layer_are_found(folder):
    path = "encoder.block.1.layer.1.mlp.experts.expert_0.wi"

    def change(tensors):
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.zeros(2, 16)
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.zeros(20, 2)

    change_weights(folder, change)
    edit_json(folder / CONFIG, lambda c: c["target_modules"].append(path))
    found(folder, "blocks [1, 3]")


@pytest.mark.parametrize("name", ["owner_map", "base_model.model.encoder.block.0.layer.0.SelfAttention.q.weight"])
def test_a_tensor_that_is_no_adapter_is_found(folder, name):
    change_weights(folder, lambda tensors: tensors.update({name: torch.zeros(4, 4)}))
    found(folder, name)


def test_a_removed_half_of_a_pair_is_found(folder):
    name = "encoder.block.0.layer.0.SelfAttention.q"
    change_weights(folder, lambda tensors: tensors.pop(f"base_model.model.{name}.lora_B.weight"))
    found(folder, name)


def test_metadata_in_the_weights_is_found(folder):
    change_weights(folder, lambda tensors: None, {"format": "pt", "trained_by": "alice"})
    found(folder, "trained_by")


def test_hidden_bytes_in_the_weights_are_found(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data + b"canary")
    found(folder, "no tensor")
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {"format": "pt"}
    next(iter(h for n, h in header.items() if n != "__metadata__"))["note"] = "canary"
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    found(folder, "no tensor")


def test_a_gap_between_tensors_is_found(folder):
    data = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    last = max((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])
    start, stop = last["data_offsets"]
    last["data_offsets"] = [start + 8, stop + 8]
    text = json.dumps(header).encode()
    gap = struct.pack("<Q", len(text)) + text + body[:start] + b"acanary!" + body[start:]
    (folder / WEIGHTS).write_bytes(gap)
    found(folder, "no tensor")
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", length + 8) + b" " * 8 + data[8:])
    found(folder, "no tensor")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(use_rslora=True), ("use_rslora",)),
        (lambda c: c.update(lora_dropout=0.5), ("lora_dropout",)),
        (lambda c: c.update(auto_mapping={"parent_library": "evil"}), ("auto_mapping",)),
        (lambda c: c.update(something_new="canary"), ("something_new",)),
        (lambda c: c.update(target_modules=["q"]), ("exactly the modules",)),
        (lambda c: c.update(modules_to_save=["score", "classifier"]), ("exactly the modules",)),
        (lambda c: c.update(r=4), ("rank 4",)),
        (lambda c: c.update(base_model_name_or_path="other-org/base"), ("other-org/base",)),
        (lambda c: c.update(revision="main"), ("'main'",)),
        (lambda c: c.update(base_model_name_or_path="/home/alice/base"), ("local path",)),
        (lambda c: c.update(seed=42), ("`seed`",)),
    ],
    ids=range(11),
)
def test_a_changed_configuration_is_found(folder, change, words):
    edit_json(folder / CONFIG, change)
    found(folder, *words)


def test_the_same_field_twice_is_found(folder):
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text.replace('"r": 2,', '"r": 3, "r": 2,'))
    found(folder, "twice")


def test_experts_stacked_in_one_tensor_are_read():
    """PEFT's form for stacked experts, as OLMoE's: rank x experts rows in one pair."""
    block = "base_model.model.model.layers.5.mlp.experts"
    shapes = {f"{block}{inner}.lora_{kind}.weight": ("F32", shape) for inner in (".base_layer", "")
              for kind, shape in (("A", (8 * 4, 16)), ("B", (20, 8 * 4)))}  # fmt: skip
    shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] = ("F32", (4, 16))
    shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"] = ("F32", (16, 4))
    shapes["base_model.model.model.layers.0.mlp.gate.lora_A.weight"] = ("F32", (4, 16))
    shapes["base_model.model.model.layers.0.mlp.gate.lora_B.weight"] = ("F32", (8, 4))
    contents = read_contents(shapes, 4)
    assert contents.num_experts == 8 and contents.layers == (5,) and contents.stacked
    assert contents.routers == ("model.layers.0.mlp.gate",) and not contents.foreign and not contents.unpaired


def test_a_file_that_is_no_safetensors_file(release):
    for data in (b"", b"\x80\x04K\x01.", b"\xff" * 16, (release / WEIGHTS).read_bytes()[:100]):
        assert_refused(lambda data=data: read_header(data), ReleaseError, "safetensors")


# ------------------------------------------------------------------ the card


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("1.491 / 1.491", "1.1 / 1.1", ("privacy section",)),
        ("- hyper-parameter search", "- nothing: hyper-parameter search", ("privacy section",)),
        ("<!-- raptor-hf: end -->", "", ("privacy section",)),
        ("base_model: example-org/tiny", "base_model: other-org/base", ("base_model: other-org/base",)),
        ("library_name: peft", "library_name: transformers", ("library_name",)),
        ("# A private", "Trained with ε = 0.5.\n\n# A private", ("0.5",)),
        ("# A private", "It has epsilon of 1.2\n\n# A private", ("1.2",)),
        ("# A private", "Trained in /home/alice/x\n\n# A private", ("local path",)),
    ],
    ids=range(8),
)
def test_a_card_that_says_something_else_is_found(folder, old, new, words):
    text = (folder / "README.md").read_text()
    assert old in text
    (folder / "README.md").write_text(text.replace(old, new, 1))
    found(folder, *words)


def test_a_card_may_have_text_of_its_own(folder):
    with (folder / "README.md").open("a") as file:
        file.write("\n## Uses\n\nFor English reviews; target epsilon was 8.\n")
    assert problems(folder) == []


def test_a_manifest_that_is_damaged_is_found(folder):
    (folder / "release.json").write_text('{"files": 3}')
    found(folder, "release.json", hashes=False)


def test_a_method_with_one_stream_may_train_experts_of_any_layer():
    """A baseline that accounts for all experts as one stream declares no protected layer."""
    from types import SimpleNamespace

    from safetensors.torch import save

    from raptor_hf.hub.weights import check_adapter

    paths = [f"encoder.block.{b}.layer.1.mlp.experts.expert_{e}.wi" for b in (1, 3) for e in range(2)]
    tensors = {f"base_model.model.{p}.lora_{k}.weight": torch.zeros(2, 2) for p in paths for k in "AB"}
    weights, config = save(tensors), {"r": 2, "target_modules": paths, "peft_type": "LORA"}
    one = SimpleNamespace(expert=None, protected_layer=None, num_experts=None)
    assert not list(check_adapter(weights, config, one))
    two = SimpleNamespace(expert=1, protected_layer=3, num_experts=2)
    assert any("blocks [1, 3]" in f.what for f in check_adapter(weights, config, two))
