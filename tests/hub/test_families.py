"""Releases of every family: what an adapter trains is told from its file alone, as the model would tell it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from raptor_hf import PrivacyStatement, attach_adapters, export_release, find_moe_layout, load_release
from raptor_hf.hub.weights import _role
from raptor_hf.privacy import StreamStatement
from tests.families import EXPERTS, FAMILIES, build, collate, records, shake
from tests.hub.build import BASE, edit_json, problems, rehash

BATCH = collate(records(4), 10)


class Trained:
    """As much of a trainer as a release needs: no training, so that all families are quick."""

    processing_class = None

    def __init__(self, family: str, head: str):
        from peft import LoraConfig

        self.model = build(family, head=head)
        self.layer = find_moe_layout(self.model).sparse_layers[-1].index
        attach_adapters(self.model, LoraConfig(r=2, lora_alpha=4), self.layer)
        shake(self.model)

    def privacy_statement(self) -> PrivacyStatement:
        shared, expert = (StreamStatement(None, 0.5, 1.0, d, 1, 1) for d in (8.0, 8.0 / EXPERTS))
        return PrivacyStatement.build(
            method="raptor", shared=shared, expert=expert, delta=1e-3, dataset_size=16, expected_batch_size=8,
            num_experts=EXPERTS, protected_layer=self.layer, ownership="gate",
        )  # fmt: skip


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**{key: value for key, value in BATCH.items() if key != "labels"}).logits


@pytest.mark.parametrize("head", ["score", "lm_head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_and_load(family, head, tmp_path):
    try:
        trained = Trained(family, head)
    except ValueError as problem:  # a head that the family lacks
        pytest.skip(str(problem)[:80])
    folder = export_release(trained, tmp_path / "made", **BASE)
    assert problems(folder) == []
    expected = logits(trained.model)
    assert (expected - logits(build(family, head=head))).abs().max() > 1e-3
    assert torch.equal(logits(load_release(folder, build(family, head=head))), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_are_told_from_names_as_the_model_tells_them(family):
    model = build(family)
    layout = find_moe_layout(model)
    roles = {name: layout.role(name) for name, _ in model.named_parameters()}
    for name, role in roles.items():
        if role != "head" and "." in name:
            assert _role(name.rpartition(".")[0]) == role, f"{name} is a {role}"
    assert {"router", "expert"} <= set(roles.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_on_a_router_is_found(family, tmp_path):
    trained = Trained(family, "score")
    folder = export_release(trained, tmp_path / "made", **BASE)
    layout = find_moe_layout(trained.model)
    name = next(n for n, _ in trained.model.named_parameters() if layout.role(n) == "router" and n.endswith("weight"))
    path = name.rpartition(".")[0]
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"base_model.model.{path}.lora_A.weight"] = torch.zeros(2, 16)
    tensors[f"base_model.model.{path}.lora_B.weight"] = torch.zeros(EXPERTS, 2)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "adapter_config.json", lambda c: c["target_modules"].append(path))
    rehash(folder)
    assert any("router" in text and path in text for text in problems(folder))


def test_a_stacked_parameter_of_another_layer_is_found(tmp_path):
    trained = Trained("olmoe", "score")
    folder = export_release(trained, tmp_path / "made", **BASE)
    (old,) = {t.rpartition(".")[0] for t in _parameters(folder)}
    other = old.replace(f".{trained.layer}.", ".0.")
    moved = [name.replace(old, other) for name in _parameters(folder)]
    edit_json(folder / "adapter_config.json", lambda c: c.update(target_parameters=moved))
    rehash(folder)
    assert any("exactly the modules" in text for text in problems(folder))


def _parameters(folder) -> list[str]:
    import json

    return json.loads((folder / "adapter_config.json").read_text())["target_parameters"]


def test_a_causal_language_model_generates(tmp_path):
    trained = Trained("olmoe", "lm_head")
    folder = export_release(trained, tmp_path / "made", **BASE)
    build("olmoe", head="lm_head").save_pretrained(tmp_path / "base")
    prompt = torch.tensor([[5, 6, 7, 8]])
    options = dict(max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(prompt))
    expected = trained.model.generate(prompt, **options)
    assert torch.equal(load_release(folder, tmp_path / "base").generate(prompt, **options), expected)
    merged = load_release(folder, tmp_path / "base", merge=True)
    assert type(merged).__name__ == "OlmoeForCausalLM"
    assert torch.equal(merged.generate(prompt, **options), expected)
    assert not torch.equal(build("olmoe", head="lm_head").generate(prompt, **options), expected)
