"""Every method of the paper, for two cycles, against its formula computed by hand.

The oracle is stock transformers and stock PEFT, one record at a time, on the adapters (or weights) in the saved files.
"""

from __future__ import annotations

import math

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file

from raptor_hf import PrivacyConfigError, PrivacyStatement, find_moe_layout
from raptor_hf.methods import METHODS
from raptor_hf.moe.weights import train_weights
from tests.accountants import pld_epsilon
from tests.helpers import EXPERTS, SPARSE, tiny_config, tiny_model, tiny_records
from tests.trainer.build import assert_refused, fix_draws, make_config, make_trainer, perturb_adapters, run
from tests.trainer.oracle import LAYER, load_peft, loss_of, owners

BATCH, RATE = 8, 0.05
RECORDS = tiny_records(16, seed=5)
# the second draw is not used by a method with one mechanism
DRAWS = [([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 3, 10, 11, 12, 13]), ([2, 15, 14], [0, 1, 2, 4, 5])]
NORM = 8.0  # some records are above it and some below (asserted)


def noise_for(method: str, sigma: float | None) -> dict:
    """The noise multipliers that a method takes."""
    counters = METHODS[method].counters if METHODS[method].private else ()
    return {f"{name}_noise_multiplier": sigma if name in counters else None for name in ("shared", "expert")}


def build(method: str, sigma: float = 0.0, **changes):
    settings = dict(method=method, shared_max_grad_norm=NORM, expert_max_grad_norm=NORM, learning_rate=RATE)
    settings |= noise_for(method, sigma)
    trainer = make_trainer(RECORDS, **{**settings, **changes})
    perturb_adapters(trainer.model)
    return fix_draws(trainer, DRAWS)


def trained_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = get_peft_model_state_dict(model) if isinstance(model, PeftModel) else model.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def clipped_step(model, records, drawn, chosen, *, bound, rate, seen) -> None:
    """Plain SGD by sum_i min(1, C / |g_i|) g_i over `chosen`, times `rate(name)`."""
    total = {name: torch.zeros_like(p) for name, p in chosen.items()}
    for i in drawn:
        found = torch.autograd.grad(loss_of(model, records[i]), list(chosen.values()), allow_unused=True)
        gradient = {n: g for n, g in zip(chosen, found, strict=True) if g is not None}
        length = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
        seen.append(length)
        for name, g in gradient.items():
            total[name] += g * min(1.0, bound / length)
    with torch.no_grad():
        for name, p in chosen.items():
            p -= rate(name) * total[name]


def assert_moved_alike(found: dict, expected: dict, start: dict) -> None:
    assert found.keys() == expected.keys() == start.keys()
    for name, value in expected.items():
        moved, error = (value - start[name]).abs().max(), (found[name] - value).abs().max()
        assert error <= 3e-4 * moved + 5e-7, f"{name}: off by {error:.2e}, moved by {moved:.2e}"


def is_expert(name: str, layer: int | None = None) -> bool:
    return ".mlp.experts." in name and (layer is None or f"block.{layer}." in name)


# ---- One block of adapters ----


@pytest.mark.parametrize("engine", ["functorch", "hooks", "reference"])
@pytest.mark.parametrize("method", ["matched_global", "monolithic_lora", "shared_only", "nonprivate_lora"])
def test_a_block_of_adapters_is_one_clipped_step(tmp_path, method, engine):
    trainer = build(method, grad_sample_mode=engine)
    trainer.model.save_pretrained(tmp_path / "start")
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    layers = SPARSE if method == "monolithic_lora" else (LAYER,)
    assert {n for n in start if ".experts." in n} == {
        f"base_model.model.encoder.block.{layer}.layer.1.mlp.experts.expert_{e}.{w}.lora_{k}.weight"
        for layer in layers for e in range(EXPERTS) for w in ("wi", "wo") for k in "AB"
    }  # fmt: skip
    model = load_peft(tmp_path / "start")
    chosen = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if method == "shared_only":
        chosen = {n: p for n, p in chosen.items() if not is_expert(n)}
    bound, seen = (math.inf if method == "nonprivate_lora" else NORM), []
    for draw, _ in DRAWS:
        clipped_step(model, RECORDS, draw, chosen, bound=bound, rate=lambda _: RATE / BATCH, seen=seen)
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "end")
    assert_moved_alike(load_file(tmp_path / "end" / "adapter_model.safetensors"), trained_state(model), start)
    assert min(seen) < NORM < max(seen)


