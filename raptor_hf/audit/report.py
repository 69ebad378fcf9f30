"""What an audit found, as JSON, Markdown and a picture. All three are private: they are computed from the records."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from raptor_hf.analysis.plots import plot_roc
from raptor_hf.audit.attacks import loss_attack
from raptor_hf.audit.folder import close_permissions, write_text
from raptor_hf.audit.lira import lira_online
from raptor_hf.audit.roc import roc_curve, summarise_attack
from raptor_hf.audit.shadows import Cell, Design, ShadowResults

__all__ = [
    "attack_cell",
    "check_design",
    "largest_auc",
    "membership_markdown",
    "public_summary",
    "spread",
    "write_report",
]

SCHEMA_VERSION = 1
RATES = (0.001, 0.01)
_ATTACKS = {"loss": "loss", "lira": "LiRA"}
_PACKAGES = ("raptor-hf", "torch", "transformers", "peft", "numpy", "scipy")


def versions() -> dict[str, str]:
    """Versions of the packages that the results depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def spread(values: np.ndarray, blocks: np.ndarray, confidence: float) -> dict[str, Any]:
    """Mean over the shadows, and Student's interval over the blocks' means.

    Shadows of one block share a shuffle of the pool, so their figures depend on each other; the blocks' do not.
    """
    means = np.array([values[blocks == block].mean() for block in np.unique(blocks)])
    mean = float(values.mean())
    if len(means) < 2 or not np.isfinite(means).all():
        return {"mean": mean, "interval": None}
    half = float(stats.t.isf((1 - confidence) / 2, len(means) - 1) * means.std(ddof=1) / math.sqrt(len(means)))
    return {"mean": mean, "interval": [max(0.0, mean - half), min(1.0, mean + half)]}


def attack_scores(found: ShadowResults, design: Design) -> dict[str, np.ndarray]:
    """Attack -> (K, n) scores, higher for members: each shadow in turn is the model under attack."""
    lira = np.empty_like(found.confidences)
    for target in range(len(lira)):
        others = design.shadows_for(target)
        lira[target] = lira_online(found.confidences[target], found.confidences[others], design.masks[others])
    return {"loss": loss_attack(found.losses), "lira": lira}


def check_design(design: Design) -> None:
    """Refuse a design by which some record could not be attacked, before a model is trained for it."""
    noise = np.random.default_rng(0).normal(size=design.masks.shape)
    for target in range(len(noise)):
        others = design.shadows_for(target)
        lira_online(noise[target], noise[others], design.masks[others])


def largest_auc(epsilon: float | None, delta: float) -> float:
    """The largest AUC of any attack on an (epsilon, delta)-DP model; 1 without a claim.

    TPR <= e^eps FPR + delta and, by the other direction, TPR <= 1 - e^-eps (1 - delta - FPR), for every threshold; the
    area under the smaller of both. Averages over records obey it too.
    """
    if epsilon is None or math.isinf(epsilon):
        return 1.0
    # the two lines cross at this false positive rate; beyond 1 - delta everything is allowed
    cross = (1 - delta) / (1 + math.exp(epsilon))
    top = 1 - cross
    return cross * (delta + top) / 2 + (1 - delta - cross) * (top + 1) / 2 + delta


def attack_cell(cell: Cell, found: ShadowResults, design: Design, confidence: float) -> dict[str, Any]:
    """The figures of one line of the table: means over the attacked shadows, with intervals over the blocks."""
    row: dict[str, Any] = {
        "name": cell.name,
        "method": cell.method,
        "target_epsilon": cell.epsilon,
        "epsilon": None if np.isinf(found.epsilons).any() else float(found.epsilons.max()),
        "delta": float(found.deltas.max()),
        "largest_auc": largest_auc(float(found.epsilons.max()), float(found.deltas.max())),
        "accuracy": spread(found.accuracies, design.blocks, confidence),
        "seconds": float(found.seconds.mean()),
        "attacks": {},
    }
    for name, scores in attack_scores(found, design).items():
        each = [summarise_attack(s, m, RATES, confidence) for s, m in zip(scores, design.masks, strict=True)]
        figures = {"auc": spread(np.array([one.auc for one in each]), design.blocks, confidence)}
        for place, rate in enumerate(RATES):
            values = np.array([one.points[place].tpr for one in each])
            figures[f"tpr_at_fpr_{rate:g}"] = spread(values, design.blocks, confidence)
        row["attacks"][name] = figures
    return row


