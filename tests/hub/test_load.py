"""Loading: the same predictions, by our reader, stock PEFT, a merged model and `pipeline`."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import pipeline

from raptor_hf import ReleaseError, export_release, load_release
from raptor_hf.assets import tiny_switch_path
from raptor_hf.models import SwitchTransformersForSequenceClassification
from tests.helpers import collate, tiny_model, tiny_records
from tests.hub.build import BASE, copy, tiny_tokenizer
from tests.trainer.build import assert_refused, make_trainer

BATCH = collate(tiny_records(6), 15)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**BATCH).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model in a folder of its own, as it would be downloaded."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(folder)
    return folder


def test_the_same_predictions_from_a_model_and_from_a_folder(trainer, release, base):
    expected = logits(trainer.model)
    assert (expected - logits(tiny_model())).abs().max() > 1e-3, "the training did something"
    assert torch.equal(logits(load_release(release, tiny_model())), expected)
    model = load_release(release, base)
    assert torch.equal(logits(model), expected)
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


def test_stock_peft_and_the_merged_model(trainer, release, base):
    expected = logits(trainer.model)
    stock = PeftModel.from_pretrained(tiny_model(), release)
    assert (logits(stock) - expected).abs().max() < 2e-5
    merged = load_release(release, base, merge=True)
    assert type(merged) is SwitchTransformersForSequenceClassification
    assert {n for n, _ in merged.named_parameters()} == {n for n, _ in tiny_model().named_parameters()}
    assert (logits(merged) - expected).abs().max() < 2e-5


def test_a_merged_model_is_saved_as_a_plain_checkpoint(trainer, release, base, tmp_path):
    load_release(release, base, merge=True).save_pretrained(tmp_path)
    again = SwitchTransformersForSequenceClassification.from_pretrained(tmp_path)
    assert (logits(again) - logits(trainer.model)).abs().max() < 2e-5


def test_pipeline_with_labels(trainer, base, tmp_path):
    release = export_release(trainer, tmp_path / "made", labels=["bad", "so so", "good"], **BASE)
    model = load_release(release, base)
    found = pipeline("text-classification", model=model, tokenizer=str(release), top_k=None)("w5 w6 w7 w8")
    found = found[0] if isinstance(found[0], list) else found  # the shape has changed between versions
    ids = tiny_tokenizer()("w5 w6 w7 w8", return_tensors="pt")
    with torch.no_grad():
        expected = trainer.model.eval()(**ids).logits.softmax(-1)[0].tolist()
    assert {row["label"] for row in found} == {"bad", "so so", "good"}
    order = ["bad", "so so", "good"]
    assert [row["score"] for row in sorted(found, key=lambda r: order.index(r["label"]))] == pytest.approx(expected)


def test_the_bundled_model_is_named_without_a_path(tmp_path):
    model = SwitchTransformersForSequenceClassification.from_pretrained(tiny_switch_path(), num_labels=3)
    trainer = make_trainer(8, model=model, expected_batch_size=4, max_steps=1)
    trainer.train()
    release = export_release(trainer, tmp_path / "made")
    assert not any(b"assets" in path.read_bytes() for path in release.iterdir())
    assert torch.equal(logits(load_release(release)), logits(trainer.model))


def test_a_tampered_release_is_not_loaded(release, base, tmp_path):
    folder = copy(release, tmp_path / "copy")
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    assert_refused(lambda: load_release(folder, base), ReleaseError, "adapter_model.bin")


def test_a_release_without_a_base_model_asks_for_one(trainer, base, tmp_path):
    with pytest.warns(UserWarning, match="base_model="):
        release = export_release(trainer, tmp_path / "made")
    assert_refused(lambda: load_release(release), ReleaseError, "Pass `base_model`")
    assert torch.equal(logits(load_release(release, base)), logits(trainer.model))


def test_from_the_hub_and_then_from_its_cache(hub, trainer, release, monkeypatch):
    base = tiny_model()
    hub.put("example-org/adapter", {p.name: p.read_bytes() for p in release.iterdir()})
    expected = logits(trainer.model)
    assert torch.equal(logits(load_release("example-org/adapter", base)), expected)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert torch.equal(logits(load_release("example-org/adapter", tiny_model())), expected)
    assert_refused(lambda: load_release("example-org/never-seen", tiny_model()), ReleaseError, "cache")