@pytest.mark.parametrize("engine", ["functorch", "hooks", "reference"])
def test_expert_only_trains_the_owners_and_nothing_else(tmp_path, engine):
    trainer = build("expert_only", grad_sample_mode=engine, expert_max_grad_norm=0.02)
    trainer.model.save_pretrained(tmp_path / "start")
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    model, owner, seen = load_peft(tmp_path / "start"), owners(RECORDS), []
    for _, draw in DRAWS:
        step = {n: torch.zeros_like(p) for n, p in model.named_parameters() if is_expert(n) and p.requires_grad}
        for i in draw:
            chosen = {n: p for n, p in model.named_parameters() if n in step and f"expert_{owner[i]}." in n}
            loss = loss_of(model, RECORDS[i])
            grads = torch.autograd.grad((1 - math.exp(-loss.item())) * loss, list(chosen.values()), allow_unused=True)
            length = math.sqrt(sum(float(g.double().square().sum()) for g in grads if g is not None))
            seen.append(length)
            for name, g in zip(chosen, grads, strict=True):
                if g is not None:
                    step[name] += g * min(1.0, 0.02 / length)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in step:
                    p -= RATE / (BATCH / EXPERTS) * step[name]
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "end")
    assert_moved_alike(load_file(tmp_path / "end" / "adapter_model.safetensors"), trained_state(model), start)
    assert max(seen) > 0.02


# ---- Ablations of RAPTOR ----


def two_streams(model, owner, i):
    """(shared gradient, owner's gradient) of one record, the second with the residual weight."""
    shared = {n: p for n, p in model.named_parameters() if p.requires_grad and not is_expert(n)}
    owned = f"{LAYER}.layer.1.mlp.experts.expert_{owner}."
    mine = {n: p for n, p in model.named_parameters() if p.requires_grad and owned in n}
    loss = loss_of(model, RECORDS[i])
    both = {**shared, **mine}
    grads = torch.autograd.grad(loss, list(both.values()), allow_unused=True)
    weight = 1 - math.exp(-loss.item())
    return {
        n: torch.zeros_like(both[n]) if g is None else g * (weight if n in mine else 1.0)
        for n, g in zip(both, grads, strict=True)
    }


@pytest.mark.parametrize("engine", ["functorch", "hooks", "reference"])
@pytest.mark.parametrize("ablation", ["clipping", "alternating"])
def test_joint_steps_of_both_streams(tmp_path, ablation, engine):
    changes = {"clipping": "global"} if ablation == "clipping" else {"alternating": False}
    noise = dict(shared_noise_multiplier=0.0, expert_noise_multiplier=None if ablation == "clipping" else 0.0)
    trainer = build("raptor", grad_sample_mode=engine, expert_max_grad_norm=0.02, **noise, **changes)
    trainer.model.save_pretrained(tmp_path / "start")
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    model, owner, seen = load_peft(tmp_path / "start"), owners(RECORDS), []
    for shared_draw, expert_draw in DRAWS:
        step = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
        draws = [(shared_draw, None)] if ablation == "clipping" else [(shared_draw, False), (expert_draw, True)]
        for draw, experts in draws:
            for i in draw:
                gradient = two_streams(model, owner[i], i)
                if experts is not None:
                    gradient = {n: g for n, g in gradient.items() if is_expert(n) == experts}
                bound = 0.02 if experts else NORM
                length = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
                seen.append(length / bound)
                for name, g in gradient.items():
                    step[name] += g * min(1.0, bound / length if length else 1.0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in step:
                    p -= RATE / (BATCH / EXPERTS if is_expert(name) else BATCH) * step[name]
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "end")
    assert_moved_alike(load_file(tmp_path / "end" / "adapter_model.safetensors"), trained_state(model), start)
    assert min(seen) < 1 < max(seen)


# ---- Base weights ----


