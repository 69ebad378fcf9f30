"""What the figures show: the numbers in their artists, not only that they are drawn."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from raptor_hf.analysis import plots
from raptor_hf.analysis.corpus_size import corpus_size_study, owners_by_layer
from raptor_hf.moe import routing_table
from tests.helpers import EXPERTS, SPARSE, collate, tiny_model, tiny_records

with (Path(__file__).parent.parent / "oracles" / "table7_routing_entropy.csv").open() as file:
    PAPER = list(csv.DictReader(file))


def points(line) -> list[tuple[float, float]]:
    return [tuple(map(float, pair)) for pair in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def labelled(axes) -> dict:
    handles, labels = axes.get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True))


TABLE = [
    {"block": 1, "normalised_entropy": 0.9, "counts": [40, 60]},
    {"block": 3, "normalised_entropy": 0.4, "counts": [90, 10]},
]


def test_routing_table():
    figure = plots.plot_routing_table(TABLE, chosen=3)
    left, right = figure.axes[:2]
    assert [bar.get_width() for bar in left.patches] == [0.9, 0.4]
    assert [t.get_text() for t in left.get_yticklabels()] == ["block 1", "block 3 (protected)"]
    assert left.patches[0].get_facecolor() != left.patches[1].get_facecolor()
    assert right.images[0].get_array().tolist() == [[0.4, 0.6], [0.9, 0.1]]
    assert "100 public records" in figure.get_suptitle()


def test_a_path_saves_and_the_figure_comes_back(tmp_path):
    target = tmp_path / "new" / "table.png"
    figure = plots.plot_routing_table(TABLE, target)
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and figure.axes
    plots.plot_roc({"a": ([0, 1], [0, 1])}, tmp_path / "roc.pdf")
    assert (tmp_path / "roc.pdf").read_bytes()[:4] == b"%PDF"


def test_no_global_state():
    """In a fresh process: pyplot is never imported, and no setting of matplotlib changes."""
    code = (
        "import sys, matplotlib\n"
        "before = dict(matplotlib.rcParams)\n"
        "from raptor_hf.analysis import plot_roc\n"
        "plot_roc({'a': ([0, 1], [0, 1])})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert dict(matplotlib.rcParams) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- size of the corpus


def study(repeats: int = 40):
    rng = np.random.default_rng(0)
    owners = {
        3: torch.from_numpy(rng.choice(4, 300, p=[0.3, 0.3, 0.2, 0.2])),
        1: torch.from_numpy(rng.choice(4, 300, p=[0.85, 0.05, 0.05, 0.05])),
        5: torch.from_numpy(rng.choice(4, 300, p=[0.28, 0.26, 0.24, 0.22])),
    }
    return owners, corpus_size_study(owners, 4, [5, 40, 300], repeats=repeats, seed=1)


def test_the_study_at_the_size_of_the_corpus_is_exact():
    owners, found = study()
    for block, owner in owners.items():
        expected = stats.entropy(np.bincount(owner.numpy(), minlength=4)) / math.log(4)
        assert found.entropies[block][2] == pytest.approx(expected, abs=1e-12)
    assert found.full == 5 and (found.chosen[2] == 5).all() and found.agreement()[2] == 1
    assert found.entropies[3].shape == (3, 40)


def test_smaller_parts_are_biased_down_and_spread():
    """Entropy of a sample underestimates; its mean over all parts of two records is known exactly."""
    owner = torch.tensor([0, 0, 0, 1, 1, 2])
    found = corpus_size_study({0: owner}, 3, [2], repeats=4_000, seed=3)
    same = (math.comb(3, 2) + math.comb(2, 2)) / math.comb(6, 2)  # both of one owner: entropy 0, else log 2
    expected = (1 - same) * math.log(2) / math.log(3)
    assert found.entropies[0].mean() == pytest.approx(expected, abs=0.02)
    assert set(np.round(found.entropies[0].ravel(), 6)) == {0.0, round(math.log(2) / math.log(3), 6)}
    _, other = study()
    assert other.entropies[3][0].mean() < other.entropies[3][1].mean() < other.entropies[3][2].mean()
    assert other.entropies[3][0].std() > other.entropies[3][1].std() > 0
    assert other.agreement()[0] < 1


def test_each_part_chooses_its_own_best_layer():
    _, found = study()
    for i in range(3):
        for j in range(40):
            best = max(sorted(found.entropies), key=lambda block: found.entropies[block][i, j])
            assert found.chosen[i, j] == best


def test_owners_by_layer_have_the_counts_of_the_routing_table():
    records = tiny_records(30)
    owners = owners_by_layer(tiny_model(), records, data_collator=collate, batch_size=7)
    assert sorted(owners) == list(SPARSE)
    for row in routing_table(tiny_model(), records, data_collator=collate):
        assert torch.bincount(owners[row["block"]], minlength=EXPERTS).tolist() == row["counts"]


def test_a_part_larger_than_the_corpus_is_refused():
    with pytest.raises(ValueError, match="for 3 records"):
        corpus_size_study({0: torch.tensor([0, 1, 1])}, 2, [4])


def test_entropy_vs_size():
    _, found = study()
    left, right = plots.plot_entropy_vs_size(found).axes
    lines = labelled(left)
    assert list(lines) == ["block 1", "block 3", "block 5 (chosen)"]
    means = found.entropies[5].mean(axis=1)
    assert points(lines["block 5 (chosen)"]) == [
        (s, pytest.approx(m)) for s, m in zip((5, 40, 300), means, strict=True)
    ]
    band = left.collections[1].get_paths()[0].vertices  # of block 3
    low, high = np.quantile(found.entropies[3], [0.05, 0.95], axis=1)
    for size, a, b in zip((5, 40, 300), low, high, strict=True):
        heights = band[np.isclose(band[:, 0], size), 1]
        assert heights.min() == pytest.approx(a) and heights.max() == pytest.approx(b)
    assert points(right.lines[0]) == [
        (s, pytest.approx(v)) for s, v in zip((5, 40, 300), found.agreement(), strict=True)
    ]
    assert left.get_xscale() == right.get_xscale() == "log"


def test_transfer_pairs_the_layers_by_block():
    public = {
        task: [
            {"block": int(r["encoder_block"]), "normalised_entropy": float(r["normalised_entropy"])}
            for r in PAPER
            if r["task"] == task
        ]
        for task in ("SST-2", "MNLI")
    }
    other = {
        task: [{**row, "normalised_entropy": row["block"] / 20} for row in rows[::-1]] for task, rows in public.items()
    }
    axes = plots.plot_transfer(public, other, other_name="development records").axes[0]
    lines = labelled(axes)
    assert points(lines["equal"]) == [(0, 0), (1, 1)]
    assert points(lines["SST-2"]) == [(row["normalised_entropy"], row["block"] / 20) for row in public["SST-2"]]
    notes = {(note.xy[0], note.get_text()) for note in axes.texts}
    assert (0.972, "1") in notes and (0.304, "9") in notes and len(axes.texts) == 12
    assert "development records" in axes.get_ylabel()
    with pytest.raises(ValueError, match="different blocks"):
        plots.plot_transfer({"a": TABLE}, {"a": TABLE[:1]})


SWEEP = [
    {"epsilon": e, "rho": r, "accuracy": 80 + e - 10 * abs(r - 0.9) + noise}
    for e in (1.0, 8.0)
    for r in (0.7, 0.9)
    for noise in (-1.0, 1.0)
][:-2]  # the last setting was not run


def test_budget_sweep_has_means_spreads_and_a_gap():
    left, right = plots.plot_budget_sweep(SWEEP).axes[:2]
    grid = left.images[0].get_array()
    assert np.ma.filled(grid, np.nan).tolist() == [
        [pytest.approx(79), pytest.approx(81)],
        [pytest.approx(86), pytest.approx(math.nan, nan_ok=True)],
    ]
    assert [t.get_text() for t in left.texts] == ["79", "81", "86"]
    assert [t.get_text() for t in left.get_xticklabels()] == ["0.7", "0.9"]
    assert [t.get_text() for t in left.get_yticklabels()] == ["1", "8"]
    bars = labelled(right)
    line, _, (segments,) = bars["epsilon = 1"].lines
    assert points(line) == [(0.7, pytest.approx(79)), (0.9, pytest.approx(81))]
    first = segments.get_segments()[0]
    assert first[:, 1].tolist() == [pytest.approx(79 - math.sqrt(2)), pytest.approx(79 + math.sqrt(2))]
    assert points(bars["epsilon = 8"].lines[0]) == [(0.7, pytest.approx(86))]


def test_expert_snr():
    axes = plots.plot_expert_snr({"raptor": [1e-3, 3e-3, 0.0], "monolithic": [1e-5, 1e-5, 1e-5]}).axes[0]
    assert axes.get_yscale() == "log"
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == [1e-3, 3e-3, 0.0, 1e-5, 1e-5, 1e-5]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    assert centres == pytest.approx([-0.2, 0.8, 1.8, 0.2, 1.2, 2.2])
    cv = np.std([1e-3, 3e-3, 0]) / np.mean([1e-3, 3e-3, 0])
    assert list(labelled(axes)) == [f"raptor: mean 1.33e-03, CV {cv:.2f}", "monolithic: mean 1.00e-05, CV 0.00"]
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([4e-3 / 3, 1e-5])


def test_accuracy_vs_epsilon():
    rows = [{"method": "raptor", "epsilon": e, "accuracy": a} for e, a in ((8, 71), (1, 60), (8, 73), (1, 62))]
    rows += [{"method": "lora", "epsilon": math.inf, "accuracy": a} for a in (78, 80)]
    axes = plots.plot_accuracy_vs_epsilon(rows, chance=50).axes[0]
    found = labelled(axes)
    line, _, (segments,) = found["raptor"].lines
    assert points(line) == [(1, 61), (8, 72)]
    assert segments.get_segments()[1][:, 1].tolist() == [
        pytest.approx(72 - math.sqrt(2)),
        pytest.approx(72 + math.sqrt(2)),
    ]
    assert list(found["lora (not private)"].get_ydata()) == [79, 79]
    assert list(found["guessing"].get_ydata()) == [50, 50]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "8"] and axes.get_xscale() == "log"


def test_roc():
    rng = np.random.default_rng(0)
    member, other = rng.normal(1, 1, 3_000), rng.normal(0, 1, 3_000)
    cuts = np.linspace(-5, 6, 400)[::-1]
    fpr, tpr = ([float((scores >= c).mean()) for c in cuts] for scores in (other, member))
    axes = plots.plot_roc({"LiRA": (fpr[::-1], tpr[::-1]), "loss": ([0, 0.5, 1], [0, 0.5, 1])}).axes[0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert axes.get_xlim() == axes.get_ylim() == (1e-4, 1)
    lines = labelled(axes)
    assert points(lines["guessing"]) == [(1e-4, 1e-4), (1, 1)]
    best = max(t for f, t in zip(fpr, tpr, strict=True) if f <= 1e-3)
    drawn = points(lines[f"LiRA: TPR {best:.2%} at 0.1 % FPR"])
    assert drawn == [(max(f, 1e-4), max(t, 1e-4)) for f, t in sorted(zip(fpr, tpr, strict=True))]
    assert points(lines["loss: TPR 0.00% at 0.1 % FPR"])[1:] == [(0.5, 0.5), (1, 1)]
    with pytest.raises(ValueError, match="one length"):
        plots.plot_roc({"a": ([0, 1], [0])})
