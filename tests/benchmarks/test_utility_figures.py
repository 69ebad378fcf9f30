"""Figures 4 to 7: from finished runs, and from a stock model's router."""

from __future__ import annotations

import csv
import math
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.utility.figures import budget_rows, default_sizes, main
from benchmarks.utility.report import RUN_FIELDS
from benchmarks.utility.tasks import load, load_base_model
from tests.helpers import brute_owner, stock_dispatch

BLOCKS = (1, 3)
PNG = b"\x89PNG\r\n\x1a\n"
FLAGS = ["--model", "tiny", "--public-size", "60", "--max-length", "12"]


def _runs(path: Path, *runs: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, RUN_FIELDS)
        writer.writeheader()
        for number, run in enumerate(runs):
            values = {"key": f"{path.parent.name}-{number}", "variant": "raptor", "seed": 0, "epsilon": 1.0, **run}
            writer.writerow({**dict.fromkeys(RUN_FIELDS, "1"), **values})
    return path


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def _entropies(texts: list[str]) -> dict[int, float]:
    """H / log E of the owners at every sparse layer, by the stock model and a loop."""
    model, tokenizer = load_base_model("tiny", 2)
    owners: dict[int, Counter] = {block: Counter() for block in BLOCKS}
    for text in texts:
        record = {"input_ids": tokenizer(text, truncation=True, max_length=12)["input_ids"]}
        for block, sent in stock_dispatch(model, record, BLOCKS).items():
            owners[block][brute_owner(sent.sum(0).tolist())] += 1
    return {
        block: -sum(n / len(texts) * math.log(n / len(texts)) for n in count.values()) / math.log(8)
        for block, count in owners.items()
    }


def test_a_budget_sweep_is_the_runs_of_several_folders(tmp_path):
    one = _runs(
        tmp_path / "a" / "runs.csv", {"budget_split": 0.7, "accuracy": 0.61},
        {"budget_split": 0.7, "accuracy": 0.65, "seed": 1}, {"variant": "shared_only", "budget_split": 0.7},
    )  # fmt: skip
    two = _runs(tmp_path / "b" / "runs.csv", {"budget_split": 0.9, "accuracy": 0.7, "epsilon": 8.0})
    rows = budget_rows([two, one, one])
    assert [(r["epsilon"], r["rho"], r["seed"]) for r in rows] == [(1, 0.7, 0), (1, 0.7, 1), (8, 0.9, 0)]
    assert [r["accuracy"] for r in rows] == pytest.approx([61, 65, 70])
    figure = tmp_path / "out" / "figure4.png"
    assert main(["budget-sweep", str(one), str(two), "--output", str(figure)]) == 0
    assert figure.read_bytes()[:8] == PNG
    assert [float(r["accuracy"]) for r in _table(figure.with_suffix(".csv"))] == pytest.approx([61, 65, 70])


def test_a_sweep_of_other_things_than_the_split_is_refused(tmp_path, capsys):
    one = _runs(tmp_path / "a" / "runs.csv", {"budget_split": 0.7, "learning_rate": 0.1})
    two = _runs(tmp_path / "b" / "runs.csv", {"budget_split": 0.9, "learning_rate": 0.2})
    with pytest.raises(ValueError, match=r"`learning_rate`: 0\.1, 0\.2"):
        budget_rows([one, two])
    with pytest.raises(ValueError, match="no run of `matched_global`"):
        budget_rows([one], "matched_global")
    for output, words in ((tmp_path / "a" / "runs.png", "would replace it"), (tmp_path / "x.png", "learning_rate")):
        with pytest.raises(SystemExit):
            main(["budget-sweep", str(one), str(two), "--output", str(output)])
        assert words in capsys.readouterr().err and not output.exists()


def test_corpus_size_ends_at_the_entropies_of_the_whole_corpus(tmp_path):
    figure = tmp_path / "figure5.png"
    assert main(["corpus-size", "--task", "rt", *FLAGS, "--repeats", "4", "--output", str(figure)]) == 0
    assert figure.read_bytes()[:8] == PNG
    rows = _table(figure.with_suffix(".csv"))
    assert sorted({int(row["records"]) for row in rows}) == [10, 20, 50, 60]
    wanted = _entropies(load("rt", public_size=60).public["text"])
    whole = {int(row["block"]): row for row in rows if row["records"] == "60"}
    for block, row in whole.items():
        assert float(row["entropy"]) == pytest.approx(wanted[block], abs=1e-3)
        assert float(row["quantile_05"]) == float(row["quantile_95"]) == float(row["entropy"])
        assert float(row["chosen_share"]) == (block == max(wanted, key=lambda b: wanted[b]))
    for row in rows:
        assert 0 <= float(row["quantile_05"]) <= float(row["entropy"]) <= float(row["quantile_95"]) <= 1


def test_transfer_pairs_the_public_corpus_with_the_evaluation_split(tmp_path):
    figure = tmp_path / "figure7.png"
    assert main(["transfer", "--tasks", "rt", *FLAGS, "--eval-size", "30", "--output", str(figure)]) == 0
    assert figure.read_bytes()[:8] == PNG
    task = load("rt", public_size=60, eval_size=30)
    public, evaluation = _entropies(task.public["text"]), _entropies(task.evaluation["text"])
    rows = _table(figure.with_suffix(".csv"))
    assert [int(row["block"]) for row in rows] == [1, 3]
    for row in rows:
        assert float(row["public"]) == pytest.approx(public[int(row["block"])], abs=1e-3)
        assert float(row["evaluation"]) == pytest.approx(evaluation[int(row["block"])], abs=1e-3)


def test_the_help_says_what_transfer_reads(capsys):
    with pytest.raises(SystemExit):
        main(["transfer", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "may be chosen by this figure" in told and "no epsilon covers it" in told


def test_sizes_grow_to_the_whole_corpus():
    assert default_sizes(2_000) == [10, 20, 50, 100, 200, 500, 1_000, 2_000]
    assert default_sizes(7) == [7]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["corpus-size", "--model", "magic"], "owner/name"),
        (["corpus-size", "--public-size", "30", "--sizes", "10,90"], "No part is that large"),
        (["transfer", "--tasks", "cola"], "no task"),
        (["budget-sweep", "/not/there.csv"], "No such file"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit):
        main([*arguments, "--output", str(tmp_path / "figure.png")])
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())