@pytest.mark.parametrize("method", ["monolithic_full", "nonprivate_ffn"])
def test_base_weights(tmp_path, method):
    trainer = build(method)
    model = tiny_model()
    model.load_state_dict(trainer.model.state_dict())
    start, seen = trained_state(model), []
    chosen = dict(model.named_parameters())
    if method == "nonprivate_ffn":
        # both dense and sparse blocks keep their feed-forward weights in wi and wo
        chosen = {n: p for n, p in chosen.items() if n.endswith(("wi.weight", "wo.weight")) or n.startswith("score.")}
        assert len(chosen) == 2 * (2 + 2 * EXPERTS) + 2
    bound = NORM if method == "monolithic_full" else math.inf
    for draw, _ in DRAWS:
        clipped_step(model, RECORDS, draw, chosen, bound=bound, rate=lambda _: RATE / BATCH, seen=seen)
    trainer.train()
    assert_moved_alike(trained_state(trainer.model), trained_state(model), start)
    assert max(seen) > NORM
    trainer.save_model(tmp_path / "end")
    again = type(model).from_pretrained(tmp_path / "end")
    assert all(torch.equal(again.state_dict()[n], value) for n, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("method", ["monolithic_full", "monolithic_lora", "shared_only", "expert_only"])
def test_a_method_goes_on_from_a_checkpoint(tmp_path, method):
    settings = dict(method=method, output_dir=str(tmp_path), save_strategy="steps", save_steps=2)
    settings |= noise_for(method, 1.0)
    weights = "model.safetensors" if method == "monolithic_full" else "adapter_model.safetensors"
    make_trainer(max_steps=2, **settings).train()
    state = load_file(tmp_path / "checkpoint-2" / weights)
    trainer = make_trainer(max_steps=2, **settings)
    trainer.train(resume_from_checkpoint=True)
    trainer.model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / weights)
    assert all(torch.equal(again[key], value) for key, value in state.items())
    trainer = make_trainer(max_steps=4, **settings)
    trainer.train(resume_from_checkpoint=True)
    taken = [stream.steps_taken for stream in trainer.privacy_statement().streams.values()]
    assert taken == [4]


# ---- Statements ----


PRIVATE = [name for name, method in METHODS.items() if method.private]


@pytest.mark.parametrize("method", PRIVATE)
def test_the_whole_budget_goes_to_the_methods_mechanisms(method):
    trainer = make_trainer(200, method=method, target_epsilon=4.0, target_delta=1e-4, max_steps=20)
    statement = trainer.privacy_statement()
    assert statement.method == method
    assert 0.99 * 4 < statement.epsilon_planned <= 4
    mechanisms = [(s.noise_multiplier, s.sample_rate, s.steps_planned) for s in statement.streams.values()]
    assert len(mechanisms) == len(METHODS[method].mechanisms)
    assert pld_epsilon(mechanisms, 1e-4) <= 4.0 * 1.001
    assert PrivacyStatement.from_json(statement.to_json()) == statement
    denominators = {name: s.denominator for name, s in statement.streams.items()}
    assert denominators.get("shared", 8) == 8 and denominators.get("expert", 8 / EXPERTS) == 8 / EXPERTS


@pytest.mark.parametrize("method", ["nonprivate_lora", "nonprivate_ffn"])
@pytest.mark.filterwarnings("ignore:`method=")
def test_a_method_without_privacy_says_so_first(method):
    trainer = build(method)
    trainer.train()
    statement = trainer.privacy_statement()
    assert statement.verdict.startswith("NOT PRIVATE") and statement.epsilon_spent is None
    for given in (dict(target_epsilon=1.0), dict(shared_noise_multiplier=1.0)):
        settings = {"method": method, **noise_for(method, None), **given}
        assert_refused(lambda settings=settings: make_config(**settings), PrivacyConfigError, method)


@pytest.mark.parametrize("changes, label, mechanisms", [
    (dict(clipping="global", expert_noise_multiplier=None), "raptor (clipping=global)", 1),
    (dict(alternating=False), "raptor (alternating=False)", 2),
])  # fmt: skip
def test_an_ablation_is_named_in_the_statement(changes, label, mechanisms):
    statement = make_trainer(**changes).privacy_statement()
    assert statement.method == label and len(statement.streams) == mechanisms
    plain = make_trainer().privacy_statement()
    assert (statement.epsilon_planned < plain.epsilon_planned) == (mechanisms == 1)