def _percent(value: Mapping[str, Any], digits: int = 2) -> str:
    return _with_interval(value, lambda x: f"{100 * x:.{digits}f}")


def _plain(value: Mapping[str, Any], digits: int = 3) -> str:
    return _with_interval(value, lambda x: f"{x:.{digits}f}")


def _with_interval(value: Mapping[str, Any], show: Any) -> str:
    if not math.isfinite(value["mean"]):
        return "-"
    if value["interval"] is None:
        return show(value["mean"])
    low, high = value["interval"]
    return f"{show(value['mean'])} ({show(low)}-{show(high)})"


def membership_markdown(report: Mapping[str, Any]) -> str:
    """The paper's Table 3 with intervals, and TPR at 1 % FPR beside it."""
    lines = [
        "# Membership inference by shadow models",
        "",
        f"{report['shadows']} shadow models a line; each is trained on {report['members']} of a pool of "
        f"{report['pool']} records and attacked with the shadows of the other blocks. Means over the attacked models, "
        f"with {report['confidence']:.0%} Student intervals over {report['blocks']} independent blocks. Chance is an "
        "AUC of 0.5 and a TPR equal to the FPR.",
        "",
        "| method | epsilon | largest AUC it allows | accuracy % | loss AUC | loss TPR % @0.1% FPR "
        "| LiRA AUC | LiRA TPR % @0.1% FPR | loss TPR % @1% FPR | LiRA TPR % @1% FPR |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["cells"]:
        loss, lira = row["attacks"]["loss"], row["attacks"]["lira"]
        epsilon = "inf" if row["epsilon"] is None else f"{row['epsilon']:.3g} (delta {row['delta']:.2g})"
        columns = [
            row["method"],
            epsilon,
            f"{row['largest_auc']:.3f}",
            _percent(row["accuracy"]),
            _plain(loss["auc"]),
            _percent(loss["tpr_at_fpr_0.001"]),
            _plain(lira["auc"]),
            _percent(lira["tpr_at_fpr_0.001"]),
            _percent(loss["tpr_at_fpr_0.01"]),
            _percent(lira["tpr_at_fpr_0.01"]),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    lines += [
        "",
        "An attack that fails proves nothing: this is an illustration, and the guarantee is the accountant's. These "
        "figures are computed from private records and are not covered by any epsilon.",
        "",
    ]
    return "\n".join(lines)


def public_summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """What may be published of an audit, if its owner chooses to: rates and bounds over all records, nothing of one.

    The summary is still a function of the private records outside every epsilon, and says so.
    """
    kept = ("schema_version", "kind", "confidence", "packages", "shadows", "members", "pool", "canaries", "cells")
    found = {key: report[key] for key in kept if key in report}
    shown = ("name", "claimed_epsilon", "delta", "bounds", "measured", "verdict")
    found["runs"] = [{key: run[key] for key in shown} for run in report.get("runs", [])]
    found["note"] = (
        "Computed from private records and published by the choice of their holder; not covered by the privacy "
        "statement. An audit can refute a claimed epsilon and never prove one."
    )
    return {key: value for key, value in found.items() if value not in ([], None)}


def write_report(folder: Path, report: Mapping[str, Any], markdown: str) -> None:
    """`results.json` and `RESULTS.md` in the audit's folder, readable by its owner alone."""
    write_text(folder / "results.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    write_text(folder / "RESULTS.md", markdown)
    close_permissions(folder)


def plot(folder: Path, cells: Sequence[Cell], results: Mapping[str, ShadowResults], design: Design) -> None:
    """`roc.png`: both attacks on all shadows of every cell, on logarithmic axes from 1e-4."""
    curves = {}
    for cell in cells:
        for name, scores in attack_scores(results[cell.name], design).items():
            roc = roc_curve(scores.ravel(), design.masks.ravel())
            curves[f"{cell.name}, {_ATTACKS[name]}"] = (roc.fpr, roc.tpr)
    plot_roc(curves, folder / "roc.png", lowest=1e-4)
    close_permissions(folder)
