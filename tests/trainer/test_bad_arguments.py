"""Arguments that cannot work: each a clear error, before any training, in three parts."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments

from raptor_hf import PrivacyConfigError, RaptorTrainer
from raptor_hf.config import REFUSED_ARGUMENTS
from raptor_hf.preflight import check_device
from tests.helpers import tiny_model, tiny_records
from tests.trainer.build import assert_refused, assert_refused_before_training, make_config, make_trainer

RECORDS = tiny_records(24, seed=5)


@pytest.mark.parametrize(
    "given",
    [
        dict(target_epsilon=None, shared_noise_multiplier=None, expert_noise_multiplier=None),
        dict(target_epsilon=4.0, shared_noise_multiplier=1.0, expert_noise_multiplier=1.0),
        dict(target_epsilon=4.0, shared_noise_multiplier=1.0, expert_noise_multiplier=None),
        dict(target_epsilon=None, shared_noise_multiplier=1.0, expert_noise_multiplier=None),
        dict(target_epsilon=None, shared_noise_multiplier=None, expert_noise_multiplier=1.0),
    ],
)
def test_exactly_one_of_budget_and_noise(given):
    assert_refused(lambda: make_config(**given), PrivacyConfigError, "target_epsilon", "noise")


@pytest.mark.parametrize("value", [1.0, 1e-6])
def test_max_grad_norm_is_refused(value):
    message = assert_refused(lambda: make_config(max_grad_norm=value), PrivacyConfigError, f"max_grad_norm={value}")
    assert "shared_max_grad_norm" in message and "expert_max_grad_norm" in message


REFUSED_VALUES = {
    "max_grad_norm": 1.0, "label_smoothing_factor": 0.1, "fp16": True, "torch_compile": True, "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0, "auto_find_batch_size": True, "dataloader_drop_last": True,
    "train_sampling_strategy": "group_by_length", "gradient_checkpointing": True, "activation_checkpointing": True,
    "include_num_input_tokens_seen": "all", "skip_memory_metrics": False, "debug": "underflow_overflow",
    "fp16_full_eval": True, "bf16_full_eval": True, "enable_jit_checkpoint": True,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_an_inherited_argument_that_cannot_work_is_refused(name):
    current = "activation_checkpointing" if name == "gradient_checkpointing" else name  # its newer name
    assert_refused(lambda: make_config(**{name: REFUSED_VALUES[name]}), PrivacyConfigError, current)


def test_every_refused_argument_is_tested():
    assert set(REFUSED_ARGUMENTS) - set(REFUSED_VALUES) <= {
        "deepspeed",
        "fsdp",
        "parallelism_config",
    }  # these need several processes


@pytest.mark.parametrize(
    "name, value",
    [
        ("method", "raptorr"), ("target_epsilon", -1.0), ("target_epsilon", 0.0), ("target_epsilon", float("nan")),
        ("target_epsilon", float("inf")), ("target_delta", 0.0), ("target_delta", 1.0),
        ("shared_noise_multiplier", -0.1), ("expert_noise_multiplier", float("nan")),
        ("shared_max_grad_norm", 0.0), ("expert_max_grad_norm", -1.0), ("shared_max_grad_norm", float("inf")),
        ("budget_split", 1.5), ("budget_rule", "sum"), ("accountant", "rdp"), ("expected_batch_size", 0),
        ("ownership", "random"), ("expert_denominator", "realised"), ("clipping", "per_layer"), ("alternating", "no"),
        ("residual_gamma", -1.0), ("grad_sample_mode", "opacus"), ("lora_rank", 0), ("lora_alpha", 0.0),
        ("expert_learning_rate", -1.0), ("insecure_noise_seed", -3), ("insecure_noise_seed", 1.5),
    ],
)  # fmt: skip
def test_an_argument_out_of_range_is_refused(name, value):
    assert_refused(lambda: make_config(**{name: value}), PrivacyConfigError, name)


@pytest.mark.parametrize("noise", [(0.1, 1.0), (1.0, 0.1), (0.3, 0.3)])
def test_an_epsilon_that_cannot_be_certified_is_refused_before_training(noise):
    """Too little noise to account for: said at once, and not at the first log or save."""
    trainer = make_trainer(shared_noise_multiplier=noise[0], expert_noise_multiplier=noise[1], max_steps=50)
    assert_refused_before_training(trainer, PrivacyConfigError, "noise")


def test_no_noise_is_allowed_and_never_called_private(tmp_path):
    """Noise multipliers of zero are for debugging: training, saving and stating work, and say what they are."""
    for pair in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0)):
        trainer = make_trainer(shared_noise_multiplier=pair[0], expert_noise_multiplier=pair[1])
        trainer.train()
        trainer.save_model(tmp_path)
        assert "NOT PRIVATE" in (tmp_path / "privacy.json").read_text()
        assert trainer.ledger.epsilon() is None


def test_none_as_max_grad_norm_means_off():
    trainer = make_trainer(max_grad_norm=None)
    trainer.train()
    assert trainer.args.max_grad_norm == 0


@pytest.mark.parametrize("optim", ["galore_adamw", "apollo_adamw", "lomo"])
def test_optimizers_that_take_gradients_apart_are_refused(optim):
    if optim == "lomo":
        pytest.importorskip("lomo_optim")
    trainer = make_trainer(optim=optim, optim_target_modules=["q"])
    with pytest.raises((PrivacyConfigError, ImportError)):  # without its package, transformers refuses first
        trainer.train()


def test_an_optimizer_made_before_is_refused():
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(model=model, optimizers=(optimizer, None))
    assert_refused_before_training(trainer, PrivacyConfigError, "optimizers", "attach_adapters")


def test_the_plain_arguments_are_refused(tmp_path):
    plain = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    data = Dataset.from_list(RECORDS)
    for args in (plain, None):
        assert_refused(lambda args=args: RaptorTrainer(tiny_model(), args, train_dataset=data), PrivacyConfigError,
                       "RaptorConfig")  # fmt: skip


def test_losses_over_a_whole_batch_are_refused():
    config = make_config()
    data = Dataset.from_list(RECORDS)

    class Own(RaptorTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs).loss

    loss = dict(compute_loss_func=lambda *args, **kwargs: 0.0)
    assert_refused(lambda: RaptorTrainer(tiny_model(), config, train_dataset=data, **loss), PrivacyConfigError, "loss")
    assert_refused(lambda: Own(tiny_model(), config, train_dataset=data), PrivacyConfigError, "compute_loss")
    assert_refused(lambda: RaptorTrainer(None, config, train_dataset=data, model_init=tiny_model), PrivacyConfigError,
                   "model_init")  # fmt: skip


def test_searching_is_refused():
    assert_refused(make_trainer().hyperparameter_search, PrivacyConfigError, "search")


def test_a_device_without_float64_is_refused():
    check_device(torch.device("cpu"))
    with pytest.raises(PrivacyConfigError, match="float64"):
        check_device(torch.device("mps"))
