"""Tuning of the utility benchmark: equal trials on public data, finals with new seeds, and what is frozen."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from benchmarks.utility import tune
from benchmarks.utility.driver import Outcome
from benchmarks.utility.files import write_json
from benchmarks.utility.settings import GROUPS, TUNED_FILE, VARIANTS, Settings, tuned_settings
from benchmarks.utility.tasks import TASKS
from benchmarks.utility.tune import FINALISTS, RATES, REPEATS, STAGES, TRIALS, averages, best, candidates, finals


def test_the_shipped_settings_are_the_best_of_their_trials():
    frozen = json.loads(TUNED_FILE.read_text(encoding="utf-8"))
    assert set(frozen["chosen"]["tiny"]) == set(GROUPS["all"])
    for model, chosen in frozen["chosen"].items():
        trials = frozen["trials"][model]
        # no method was tuned more than another
        assert len({(t["count"], len(t.get("finals", ())), _runs(t)) for t in (trials[name] for name in chosen)}) == 1
        for name in chosen:
            values, rows = tuned_settings(model, name), trials[name]["rows"]
            Settings("rt", model, name, 8.0 if VARIANTS[name].private else math.inf, 0, **values)
            assert len({json.dumps(row) for row in rows}) == len(rows) == trials[name]["count"]
            for row in (decided := trials[name].get("finals", [])):
                assert row["accuracy"] == pytest.approx(sum(row["runs"]) / len(row["runs"]), abs=1e-4)
                better = [r for r in rows if r["accuracy"] > max(_accuracies(rows, row))]
                assert len(better) < len(decided)  # it was among the best trials
            assert max(_accuracies(decided or rows, values)) == max(row["accuracy"] for row in decided or rows)
    assert frozen["trials"]["tiny"]["raptor"]["count"] == TRIALS
    assert len(frozen["trials"]["tiny"]["raptor"]["finals"]) == FINALISTS
    assert _runs(frozen["trials"]["tiny"]["raptor"]) == FINALISTS * REPEATS


def _runs(trial):
    return sum(len(row["runs"]) for row in trial.get("finals", ()))


def _accuracies(rows, like):
    """Of the rows that have the settings of `like`."""
    names = set(like) - {"accuracy", "runs"}
    return [row["accuracy"] for row in rows if all(row[name] == like[name] for name in names)]


def test_every_method_gets_the_same_number_of_trials():
    for name in GROUPS["all"]:
        start = Settings("imdb", "tiny", name, 8.0 if VARIANTS[name].private else math.inf, 0)
        found = {start_trial.key for stage in STAGES for start_trial in candidates(stage, start)}
        first = {s.key for s in candidates("learning_rate", start)}
        assert len(found) == TRIALS and len(first) == len(RATES), name


def test_a_trial_never_reads_the_private_task():
    start = Settings("imdb", "tiny", "raptor", 8.0, 0)
    assert {s.task for stage in STAGES for s in candidates(stage, start)} == {"imdb"}
    assert "labelled_imdb" not in TASKS  # the public stand-in has one name


def test_the_best_trial_is_the_most_accurate_then_the_one_of_smaller_loss():
    rows = [{"accuracy": a, "eval_loss": b} for a, b in ((0.6, 0.5), (0.7, 0.9), (0.7, 0.8), (0.1, 0.1))]
    assert best(rows) == rows[2]


def _result(settings, accuracy, loss=0.5):
    return {"settings": settings.to_dict(), "accuracy": accuracy, "eval_loss": loss}


def test_finalists_are_the_best_trials_with_seeds_that_neither_trials_nor_tables_have():
    trials = [Settings("imdb", "tiny", "raptor", 8.0, 0, clip=clip) for clip in (0.1, 1.0, 10.0, 5.0)]
    results = [_result(s, a, b) for s, a, b in zip(trials, (0.6, 0.7, 0.5, 0.6), (0.9, 0.5, 0.1, 0.8), strict=True)]
    found = finals(results, 2, 3)
    assert [s.clip for s in found] == [1.0] * 3 + [5.0] * 3  # of equals, the one of smaller loss
    assert len({s.key for s in found}) == 6 and min(s.seed for s in found) > 50
    assert {dataclasses.replace(s, seed=0) for s in found} == {trials[1], trials[3]}


def test_the_mean_over_the_new_seeds_decides_and_not_the_best_run():
    lucky, steady = (Settings("imdb", "tiny", "raptor", 8.0, 7, clip=clip) for clip in (0.1, 1.0))
    runs = [(lucky, 0, 0.9), (steady, 0, 0.7), (lucky, 1, 0.3), (steady, 1, 0.72)]
    means = averages([_result(dataclasses.replace(s, seed=k), a, k) for s, k, a in runs])
    assert [(m["accuracy"], m["eval_loss"], m["runs"]) for m in means] == [
        (pytest.approx(0.6), 0.5, [0.9, 0.3]), (pytest.approx(0.71), 0.5, [0.7, 0.72]),
    ]  # fmt: skip
    assert best(means)["settings"]["clip"] == 1.0


def test_tuning_freezes_what_the_finals_say_and_leaves_other_methods(tmp_path, monkeypatch):
    """Runs are stood in for by numbers: the trial of clip 10 looks best once, clip 0.1 on average."""

    def execute(runs, output, **options):
        for s in runs:
            again = 0.9 if s.clip == 0.1 else 0.2
            accuracy = again if s.seed else 0.3 + 0.4 * (s.learning_rate == 0.02) + 0.01 * s.clip
            write_json(output / "runs" / f"{s.key}.json", _result(s, accuracy))
        return Outcome(tuple(s.key for s in runs), ())

    monkeypatch.setattr(tune, "execute", execute)
    path = tmp_path / "tuned.json"
    write_json(path, {"chosen": {"tiny": {"shared_only": {"clip": 3.0}}}, "trials": {"tiny": {}}})
    arguments = ["--methods", "raptor", "--output", str(tmp_path), "--file", str(path), "--finalists", "9"]
    assert tune.main(arguments) == 0
    frozen = json.loads(path.read_text(encoding="utf-8"))
    assert frozen["chosen"]["tiny"]["raptor"]["clip"] == 0.1 and frozen["chosen"]["tiny"]["shared_only"]["clip"] == 3.0
    found = frozen["trials"]["tiny"]["raptor"]
    assert found["count"] == TRIALS and len(found["finals"]) == 9 and _runs(found) == 9 * REPEATS
    assert max(found["rows"], key=lambda row: row["accuracy"])["clip"] == 10.0
    assert tune.main([*arguments[:-1], "0"]) == 0  # without finals the best trial
    assert json.loads(path.read_text(encoding="utf-8"))["chosen"]["tiny"]["raptor"]["clip"] == 10.0
