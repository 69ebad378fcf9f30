"""Several protected layers, trained one after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from raptor_hf import export_release, load_release, verify_release
from raptor_hf.errors import RaptorError
from raptor_hf.plan import stage_of
from tests.helpers import EXPERTS, collate, tiny_model, tiny_records
from tests.trainer.build import assert_refused, files, fix_draws, make_trainer, perturb_adapters, run
from tests.trainer.oracle import load_peft, loss_of, owners

RECORDS = tiny_records(16, seed=5)
BATCH, RATE, NORM = 8, 0.05, 0.02
DRAWS = [([0, 1, 2], [1, 3, 10, 11]), ([2, 15], [0, 1, 2, 4]), ([3], [5, 6, 7]), ([], list(range(16)))]


def test_each_stage_trains_its_layer_by_its_owners(tmp_path):
    """Four cycles: two train the experts of block 3, then two those of block 1, by hand with stock PEFT."""
    trainer = make_trainer(
        RECORDS, protected_layer="3,1", shared_noise_multiplier=0.0, expert_noise_multiplier=0.0, learning_rate=RATE,
        shared_max_grad_norm=1e-12, expert_max_grad_norm=NORM, residual_weighting=False,
    )  # fmt: skip
    perturb_adapters(trainer.model)
    fix_draws(trainer, DRAWS)
    trainer.model.save_pretrained(tmp_path / "start")
    model = load_peft(tmp_path / "start")
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    for cycle, (_, drawn) in enumerate(DRAWS):
        layer = 3 if cycle < 2 else 1
        owner = owners(RECORDS, layer)
        place = f"block.{layer}.layer.1.mlp.experts.expert_"
        steps = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad and place in n}
        for i in drawn:
            chosen = {n: p for n, p in model.named_parameters() if n in steps and f"{place}{owner[i]}." in n}
            grads = torch.autograd.grad(loss_of(model, RECORDS[i]), list(chosen.values()), allow_unused=True)
            length = sum(float(g.double().square().sum()) for g in grads if g is not None) ** 0.5
            for name, g in zip(chosen, grads, strict=True):
                if g is not None:
                    steps[name] += g * min(1.0, NORM / length if length else 1.0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in steps:
                    p -= RATE / (BATCH / EXPERTS) * steps[name]
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "end")
    end = load_file(tmp_path / "end" / "adapter_model.safetensors")
    expected = {n.replace(".default", ""): p for n, p in model.named_parameters() if "mlp.experts" in n and "lora" in n}
    assert len(expected) == 2 * EXPERTS * 4
    for name, value in expected.items():
        moved, error = (value - start[name]).abs().max(), (end[name] - value).abs().max()
        assert error <= 3e-4 * moved + 5e-7, name


def test_the_other_layers_experts_stay_as_they_are():
    trainer = make_trainer(24, protected_layer="1,3", max_steps=4)
    updates = run(trainer)
    for cycle, update in enumerate(updates):
        moved = {name.split("block.")[1][0] for name, t in update["expert"].items() if t.abs().sum() > 0}
        assert moved == {"1" if cycle < 2 else "3"}


def test_stages_cost_what_one_layer_costs_and_say_so(tmp_path):
    trainer = make_trainer(24, protected_layer="1,3", max_steps=4, output_dir=str(tmp_path))
    trainer.model.name_or_path = "google/switch-base-8"
    one = make_trainer(24, protected_layer="3", max_steps=4)
    for each in (trainer, one):
        each.train()
    statement = trainer.privacy_statement()
    assert statement.epsilon_spent == one.privacy_statement().epsilon_spent
    assert statement.protected_layer == "1,3" and "sequentially" in statement.parallel_composition
    (kept,) = [name for name in files(tmp_path) if name.endswith("owner_map.npz")]
    stored = np.load(tmp_path / kept)["owners"]
    for row, layer in zip(stored, (1, 3), strict=True):
        assert row.tolist() == owners(tiny_records(24, seed=5), layer)
    release = export_release(trainer, tmp_path / "release", base_revision="a" * 40)
    report = verify_release(release)
    assert report.private, report.findings
    loaded = load_release(release, base_model=tiny_model()).eval()
    batch = collate(RECORDS[:5])
    trainer.model.eval()
    with torch.no_grad():
        assert torch.allclose(loaded(**batch).logits, trainer.model(**batch).logits, atol=1e-5)


def test_a_run_in_stages_goes_on_in_its_stage(tmp_path):
    settings = dict(protected_layer="1,3", output_dir=str(tmp_path), save_strategy="steps", save_steps=3)
    make_trainer(24, max_steps=6, **settings).train()
    trainer = make_trainer(24, max_steps=6, **settings)
    recorded = []
    original = trainer.record_gradients
    trainer.record_gradients = lambda stream, *more: recorded.append(stream) or original(stream, *more)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    names = {name for stream in recorded if stream.name == "expert" for name in stream.parameters}
    assert names and all("block.3." in name for name in names)


@pytest.mark.parametrize("cycles, count", [(60, 2), (7, 3), (2, 3), (1, 1)])
def test_stages_are_of_nearly_equal_length(cycles, count):
    found = [stage_of(cycle, cycles, count) for cycle in range(cycles)]
    assert found == sorted(found) and found[0] == 0 and max(found) <= count - 1
    lengths = [found.count(stage) for stage in range(count)]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("layers", ["1,1", "3,last", "1,2", "1,"])
def test_layers_that_cannot_be_stages_are_refused(layers):
    assert_refused(lambda: make_trainer(24, protected_layer=layers), RaptorError, "layer")
