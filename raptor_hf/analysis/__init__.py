"""What the paper says about utility: formulas (`theory`, `budget`), measurements, and plots of both.

`diagnostics`, `joint` and `drift` take records that are declared public, and others in runs of `research_diagnostics`
only. `suggest`, `corpus_size` and the routing table are for a public corpus.
"""

from raptor_hf.analysis.budget import NoiseCosts, OptimalSplit, optimal_split
from raptor_hf.analysis.corpus_size import CorpusSizeStudy, corpus_size_study, owners_by_layer
from raptor_hf.analysis.diagnostics import (
    ExpertDiagnostics,
    GradientOptions,
    NoiseSensitivity,
    OwnershipDrift,
    RoleDiagnostics,
    expert_diagnostics,
    noise_sensitivity,
    ownership_drift,
    role_diagnostics,
)
from raptor_hf.analysis.drift import OwnershipDriftCallback
from raptor_hf.analysis.joint import JointDiagnostics, joint_diagnostics
from raptor_hf.analysis.plots import (
    plot_accuracy_vs_epsilon,
    plot_budget_sweep,
    plot_entropy_vs_size,
    plot_expert_snr,
    plot_roc,
    plot_routing_table,
    plot_transfer,
)
from raptor_hf.analysis.suggest import (
    BudgetSplit,
    ClippingNorms,
    PublicSensitivities,
    public_sensitivities,
    suggest_budget_split,
    suggest_clipping_norms,
)
from raptor_hf.analysis.theory import ExpertError, expert_error

__all__ = [
    "BudgetSplit",
    "ClippingNorms",
    "CorpusSizeStudy",
    "ExpertDiagnostics",
    "ExpertError",
    "GradientOptions",
    "JointDiagnostics",
    "NoiseCosts",
    "NoiseSensitivity",
    "OptimalSplit",
    "OwnershipDrift",
    "OwnershipDriftCallback",
    "PublicSensitivities",
    "RoleDiagnostics",
    "corpus_size_study",
    "expert_diagnostics",
    "expert_error",
    "joint_diagnostics",
    "noise_sensitivity",
    "optimal_split",
    "owners_by_layer",
    "ownership_drift",
    "plot_accuracy_vs_epsilon",
    "plot_budget_sweep",
    "plot_entropy_vs_size",
    "plot_expert_snr",
    "plot_roc",
    "plot_routing_table",
    "plot_transfer",
    "public_sensitivities",
    "role_diagnostics",
    "suggest_budget_split",
    "suggest_clipping_norms",
]
