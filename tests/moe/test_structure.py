"""Families that structure alone tells: what `test_families.py` asks of a listed family, in one pass for each."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel

from raptor_hf.checks import check_model
from raptor_hf.grad_sample import per_sample_gradients
from raptor_hf.moe import find_moe_layout, load_adapter, owner_map, stream_parameters
from raptor_hf.moe.adapter_io import check_loaded
from raptor_hf.moe.families import FUSED, HOOKS_ONLY, REFUSED, STRUCTURE
from tests.families import EXPERTS, TOLD, TOP_K, StockLora, adapt, brute_owners, collate, records, told
from tests.helpers import assert_close

RANK, ALPHA = 2, 3
ITEMS = records(5, seed=3)
# one of each kind at every run; all of them with `-m slow`
USUAL = {"afmoe", "glm5_next_text", "inkling2_text", "jamba", "minimax_m2", "nemotron_h", "qwen3_next"}
TYPES = [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.slow]) for name in sorted(TOLD)]


def adapted(family, dtype=torch.float32):
    return adapt(told(family, dtype), rank=RANK, alpha=ALPHA)


def logits(model):
    batch = collate(ITEMS)
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def test_the_list_is_the_one_in_the_docs():
    assert set(TOLD) == set(STRUCTURE) and not set(STRUCTURE) & (set(FUSED) | set(REFUSED))


@pytest.mark.parametrize("family", TYPES)
def test_roles_owners_and_neighbours(family):
    stock = told(family)
    layout = find_moe_layout(stock)
    for name, _ in stock.named_parameters():
        parts = set(name.split(".")[: -1 if name.endswith(("weight", "bias")) else None])
        block = any(name.startswith(layer.name + ".") for layer in layout.sparse_layers)
        expected = "head" if "score" in parts else "expert" if block and "experts" in parts else None
        router = block and parts & {layout.sparse_layers[0].router_path} and not parts & {"experts"}
        assert layout.role(name) == (expected or ("router" if router else "shared")), name
    items, used = records(8, seed=7), set()
    for layer in layout.sparse_layers:
        assert (layer.num_experts, layer.top_k) == (EXPERTS, TOP_K)
        expected = brute_owners(stock, items, layer.name, "gate")
        assert owner_map(stock, items, layer.index, data_collator=collate, batch_size=3).tolist() == expected
        used |= set(expected)
    assert len(used) >= 2
    for mode in ("functorch", "hooks"):
        report = check_model(stock, records=ITEMS[:3], collate=collate, mode=mode, raise_on_error=False)
        refused = [finding.what for finding in report.errors]
        assert len(refused) == (mode == "functorch" and family in HOOKS_ONLY)
        assert all('grad_sample_mode="functorch"' in what for what in refused)


@pytest.mark.parametrize("family", TYPES)
def test_gradients_of_both_streams(family, float64):
    model = adapted(family, torch.float64)
    streams = stream_parameters(model)
    oracle = StockLora(told(family, torch.float64), {**streams["shared"], **streams["expert"]}, ALPHA / RANK)
    owners = brute_owners(told(family, torch.float64), ITEMS, model.raptor_adapters.protected.name, "gate")
    owners[0] = (owners[0] + 1) % EXPERTS
    for stream, parameters in streams.items():
        given = owners if stream == "expert" else None
        expected = oracle.gradients(ITEMS, list(parameters), given)
        assert max(float(value.abs().max()) for value in expected.values()) > 1e-3
        for mode in ("hooks",) if family in HOOKS_ONLY else ("functorch", "hooks"):
            owner = None if given is None else torch.tensor(given)
            found = per_sample_gradients(model, collate(ITEMS, 11), parameters, mode=mode, owner=owner)
            assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("family", TYPES)
def test_stock_peft_reads_what_was_saved(family, tmp_path):
    model = adapted(family)
    model.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(told(family), tmp_path)
    check_loaded(stock, tmp_path)
    expected = logits(model)
    assert float((logits(told(family)) - expected).abs().max()) > 1e-2
    assert float((logits(stock) - expected).abs().max()) <= 1e-5
    assert torch.equal(logits(load_adapter(told(family), tmp_path)), expected)
