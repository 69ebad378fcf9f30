"""Empirical privacy: membership attacks, and lower bounds on epsilon. Everything it finds is private.

What needs the trainer is imported on first use, so that the command line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raptor_hf.audit.attacks import calibrated_loss_attack, loss_attack, rmia_attack
from raptor_hf.audit.bounds import (
    EpsilonBound,
    epsilon_from_mu,
    epsilon_lower_bound,
    mu_lower_bound,
    split_epsilon_bound,
)
from raptor_hf.audit.lira import lira_leave_one_out, lira_offline, lira_online
from raptor_hf.audit.one_run import OneRunAudit, guess_membership, one_run_audit, one_run_epsilon, one_run_p_value
from raptor_hf.audit.roc import (
    AttackSummary,
    OperatingPoint,
    Roc,
    auc,
    auc_interval,
    clopper_pearson,
    roc_curve,
    summarise_attack,
    tpr_at_fpr,
)
from raptor_hf.audit.scores import RecordScores, record_scores

if TYPE_CHECKING:
    from raptor_hf.audit.canaries import Canaries, CanaryTrainer, Observer, draw_canaries
    from raptor_hf.audit.verdict import CanaryResult, bound_run

_WITH_TRAINER = {
    "Canaries": "canaries",
    "CanaryResult": "verdict",
    "CanaryTrainer": "canaries",
    "Observer": "canaries",
    "bound_run": "verdict",
    "draw_canaries": "canaries",
}

__all__ = [
    "AttackSummary",
    "Canaries",
    "CanaryResult",
    "CanaryTrainer",
    "EpsilonBound",
    "Observer",
    "OneRunAudit",
    "OperatingPoint",
    "RecordScores",
    "Roc",
    "auc",
    "auc_interval",
    "bound_run",
    "calibrated_loss_attack",
    "clopper_pearson",
    "draw_canaries",
    "epsilon_from_mu",
    "epsilon_lower_bound",
    "guess_membership",
    "lira_leave_one_out",
    "lira_offline",
    "lira_online",
    "loss_attack",
    "mu_lower_bound",
    "one_run_audit",
    "one_run_epsilon",
    "one_run_p_value",
    "record_scores",
    "rmia_attack",
    "roc_curve",
    "split_epsilon_bound",
    "summarise_attack",
    "tpr_at_fpr",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TRAINER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WITH_TRAINER[name]}"), name)
    globals()[name] = value
    return value
