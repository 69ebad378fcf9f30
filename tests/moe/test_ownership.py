"""Owner maps against brute force: a stock model, one record at a time, its router's own output counted by a loop."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.moe import attach_adapters, owner_distribution, owner_map
from raptor_hf.moe.ownership import owner_scores
from raptor_hf.moe.routing import Routing
from tests.helpers import EXPERTS, SPARSE, brute_owner, collate, stock_dispatch, tiny_model, tiny_records

CAPACITIES = [64, 2]


def brute_owners(records, block, **changes) -> list[int]:
    model = tiny_model(**changes)
    return [brute_owner(stock_dispatch(model, r)[block].sum(0).tolist()) for r in records]


@pytest.mark.parametrize("rule", ["gate", "vote"])
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("block", SPARSE)
def test_owner_map_equals_brute_force(block, capacity, rule):
    records = tiny_records(120)
    expected = brute_owners(records, block, expert_capacity=capacity)
    found = owner_map(
        tiny_model(expert_capacity=capacity), records, block, rule=rule, data_collator=collate, batch_size=16
    )
    assert found.dtype == torch.int64 and found.tolist() == expected
    assert set(expected) == set(range(EXPERTS)), "the records must reach every expert, or this test shows little"


def test_ties_go_to_the_lowest_expert():
    """Of two-token records many are tied; the smaller index must win whichever token comes first."""
    records = tiny_records(200, seed=1, longest=2, shortest=2)
    model, tied, first_is_larger = tiny_model(), 0, 0
    found = owner_map(tiny_model(), records, 1, data_collator=collate)
    for record, owner in zip(records, found.tolist(), strict=True):
        one, two = stock_dispatch(model, record)[1].argmax(-1).tolist()
        tied += one != two
        first_is_larger += one > two
        assert owner == min(one, two)
    assert tied > 30 and first_is_larger > 10


def test_dropped_tokens_do_not_vote():
    """Capacity 1 leaves each expert at most one token, so every owner is the lowest expert in use."""
    records = tiny_records(80, shortest=6)
    model = tiny_model(expert_capacity=1)
    found = owner_map(tiny_model(expert_capacity=1), records, 3, data_collator=collate)
    unlimited = owner_map(tiny_model(), records, 3, data_collator=collate)
    for record, owner in zip(records, found.tolist(), strict=True):
        assert owner == stock_dispatch(model, record)[3].any(0).nonzero().min()
    assert found.tolist() != unlimited.tolist()


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_nothing_but_the_record_decides(capacity):
    """Batch size, padding length and content, order and neighbours."""
    records = tiny_records(60)
    model = tiny_model(expert_capacity=capacity)
    expected = owner_map(model, records, 3, data_collator=collate, batch_size=1).tolist()
    for batch_size in (3, 7, 60):
        assert owner_map(model, records, 3, data_collator=collate, batch_size=batch_size).tolist() == expected
    for width, pad in ((25, 0), (13, 9)):
        padded = [collate(records[i : i + 20], width, pad) for i in (0, 20, 40)]
        assert owner_map(model, padded, 3).tolist() == expected
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = owner_map(model, [records[i] for i in order], 3, data_collator=collate).tolist()
    assert shuffled == [expected[i] for i in order]
    neighbours = tiny_records(60, seed=9, longest=20)
    mixed = [r for pair in zip(records, neighbours, strict=True) for r in pair]
    assert owner_map(model, mixed, 3, data_collator=collate, batch_size=8)[::2].tolist() == expected


def almost_tied(blocks, **changes):
    """Routers whose experts 0 and 1, and 2 and 3, differ by less than rounding: batching could flip every token."""
    model = tiny_model(**changes)
    for block in blocks:
        weight = model.get_submodule(f"encoder.block.{block}.layer.1.mlp.router.classifier").weight
        noise = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(block)) * 3e-7
        weight.data[1::2] = weight.data[::2] + noise
    return model


@pytest.mark.parametrize("capacity", [64, 3])
@pytest.mark.parametrize("blocks", [(1,), (3,), (1, 3)], ids=str)
def test_rounding_does_not_decide(blocks, capacity):
    """Whether in the layer itself or in one below it, and where one flip moves another token over the capacity."""
    records = tiny_records(45, shortest=3)
    model, stock = (almost_tied(blocks, expert_capacity=capacity) for _ in range(2))
    expected = [brute_owner(stock_dispatch(stock, r)[3].sum(0).tolist()) for r in records]
    for batch_size in (17, 45):
        assert owner_map(model, records, 3, data_collator=collate, batch_size=batch_size).tolist() == expected
    assert owner_map(model, [collate(records, 40)], 3).tolist() == expected


def test_half_precision_does_not_decide_either():
    records = tiny_records(60, shortest=3)
    model = tiny_model(torch.bfloat16)
    expected = owner_map(model, records, 3, data_collator=collate, batch_size=1).tolist()
    for batch_size in (7, 60):
        assert owner_map(model, records, 3, data_collator=collate, batch_size=batch_size).tolist() == expected


def test_trained_adapters_do_not_change_the_map():
    records = tiny_records(60)
    model = tiny_model()
    expected = owner_map(model, records, 3, data_collator=collate)
    attach_adapters(model, LoraConfig(r=4, lora_alpha=64), 3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    assert torch.equal(owner_map(model, records, 3, data_collator=collate), expected)
    batch = collate(records[:4])
    before = model(**batch).logits
    owner_map(model, records[:4], 3, data_collator=collate)
    assert torch.equal(model(**batch).logits, before), "the adapters must be on again"


def test_the_forward_pass_stops_at_the_protected_layer():
    model, called = tiny_model(), []
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda _m, _args, path=path: called.append(path))
    owner_map(model, tiny_records(8, shortest=3), 1, data_collator=collate, batch_size=8)
    assert "encoder.block.1.layer.0.SelfAttention.q" in called
    below = ("encoder.block.1.layer.1.mlp.experts", "encoder.block.2", "encoder.block.3", "encoder.final", "score")
    assert not any(path.startswith(below) for path in called)


def test_train_mode_draws_nothing_and_is_given_back():
    records = tiny_records(40)
    model = tiny_model(dropout_rate=0.5, router_jitter_noise=0.5).train()
    model.score.eval()
    expected = owner_map(tiny_model(), records, 3, data_collator=collate)
    assert torch.equal(owner_map(model, records, 3, data_collator=collate), expected)
    assert model.training and not model.score.training and model.encoder.training


def test_a_fresh_attached_model_has_the_stock_models_map():
    records = tiny_records(40)
    model = attach_adapters(tiny_model(expert_capacity=2), LoraConfig(r=2), 3)
    expected = brute_owners(records, 1, expert_capacity=2)
    assert owner_map(model, records, 1, data_collator=collate).tolist() == expected


@pytest.mark.parametrize("mask", [[[0, 1, 1]], [[1, 0, 1]], [[1, 1, 1], [0, 0, 1]]])
def test_padding_that_is_not_on_the_right_is_refused(mask):
    mask = torch.tensor(mask)
    batch = {"input_ids": torch.ones_like(mask), "attention_mask": mask}
    with pytest.raises(PrivacyConfigError, match="right"):
        owner_map(tiny_model(), [batch], 1)


def test_batches_without_a_mask_are_all_tokens():
    records = tiny_records(20, shortest=6, longest=6)
    batches = [{"input_ids": collate(records)["input_ids"]}]
    assert owner_map(tiny_model(), batches, 1).tolist() == brute_owners(records, 1)


def test_labels_are_not_needed_and_not_read():
    records = tiny_records(10)
    model = tiny_model()
    expected = owner_map(model, records, 1, data_collator=collate)
    batch = collate(records)
    batch["labels"] = torch.full((10,), 10**6)
    assert torch.equal(owner_map(model, [batch], 1), expected)
    del batch["labels"]
    assert torch.equal(owner_map(model, (b for b in [batch]), 1), expected)


@pytest.mark.parametrize("blocks", [(), (1, 3)], ids=str)
def test_a_record_without_a_token_belongs_to_the_first_expert(blocks):
    """Nothing votes, so all are tied; and it must not disturb its neighbours."""
    records = tiny_records(6)
    model = almost_tied(blocks)
    expected = owner_map(model, records, 3, data_collator=collate).tolist()
    batch = collate(records, 15)
    batch = {name: torch.cat([value[:3], value[:1], value[3:]]) for name, value in batch.items()}
    batch["attention_mask"][3] = 0
    assert owner_map(model, [batch], 3).tolist() == [*expected[:3], 0, *expected[3:]]


def test_an_empty_dataset_has_an_empty_map():
    found = owner_map(tiny_model(), [], 1)
    assert found.shape == (0,) and found.dtype == torch.int64


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="rule"):
        owner_map(tiny_model(), [], 1, rule="top")
    with pytest.raises(ValueError, match="batch_size"):
        owner_map(tiny_model(), [], 1, batch_size=0)
    with pytest.raises(ValueError, match="1, 3"):
        owner_map(tiny_model(), [], 2)


# ------------------------------------------------- the two rules, on made-up top-2 routing

INDEX = torch.tensor([[[0, 1], [2, 1], [0, 2], [3, 3]]])
GATE = torch.tensor([[[0.9, 0.1], [0.7, 0.3], [0.6, 0.4], [0.5, 0.5]]])
MASK = torch.tensor([[True, True, True, False]])


def score(rule, index=INDEX, mask=MASK):
    return owner_scores(Routing(index, GATE, torch.full((1, 4), 9.0)), mask, 4, rule)[0].tolist()


def test_gate_scores_are_sums_of_gate_weights():
    assert score("gate") == pytest.approx([1.5, 0.4, 1.1, 0.0])


def test_vote_scores_count_choices():
    assert score("vote") == [2.0, 2.0, 2.0, 0.0]


def test_an_index_of_e_is_no_choice():
    index = INDEX.clone()
    index[0, 0] = 4
    assert score("vote", index) == [1.0, 1.0, 2.0, 0.0]
    assert score("gate", index) == pytest.approx([0.6, 0.3, 1.1, 0.0])


def test_owner_distribution():
    q = owner_distribution(torch.tensor([0, 2, 2, 0, 2]), 4)
    assert q.tolist() == [0.4, 0.0, 0.6, 0.0] and q.dtype == torch.float64


def test_the_random_model_is_not_collapsed():
    """Guards the tests above: both layers use several experts, and layer 3 is not layer 1 again."""
    records = tiny_records(120)
    one, three = (torch.bincount(torch.tensor(brute_owners(records, b)), minlength=EXPERTS) for b in SPARSE)
    assert (one > 0).all() and (three > 0).all() and one.tolist() != three.tolist()
