"""What a first run gets wrong: each is said before training, and names the argument that was typed."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from raptor_hf import PrivacyConfigError
from raptor_hf.checks import check_batch
from raptor_hf.limits import Limits, class_count
from raptor_hf.methods import METHODS
from raptor_hf.validate import large_delta
from tests.helpers import tiny_model, tiny_records
from tests.trainer.build import assert_refused, fix_draws, make_trainer

# ---- Labels ----


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_without_an_output_is_refused_before_training(label):
    records = tiny_records(24, seed=5)
    records[17]["labels"] = label  # neither among the first records, nor of a length of its own
    trainer = make_trainer(records)
    assert_refused(trainer.train, PrivacyConfigError, "label", "0 to 2", "num_labels")
    assert trainer.state.global_step == 0 and trainer.privacy_statement().shared.steps_taken == 0


def test_labels_that_are_fine():
    ids = torch.ones(3, 4, dtype=torch.long)

    def check(labels, classes=3):
        check_batch({"input_ids": ids, "labels": labels}, 3, ["labels"], Limits(classes=classes))

    check(torch.tensor([0, 2, -100]))
    check(torch.tensor([[0], [1], [2]]))
    check(torch.tensor([0.5, 7.0, -3.0]))  # regression
    check(torch.full((3, 4), 99))  # a label a token
    check(torch.tensor([0, 99, 2]), None)
    with pytest.raises(PrivacyConfigError):
        check(torch.tensor([[0], [1], [3]]))


def test_where_a_label_is_a_class():
    model = tiny_model()
    assert class_count(model) == 3
    model.config.problem_type = "regression"
    assert class_count(model) is None
    assert class_count(torch.nn.Linear(2, 2)) is None


# ---- Sizes ----


def test_a_batch_larger_than_the_set_names_what_was_set():
    assert_refused(lambda: make_trainer(expected_batch_size=25), PrivacyConfigError, "as was set", "24")
    assert_refused(
        lambda: make_trainer(expected_batch_size=None, per_device_train_batch_size=8, gradient_accumulation_steps=4),
        PrivacyConfigError, "32", "`per_device_train_batch_size=8` x 4 accumulation steps x 1 processes", "24",
    )  # fmt: skip


def test_a_large_default_delta_is_said():
    with pytest.warns(UserWarning, match="default delta.*24 records.*0.03"):
        make_trainer()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The default delta")
        make_trainer(target_delta=1e-5)
    assert not large_delta(1e-3, 600)


@pytest.mark.parametrize("method", [m.name for m in METHODS.values() if not m.private])
def test_a_run_without_privacy_has_no_delta_to_speak_of(method):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make_trainer(method=method, shared_noise_multiplier=None, expert_noise_multiplier=None)
    assert any("NOT private" in str(w.message) for w in said) and not any("delta" in str(w.message) for w in said)


# ---- A schedule that had ended ----


@pytest.mark.parametrize("schedule, said", [("linear", True), ("constant", False)])
def test_a_resumed_run_that_begins_without_a_rate_says_so(tmp_path, caplog, schedule, said):
    settings = dict(lr_scheduler_type=schedule, output_dir=str(tmp_path), save_strategy="steps", save_steps=2)
    fix_draws(make_trainer(max_steps=2, **settings), [([], [])] * 2).train()
    longer = fix_draws(make_trainer(max_steps=4, **settings), [([], [])] * 4)
    logging.enable_propagation()
    try:
        longer.train(resume_from_checkpoint=True)
    finally:
        logging.disable_propagation()
    assert ("learning rate of 0" in caplog.text) == said


# ---- Importing ----

LOADS = """
import sys
import raptor_hf
assert "torch" not in sys.modules and "transformers" not in sys.modules
raptor_hf.compute_epsilon, raptor_hf.PrivacyStatement, raptor_hf.PrivacyConfigError
assert "transformers" not in sys.modules
raptor_hf.RaptorConfig
from raptor_hf.assets import tiny_switch_path
from transformers import AutoModelForSequenceClassification
print(type(AutoModelForSequenceClassification.from_pretrained(tiny_switch_path())).__name__)
"""


def test_one_name_of_the_package_is_enough_to_load_the_bundled_model():
    result = subprocess.run(
        [sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2]
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "SwitchTransformersForSequenceClassification"
