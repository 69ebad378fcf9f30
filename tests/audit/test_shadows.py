"""Shadow designs, the folder they lie in, and the processes that train them."""

from __future__ import annotations

import stat
import sys
import time

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from raptor_hf import PrivacyConfigError
from raptor_hf.audit import folder as store
from raptor_hf.audit.lira import lira_leave_one_out
from raptor_hf.audit.report import attack_cell, attack_scores, check_design, membership_markdown, public_summary
from raptor_hf.audit.shadows import Cell, ShadowResults, Task, make_design, read_results, result_path, run_processes
from raptor_hf.errors import RaptorError
from tests.trainer.build import assert_refused


def results(scores: np.ndarray, masks: np.ndarray) -> ShadowResults:
    count = len(scores)
    return ShadowResults(
        -scores, scores, masks, np.full(count, 0.75), np.full(count, 2.0), np.full(count, 1e-5), np.ones(count)
    )


# ---- Designs ----


@pytest.mark.parametrize(("shadows", "pool", "members"), [(8, 100, 50), (12, 90, 30), (9, 90, 60), (6, 41, 13)])
def test_every_shadow_has_its_members_and_every_record_equally_many_shadows(shadows, pool, members):
    design = make_design(shadows, pool, members, np.random.default_rng(1))
    assert (design.masks.sum(1) == members).all()
    if pool != 41:  # 41 and 13 have no common divisor: subsets of their own
        assert (design.masks.sum(0) == shadows * members // pool).all()
    else:
        assert len(set(design.blocks)) == shadows


def test_halves_come_in_complements_and_the_partner_is_never_a_shadow_of_the_target():
    design = make_design(8, 100, 50, np.random.default_rng(2))
    for target in range(8):
        others = design.shadows_for(target)
        partner = target ^ 1
        assert (design.masks[target] != design.masks[partner]).all() and not others[partner] and not others[target]
        assert (design.masks[others].sum(0) == 3).all(), "the count of shadows would tell who is a member"


def test_attacks_find_nothing_where_there_is_nothing():
    """Leaving the block out is unbiased. Leaving only the target out is not: members have one "in" shadow fewer."""
    rng, found, naive = np.random.default_rng(3), [], []
    for _ in range(6):
        design = make_design(8, 3000, 1500, rng)
        scores = rng.normal(size=(1, 3000)) * 2 + rng.normal(size=(8, 3000))
        lira = attack_scores(results(scores, design.masks), design)["lira"]
        found += [roc_auc_score(m, s) for m, s in zip(design.masks, lira, strict=True)]
        wrong = lira_leave_one_out(scores, design.masks)
        naive += [roc_auc_score(m, s) for m, s in zip(design.masks, wrong, strict=True)]
    error = np.std(found) / len(found) ** 0.5
    assert abs(np.mean(found) - 0.5) < 5 * error and error < 0.003
    assert np.mean(naive) < 0.5 - 3 * error, "the reason for leaving blocks out is gone"


def test_attacks_find_what_is_planted():
    rng = np.random.default_rng(4)
    design = make_design(16, 2000, 1000, rng)
    hardness, shift = rng.normal(size=(1, 2000)) * 5, 1.0
    scores = hardness + shift * design.masks + rng.normal(size=(16, 2000))
    row = attack_cell(Cell("raptor", "raptor", 2.0, ()), results(scores, design.masks), design, 0.95)
    lira, loss = row["attacks"]["lira"]["auc"], row["attacks"]["loss"]["auc"]
    # the difference of two unit normals a distance of 1 apart: Phi(1 / sqrt 2) = 0.760; the fits cost a little
    assert 0.70 < lira["mean"] < 0.765 and lira["interval"][0] < lira["mean"] < lira["interval"][1]
    assert 0.5 < loss["mean"] < 0.6, "records differ by far more than membership moves them"
    assert row["epsilon"] == 2.0 and row["accuracy"]["mean"] == 0.75


def test_designs_by_which_a_record_could_not_be_attacked_are_refused():
    with pytest.raises(PrivacyConfigError):
        check_design(make_design(4, 100, 50, np.random.default_rng(0)))
    assert_refused(lambda: make_design(4, 10, 10, np.random.default_rng(0)), PrivacyConfigError, "--non-members")


def test_the_tables_and_the_summary():
    rng = np.random.default_rng(5)
    design = make_design(6, 60, 30, rng)
    found = results(rng.normal(size=(6, 60)), design.masks)
    cells = [attack_cell(Cell("raptor-eps2", "raptor", 2.0, ()), found, design, 0.95)]
    report = {"shadows": 6, "members": 30, "pool": 60, "blocks": 3, "confidence": 0.95, "cells": cells, "kind": "lira"}
    text = membership_markdown(report)
    assert "| raptor | 2 (delta 1e-05) | 0.881 | 75.00 (75.00-75.00) |" in text and "LiRA TPR % @0.1% FPR" in text
    summary = public_summary(report)
    assert summary["cells"] == cells and "not covered" in summary["note"]
    numbers = str(summary)
    assert not any(repr(float(value)) in numbers for value in found.losses.ravel()), "a record's own figure"


# ---- Folder ----


def test_the_folder_is_private_and_bound_to_its_settings(tmp_path):
    folder = store.open_folder(tmp_path / "audit")
    assert not store.bind(folder, {"shadows": 8, "rates": (1, 2)})
    assert store.bind(folder, {"shadows": 8, "rates": (1, 2)}), "the same settings go on"
    message = assert_refused(lambda: store.bind(folder, {"shadows": 9, "rates": (1, 2)}), PrivacyConfigError, "shadows")
    assert "8 then, 9 now" in message
    store.write_arrays(folder / "a.npz", x=np.arange(3))
    store.subfolder(folder, "deep", "er")
    assert np.array_equal(store.read_arrays(folder / "a.npz")["x"], [0, 1, 2])
    (folder / "library.png").write_bytes(b"png")
    (folder / "library.png").chmod(0o644)
    store.close_permissions(folder)
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "privacy.json").write_text("{}")
    assert_refused(lambda: store.open_folder(tmp_path), PrivacyConfigError, "no audit", "new folder")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / store.MARKER).write_text('{"sha')
    assert_refused(lambda: store.bind(tmp_path / "cut", {}), PrivacyConfigError, "cannot be read")