@pytest.mark.parametrize("changes, words", [
    (dict(method="shared_only"), "expert_noise_multiplier"),
    (dict(method="shared_only", shared_noise_multiplier=None), "shared_noise_multiplier"),
    (dict(method="expert_only", expert_noise_multiplier=None), "expert_noise_multiplier"),
    (dict(clipping="global"), "expert_noise_multiplier"),
    (dict(method="matched_global", expert_noise_multiplier=None, clipping="global"), "clipping"),
    (dict(method="shared_only", expert_noise_multiplier=None, alternating=False), "alternating"),
    (dict(method="monolithic_full", expert_noise_multiplier=None, grad_sample_mode="hooks"), "grad_sample_mode"),
])  # fmt: skip
def test_settings_that_contradict_the_method_are_refused(changes, words):
    assert_refused(lambda: make_config(**changes), PrivacyConfigError, words)


def test_a_model_prepared_for_another_method_is_refused():
    model = make_trainer(method="shared_only", **noise_for("shared_only", 1.0)).model
    assert_refused(lambda: make_trainer(model=model), PrivacyConfigError, "method='raptor'")


def test_the_papers_count_of_all_parameters():
    """Mechanism section 1: the full encoder classifier of switch-base-8 has 307.85 M parameters."""
    sizes = dict(vocab_size=32128, d_model=768, d_kv=64, d_ff=3072, num_heads=12, num_layers=12, num_experts=8,
                 num_sparse_encoder_layers=6, num_labels=2)  # fmt: skip
    with torch.device("meta"):
        from raptor_hf.models import SwitchTransformersForSequenceClassification

        model = SwitchTransformersForSequenceClassification(tiny_config(**sizes))
        train_weights(model, "full", "last")
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert round(count / 1e6, 2) == 307.85
    assert len(find_moe_layout(model).sparse_layers) == 6


def test_the_papers_count_of_the_monolithic_baseline():
    """Rank 32 on q, k, v, o and on all experts of all six sparse layers, and the head: 14,157,314."""
    from types import SimpleNamespace

    from raptor_hf import attach_adapters, stream_parameters
    from raptor_hf.models import SwitchTransformersForSequenceClassification

    sizes = dict(vocab_size=32128, d_model=768, d_kv=64, d_ff=3072, num_heads=12, num_layers=12, num_experts=8,
                 num_sparse_encoder_layers=6, num_labels=2)  # fmt: skip
    with torch.device("meta"):
        model = SwitchTransformersForSequenceClassification(tiny_config(**sizes))
        config = SimpleNamespace(lora_rank=32, lora_alpha=32, shared_target_modules=None)
        attach_adapters(model, config, "last", all_layers=True)
    streams = stream_parameters(model)
    assert sum(p.numel() for stream in streams.values() for p in stream.values()) == 14_157_314


@pytest.mark.parametrize("method", PRIVATE)
def test_every_private_method_has_noise_of_the_stated_size(method):
    """With an empty draw only the noise moves a tensor: its variance is (lr sigma C / D)^2."""
    sigma, trainer = 2.0, build(method, sigma=2.0, optim="sgd")
    fix_draws(trainer, [([], [])] * 6)
    updates = run(trainer)
    for stream, factor in (("shared", RATE / BATCH), ("expert", RATE / BATCH)):
        rows = [t.flatten() for update in updates for t in update[stream].values()]
        if not rows:
            continue
        owned = METHODS[method].owners and stream == "expert"
        expected = sigma * NORM * factor * (EXPERTS if owned else 1)
        assert float(torch.cat(rows).std()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("method", ["raptor", "shared_only", "nonprivate_lora"])
@pytest.mark.filterwarnings("ignore:`method=")
def test_a_record_that_cannot_be_trained_on_is_refused_before_any_release(method):
    records = tiny_records(24, seed=5)
    records[17]["labels"] = 9  # there are three classes
    trainer = make_trainer(records, method=method, **noise_for(method, 1.0))
    with pytest.raises(PrivacyConfigError, match="label"):
        trainer.train()
    assert trainer.ledger is None or trainer.ledger.shared_steps == 0
