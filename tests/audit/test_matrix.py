"""Broken trainers against attacks, and the true one against all of them. `python -m tests.audit.matrix` prints it."""

from __future__ import annotations

import math

import pytest

from raptor_hf.audit.report import largest_auc
from tests.audit.matrix import CHIEF, canaries, judge, quietly, shadows
from tests.trainer.mutations import MUTATIONS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# What one run with canaries finds, by the bound or by what is measured along the canaries.
FOUND = (*CHIEF, "Noise without the clipping norm in its scale")


def test_the_variants_exist():
    assert set(FOUND) <= set(MUTATIONS)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
def test_the_largest_auc_that_a_claim_allows(epsilon):
    """The area under min(1, e^eps x + delta, 1 - e^-eps (1 - delta - x)), by the trapezoid rule."""
    delta, steps = 0.01, 200_000
    grid = [i / steps for i in range(steps + 1)]
    best = [min(1.0, math.exp(epsilon) * x + delta, 1 - math.exp(-epsilon) * (1 - delta - x)) for x in grid]
    area = (sum(best) - (best[0] + best[-1]) / 2) / steps
    assert largest_auc(epsilon, delta) == pytest.approx(area, abs=1e-4)
    assert largest_auc(epsilon, 0.0) == pytest.approx(math.exp(epsilon) / (1 + math.exp(epsilon)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_canaries_catch(name):
    found = judge(name, ("one-run", "measured"))
    assert "caught" in found.values()


@pytest.mark.slow
def test_shadow_models_catch_missing_noise():
    with quietly("Noise divided by the batch size twice"):
        row = shadows()
    for attack in row["attacks"].values():
        assert attack["auc"]["mean"] > largest_auc(row["epsilon"], row["delta"])


@pytest.mark.slow
def test_shadow_models_find_nothing_in_the_true_code():
    with quietly(""):
        row = shadows()
    for attack in row["attacks"].values():
        assert attack["auc"]["interval"][0] < largest_auc(row["epsilon"], row["delta"])
        assert 0.3 < attack["auc"]["mean"] < 0.7


@pytest.mark.slow
def test_the_true_code_never_exceeds_its_claim():
    """Twenty runs."""
    for _ in range(20):
        with quietly(""):
            verdict = canaries()
        assert verdict["holds"], verdict["verdict"]
