"""Diagnostics on tiny models against computations by hand: stock autograd, one record and one number at a time."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig

from raptor_hf.analysis import diagnostics as diag
from raptor_hf.analysis import suggest
from raptor_hf.analysis._records import mean_loss, prepare
from raptor_hf.analysis.budget import gdp_mu, mu_of
from raptor_hf.analysis.theory import optimal_budget_split
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.moe import attach_adapters, owner_map, stream_parameters
from raptor_hf.moe.ownership import current_owner_map
from raptor_hf.moe.weights import train_weights
from tests import families
from tests.analysis.build import researched
from tests.helpers import EXPERTS, SPARSE, brute_owner, collate, stock_dispatch, tiny_model, tiny_records

BLOCK = SPARSE[1]
RECORDS = tiny_records(14, seed=11, shortest=3)
MODES = ["functorch", "hooks", "reference"]


def adapted(scale: float = 0.3, block: int = BLOCK, seed: int = 5, **changes):
    model = attach_adapters(tiny_model(torch.float64, **changes), LoraConfig(r=3, lora_alpha=5), block)
    generator = torch.Generator().manual_seed(seed)
    for stream in stream_parameters(model).values():
        for name, parameter in stream.items():
            if "lora_" in name:
                parameter.data = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


@pytest.fixture(autouse=True)
def _exact(exact_norms):
    """Norms in the model's own dtype, so that comparisons are exact."""


def hand(model, records, weighted: bool):
    """Of every record: loss and gradients of all trainables, by autograd on a batch of one."""
    parameters = {name: p for stream in stream_parameters(model).values() for name, p in stream.items()}
    rows = []
    for record in records:
        logits = model(input_ids=torch.tensor([record["input_ids"]])).logits[0]
        loss = -logits.log_softmax(-1)[record["labels"]]
        scaled = loss * (1 - torch.exp(-loss.detach())) if weighted else loss
        grads = torch.autograd.grad(scaled, list(parameters.values()), allow_unused=True)
        rows.append(
            (
                loss.item(),
                {
                    n: torch.zeros_like(p) if g is None else g
                    for (n, p), g in zip(parameters.items(), grads, strict=True)
                },
            )
        )
    return rows


def base_owners(records, block=BLOCK) -> list[int]:
    model = tiny_model(torch.float64)
    return [brute_owner(stock_dispatch(model, record)[block].sum(0).tolist()) for record in records]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gamma", [1.0, None])
def test_role_mismatch_by_hand(mode, gamma):
    model = researched(adapted())
    owners, shared = base_owners(RECORDS), hand(model, RECORDS, weighted=False)
    expert = hand(model, RECORDS, weighted=gamma is not None)
    norms = {"shared": 0.0, "router": 0.0, "head": 0.0, "expert": 0.0}
    for i in range(len(RECORDS)):
        squares = dict.fromkeys(norms, 0.0)
        for name, g in shared[i][1].items():
            if ".expert_adapters." in name:
                squares["expert"] += float(expert[i][1][name][owners[i]].square().sum())
            else:
                squares["head" if name.startswith("score") else "shared"] += float(g.square().sum())
        for role, value in squares.items():
            norms[role] += math.sqrt(value) / len(RECORDS)
    counts = dict.fromkeys(norms, 0)
    for name, p in model.named_parameters():
        if p.requires_grad:
            role = "head" if name.startswith("score") else "expert" if "expert_adapters" in name else "shared"
            counts[role] += p.numel()
    total, size = sum(norms.values()), sum(counts.values())
    mismatch = sum(abs(norms[r] / total - counts[r] / size) for r in norms) / 2

    options = diag.GradientOptions(mode=mode, residual_gamma=gamma)
    found = diag.role_diagnostics(model, RECORDS, data_collator=collate, batch_size=5, options=options)
    assert found.parameters == counts and found.private
    # the hooks engine's norms are upper bounds, a rounding error above
    assert found.norms == pytest.approx(norms, rel=1e-9, abs=1e-12)
    assert found.mismatch == pytest.approx(mismatch, rel=1e-9) and 0.01 < mismatch < 1


NOISE = {"noise_multiplier": 1.7, "max_norm": 0.4, "expected_batch_size": 5.0}


