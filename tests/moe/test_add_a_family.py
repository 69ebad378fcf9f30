"""The worked example of docs/add-a-family.md, as it stands there, against the reference loop and stock PEFT."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import BertConfig, BertForSequenceClassification

from raptor_hf.checks import check_model
from raptor_hf.grad_sample import per_sample_gradients
from raptor_hf.moe import attach_adapters, find_moe_layout, owner_map, stream_parameters
from raptor_hf.moe import layout as layouts
from tests.families import collate, records, shake, spread

DOC = Path(__file__).resolve().parents[2] / "docs" / "add-a-family.md"
ITEMS = records(5, seed=2)


@pytest.fixture
def upcycle(monkeypatch):
    """What the code of the page defines; the registration is undone."""
    monkeypatch.setattr(layouts, "_FAMILIES", dict(layouts._FAMILIES))
    space: dict = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, space)
    return space["upcycle"]


def build(upcycle):
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=12, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32,
    )  # fmt: skip
    return spread(upcycle(BertForSequenceClassification(config))).eval()


def logits(model):
    batch = collate(ITEMS)
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def test_the_example_works(upcycle, tmp_path):
    model = build(upcycle)
    stock = logits(model)
    assert [layer.index for layer in find_moe_layout(model).sparse_layers] == [1, 3]
    owners = owner_map(model, ITEMS, 3, data_collator=collate)
    assert not check_model(model, records=ITEMS[:3], collate=collate, raise_on_error=False).errors
    attach_adapters(model, LoraConfig(r=2, lora_alpha=3), "last")
    assert float((logits(model) - stock).abs().max()) < 1e-5
    shake(model)
    for stream, parameters in stream_parameters(model).items():
        given = owners if stream == "expert" else None
        wanted = per_sample_gradients(model, collate(ITEMS), parameters, mode="reference", owner=given)
        for mode in ("functorch", "hooks"):
            found = per_sample_gradients(model, collate(ITEMS), parameters, mode=mode, owner=given)
            for name, value in wanted.items():
                assert float((found[name] - value).abs().max()) <= 2e-5 * max(1.0, float(value.abs().max()))
            assert max(float(value.abs().max()) for value in found.values()) > 1e-3
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(upcycle), tmp_path)
    assert float((logits(loaded) - logits(model)).abs().max()) <= 1e-5 < float((logits(model) - stock).abs().max())
