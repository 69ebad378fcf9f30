"""Every method and ablation runs two cycles on the bundled model, and its statement is checked by other accountants."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from opacus.accountants import PRVAccountant

from raptor_hf import SwitchTransformersForSequenceClassification
from raptor_hf.assets import tiny_switch_path
from raptor_hf.methods import METHODS
from tests.accountants import pld_epsilon
from tests.helpers import tiny_records
from tests.trainer.build import make_trainer

ABLATIONS = {
    "batch denominator": {"expert_denominator": "batch"},
    "global clip": {"clipping": "global"},
    "no alternating": {"alternating": False},
    "no residual weight": {"residual_weighting": False},
    "residual gamma": {"residual_gamma": 0.5},
}
CASES = [(name, name, {}) for name in METHODS] + [(name, "raptor", changes) for name, changes in ABLATIONS.items()]
N, B, DELTA = 24, 8, 1e-3


@functools.cache
def opacus_epsilon(mechanisms: tuple[tuple[float, float, int], ...]) -> float:
    accountant = PRVAccountant()
    accountant.history = list(mechanisms)
    return float(accountant.get_epsilon(DELTA, eps_error=0.005, delta_error=DELTA / 1000))


@pytest.mark.parametrize(("method", "changes"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
@pytest.mark.filterwarnings("ignore:`method=")
def test_two_cycles(method, changes):
    model = SwitchTransformersForSequenceClassification.from_pretrained(tiny_switch_path(), num_labels=3)
    private = METHODS[method].private
    noise = {"target_epsilon": 4.0, "target_delta": DELTA} if private else {}
    if not private:
        noise = {"shared_noise_multiplier": None, "expert_noise_multiplier": None}
    trainer = make_trainer(tiny_records(N, seed=5), model, method=method, expected_batch_size=B, **noise, **changes)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert trainer.state.global_step == 2
    after = {name: p.detach() for name, p in trainer.model.named_parameters()}
    moved = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert all(after[name].isfinite().all() for name in before)
    statement = trainer.privacy_statement()
    if not private:
        assert moved and statement.verdict.startswith("NOT PRIVATE") and statement.epsilon_spent is None
        return
    assert moved == set(before), "noise reaches every trainable"
    one = len(METHODS[method].mechanisms) == 1 or changes.get("clipping") == "global"
    mechanisms = tuple((s.noise_multiplier, s.sample_rate, s.steps_taken) for s in statement.streams.values())
    assert len(mechanisms) == (1 if one else 2)
    # an expert's sum is divided by B / E (Eq. 9), or by B in the ablation; a sum over all records by B
    expert = B if changes.get("expert_denominator") == "batch" else B / 8
    stated = {name: stream.denominator for name, stream in statement.streams.items()}
    assert stated == {name: {"shared": B, "expert": expert}[name] for name in statement.streams}
    assert {(rate, steps) for _, rate, steps in mechanisms} == {(B / N, 2)}
    assert 0.98 * 4.0 < statement.epsilon_spent <= 4.0, "the whole budget, and no more"
    tight = pld_epsilon(mechanisms, DELTA)
    assert tight <= statement.epsilon_spent * 1.002
    for found in (tight, opacus_epsilon(mechanisms)):
        assert math.isclose(found, statement.epsilon_spent, rel_tol=0.02)