# ---- Processes ----

WORKER = """
import sys, time
import numpy as np
from pathlib import Path
from raptor_hf.audit.folder import write_arrays
from raptor_hf.audit.shadows import Task, result_path
folder, fail, wait, *tasks = sys.argv[1:]
for task in map(Task.parse, tasks):
    with open(Path(folder) / "ran.txt", "a") as log:
        log.write(str(task) + "\\n")
    if str(task) == fail:
        sys.exit("the worker's own words")
    time.sleep(float(wait))
    write_arrays(result_path(Path(folder), task), masks=np.zeros(4, bool))
"""


def command(folder, fail="", wait="0"):
    return lambda tasks: [sys.executable, "-c", WORKER, str(folder), fail, wait, *map(str, tasks)]


TASKS = [Task("a", 0), Task("b-eps8", 0), Task("a", 1)]


def test_what_is_missing_is_run_and_what_failed_is_said(tmp_path, capsys):
    folder = store.open_folder(tmp_path / "audit")
    with pytest.raises(RaptorError, match="b-eps8:0 ended with exit code 1"):
        run_processes(folder, TASKS, command(folder, fail="b-eps8:0"), poll=0.05)
    assert "the worker's own words" in capsys.readouterr().err
    seen: list[int] = []
    run_processes(folder, TASKS, command(folder), jobs=2, on_done=seen.append, poll=0.05)
    assert seen[0] == 1 and seen[-1] == 3 and all(result_path(folder, task).is_file() for task in TASKS)
    assert (folder / "ran.txt").read_text().split().count("a:0") == 1, "a finished shadow was trained again"
    for log in (folder / "logs").iterdir():
        assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_an_interrupted_audit_stops_its_workers(tmp_path):
    folder = store.open_folder(tmp_path / "audit")

    def interrupt(done):
        if (folder / "ran.txt").exists():
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_processes(folder, TASKS, command(folder, wait="60"), on_done=interrupt, poll=0.05)
    assert time.monotonic() - started < 30
    assert (folder / "ran.txt").read_text().split() == ["a:0"]


def test_results_of_another_design_are_refused(tmp_path):
    folder = store.open_folder(tmp_path / "audit")
    design = make_design(2, 4, 2, np.random.default_rng(0))
    with pytest.raises(RaptorError, match="missing"):
        read_results(folder, "a", design)
    store.subfolder(folder, "shadows", "a")
    for shadow in range(2):
        store.write_arrays(result_path(folder, Task("a", shadow)), masks=np.zeros(4, bool))
    assert_refused(lambda: read_results(folder, "a", design), RaptorError, "other members")
