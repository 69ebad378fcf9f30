"""Models and data that would break the guarantee: each a clear error, before any training, in three parts."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BertConfig, BertForSequenceClassification

from raptor_hf import PrivacyConfigError, UnsupportedModelError
from raptor_hf.errors import RaptorError
from tests.helpers import collate, tiny_config, tiny_model, tiny_records
from tests.trainer.build import assert_refused, assert_refused_before_training, make_trainer

RECORDS = tiny_records(24, seed=5)


# ---- Model ----


def test_a_dense_model_is_refused():
    bert = BertForSequenceClassification(
        BertConfig(vocab_size=60, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    assert_refused(lambda: make_trainer(model=bert), UnsupportedModelError, "dense", "Mixture-of-Experts")
    config = tiny_config()
    config.encoder_sparse_step = 0
    dense = type(tiny_model())(config)
    assert_refused(lambda: make_trainer(model=dense), UnsupportedModelError, "no sparse layer")


@pytest.mark.parametrize("flag", ["output_router_logits", "add_router_probs"])
def test_an_auxiliary_loss_is_refused(flag):
    model = tiny_model()
    setattr(model.config, flag, True)
    assert_refused(lambda: make_trainer(model=model), PrivacyConfigError, flag, "load-balancing", "False")


def test_batch_normalisation_is_refused():
    model = tiny_model()
    model.score = torch.nn.Sequential(torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))
    assert_refused(lambda: make_trainer(model=model), UnsupportedModelError, "batch normalisation")


@pytest.mark.parametrize("layer", [0, 2, 7, -1, "middle"])
def test_a_layer_that_is_not_sparse_is_refused(layer):
    assert_refused(lambda: make_trainer(protected_layer=layer), RaptorError, "first", "last")


@pytest.mark.parametrize("targets", [["q", "classifier"], ["router.classifier"]])
def test_a_trainable_router_is_refused(targets):
    assert_refused(lambda: make_trainer(shared_target_modules=targets), PrivacyConfigError, "router")
    config = LoraConfig(r=2, target_modules=targets)
    assert_refused(lambda: make_trainer(peft_config=config), PrivacyConfigError, "router")


def test_a_router_unfrozen_by_hand_is_refused():
    trainer = make_trainer()
    router = trainer.model.encoder.block[3].layer[1].mlp.router.classifier.weight
    router.requires_grad_(True)
    before = router.clone()
    assert_refused(trainer.train, PrivacyConfigError, "router", "Freeze")
    assert torch.equal(router, before)


@pytest.mark.parametrize(
    "option", [dict(lora_dropout=0.1), dict(use_dora=True), dict(use_rslora=True), dict(bias="all"),
               dict(rank_pattern={"q": 4}), dict(alpha_pattern={"q": 4})],
)  # fmt: skip
def test_lora_options_without_per_sample_gradient_are_refused(option):
    config = LoraConfig(r=2, target_modules=["q"], **option)
    assert_refused(lambda: make_trainer(peft_config=config), PrivacyConfigError, next(iter(option)))


def test_jitter_and_expert_dropout_are_switched_off_with_a_notice():
    model = tiny_model(router_jitter_noise=0.2, dropout_rate=0.1)
    with pytest.warns(UserWarning, match=r"Switched off: router jitter \(0.2\) and dropout inside the routed experts"):
        make_trainer(model=model)
    blocks = [model.encoder.block[i].layer[1].mlp for i in (1, 3)]
    assert all(block.router.jitter_noise == 0 for block in blocks)
    assert all(expert.dropout.p == 0 for block in blocks for expert in block.experts.values())
    assert any(isinstance(m, torch.nn.Dropout) and m.p == 0.1 for m in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make_trainer(model=tiny_model(), target_delta=1e-5)  # nothing to switch off: no notice


# ---- Data ----


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(RECORDS)


@pytest.mark.parametrize("stream", [Stream(), Dataset.from_list(RECORDS).to_iterable_dataset()])
def test_an_iterable_dataset_is_refused(stream):
    assert_refused(lambda: make_trainer(train_dataset=stream), PrivacyConfigError, "Poisson", "map-style")


def test_more_expected_records_than_there_are_is_refused():
    assert_refused(lambda: make_trainer(5, expected_batch_size=6), PrivacyConfigError, "expected_batch_size=6", "5")
    assert make_trainer(6, expected_batch_size=6)


@pytest.mark.parametrize("size", [23, 25, 1000])
def test_a_false_dataset_size_is_refused(size):
    """A larger n than there are records would claim a smaller sampling rate than was used."""
    assert_refused(lambda: make_trainer(24, dataset_size=size), PrivacyConfigError, f"dataset_size={size}")


def test_missing_labels_are_refused():
    bare = [{k: v for k, v in record.items() if k != "labels"} for record in RECORDS]

    assert_refused(lambda: make_trainer(bare, data_collator=pad), PrivacyConfigError, "labels")


class Left:
    padding_side = "left"


def left(records):
    return {k: v.flip(1) if v.dim() == 2 else v for k, v in collate(records).items()}


def test_left_padding_is_refused():
    assert_refused(lambda: make_trainer(processing_class=Left()), PrivacyConfigError, "padding_side", "right")
    assert_refused(lambda: make_trainer(data_collator=left), PrivacyConfigError, "padding_side", "right")


def test_left_padding_of_later_records_is_refused_before_training():
    """The first records are of one length, so that their batch has no padding to look at."""
    records = [*tiny_records(3, longest=5, shortest=5), *RECORDS]
    assert_refused_before_training(make_trainer(records, data_collator=left), PrivacyConfigError, "padding_side")


def packing(records):
    batch = collate(records)
    return {k: v.reshape(1, -1) if v.dim() == 2 else v[:1] for k, v in batch.items()}


def dropping(records):
    return collate(records[:1])


@pytest.mark.parametrize("collator", [packing, dropping])
def test_a_collator_that_packs_or_drops_records_is_refused(collator):
    assert_refused(lambda: make_trainer(data_collator=collator), PrivacyConfigError, "one row a record", "packing")


def test_a_collator_that_drops_from_large_batches_only_is_refused_before_training():
    trainer = make_trainer(data_collator=lambda records: collate(records[:3]))
    assert_refused_before_training(trainer, PrivacyConfigError, "one row a record")


def pad(records):
    """Takes records with and without labels, as `DataCollatorWithPadding` does."""
    batch = collate([{"labels": -1, **record} for record in records])
    return batch if "labels" in records[0] else {k: v for k, v in batch.items() if k != "labels"}


def public(records) -> Dataset:
    return Dataset.from_list([{k: v for k, v in r.items() if k != "labels"} for r in records])


@pytest.mark.filterwarnings("ignore:The two best layers")
def test_a_public_corpus_that_shares_a_record_is_refused():
    others = tiny_records(6, seed=77, shortest=6)
    shared = public([*others, RECORDS[9]])
    settings = dict(protected_layer="auto", public_dataset=shared, data_collator=pad)
    assert_refused(lambda: make_trainer(**settings), PrivacyConfigError, "public_dataset", "train_dataset")
    padded = copy.deepcopy(RECORDS[9])
    padded["input_ids"] += [0, 0]
    padded["attention_mask"] += [0, 0]
    settings["public_dataset"] = public([*others, padded])
    message = assert_refused(lambda: make_trainer(**settings), PrivacyConfigError, "public_dataset")
    assert "1 " not in message  # how many are shared is private
    settings["public_dataset"] = public(others)
    assert make_trainer(**settings).privacy_statement().disjointness
