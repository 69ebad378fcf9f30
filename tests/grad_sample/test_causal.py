"""Causal language models: each record's loss is the mean over its own supervised tokens. Oracle: W + s B A, by hand."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel

from raptor_hf.checks import check_batch, check_model
from raptor_hf.config import RaptorConfig
from raptor_hf.data import CompletionCollator, choose, completion_log_likelihoods, encode_completion
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.grad_sample import ENGINES, model_loss, per_sample_gradients, residual_weighted
from raptor_hf.moe import attach_adapters, find_moe_layout, load_adapter, owner_map, stream_parameters
from raptor_hf.moe.adapter_io import check_loaded
from raptor_hf.trainer import RaptorTrainer
from tests.families import CAUSAL, EXPERTS, SETTINGS, StockLora, adapt, build, every_parameter, records, shake

ITEMS = records(5, seed=4, causal=True)
# no supervised token at all; only the first one, which nothing predicts; a single token
SILENT = [
    {"input_ids": [5, 6, 7], "attention_mask": [1] * 3, "labels": [-100] * 3},
    {"input_ids": [5, 6, 7], "attention_mask": [1] * 3, "labels": [5, -100, -100]},
    {"input_ids": [9], "attention_mask": [1], "labels": [9]},
    {"input_ids": [], "attention_mask": [], "labels": []},
]
COLLATE = CompletionCollator()
FLOAT64 = torch.float64
# model types that structure alone tells
STRUCTURE = {
    "minimax_m2": dict(num_local_experts=EXPERTS),
    "hy_v3": dict(num_experts=EXPERTS),
    "afmoe": dict(num_experts=EXPERTS, num_local_experts=EXPERTS),
    "exaone_moe": dict(num_experts=EXPERTS, n_group=1, topk_group=1, first_k_dense_replace=1),
    "solar_open": {**SETTINGS["glm4_moe"]},
}


@pytest.fixture
def more(monkeypatch):
    for name, settings in STRUCTURE.items():
        monkeypatch.setitem(SETTINGS, name, settings)


def adapted(family="olmoe", dtype=torch.float32, **changes):
    return adapt(build(family, dtype, head="lm", **changes))


def oracle_of(model, family, **changes):
    return StockLora(build(family, FLOAT64, head="lm", **changes), every_parameter(model), 1.5)


def compare(found, expected, tolerance=1e-12):
    for name, value in found.items():
        scale = max(1.0, float(expected[name].abs().max()))
        assert float((value - expected[name]).abs().max()) <= tolerance * scale, name
    assert max(float(value.abs().max()) for value in found.values()) > 1e-3


@pytest.mark.parametrize("family", [*CAUSAL, *STRUCTURE])
def test_gradients_are_of_each_records_own_mean(family, float64, more):
    """Both engines, both streams, with the residual weight in the expert stream."""
    model = adapted(family, FLOAT64)
    oracle = oracle_of(model, family)
    for stream, parameters in stream_parameters(model).items():
        owners = [0, 1, 2, 3, 0] if stream == "expert" else None
        expected = oracle.gradients(ITEMS, list(parameters), owners, weighted=stream == "expert")
        for mode in ("functorch", "hooks"):
            found = per_sample_gradients(
                model, COLLATE(ITEMS), parameters, mode=mode,
                loss_fn=residual_weighted(model_loss) if owners else None,
                owner=None if owners is None else torch.tensor(owners),
            )  # fmt: skip
            compare(found, expected)


@pytest.mark.parametrize("mode", sorted(ENGINES))
@pytest.mark.parametrize("stream", ["shared", "expert"])
def test_a_record_without_supervised_token_contributes_exactly_zero(mode, stream, float64):
    model = adapted(dtype=FLOAT64)
    parameters = stream_parameters(model)[stream]
    mixed = [SILENT[0], ITEMS[0], *SILENT[1:], ITEMS[1]]
    owner = torch.zeros(len(mixed), dtype=torch.long) if stream == "expert" else None
    found = per_sample_gradients(
        model, COLLATE(mixed), parameters, mode=mode, loss_fn=residual_weighted(model_loss), owner=owner
    )
    for value in found.values():
        assert value.isfinite().all() and not value[[0, 2, 3, 4]].any()
    expected = oracle_of(model, "olmoe").gradients(
        ITEMS[:2], list(parameters), None if owner is None else [0, 0], weighted=True
    )
    compare({name: value[[1, 5]] for name, value in found.items()}, expected)


@pytest.mark.parametrize("item", SILENT, ids=["none", "the first", "one token", "empty"])
def test_the_loss_of_a_silent_record_is_zero(item):
    model = build("olmoe", head="lm")
    loss = residual_weighted(model_loss)(model, COLLATE([item]))
    assert loss.requires_grad and float(loss.detach()) == 0.0
    assert float(model_loss(model, COLLATE([ITEMS[0]])).detach()) > 0


@pytest.mark.parametrize("mode", sorted(ENGINES))
def test_batches_of_silent_records_alone(mode):
    for batch in (COLLATE(SILENT), COLLATE(SILENT[2:3]), COLLATE(SILENT[3:])):
        model = adapted()
        found = per_sample_gradients(model, batch, stream_parameters(model)["shared"], mode=mode)
        assert all(not value.any() and value.isfinite().all() for value in found.values())


def test_silent_and_empty_records_have_an_owner():
    owners = owner_map(adapted(), [*SILENT, *ITEMS], 2, data_collator=COLLATE, batch_size=3)
    again = owner_map(adapted(), [*ITEMS, *SILENT], 2, data_collator=COLLATE, batch_size=4)
    assert owners.tolist() == [*again.tolist()[5:], *again.tolist()[:5]]
    assert owners[3] == 0


# ------------------------------------------------------------------ model


@pytest.mark.parametrize("tied", [False, True])
def test_the_lm_head_stays_frozen(tied, tmp_path):
    model = build("olmoe", head="lm", tie_word_embeddings=tied)
    layout = find_moe_layout(model)
    assert layout.head == "lm_head" and not layout.trains_head
    assert layout.role("lm_head.weight") == "head"
    assert not check_model(model, records=ITEMS[:3], collate=COLLATE, raise_on_error=False).errors
    attach_adapters(model, LoraConfig(r=2, lora_alpha=3), "last")
    shake(model)
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    model.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(build("olmoe", head="lm", tie_word_embeddings=tied), tmp_path).eval()
    check_loaded(stock, tmp_path)
    again = load_adapter(build("olmoe", head="lm", tie_word_embeddings=tied), tmp_path)
    batch = COLLATE(ITEMS)
    with torch.no_grad():
        expected = model.eval()(**batch).logits
        assert float((stock(**batch).logits - expected).abs().max()) <= 1e-5
        assert torch.equal(again.eval()(**batch).logits, expected)


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_one_cycle(mode, tmp_path):
    model = build("olmoe", head="lm")
    args = RaptorConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, shared_noise_multiplier=1.0,
        expert_noise_multiplier=1.0, lora_rank=2, learning_rate=1e-2, report_to="none", save_strategy="no",
        use_cpu=True, disable_tqdm=True,
        grad_sample_mode=mode,
    )  # fmt: skip
    trainer = RaptorTrainer(
        model,
        args,
        data_collator=COLLATE,
        train_dataset=[*ITEMS, *SILENT],
        eval_dataset=records(5, seed=14, causal=True),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainer.evaluate()["eval_loss"] > 0


def test_generation_still_works():
    model = adapted().eval()
    out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=99)
    ids = [5, 6, 7]
    for _ in range(3):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert out[0].tolist() == ids


# ------------------------------------------------------------------ data


class Words:
    """A tokenizer: words are numbers; 1 begins, 2 ends."""

    eos_token_id = 2

    def __call__(self, text, add_special_tokens=True):
        ids = [int(word) for word in text.split()]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


def test_prompts_are_not_supervised():
    record = encode_completion(Words(), "10 11", "12 13")
    assert record["input_ids"] == [1, 10, 11, 12, 13, 2]
    assert record["labels"] == [-100, -100, -100, 12, 13, 2]
    assert record["attention_mask"] == [1] * 6
    assert encode_completion(Words(), "10 11", "12", end=False)["input_ids"] == [1, 10, 11, 12]


@pytest.mark.parametrize(
    ("length", "ids", "labels"),
    [
        (9, [1, 10, 11, 12, 13, 2], [-100] * 3 + [12, 13, 2]),
        (5, [10, 11, 12, 13, 2], [-100] * 2 + [12, 13, 2]),
        (3, [12, 13, 2], [12, 13, 2]),
        (2, [12, 13], [12, 13]),
    ],
)
def test_long_records_lose_the_start_of_the_prompt_first(length, ids, labels):
    record = encode_completion(Words(), "10 11", "12 13", max_length=length)
    assert (record["input_ids"], record["labels"]) == (ids, labels)


def test_padding_is_on_the_right_masked_and_not_supervised():
    batch = CompletionCollator(pad_token_id=7)([ITEMS[0], SILENT[2]])
    length = len(ITEMS[0]["input_ids"])
    assert batch["input_ids"].tolist() == [ITEMS[0]["input_ids"], [9] + [7] * (length - 1)]
    assert batch["attention_mask"].tolist() == [[1] * length, [1] + [0] * (length - 1)]
    assert batch["labels"].tolist() == [ITEMS[0]["labels"], [9] + [-100] * (length - 1)]
    check_batch(batch, 2, ["labels"])


@pytest.mark.parametrize("name", ["seq_lengths", "seq_idx", "cu_seq_lens_q"])
def test_packed_records_are_refused(name):
    with pytest.raises(PrivacyConfigError, match="packed"):
        COLLATE([{**ITEMS[0], name: [2, 2]}])


@pytest.mark.parametrize(
    "extra",
    [
        {"position_ids": torch.tensor([[0, 1, 0, 1]])},
        {"seq_idx": torch.zeros(1, 4)},
        {"attention_mask": torch.tensor([[1, 1, 2, 2]])},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_packed_batches_are_refused(extra):
    batch = {"input_ids": torch.ones(1, 4).long(), "labels": torch.ones(1, 4).long(), **extra}
    with pytest.raises(PrivacyConfigError, match="packed"):
        check_batch(batch, 1, ["labels"])


def test_positions_of_one_record_are_no_packing():
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    ids = torch.ones(2, 4).long()
    check_batch({"input_ids": ids, "labels": ids, "position_ids": positions, "attention_mask": mask}, 2, ["labels"])


def test_too_long_and_crooked_records_are_refused():
    with pytest.raises(PrivacyConfigError, match="more than 3 tokens"):
        CompletionCollator(max_length=3)([{"input_ids": [1] * 4}])
    with pytest.raises(PrivacyConfigError, match="labels"):
        COLLATE([{"input_ids": [1, 2], "labels": [1]}])


# ------------------------------------------------------------------ multiple choice


def test_log_likelihoods_by_hand():
    model = build("olmoe", head="lm")
    found = completion_log_likelihoods(model, COLLATE([*ITEMS, SILENT[0]]))
    for i, item in enumerate(ITEMS):
        probabilities = model(input_ids=torch.tensor([item["input_ids"]])).logits[0].softmax(-1)
        total = 1.0
        for t, label in enumerate(item["labels"]):
            total *= float(probabilities[t - 1, label]) if label != -100 else 1.0
        assert float(found[i].exp()) == pytest.approx(total, rel=1e-3)
    assert float(found[-1]) == 0.0


def test_the_likeliest_choice():
    model = build("olmoe", head="lm").train()
    with torch.no_grad():
        probabilities = model.eval()(input_ids=torch.tensor([[1, 10, 11]])).logits[0, -1].softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    order = [token for token in order if token > 2][:4]
    best, scores = choose(model, Words(), "10 11", [str(token) for token in (order[2], order[0], order[1])])
    assert best == 1 and len(scores) == 3 and scores[1] == pytest.approx(float(probabilities[order[0]].log()), rel=1e-4)
    long = f"{order[0]} {order[1]} {order[2]}"
    assert choose(model, Words(), "10 11", [long, str(order[3])])[0] == 1
    (_, [mean, _]), (_, [total, _]) = (
        choose(model, Words(), "10 11", [long, "5"], per_token=flag) for flag in (True, False)
    )
    assert mean == pytest.approx(total / 3)
