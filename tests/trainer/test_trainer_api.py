"""The trainer is a `Trainer`: evaluation, prediction, callbacks, schedules, saving; and it tells public things only."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import TrainerCallback

from raptor_hf import PrivacyStatement, load_adapter, stream_parameters
from tests.helpers import LABELS, collate, tiny_model, tiny_records
from tests.trainer.build import fix_draws, make_trainer, perturb_adapters, run

EVAL = Dataset.from_list(tiny_records(10, seed=9))


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def logits_of(model, records=EVAL) -> torch.Tensor:
    """One record at a time, without padding."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([r["input_ids"]])).logits for r in records])


def test_every_adapter_moves_and_nothing_else_does():
    trainer = make_trainer(model=tiny_model(dropout_rate=0.1), optim="adamw_torch", weight_decay=0.1, max_steps=3)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    buffers = {name: b.clone() for name, b in trainer.model.named_buffers()}
    trainer.train()
    streams = stream_parameters(trainer.model)
    trained = {**streams["shared"], **streams["expert"]}
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]) == (name not in trained), name
    for parameter in streams["expert"].values():
        assert all(not torch.equal(a, b) for a, b in zip(parameter, before[_name(trainer, parameter)], strict=True))
    assert all(torch.equal(b, buffers[name]) for name, b in trainer.model.named_buffers())
    router = [name for name in before if "router" in name]
    assert router and not set(router) & set(trained)


def _name(trainer, parameter) -> str:
    return next(name for name, p in trainer.model.named_parameters() if p is parameter)


def test_evaluate_predict_and_metrics():
    trainer = make_trainer(eval_dataset=EVAL, compute_metrics=accuracy, per_device_eval_batch_size=3)
    trainer.train()
    by_hand = logits_of(trainer.model)
    predicted = trainer.predict(EVAL)
    np.testing.assert_allclose(predicted.predictions, by_hand.numpy(), atol=1e-4)
    labels = torch.tensor([r["labels"] for r in EVAL])
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] == pytest.approx(float((by_hand.argmax(-1) == labels).float().mean()))
    loss = torch.nn.functional.cross_entropy(by_hand, labels)
    assert metrics["eval_loss"] == pytest.approx(float(loss), rel=0.25)  # a mean over batches, not records


@pytest.mark.parametrize("reader", ["ours", "stock"])
def test_what_is_saved_reproduces_the_predictions(tmp_path, reader):
    trainer = make_trainer()
    perturb_adapters(trainer.model)
    trainer.train()
    trainer.save_model(tmp_path)
    fresh = tiny_model()
    assert not torch.allclose(logits_of(fresh), logits_of(trainer.model), atol=1e-2)
    loaded = load_adapter(fresh, tmp_path) if reader == "ours" else PeftModel.from_pretrained(fresh, tmp_path)
    torch.testing.assert_close(logits_of(loaded), logits_of(trainer.model), atol=2e-4, rtol=2e-4)


def test_no_base_weight_is_saved(tmp_path):
    trainer = make_trainer()
    trainer.save_model(tmp_path)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert size < 4 * trainable + 20_000
    assert not list(tmp_path.glob("model*.safetensors"))


# ---- Logging ----

# Keys that may be logged. Anything else is either new or private: decide, then add it.
PUBLIC_KEYS = {
    "epoch", "step", "learning_rate", "expert_learning_rate", "grad_norm", "epsilon", "train_runtime",
    "train_samples_per_second", "train_steps_per_second",
}  # fmt: skip


