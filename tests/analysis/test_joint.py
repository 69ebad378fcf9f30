"""Diagnostics of methods without owners against stock autograd, one record and one expert at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from peft import LoraConfig

from raptor_hf.analysis import GradientOptions, joint_diagnostics, role_diagnostics
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.moe import attach_adapters
from raptor_hf.moe.weights import train_weights
from tests import families
from tests.analysis.build import researched
from tests.helpers import EXPERTS, SPARSE, collate, tiny_model, tiny_records

BLOCK = SPARSE[1]
RECORDS = tiny_records(9, seed=3, shortest=3)
NOISE = {"noise_multiplier": 1.7, "max_norm": 0.9, "expected_batch_size": 5.0}
MLP = f"encoder.block.{BLOCK}.layer.1.mlp."


@pytest.fixture(autouse=True)
def _exact(exact_norms):
    """Norms in the model's own dtype, so that comparisons are exact."""


def adapted(all_layers: bool):
    model = attach_adapters(tiny_model(torch.float64), LoraConfig(r=3, lora_alpha=5), BLOCK, all_layers=all_layers)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def by_autograd(model, items, together) -> list[dict[str, np.ndarray]]:
    """Of every record: gradient of its own loss in every trainable."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for item in items:
        loss = model(**together([item])).loss
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        rows.append(
            {
                name: (torch.zeros_like(p) if g is None else g).detach().to_dense().numpy()
                for (name, p), g in zip(trained.items(), grads, strict=True)
            }
        )
    return rows


def snr_by_hand(rows, part_of) -> tuple[list[float], int, bool]:
    """SNR of every expert; `part_of` takes (gradients of a record, expert) to that expert's numbers, flat."""
    sigma, norm, batch = NOISE.values()
    scaled, cut = [], False
    for row in rows:
        length = math.sqrt(sum(float((g**2).sum()) for g in row.values()))
        cut |= length > norm
        scaled.append((row, min(1.0, norm / length)))
    found, size = [], 0
    for expert in range(EXPERTS):
        # the mean of the release is p / B times the sum over the dataset, its noise sigma C / B a number
        total = sum(factor * part_of(row, expert) for row, factor in scaled)
        size = len(total)
        mean = batch / len(rows) / batch * total
        found.append(float(mean @ mean) / ((sigma * norm / batch) ** 2 * size))
    return found, size, cut


@pytest.mark.parametrize("mode", ["functorch", "hooks", "reference"])
@pytest.mark.parametrize("all_layers", [True, False])
def test_snr_of_adapters_by_hand(mode, all_layers):
    """`monolithic_lora` (adapters in both sparse layers, those of the protected one measured) and `matched_global`."""
    model = researched(adapted(all_layers))
    rows = by_autograd(model, RECORDS, collate)
    names = [name for name in rows[0] if name.startswith(MLP + "expert_adapters.")]
    others = [name for name in rows[0] if "expert_adapters." in name and name not in names]
    assert len(names) == 4 and len(others) == 4 * all_layers

    def part(row, expert):
        return np.concatenate([row[name][expert].ravel() for name in names])

    snr, size, cut = snr_by_hand(rows, part)
    found = joint_diagnostics(model, RECORDS, data_collator=collate, batch_size=4, mode=mode, **NOISE)
    assert cut and min(snr) > 0
    assert found.snr == pytest.approx(snr, rel=1e-5) and found.dimension == size and found.private
    assert found.mean_snr == pytest.approx(np.mean(snr), rel=1e-5)
    assert found.snr_cv == pytest.approx(np.std(snr) / np.mean(snr), rel=1e-5)


def test_snr_of_base_weights_by_hand():
    """`monolithic_full`: an expert's numbers are its two weight matrices."""
    model = train_weights(tiny_model(torch.float64), "full", BLOCK)
    rows = by_autograd(model, RECORDS, collate)

    def part(row, expert):
        return np.concatenate([row[f"{MLP}experts.expert_{expert}.{w}.weight"].ravel() for w in ("wi", "wo")])

    snr, size, cut = snr_by_hand(rows, part)
    options = {"data_collator": collate, "batch_size": 2, "mode": "reference", "public_data": True}
    found = joint_diagnostics(model, RECORDS, **options, **NOISE)
    assert cut and size == 2 * 16 * 20 and found.dimension == size and not found.private
    assert found.snr == pytest.approx(snr, rel=1e-5)


def test_snr_of_stacked_base_weights_by_hand():
    model = train_weights(families.build("olmoe", torch.float64), "full", 1)
    items = families.records(6)
    rows = by_autograd(model, items, families.collate)
    names = [name for name in rows[0] if ".layers.1.mlp.experts." in name or name.startswith("layers.1.mlp.experts.")]
    assert len(names) == 2 and all(len(rows[0][name]) == EXPERTS for name in names)

    def part(row, expert):
        return np.concatenate([row[name][expert].ravel() for name in names])

    snr, size, _ = snr_by_hand(rows, part)
    found = joint_diagnostics(model, items, data_collator=families.collate, mode="reference", public_data=True, **NOISE)
    assert found.snr == pytest.approx(snr, rel=1e-5) and found.dimension == size


@pytest.mark.parametrize("which", ["adapters", "full"])
def test_roles_without_owners_by_hand(which):
    model = adapted(all_layers=True) if which == "adapters" else train_weights(tiny_model(torch.float64), "full", BLOCK)
    rows = by_autograd(model, RECORDS, collate)

    def role(name: str) -> str:
        if name.startswith("score."):
            return "head"
        return "expert" if ".expert" in name else "router" if ".router." in name else "shared"

    norms, counts = dict.fromkeys(("shared", "router", "head", "expert"), 0.0), {}
    for row in rows:
        for kind in norms:
            norms[kind] += math.sqrt(sum(float((g**2).sum()) for n, g in row.items() if role(n) == kind)) / len(rows)
    for kind in norms:
        counts[kind] = sum(g.size for n, g in rows[0].items() if role(n) == kind)
    assert (norms["router"] > 0) == (which == "full") and min(norms["shared"], norms["head"], norms["expert"]) > 0
    mode = "functorch" if which == "adapters" else "reference"
    options = GradientOptions(mode=mode, owners=False)
    found = role_diagnostics(model, RECORDS, data_collator=collate, batch_size=4, options=options, public_data=True)
    assert found.norms == pytest.approx(norms, rel=1e-9, abs=1e-12) and found.parameters == counts
    total, size = sum(norms.values()), sum(counts.values())
    assert found.mismatch == pytest.approx(sum(abs(norms[k] / total - counts[k] / size) for k in norms) / 2, rel=1e-9)


def test_a_model_whose_experts_are_frozen_is_refused():
    model = attach_adapters(tiny_model(), LoraConfig(r=2), BLOCK, trains=("shared",))
    with pytest.raises(PrivacyConfigError, match="nothing is trained"):
        joint_diagnostics(model, RECORDS, data_collator=collate, public_data=True, **NOISE)
    # what it does train has roles all the same
    found = role_diagnostics(model, RECORDS, data_collator=collate, public_data=True)
    assert found.norms["expert"] == 0 == found.parameters["expert"] and found.norms["head"] > 0
