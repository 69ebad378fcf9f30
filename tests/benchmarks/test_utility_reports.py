"""The utility benchmark: which runs are believed, and what a table says."""

from __future__ import annotations

import csv
import dataclasses
import json
import math

import pytest

from benchmarks.utility.report import markdown_table, monotonicity_notes, summarise, write_report
from benchmarks.utility.settings import (
    Settings,
)
from benchmarks.utility.verify import VerificationError, verify
from raptor_hf import PrivacyStatement, calibrate_noise_multipliers
from raptor_hf.privacy.statement import StreamStatement
from tests.benchmarks.runs import RECORDS, RUN

# ---- Verification ----


def _statement(settings: Settings = RUN, records: int = RECORDS, **changes) -> PrivacyStatement:
    delta, rate = records**-1.1, settings.batch_size / records
    sigma = calibrate_noise_multipliers(
        settings.epsilon, delta, rate, settings.cycles, budget_split=settings.budget_split
    )
    streams = {
        name: StreamStatement(value, rate, settings.clip, settings.batch_size, settings.cycles, settings.cycles)
        for name, value in (("shared", sigma.shared), ("expert", sigma.expert))
    }
    values = dict(
        method="raptor", **streams, delta=delta, dataset_size=records, expected_batch_size=settings.batch_size,
        target_epsilon=settings.epsilon, num_experts=8, protected_layer=1, ownership="gate",
    )  # fmt: skip
    return PrivacyStatement.build(**{**values, **changes})


@pytest.fixture(scope="module")
def statement() -> PrivacyStatement:
    return _statement()


def test_a_true_statement_passes_and_its_epsilon_is_recomputed(statement):
    found = verify(statement, RUN, RECORDS)
    assert found["claimed"] == statement.epsilon_spent <= 8
    assert found["recomputed"] == pytest.approx(found["claimed"], rel=1e-9)
    assert found["opacus"] == pytest.approx(found["claimed"], rel=0.02)  # another implementation


def _stream(statement: PrivacyStatement, **changes) -> StreamStatement:
    return dataclasses.replace(statement.shared, **changes)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {"method": "matched_global"},
        lambda s: {"noise_source": "insecure_seed"},
        lambda s: {"research_diagnostics": True},
        lambda s: {"shared": _stream(s, steps_taken=s.shared.steps_taken - 1)},
        lambda s: {"shared": _stream(s, noise_multiplier=None)},
        lambda s: {"shared": _stream(s, noise_multiplier=s.shared.noise_multiplier * 0.9)},
        lambda s: {"shared": _stream(s, noise_multiplier=s.shared.noise_multiplier * 1.5)},
        lambda s: {"expert": None, "num_experts": None, "ownership": None},
        lambda s: {"delta": 1e-3},
    ],
)
def test_a_statement_that_does_not_fit_the_run_is_refused(statement, change):
    with pytest.raises(VerificationError):
        verify(_statement(**change(statement)), RUN, RECORDS)


def test_a_statement_about_other_data_or_another_budget_is_refused(statement):
    with pytest.raises(VerificationError, match="records"):
        verify(statement, RUN, RECORDS + 1)
    with pytest.raises(VerificationError, match="more than"):
        verify(statement, dataclasses.replace(RUN, epsilon=4.0), RECORDS)
    with pytest.raises(VerificationError, match="larger than the budget asks"):
        verify(statement, dataclasses.replace(RUN, epsilon=16.0), RECORDS)


# ---- Reports ----


def _result(statement: PrivacyStatement, accuracy: float, settings: Settings = RUN) -> dict:
    return {
        "key": settings.key, "settings": settings.to_dict(), "accuracy": accuracy, "eval_loss": 0.5,
        "epsilon": {"claimed": statement.epsilon_spent, "recomputed": None, "opacus": None}, "protected_layer": 1,
        "trainable": 10, "train_records": RECORDS, "eval_records": 1_030, "seconds": 3.0, "cpu_seconds": 2.0,
        "peak_process_mb": 5, "machine": {}, "statement": json.loads(statement.to_json()),
    }  # fmt: skip


def test_means_and_errors_are_those_of_the_accuracies(statement):
    results = [
        _result(statement, accuracy, dataclasses.replace(RUN, seed=seed))
        for seed, accuracy in enumerate((0.70, 0.72, 0.77))
    ]
    (cell,) = summarise(results).values()
    # by hand: deviations -3, -1, 4 from 73; variance 26 / 2; over 3 runs
    assert cell.mean == pytest.approx(73.0) and cell.error == pytest.approx(math.sqrt(13 / 3)) and cell.runs == 3
    assert cell.sampling_error == pytest.approx(100 * math.sqrt(0.73 * 0.27 / 1_030))
    table = markdown_table(summarise(results), "rt", "tiny")
    assert "| RAPTOR | 73.00 ± 2.08 | 3 |" in table and "ε = 8" in table


def test_runs_with_other_settings_have_no_common_mean(statement):
    other = dataclasses.replace(RUN, seed=1, learning_rate=0.123)
    with pytest.raises(ValueError, match="different settings"):
        summarise([_result(statement, 0.7), _result(statement, 0.7, other)])


def test_a_smaller_budget_that_does_better_is_noted():
    def cells(low: tuple, high: tuple) -> dict:
        found = {}
        for epsilon, accuracies in ((1.0, low), (8.0, high)):
            for seed, accuracy in enumerate(accuracies):
                settings = Settings("rt", "tiny", "raptor", epsilon, seed)
                found[settings.key] = {"settings": settings.to_dict(), "accuracy": accuracy, "eval_records": 1_000}
        return summarise(found.values())

    assert monotonicity_notes(cells((0.60, 0.61, 0.62), (0.70, 0.71, 0.72))) == []
    assert monotonicity_notes(cells((0.60, 0.70, 0.80), (0.60, 0.69, 0.80))) == []  # within the error
    (note,) = monotonicity_notes(cells((0.70, 0.71, 0.72), (0.60, 0.61, 0.62)))
    assert "71.00" in note and "61.00" in note
    assert monotonicity_notes(cells((0.9,), (0.1,))) == []  # one run has no error


def test_a_report_verifies_every_run_and_writes_tables_and_a_plot(statement, tmp_path):
    runs = [_result(statement, 0.70 + seed / 100, dataclasses.replace(RUN, seed=seed)) for seed in range(3)]
    paths = write_report(runs, tmp_path)
    assert [path.name for path in paths] == ["runs.csv", "summary.csv", "tables.md", "accuracy-rt-tiny.png"]
    rows = list(csv.DictReader(paths[0].open(encoding="utf-8")))
    assert [float(row["accuracy"]) for row in rows] == [0.70, 0.71, 0.72]
    assert float(rows[0]["sigma_shared"]) == statement.shared.noise_multiplier
    (summary,) = csv.DictReader(paths[1].open(encoding="utf-8"))
    assert (summary["mean"], summary["standard_error"], summary["runs"]) == ("71.0000", "0.5774", "3")
    assert paths[3].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    runs[1]["statement"] = json.loads(_statement(noise_source="insecure_seed").to_json())
    with pytest.raises(VerificationError):
        write_report(runs, tmp_path)
