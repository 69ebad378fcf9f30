"""Settings taken from public records: what they are, that the private records have no say, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset

from raptor_hf import PrivacyConfigError, RaptorConfig, owner_map, stream_parameters
from raptor_hf.scripts._config import parse_dataclasses
from tests.helpers import collate, tiny_records
from tests.trainer.build import assert_refused, make_config, make_trainer

PUBLIC = tiny_records(30, seed=99, shortest=6)
LABELLED = Dataset.from_list(PUBLIC)
UNLABELLED = LABELLED.remove_columns("labels")


def norms_by_hand(model, stream: str, layer: int = 3) -> torch.Tensor:
    """Gradient norms of the public records in one stream, one record at a time, in evaluation mode."""
    model.eval()
    parameters, found = stream_parameters(model)[stream], []
    owners = owner_map(model, PUBLIC, layer, data_collator=collate).tolist()
    for record, owner in zip(PUBLIC, owners, strict=True):
        loss = model(**collate([record])).loss
        if stream == "expert":
            loss = (1 - math.exp(-loss.item())) * loss
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        grads = [g if stream == "shared" else g[owner] for g in grads if g is not None]
        found.append(sum(float(g.double().square().sum()) for g in grads) ** 0.5)
    return torch.tensor(found, dtype=torch.float64)


def test_clipping_norms_are_a_quantile_of_public_norms():
    trainer = make_trainer(public_dataset=LABELLED, clipping_quantile=0.6)
    for stream, value in (("shared", trainer.args.shared_max_grad_norm), ("expert", trainer.args.expert_max_grad_norm)):
        by_hand = norms_by_hand(trainer.model, stream).quantile(0.6)
        assert value == pytest.approx(float(by_hand), rel=1e-4)
    trainer.train()
    statement = trainer.privacy_statement()
    assert statement.shared.max_grad_norm == trainer.args.shared_max_grad_norm
    assert statement.public_corpus is not None and statement.disjointness is not None


def test_the_budget_split_is_the_same_whatever_the_private_records_are():
    settings = dict(target_epsilon=4.0, target_delta=1e-4, budget_split="auto", public_dataset=LABELLED)
    seeds = []
    for seed in (5, 6):
        torch.manual_seed(0)  # the adapters' start
        trainer = make_trainer(tiny_records(64, seed=seed, shortest=4), **settings)
        seeds.append(trainer.args.budget_split)
        # a split at a limit would be the same for any records
        assert 0.06 < trainer.args.budget_split < 0.94
        assert trainer.privacy_statement().epsilon_planned <= 4.0
    assert seeds[0] == seeds[1]


def test_the_command_line_takes_both_kinds_of_split():
    for text, value in (("auto", "auto"), ("0.7", 0.7)):
        argv = ["--output_dir", "out", "--target_epsilon", "4", "--budget_split", text, "--use_cpu", "True"]
        (config,) = parse_dataclasses((RaptorConfig,), argv, prog="test")
        assert config.budget_split == value


@pytest.mark.parametrize("changes, words", [
    (dict(target_epsilon=4.0, budget_split="auto"), ("public_dataset",)),
    (dict(clipping_quantile=0.5), ("public_dataset",)),
    (dict(clipping_quantile=0.5, public_dataset=UNLABELLED), ("label",)),
])  # fmt: skip
def test_without_labelled_public_records_nothing_is_chosen(changes, words):
    assert_refused(lambda: make_trainer(**changes), PrivacyConfigError, *words)


def test_public_records_that_are_among_the_private_ones_are_refused():
    overlapping = Dataset.from_list([*PUBLIC, tiny_records(24, seed=5)[3]])
    assert_refused(
        lambda: make_trainer(public_dataset=overlapping, clipping_quantile=0.5), PrivacyConfigError, "public"
    )


@pytest.mark.parametrize("changes", [
    dict(budget_split="auto"),  # without a target there is no budget
    dict(budget_split="auto", method="shared_only", target_epsilon=4.0),
    dict(budget_split="half"),
    dict(budget_split=1.0),
    dict(clipping_quantile=1.5),
    dict(clipping_quantile=0.5, method="shared_only", expert_noise_multiplier=None),
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused(changes):
    assert_refused(lambda: make_config(**changes), PrivacyConfigError, *[n for n in changes if n in ("budget_split",)])