@pytest.mark.parametrize("mode", MODES)
def test_expert_diagnostics_by_hand(mode):
    model = researched(adapted())
    owners, rows = base_owners(RECORDS), hand(model, RECORDS, weighted=True)
    n, p = len(RECORDS), NOISE["expected_batch_size"] / len(RECORDS)
    clip = NOISE["max_norm"]
    assert len(set(owners)) >= 3 and max(map(owners.count, owners)) >= 3
    names = [name for name in rows[0][1] if ".expert_adapters." in name]
    dimension = sum(rows[0][1][name][0].numel() for name in names)
    found = diag.expert_diagnostics(
        model, RECORDS, data_collator=collate, batch_size=4, options=diag.GradientOptions(mode=mode), **NOISE
    )
    clipped_some = False
    snrs = []
    for expert in range(EXPERTS):
        mine = []
        for i in range(n):
            if owners[i] == expert:
                g = np.concatenate([rows[i][1][name][expert].numpy().ravel() for name in names])
                factor = min(1.0, clip / max(np.linalg.norm(g), 1e-300))
                clipped_some |= factor < 1
                mine.append(g * factor)
        h = np.array(mine).reshape(-1, dimension)
        mu = h.sum(0) / max(len(h), 1)
        trace = float(((h - mu) ** 2).sum() / max(len(h), 1))
        variance = (EXPERTS / NOISE["expected_batch_size"] * NOISE["noise_multiplier"] * clip) ** 2 * dimension
        # mean of the released gradient: E / B times p times the sum
        signal = EXPERTS / NOISE["expected_batch_size"] * p * h.sum(0)
        snrs.append(float(signal @ signal) / variance)
        assert found.share[expert] == pytest.approx(len(h) / n)
        assert found.mu_squared[expert] == pytest.approx(float(mu @ mu), rel=1e-5)
        assert found.trace_sigma[expert] == pytest.approx(trace, rel=1e-5, abs=1e-12)
        assert found.snr[expert] == pytest.approx(snrs[-1], rel=1e-5)
        assert found.error.squared_bias[expert] == pytest.approx(float(((signal - mu) ** 2).sum()), rel=1e-5)
        assert found.error.dp_variance == pytest.approx(variance, rel=1e-12)
    assert clipped_some and found.private
    assert found.mean_snr == pytest.approx(np.mean(snrs), rel=1e-5)
    assert found.snr_cv == pytest.approx(np.std(snrs) / np.mean(snrs), rel=1e-5)


def test_a_sample_stands_for_the_dataset():
    """With n given, the sample's shares are scaled to n; p is B / n."""
    model = researched(adapted())
    whole = diag.expert_diagnostics(model, RECORDS * 3, data_collator=collate, **NOISE)
    part = diag.expert_diagnostics(model, RECORDS, data_collator=collate, dataset_size=len(RECORDS) * 3, **NOISE)
    assert part.snr == pytest.approx(whole.snr, rel=1e-9)
    assert part.error.total == pytest.approx(whole.error.total, rel=1e-9)


@pytest.mark.parametrize("change", [{"dataset_size": 0}, {"dataset_size": 4}, {"noise_multiplier": 0.0}])
def test_impossible_settings_are_refused(change):
    with pytest.raises(PrivacyConfigError, match="must"):
        diag.expert_diagnostics(researched(adapted()), RECORDS, data_collator=collate, **{**NOISE, **change})


def test_mean_loss_is_the_mean_of_the_records_losses():
    model = adapted()
    rows = hand(model, RECORDS, weighted=False)
    expected = sum(loss for loss, _ in rows) / len(rows)
    assert mean_loss(model, prepare(model, RECORDS, collate, 5)) == pytest.approx(expected, rel=1e-12)
    with torch.no_grad():
        logits = model(**{k: v for k, v in collate(RECORDS).items() if k != "labels"}).logits
    labels = torch.tensor([r["labels"] for r in RECORDS])
    assert expected == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-12)


def test_mean_loss_of_a_language_model_weighs_records_not_tokens():
    model = families.build("olmoe", torch.float64, head="lm")
    attach_adapters(model, LoraConfig(r=2), 1)
    items = families.records(5, causal=True)
    with torch.no_grad():
        alone = [float(model(**families.collate([item])).loss) for item in items]
    found = mean_loss(model, prepare(model, items, families.collate, 3))
    assert found == pytest.approx(sum(alone) / len(alone), rel=1e-6)


def trace_of_hessian(model, records, stream: str) -> float:
    """tr of the Hessian of the mean loss in one stream's parameters, by second differences of autograd gradients."""
    total, step = 0.0, 1e-4
    parameters = stream_parameters(model)[stream]
    for p in parameters.values():
        flat = p.data.view(-1)
        for j in range(flat.numel()):
            slopes = []
            for sign in (1, -1):
                flat[j] += sign * step
                loss = model(**collate(records)).loss
                slopes.append(float(torch.autograd.grad(loss, p)[0].view(-1)[j]))
                flat[j] -= sign * step
            total += (slopes[0] - slopes[1]) / (2 * step)
    return total


