"""Models of runs, for the tests of this folder."""

from __future__ import annotations

from torch import nn

from raptor_hf.state import PrivacyLedger, PrivacyPlan


def of_a_run(model: nn.Module, *, research: bool) -> nn.Module:
    """The model as a trainer leaves it: bound to the ledger of a run, of `research_diagnostics` or not."""
    plan = PrivacyPlan(1.0, 1.0, 0.1, 10, 1e-5, None, "prv", 100, 10, 3, research_diagnostics=research)
    model.raptor_ledger = PrivacyLedger(plan, shared_steps=2, expert_steps=2)
    return model


def researched(model: nn.Module) -> nn.Module:
    """A model on whose private records diagnostics may look."""
    return of_a_run(model, research=True)
