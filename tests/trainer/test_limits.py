"""Records that a model cannot take, or that say nothing: refused before training, or a contribution of zero."""

from __future__ import annotations

import re

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BertConfig, BertForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

from raptor_hf import PrivacyConfigError, UnsupportedModelError
from raptor_hf.config import RaptorConfig
from raptor_hf.data import CompletionCollator
from raptor_hf.grad_sample import per_sample_gradients
from raptor_hf.limits import Limits, limits_of
from raptor_hf.moe import attach_adapters, owner_map, stream_parameters
from raptor_hf.trainer import RaptorTrainer
from tests import families, helpers
from tests.helpers import assert_close, tiny_model, tiny_records
from tests.trainer.build import assert_refused, assert_refused_before_training, fix_draws, make_trainer

RECORDS = tiny_records(24, seed=5)
SIZES = dict(vocab_size=60, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)


class Short:
    """A tokenizer that goes up to 12 tokens."""

    padding_side = "right"
    model_max_length = 12


class Opaque(torch.utils.data.Dataset):
    """Records that are seen only when they are drawn by index."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.records[index]


def numbers(text):
    return set(re.findall(r"\d+", text))


# ------------------------------------------------------------------ limits


def test_limits_of_models():
    assert limits_of(tiny_model()) == Limits(None, helpers.VOCAB, None, helpers.LABELS)
    bert = BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=32))
    assert limits_of(bert).tokens == 32
    # RoBERTa numbers positions from the one behind its padding index
    roberta = RobertaForSequenceClassification(RobertaConfig(**SIZES, max_position_embeddings=34, pad_token_id=1))
    assert limits_of(roberta).tokens == 32
    ids = torch.full((1, 33), 5)
    assert roberta(input_ids=ids[:, :32]).logits.isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        roberta(input_ids=ids)
    language_model = families.build("olmoe", head="lm")
    assert limits_of(language_model) == Limits(None, families.VOCAB, families.VOCAB, None)


def test_limits_of_tokenizers():
    assert limits_of(tiny_model(), Short()).tokens == 12
    endless = type("Endless", (), {"model_max_length": int(1e30)})()
    assert limits_of(tiny_model(), endless).tokens is None
    processor = type("Processor", (), {"tokenizer": Short()})()
    assert limits_of(tiny_model(), processor).tokens == 12
    bert = BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=8))
    assert limits_of(bert, Short()).tokens == 8


# ------------------------------------------------------------------ too long, empty, out of range


@pytest.mark.parametrize("as_dataset", [list, Dataset.from_list])
def test_long_records_are_refused_at_once(as_dataset):
    long = {**RECORDS[0], "input_ids": [7] * 13, "attention_mask": [1] * 13}
    records = as_dataset([*RECORDS, long])
    text = assert_refused(
        lambda: make_trainer(records, processing_class=Short()), PrivacyConfigError, "more than 12 tokens", "truncation"
    )
    assert numbers(text) == {"12"}
    assert make_trainer(as_dataset(RECORDS), processing_class=Short())


def test_long_records_of_other_datasets_are_refused_before_the_first_update():
    long = {**RECORDS[0], "input_ids": [7] * 13, "attention_mask": [1] * 13}
    trainer = make_trainer(train_dataset=Opaque([*RECORDS, long]), processing_class=Short())
    assert_refused_before_training(trainer, PrivacyConfigError, "more than 12 tokens")


def test_a_collator_that_pads_behind_the_limit_is_refused_before_the_first_update():
    trainer = make_trainer(RECORDS, processing_class=Short(), data_collator=lambda some: helpers.collate(some, 13))
    assert_refused_before_training(trainer, PrivacyConfigError, "more than 12 tokens")


EMPTY = {"input_ids": [], "attention_mask": [], "labels": 1}


@pytest.mark.parametrize("as_dataset", [list, Dataset.from_list])
def test_an_empty_record_of_width_zero_is_refused_at_once(as_dataset):
    records = as_dataset([*RECORDS, EMPTY])
    assert_refused(lambda: make_trainer(records), PrivacyConfigError, "without tokens", "padding token")

    def one_wide(some):
        return helpers.collate(some, 1)

    assert make_trainer(records, data_collator=one_wide)


@pytest.mark.parametrize("token", [helpers.VOCAB, -1])
def test_unknown_tokens_are_refused_before_the_first_update(token):
    records = [*RECORDS, {**RECORDS[3], "input_ids": [4, token], "attention_mask": [1, 1]}]
    text = assert_refused_before_training(make_trainer(records), PrivacyConfigError, "token id outside")
    assert numbers(text) == {"0", str(helpers.VOCAB - 1)}


def language_trainer(tmp_path, records, **settings):
    args = RaptorConfig(
        output_dir=str(tmp_path), max_steps=2, expected_batch_size=4, per_device_train_batch_size=3,
        shared_noise_multiplier=1.0, expert_noise_multiplier=1.0, lora_rank=2, report_to="none", save_strategy="no",
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, target_delta=1e-5, **settings,
    )  # fmt: skip
    model = families.build("olmoe", head="lm")
    return RaptorTrainer(model, args, data_collator=CompletionCollator(), train_dataset=records)


@pytest.mark.parametrize("label", [families.VOCAB, -5])
def test_token_labels_out_of_range_are_refused_before_the_first_update(label, tmp_path):
    records = families.records(8, seed=4, causal=True)
    ids = records[5]["input_ids"]
    records[5] = {**records[5], "labels": [-100] * (len(ids) - 1) + [label]}
    trainer = language_trainer(tmp_path, records)
    text = assert_refused_before_training(trainer, PrivacyConfigError, "token label", "-100")
    assert numbers(text) == {"0", str(families.VOCAB - 1), str(families.VOCAB), "100"}


# ------------------------------------------------------------------ records that say nothing

ITEMS = families.records(3, seed=4)
MASKED = {"input_ids": [5, 6, 7], "attention_mask": [0, 0, 0], "labels": 1}
UNLABELLED = {**ITEMS[0], "labels": -100}
STRANGE = [ITEMS[0], MASKED, ITEMS[1], UNLABELLED, EMPTY, ITEMS[2]]


def classifier(family):
    model = tiny_model() if family == "switch" else families.build(family)
    attach_adapters(model, LoraConfig(r=2, lora_alpha=3), "last")
    families.shake(model)
    return model


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
@pytest.mark.parametrize("family", ["switch", "olmoe", "gpt_oss", "minimax"])
def test_masked_empty_and_unlabelled_records(family, mode):
    """Finite everywhere, exactly zero without a label, and no neighbour notices."""
    model, batch = classifier(family), families.collate(STRANGE)
    owners = owner_map(model, STRANGE, model.raptor_adapters.layer, data_collator=families.collate)
    assert owners[1] == owners[4] == 0
    for stream, parameters in stream_parameters(model).items():
        owner = owners if stream == "expert" else None
        found = per_sample_gradients(model, batch, parameters, mode=mode, owner=owner)
        assert all(bool(value.isfinite().all()) for value in found.values())
        assert not any(bool(value[3].any()) for value in found.values())
        usual = [0, 2, 5]
        alone = per_sample_gradients(
            model, families.collate([STRANGE[i] for i in usual]), parameters, mode=mode,
            owner=None if owner is None else owner[usual],
        )  # fmt: skip
        assert_close({name: value[usual] for name, value in found.items()}, alone, 2e-5)
        wanted = per_sample_gradients(model, batch, parameters, mode="reference", owner=owner)
        assert_close(found, wanted, 2e-5)


@pytest.mark.parametrize("mode", ["functorch", "hooks", "reference"])
def test_class_labels_in_a_column_are_class_labels(mode):
    model, batch = classifier("olmoe"), families.collate(ITEMS)
    parameters = stream_parameters(model)["shared"]
    flat = per_sample_gradients(model, batch, parameters, mode=mode)
    column = {**batch, "labels": batch["labels"].unsqueeze(-1)}
    assert_close(per_sample_gradients(model, column, parameters, mode=mode), flat, 1e-6)
    assert max(float(value.abs().max()) for value in flat.values()) > 1e-3


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_training_on_silent_records_moves_nothing_but_by_noise(mode, tmp_path):
    """C is 1e-6: what is left of an update is noise of that size, and never NaN. The check before training passes."""
    silent = [
        {"input_ids": [5, 6, 7], "attention_mask": [1] * 3, "labels": [-100] * 3},
        {"input_ids": [5, 6], "attention_mask": [0, 0], "labels": [-100] * 2},
        {"input_ids": [], "attention_mask": [], "labels": []},
    ]
    trainer = language_trainer(
        tmp_path,
        silent * 4,
        grad_sample_mode=mode,
        optim="sgd",
        learning_rate=1.0,
        shared_max_grad_norm=1e-6,
        expert_max_grad_norm=1e-6,
        lr_scheduler_type="constant",
    )
    fix_draws(trainer, [([0, 1, 2], [4, 2, 3])] * 2)
    streams = stream_parameters(trainer.model)
    before = {n: p.detach().clone() for ps in streams.values() for n, p in ps.items()}
    trainer.train()
    for name, parameter in {**streams["shared"], **streams["expert"]}.items():
        moved = float((parameter.detach() - before[name]).abs().max())
        assert 0 < moved < 1e-3, name


def test_the_check_before_training_still_sees_through_records_without_labels(tmp_path):
    """Labels are put in for the probe: an adapter that nothing reaches is found all the same."""
    silent = [{"input_ids": [5, 6, 7], "attention_mask": [1] * 3, "labels": [-100] * 3}] * 8
    trainer = language_trainer(tmp_path, silent)
    trainer.model.lm_head.register_forward_pre_hook(lambda _m, args: tuple(x.detach() for x in args))
    assert_refused_before_training(trainer, UnsupportedModelError, "no gradient reaches")