class Logs(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_only_public_quantities_are_logged(tmp_path):
    logs = Logs()
    trainer = make_trainer(
        logging_strategy="steps", logging_steps=1, logging_first_step=True, save_strategy="steps", save_steps=2,
        max_steps=3, output_dir=str(tmp_path), callbacks=[logs],
    )  # fmt: skip
    output = trainer.train()
    trainer.save_state()
    states = [json.loads(p.read_text()) for p in tmp_path.rglob("trainer_state.json")]
    assert len(states) >= 2
    for entry in [*trainer.state.log_history, *logs.seen, *(e for s in states for e in s["log_history"])]:
        assert set(entry) <= PUBLIC_KEYS, set(entry) - PUBLIC_KEYS
    assert math.isnan(output.training_loss)
    assert set(output.metrics) <= PUBLIC_KEYS
    for state in states:
        assert state["total_flos"] == 0 and state["num_input_tokens_seen"] == 0
    steps = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    assert [e["step"] for e in steps] == [1, 2, 3]
    spent = [e["epsilon"] for e in steps]
    assert spent == sorted(spent) and spent[0] > 0


METHODS = {"raptor": 2, "matched_global": 1, "shared_only": 1}


@pytest.mark.parametrize("length", [dict(max_steps=3), dict(max_steps=-1, num_train_epochs=1)], ids=["steps", "epochs"])
@pytest.mark.parametrize("method", METHODS)
def test_samples_a_second_are_the_expected_ones(method, length, monkeypatch):
    """B for each draw of each of three cycles; not the micro-batches, nor the records that were drawn."""
    monkeypatch.setattr("transformers.trainer.speed_metrics", lambda _, __, num_samples, num_steps: {"n": num_samples})
    changes = {} if method == "raptor" else dict(expert_noise_multiplier=None)
    for micro in (2, 8):
        trainer = make_trainer(24, method=method, per_device_train_batch_size=micro, **length, **changes)
        assert trainer.train().metrics["n"] == 3 * 8 * METHODS[method]
    trainer = make_trainer(24, method=method, **length, **changes)
    fix_draws(trainer, [(range(20), []), ([], [1]), ([], [])])
    assert trainer.train().metrics["n"] == 3 * 8 * METHODS[method]


def test_the_logged_gradient_norm_is_that_of_the_noisy_gradient():
    """Without records there is no gradient: what is logged then can only be noise over the public denominator."""
    trainer = make_trainer(logging_strategy="steps", logging_steps=1)
    fix_draws(trainer, [([], [])] * 4)
    trainer.train()
    count = sum(p.numel() for p in stream_parameters(trainer.model)["expert"].values())
    norms = [e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e]
    assert np.mean(norms) == pytest.approx(math.sqrt(count) / (8 / 4), rel=0.1)


def test_research_diagnostics_log_the_loss_and_say_so():
    trainer = make_trainer(research_diagnostics=True, logging_strategy="steps", logging_steps=1)
    trainer.train()
    assert any(entry.get("loss", 0) > 0 for entry in trainer.state.log_history)
    assert trainer.privacy_statement().verdict.startswith("NOT PRIVATE")


# ---- Length, schedules, callbacks ----


@pytest.mark.parametrize("epochs, cycles", [(1, 3), (2.5, 8)])
def test_an_epoch_is_n_over_b_cycles(epochs, cycles):
    trainer = make_trainer(24, max_steps=-1, num_train_epochs=epochs)
    assert trainer.planned_cycles() == cycles
    trainer.train()
    assert trainer.state.global_step == trainer.ledger.shared_steps == trainer.ledger.expert_steps == cycles


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_both_groups_follow_the_schedule(schedule):
    seen = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            seen.append({group["stream"]: group["lr"] for group in optimizer.param_groups})

    trainer = make_trainer(
        callbacks=[Watch()], lr_scheduler_type=schedule, learning_rate=0.1, expert_learning_rate=0.3, max_steps=4
    )
    updates = run(fix_draws(trainer, [([], [])] * 4))
    shape = (
        [1 - t / 4 for t in range(4)]
        if schedule == "linear"
        else [(1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]
    )
    for rates, factor in zip(seen, shape, strict=True):
        assert rates == {"shared": pytest.approx(0.1 * factor), "expert": pytest.approx(0.3 * factor)}
    for stream, bound in (("shared", 0.1 / 8), ("expert", 0.3 * 4 / 8)):
        for update, factor in zip(updates, shape, strict=True):
            flat = torch.cat([value.flatten() for value in update[stream].values()])
            assert float(flat.std()) == pytest.approx(bound * factor, rel=0.2)


def test_callbacks_are_called_once_a_cycle():
    calls = []

    class Count(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            calls.append("begin")

        def on_step_end(self, *args, **kwargs):
            calls.append("end")

    make_trainer(callbacks=[Count()], max_steps=3).train()
    assert calls == ["begin", "end"] * 3


def test_a_callback_sees_noisy_gradients_only():
    """Between the cycle and the optimizer's step, `.grad` is noise plus sum; nothing un-noised is left on the model."""
    grads = {}

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            grads.update({name: p.grad for name, p in model.named_parameters() if p.grad is not None})

    trainer = make_trainer(callbacks=[Look()])
    fix_draws(trainer, [([], [])])
    trainer.train()
    assert set(grads) == set(stream_parameters(trainer.model)["expert"])
    flat = torch.cat([g.flatten() for g in grads.values()])
    assert float(flat.std()) == pytest.approx(4 / 8, rel=0.2)


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor", "rmsprop"])
def test_optimizers_move_a_stream_only_in_its_own_step(optim):
    """Adam's state counts one step a cycle for each stream."""
    trainer = make_trainer(optim=optim, max_steps=3, weight_decay=0.01)
    trainer.train()
    steps = {int(s["step"]) for s in trainer.optimizer.state.values() if "step" in s}
    assert steps <= {3}
    assert optim == "sgd" or steps


def test_the_statement_tells_what_ran(tmp_path):
    trainer = make_trainer(max_steps=3, expert_noise_multiplier=2.0, shared_max_grad_norm=0.7)
    before = trainer.privacy_statement()
    assert before.epsilon_spent == 0 and before.shared.steps_planned == 3
    trainer.train()
    trainer.save_model(tmp_path)
    found = PrivacyStatement.from_json((tmp_path / "privacy.json").read_text())
    assert found == trainer.privacy_statement()
    assert (found.shared.noise_multiplier, found.expert.noise_multiplier) == (1.0, 2.0)
    assert (found.shared.max_grad_norm, found.shared.denominator, found.expert.denominator) == (0.7, 8, 2)
    assert (found.shared.steps_taken, found.expert.steps_taken) == (3, 3)
    assert found.dataset_size == 24 and found.shared.sample_rate == pytest.approx(8 / 24)
    assert found.protected_layer == 3 and found.num_experts == 4
    found.recompute()


def test_batches_of_a_tokenizer_collator():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(60)}, unk_token="w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", unk_token="w1")
    trainer = make_trainer(
        processing_class=tokenizer, data_collator=DataCollatorWithPadding(tokenizer), eval_dataset=EVAL
    )
    trainer.train()
    np.testing.assert_allclose(trainer.predict(EVAL).predictions, logits_of(trainer.model).numpy(), atol=1e-4)
    assert trainer.predict(EVAL).predictions.shape == (10, LABELS) and collate(list(EVAL))["labels"].shape == (10,)