@pytest.mark.parametrize("stream", ["shared", "expert"])
def test_noise_sensitivity_is_half_the_mean_curvature(stream):
    """For little noise E[dL] = std^2 / 2 tr(Hessian), so lambda = tr(Hessian) / (2 d): an exact oracle."""
    model = attach_adapters(
        tiny_model(torch.float64, num_layers=2, num_sparse_encoder_layers=1, num_experts=2, d_model=8, d_ff=6, d_kv=2),
        LoraConfig(r=1, lora_alpha=2, target_modules=["q", "v"]),
        "last",
    )
    for p in stream_parameters(model)[stream].values():
        p.data = p.data.double()
    generator = torch.Generator().manual_seed(1)
    for values in stream_parameters(model).values():
        for p in values.values():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    records = RECORDS[:6]
    count = sum(p.numel() for p in stream_parameters(model)[stream].values())
    trace = trace_of_hessian(model, records, stream)
    before = copy.deepcopy(model.state_dict())
    found = diag.noise_sensitivity(
        model, records, stream, noise_std=1e-3, draws=400, data_collator=collate, public_data=True
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert found.parameters == count and not found.private
    unit = 1e-6 * count
    assert abs(found.loss_change / unit - trace / (2 * count)) < 5 * found.standard_error / unit + 1e-3 * abs(
        trace / count
    )
    assert found.standard_error < 0.25 * abs(found.loss_change)
    assert found.value == max(found.loss_change, 0) / unit


def test_parameters_come_back_when_a_draw_fails(monkeypatch):
    model = researched(adapted())
    before = copy.deepcopy(model.state_dict())
    calls = []

    def failing(*_args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return 1.0

    monkeypatch.setattr(diag, "mean_loss", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        diag.noise_sensitivity(model, RECORDS, "shared", noise_std=0.1, data_collator=collate)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_ownership_drift_by_hand():
    """The stock model with the adapters merged into its weights tells where tokens go now."""
    model = researched(adapted(scale=0.8, block=SPARSE[1]))
    merged = tiny_model(torch.float64)
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            merged.get_submodule(name).weight.data += module.scaling * module.lora_B.data @ module.lora_A.data
    records = tiny_records(60, seed=2, shortest=3)
    base = base_owners(records)
    now = [brute_owner(stock_dispatch(merged, record)[BLOCK].sum(0).tolist()) for record in records]
    changed = sum(a != b for a, b in zip(base, now, strict=True)) / len(records)
    assert 0.1 < changed < 1
    mass = sum(abs(base.count(e) - now.count(e)) for e in range(EXPERTS)) / len(records)
    found = diag.ownership_drift(model, records, data_collator=collate, batch_size=7)
    assert found.changed == pytest.approx(changed) and found.mass == pytest.approx(mass)
    assert found.mass <= 2 * found.changed + 1e-12 and found.records == 60 and found.private
    assert current_owner_map(model, [collate(records[:20]), collate(records[20:])], BLOCK).tolist() == now
    assert owner_map(model, records, BLOCK, data_collator=collate).tolist() == base


def test_a_fresh_adapter_does_not_drift():
    model = attach_adapters(tiny_model(), LoraConfig(r=2), BLOCK)
    found = diag.ownership_drift(model, RECORDS, data_collator=collate, public_data=True)
    assert found.changed == found.mass == 0 and not found.private


def test_drift_of_trained_base_weights_is_refused():
    """Their base model is gone: every drift would be measured as zero."""
    model = train_weights(tiny_model(), "full", BLOCK)
    with pytest.raises(PrivacyConfigError, match="base weights"):
        diag.ownership_drift(model, RECORDS, data_collator=collate, public_data=True)


# --- what is meant for a public corpus -------------------------------------------------------------------------------


def test_public_sensitivities_are_those_of_the_two_streams():
    model = adapted()
    found = suggest.public_sensitivities(model, RECORDS, noise_std=0.05, draws=3, seed=4, data_collator=collate)
    for stream in ("shared", "expert"):
        alone = diag.noise_sensitivity(
            model, RECORDS, stream, noise_std=0.05, draws=3, seed=4, data_collator=collate, public_data=True
        )
        assert getattr(found, stream) == alone
    assert found.records == len(RECORDS) and not found.shared.private


def sensitivities(shared: float, expert: float, error: float = 1e-14, private: bool = False):
    return suggest.PublicSensitivities(
        diag.NoiseSensitivity("shared", 1000, 0.01, shared, error, private),
        diag.NoiseSensitivity("expert", 8000, 0.01, expert, error, private),
        100,
    )


SETTING = {"num_experts": 8, "target_epsilon": 4.0, "target_delta": 1e-5, "sample_rate": 0.02, "steps": 500}


def test_the_suggested_split_balances_the_marginal_costs():
    """At the optimum a little mu^2 moved from one stream to the other changes nothing (by numerical derivatives)."""
    found = suggest.suggest_budget_split(sensitivities(2e-3, 1e-4), shared_max_norm=0.5, expert_max_norm=0.1, **SETTING)
    mu2 = mu_of(4.0, 1e-5) ** 2
    # rise of the loss for unit sigma: lambda d (C)^2 with lambda d = dL / std^2
    prices = 2e-3 / 1e-4 * 0.5**2, 1e-4 / 1e-4 * (8 * 0.1) ** 2

    def cost(part: float, price: float) -> float:
        low, high = 1e-2, 1e3  # sigma by bisection on the forward formula
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if gdp_mu(middle, 0.02, 500) ** 2 < part else (middle, high)
        return price * low**2

    def slope(part: float, price: float) -> float:
        return (cost(part * 1.001, price) - cost(part * 0.999, price)) / (0.002 * part)

    m = found.shared_share
    assert slope(m * mu2, prices[0]) == pytest.approx(slope((1 - m) * mu2, prices[1]), rel=1e-3)
    assert found.rho == found.optimum and not found.bounded
    ratio = (1e-4 / 8000) / (2e-3 / 1000)
    assert found.eq39 == pytest.approx(
        optimal_budget_split(ratio, num_experts=8, shared_max_norm=0.5, expert_max_norm=0.1)
    )


def test_the_split_stays_within_its_limits_and_follows_the_sensitivities():
    splits = [suggest.suggest_budget_split(sensitivities(1e-3, e), **SETTING) for e in (1e-10, 1e-5, 1e-3, 1e-1)]
    assert [s.rho for s in splits] == sorted((s.rho for s in splits), reverse=True)
    assert splits[0].rho == 0.95 and splits[0].optimum > 0.95
    assert suggest.suggest_budget_split(sensitivities(1e-3, 1e-10), limits=(0.2, 0.8), **SETTING).rho == 0.8


def test_what_was_not_measured_is_bounded_or_refused():
    zero = suggest.suggest_budget_split(sensitivities(1e-3, -1e-6, error=1e-6), **SETTING)
    same = suggest.suggest_budget_split(sensitivities(1e-3, 2e-6, error=1e-12), **SETTING)
    assert zero.bounded and not same.bounded and zero.optimum == pytest.approx(same.optimum, rel=1e-6)
    with pytest.raises(PrivacyConfigError, match="rounding"):
        suggest.suggest_budget_split(sensitivities(1e-6, -1e-6, error=1e-6), **SETTING)


def test_private_measurements_are_refused():
    with pytest.raises(PrivacyConfigError, match="outside the accounting"):
        suggest.suggest_budget_split(sensitivities(1e-3, 1e-4, private=True), **SETTING)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_suggested_clipping_norms_by_hand(quantile, mode):
    model = adapted()
    owners, rows, weighted = base_owners(RECORDS), hand(model, RECORDS, False), hand(model, RECORDS, True)
    shared, expert = [], []
    for i in range(len(RECORDS)):
        parts = {n: g for n, g in rows[i][1].items() if ".expert_adapters." not in n}
        shared.append(math.sqrt(sum(float(g.square().sum()) for g in parts.values())))
        parts = {n: g[owners[i]] for n, g in weighted[i][1].items() if ".expert_adapters." in n}
        expert.append(math.sqrt(sum(float(g.square().sum()) for g in parts.values())))
    found = suggest.suggest_clipping_norms(
        model, RECORDS, quantile=quantile, data_collator=collate, batch_size=4, options=diag.GradientOptions(mode=mode)
    )
    assert found.shared == pytest.approx(np.quantile(shared, quantile), rel=1e-9)
    assert found.expert == pytest.approx(np.quantile(expert, quantile), rel=1e-9)
    assert found.records == len(RECORDS)


def test_no_labels_no_records_no_gradient():
    model = adapted()
    bare = [{k: v for k, v in collate(RECORDS[:2]).items() if k != "labels"}]
    for data in (bare, []):
        with pytest.raises(PrivacyConfigError, match="cannot be measured") as refusal:
            suggest.public_sensitivities(model, data, data_collator=collate)
        assert not any(letter.isdigit() for letter in str(refusal.value))  # they measure private records too
    with pytest.raises(PrivacyConfigError, match="no bound"):
        suggest.suggest_clipping_norms(adapted(expert_capacity=0), RECORDS, data_collator=collate)
