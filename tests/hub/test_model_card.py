"""Cards: rendered examples, metadata, and merging with what is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from raptor_hf import export_release
from raptor_hf.hub.model_card import TAGS, check_card, merge_cards
from raptor_hf.privacy import PrivacyStatement
from tests.hub.build import BASE
from tests.trainer.build import make_trainer
from tests.trainer.test_methods import noise_for

CARDS = Path(__file__).parents[2] / "model_cards"
_spec = importlib.util.spec_from_file_location("render", CARDS / "render.py")
render = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(render)


def metadata(text: str) -> dict:
    return yaml.safe_load(text.split("---")[1])


@pytest.mark.parametrize("name", render.EXAMPLES)
def test_the_examples_are_what_the_template_gives(name):
    """After a change of the template: `python model_cards/render.py`."""
    text = (CARDS / name / "README.md").read_text(encoding="utf-8")
    assert text == render.render(name)
    statement = PrivacyStatement.from_json((CARDS / name / "privacy.json").read_text(encoding="utf-8"))
    assert check_card(text, statement, {"id": render.EXAMPLES[name]["base"]}) == []
    assert 7.9 < statement.epsilon_spent <= 8.0


def test_every_example_is_checked():
    assert {path.name for path in CARDS.iterdir() if path.is_dir() and path.name[0] != "_"} == set(render.EXAMPLES)


def test_metadata_for_the_hub(trainer, tmp_path):
    folder = export_release(
        trainer, tmp_path / "made", repo_id="example-org/adapter", license="mit", language="en", tags=["reviews"],
        datasets=["stanfordnlp/imdb"], metrics={"accuracy": 0.8125}, metrics_dataset="Held-out reviews",
        layer_choice="the last", tuning="on public data", notes="For tests.", **BASE,
    )  # fmt: skip
    text = (folder / "README.md").read_text()
    data = metadata(text)
    expected = {"library_name": "peft", "base_model": "example-org/tiny", "base_model_relation": "adapter",
                "pipeline_tag": "text-classification", "license": "mit", "language": "en",
                "datasets": ["stanfordnlp/imdb"], "tags": [*TAGS, "reviews"]}  # fmt: skip
    assert {key: data[key] for key in expected} == expected
    (result,) = ModelCard.load(folder / "README.md").data.eval_results
    assert result.metric_value == 0.8125 and result.dataset_name == "Held-out reviews"
    for words in ("| accuracy | 0.8125 | Held-out reviews |", "layer: the last.", "on public data.", "For tests.",
                  'load_release("example-org/adapter")', "raptor-hf verify example-org/adapter"):  # fmt: skip
        assert words in text


def test_the_private_data_set_and_metrics_are_not_named_unasked(release):
    data = metadata((release / "README.md").read_text())
    assert not {"datasets", "model-index", "metrics", "license"} & set(data)


def test_merging_keeps_their_text_and_our_numbers(release):
    ours = (release / "README.md").read_text()
    theirs = (
        ours.replace("1.491", "1.2").replace("# A private", "# Their title: a private").replace("- moe", "- moe\n- x")
    )
    merged = merge_cards(theirs + "\n## Their section\n", ours)
    assert "# Their title" in merged and "## Their section" in merged and "1.2 " not in merged
    assert merged.count("raptor-hf: begin") == 1 and "x" in metadata(merged)["tags"]
    assert merge_cards("---\nlicense: mit\n---\n", ours).startswith("---\nlicense: mit\n")
    own = ours + "\n## Our section\n"
    assert "## Our section" in merge_cards(theirs, own)


@pytest.mark.parametrize("method, trained, other", [
    ("raptor", "4 routed experts of block 3 (the expert stream)", "one block"),
    ("shared_only", "the adapters of the experts are zero", "expert stream"),
    ("expert_only", "by their owners' records alone", "shared stream"),
    ("matched_global", "on the routed experts of block 3", "expert stream"),
    ("monolithic_lora", "on the routed experts of block 1, 3", "expert stream"),
])  # fmt: skip
def test_a_card_says_what_the_method_trained(tmp_path, method, trained, other):
    trainer = make_trainer(method=method, **noise_for(method, 1.0))
    trainer.model.name_or_path = "google/switch-base-8"
    trainer.train()
    card = (export_release(trainer, tmp_path, base_revision="a" * 40) / "README.md").read_text(encoding="utf-8")
    assert f"(method `{method}`)" in card
    assert trained in card and other not in card.split("Trained")[1].split("Every checkpoint")[0]
