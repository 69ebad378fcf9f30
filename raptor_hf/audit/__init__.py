"""Empirical privacy: membership attacks, and lower bounds on epsilon. Everything it finds is private."""

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

__all__ = [
    "AttackSummary",
    "EpsilonBound",
    "OneRunAudit",
    "OperatingPoint",
    "RecordScores",
    "Roc",
    "auc",
    "auc_interval",
    "calibrated_loss_attack",
    "clopper_pearson",
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
