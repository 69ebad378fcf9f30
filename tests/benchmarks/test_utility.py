"""The utility benchmark: what decides a run, what is done once only, and what a table says."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest

from benchmarks.utility.__main__ import main, make_parser, plan
from benchmarks.utility.console import Progress, format_seconds
from benchmarks.utility.driver import execute, load_results, seconds_left
from benchmarks.utility.files import write_json
from benchmarks.utility.report import markdown_table, monotonicity_notes, summarise, write_report
from benchmarks.utility.settings import (
    GROUPS,
    TUNED_FILE,
    VARIANTS,
    Settings,
    rank_of,
    resolve_names,
    tuned_settings,
)
from benchmarks.utility.tasks import TASKS, load
from benchmarks.utility.tune import STAGES, TRIALS, best, candidates
from benchmarks.utility.verify import VerificationError, verify, verify_result
from raptor_hf import PrivacyStatement, calibrate_noise_multipliers
from raptor_hf.config import RaptorConfig
from raptor_hf.privacy.statement import StreamStatement

RUN = Settings("rt", "tiny", "raptor", 8.0, 0)
RECORDS = 7_500


# ---- Settings ----


def test_every_setting_that_decides_a_run_changes_its_key_and_no_other():
    other = {
        "task": "sst2", "model": "minilm", "variant": "shared_only", "epsilon": 4.0, "seed": 1, "train_size": 10,
        "eval_size": 10, "public_size": 10, "max_length": 7, "batch_size": 9, "cycles": 5, "learning_rate": 0.5,
        "expert_learning_rate": 0.1, "clip": 0.2, "budget_split": 0.8, "rank": 3,
        "ownership": "vote", "dtype": "bfloat16",
    }  # fmt: skip
    free = {"engine": "functorch", "micro_batch": 8, "data_dir": "/elsewhere"}
    assert {*other, *free} == {field.name for field in dataclasses.fields(Settings)}
    keys = [dataclasses.replace(RUN, **{name: value}).key for name, value in other.items()]
    assert len({RUN.key, *keys}) == len(other) + 1
    for name, value in free.items():
        assert dataclasses.replace(RUN, **{name: value}).key == RUN.key


def test_settings_survive_json():
    for settings in (RUN, Settings("rt", "tiny", "nonprivate_lora", math.inf, 2, learning_rate=1e-3)):
        text = json.dumps(settings.to_dict(), allow_nan=False)
        assert Settings.from_dict(json.loads(text)) == settings


@pytest.mark.parametrize(
    "change", [{"variant": "magic"}, {"epsilon": 0.0}, {"epsilon": float("nan")}, {"variant": "nonprivate_ffn"}]
)
def test_impossible_settings_are_refused(change):
    with pytest.raises(ValueError):
        dataclasses.replace(RUN, **change)


def test_every_variant_is_a_configuration_of_the_package(tmp_path):
    for name, variant in VARIANTS.items():
        noise = {f"{stream}_noise_multiplier": 0.0 for stream in variant.streams} if variant.private else {}
        config = RaptorConfig(
            str(tmp_path), method=variant.method, grad_sample_mode=variant.engine("hooks"), report_to=[], **noise,
            **variant.options,
        )  # fmt: skip
        assert config.method == variant.method, name
        assert resolve_names([name]) == [name]


def test_groups_are_the_rows_of_the_papers_tables():
    assert len(GROUPS["all"]) == 8 and len({VARIANTS[name].method for name in GROUPS["all"]}) == 8
    assert set(GROUPS["table6"]) >= {"matched_global", "shared_only", "expert_only"}
    changed = [set(VARIANTS[name].options) for name in GROUPS["table5"]]
    assert changed == [set(), {"expert_denominator"}, {"clipping"}, {"alternating"}, {"residual_weighting"}]
    with pytest.raises(ValueError, match="no method"):
        resolve_names(["raptor", "nothing"])


def test_ranks_give_the_papers_counts_on_switch_base():
    d, ff, experts, layers, sparse = 768, 3072, 8, 12, 6
    head = 2 * d + 2

    def lora(rank: int, adapted: int) -> int:
        return layers * 4 * 2 * d * rank + adapted * experts * 2 * (d + ff) * rank + head

    assert lora(rank_of("google/switch-base-8", "raptor"), 1) == 17_303_042
    assert lora(rank_of("google/switch-base-8", "monolithic_lora"), sparse) == 14_157_314


# ---- The plan of a command ----


def _tuned(path: Path) -> Path:
    row = {"learning_rate": 0.25, "batch_size": 100, "cycles": 7, "clip": 1.0, "budget_split": 0.9, "rank": 4}
    write_json(path, {"chosen": {"tiny": {name: row for name in GROUPS["all"]}}})
    return path


def _planned(tmp_path: Path, *arguments: str) -> list[Settings]:
    return plan(make_parser().parse_args(["--tuned", str(_tuned(tmp_path / "tuned.json")), *arguments]))


def test_a_plan_has_every_private_method_at_every_epsilon_and_the_others_once(tmp_path):
    runs = _planned(tmp_path, "--methods", "all", "--epsilons", "1,4,8", "--seeds", "3")
    private = [settings for settings in runs if VARIANTS[settings.variant].private]
    assert len(private) == 6 * 3 * 3 and len(runs) == len(private) + 2 * 3
    assert {s.epsilon for s in private} == {1.0, 4.0, 8.0}
    assert {s.epsilon for s in runs if not VARIANTS[s.variant].private} == {math.inf}
    assert len({s.key for s in runs}) == len(runs)


def test_flags_add_tables_and_override_what_was_tuned(tmp_path):
    runs = _planned(
        tmp_path,
        "--methods",
        "raptor",
        "--ablations",
        "--baselines",
        "--epsilons",
        "8",
        "--seeds",
        "1",
        "--cycles",
        "3",
    )
    assert {s.variant for s in runs} == {*GROUPS["table5"], *GROUPS["table1"], *GROUPS["table6"]}
    assert {(s.cycles, s.learning_rate, s.batch_size) for s in runs} == {(3, 0.25, 100)}


def test_the_papers_settings_leave_the_cycles_to_the_task(tmp_path):
    paper = str(TUNED_FILE.with_name("paper.json"))
    arguments = ["--task", "sst2", "--model", "switch-base-8", "--methods", "table1", "--tuned", paper]
    with pytest.raises(ValueError, match="--cycles"):
        plan(make_parser().parse_args(arguments))
    runs = plan(make_parser().parse_args([*arguments, "--cycles", "1347"]))
    assert {(s.learning_rate, s.batch_size, s.clip, s.budget_split, s.cycles) for s in runs} == {
        (5e-4, 1000, 1.0, 0.9, 1347)
    }
    assert {s.variant: s.rank for s in runs}["raptor"] == 128


def test_what_was_never_tuned_is_an_error(tmp_path, capsys):
    path = tmp_path / "tuned.json"
    write_json(path, {"chosen": {"tiny": {}}})
    with pytest.raises(SystemExit):
        main(["--methods", "raptor", "--tuned", str(path), "--output", str(tmp_path / "out")])
    assert "benchmarks.utility.tune" in capsys.readouterr().err


def test_the_shipped_settings_are_the_best_of_their_trials():
    frozen = json.loads(TUNED_FILE.read_text(encoding="utf-8"))
    for name in GROUPS["all"]:
        values = tuned_settings("tiny", name)
        Settings("rt", "tiny", name, 8.0 if VARIANTS[name].private else math.inf, 0, **values)
        rows = frozen["trials"]["tiny"][name]["rows"]
        assert len(rows) == frozen["trials"]["tiny"][name]["count"]
        top = max(rows, key=lambda row: row["accuracy"])
        assert top["accuracy"] == max(r["accuracy"] for r in rows if all(r[k] == values[k] for k in values))
    counts = {name: trials["count"] for name, trials in frozen["trials"]["tiny"].items()}
    counts.pop("monolithic_full")  # 12 times the time of the others: README.md says what it got
    assert max(counts.values()) <= TRIALS


# ---- Tuning ----


def test_every_method_gets_the_same_number_of_trials():
    for name in GROUPS["all"]:
        start = Settings("imdb", "tiny", name, 8.0 if VARIANTS[name].private else math.inf, 0)
        found = {start_trial.key for stage in STAGES for start_trial in candidates(stage, start)}
        first = {s.key for s in candidates("learning_rate", start)}
        assert len(found) == TRIALS and len(first) == 4, name


def test_a_trial_never_reads_the_private_task():
    start = Settings("imdb", "tiny", "raptor", 8.0, 0)
    assert {s.task for stage in STAGES for s in candidates(stage, start)} == {"imdb"}
    assert "labelled_imdb" not in TASKS  # the public stand-in has one name


def test_the_best_trial_is_the_most_accurate_then_the_one_of_smaller_loss():
    rows = [{"accuracy": a, "eval_loss": b} for a, b in ((0.6, 0.5), (0.7, 0.9), (0.7, 0.8), (0.1, 0.1))]
    assert best(rows) == rows[2]


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


# ---- The driver ----

FAKE = """
import json, sys
from pathlib import Path
output, keys = Path(sys.argv[4]), sys.argv[5:]
with (output / "calls").open("a") as handle:
    handle.write(" ".join(keys) + "\\n")
for key in keys:
    if "shared_only" in key:
        sys.exit("no luck")
    (output / "runs").mkdir(exist_ok=True)
    (output / "runs" / f"{key}.json").write_text(json.dumps({"key": key, "seconds": 2.0}))
"""


def _fake_launcher(tmp_path: Path) -> str:
    # put before the command `python -m benchmarks.utility.worker OUTPUT KEY...`, which it takes as arguments
    path = tmp_path / "fake.py"
    path.write_text(FAKE, encoding="utf-8")
    return f"{sys.executable} {path}"


def _calls(output: Path) -> list[list[str]]:
    return [line.split() for line in (output / "calls").read_text().splitlines()]


def test_finished_runs_are_not_repeated_and_changed_ones_are(tmp_path):
    launcher, output = _fake_launcher(tmp_path), tmp_path / "out"
    runs = [dataclasses.replace(RUN, seed=seed) for seed in range(3)]
    seen: list[tuple] = []
    outcome = execute(runs, output, launcher=launcher, poll_seconds=0.05, progress=lambda *call: seen.append(call))
    assert outcome.failed == () and set(outcome.done) == {s.key for s in runs}
    assert seen[0] == (0, 3, None) and seen[-1] == (3, 3, 0.0)
    assert _calls(output) == [[s.key for s in runs]]  # the seeds of a cell share one process
    execute(runs, output, launcher=launcher, poll_seconds=0.05)
    assert len(_calls(output)) == 1
    execute([*runs, dataclasses.replace(RUN, cycles=99)], output, launcher=launcher, poll_seconds=0.05)
    assert len(_calls(output)) == 2 and len(_calls(output)[1]) == 1
    assert {r["key"] for r in load_results(output, [s.key for s in runs])} == {s.key for s in runs}


def test_a_failed_run_costs_no_other_cell(tmp_path):
    bad, good = Settings("rt", "tiny", "shared_only", 8.0, 0), dataclasses.replace(RUN, seed=4)
    outcome = execute([bad, good], tmp_path / "out", jobs=2, launcher=_fake_launcher(tmp_path), poll_seconds=0.05)
    assert outcome.done == (good.key,) and outcome.failed == (bad.key,)
    assert "no luck" in (tmp_path / "out" / "logs" / f"{bad.key}.log").read_text()


def test_two_drivers_do_not_share_a_folder(tmp_path):
    def again(done: int, total: int, left: float | None) -> None:
        with pytest.raises(SystemExit, match="Another driver"):
            execute([RUN], tmp_path / "out")

    execute([RUN], tmp_path / "out", launcher=_fake_launcher(tmp_path), poll_seconds=0.05, progress=again)


def test_the_time_left_is_that_of_the_runs_so_far():
    assert seconds_left([], 5, 2) is None
    assert seconds_left([10.0, 20.0], 4, 2) == 30.0
    assert seconds_left([10.0], 1, 8) == 10.0
    assert [format_seconds(s) for s in (None, 5.0, 75.0, 7_260.0)] == ["unknown", "5 s", "1 min 15 s", "2 h 1 min"]


def test_progress_without_a_terminal_is_a_line_a_change(capsys):
    with Progress("work", terminal=False) as progress:
        progress(1, 4, 65.0)
        progress(4, 4, None)
    lines = capsys.readouterr().err.splitlines()
    assert "1/4" in lines[0] and "1 min 5 s" in lines[0] and "left: 0 s" in lines[1]


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": 1})
    with pytest.raises(ValueError):
        write_json(path, {"x": float("nan")})
    assert json.loads(path.read_text()) == {"x": 1}


# ---- Tasks ----


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train_a.tsv").write_text("sentence\tlabel\nit 's a \"charming film\t1\nbleak\t0\n", encoding="utf-8")
    (folder / "train_b.tsv").write_text("sentence\tlabel\nfine\t1\n", encoding="utf-8")
    (folder / "dev.tsv").write_text("sentence\tlabel\nso so\t0\n", encoding="utf-8")
    return folder


def test_a_task_is_read_from_a_folder_with_several_files(tmp_path):
    task = load("sst2", data_dir=str(_folder(tmp_path)), public_size=5)
    assert task.train["sentence"] == ["it 's a \"charming film", "bleak", "fine"] and task.train["labels"] == [1, 0, 1]
    assert task.evaluation["labels"] == [0] and task.labels == ["0", "1"]
    assert len(task.public) == 5 and task.public.column_names == ["sentence"]


def test_a_pair_task_keeps_both_texts_and_its_public_file(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for stem, label in (("train", "entailment"), ("train2", "not_entailment"), ("dev", "entailment")):
        (folder / f"{stem}.csv").write_text(f"question,sentence,label\nwho?,he did,{label}\n", encoding="utf-8")
    (folder / "public.csv").write_text("question,sentence\nwhy?,because\n", encoding="utf-8")
    task = load("qnli", data_dir=str(folder))
    assert task.labels == ["entailment", "not_entailment"] and task.train["labels"] == [0, 1]
    assert task.text_columns == ("question", "sentence") and task.public["sentence"] == ["because"]


def test_a_folder_that_lacks_a_split_a_column_or_a_label_is_an_error(tmp_path):
    folder = _folder(tmp_path)
    (folder / "dev.tsv").write_text("sentence\tlabel\nso so\t7\n", encoding="utf-8")
    with pytest.raises(ValueError, match="labels that no training"):
        load("sst2", data_dir=str(folder))
    with pytest.raises(ValueError, match="lack the columns"):
        load("qqp", data_dir=str(folder))
    (folder / "dev.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"dev\*"):
        load("sst2", data_dir=str(folder))
    with pytest.raises(ValueError, match="no task"):
        load("imagenet")


def test_subsets_are_public_choices_and_the_public_corpus_is_apart():
    one, other = (load("rt", train_size=50, eval_size=20, public_size=30) for _ in range(2))
    assert one.train["text"] == other.train["text"] and len(one.evaluation) == 20
    assert 0 < sum(one.train["labels"]) < 50
    tuning = load("imdb", public_size=200)
    assert len(tuning.public) == 200 and not {t.lower() for t in tuning.public["text"]} & {
        t.lower() for t in tuning.train["text"]
    }


# ---- All of it ----


def test_a_command_trains_reports_and_resumes(tmp_path, capsys):
    output, tuned = tmp_path / "out", _tuned(tmp_path / "tuned.json")
    arguments = [
        "--task", "rt", "--methods", "raptor,nonprivate_lora", "--epsilons", "8", "--seeds", "1", "--train-size", "400",
        "--eval-size", "60", "--public-size", "40", "--max-length", "12", "--cycles", "2", "--output", str(output),
        "--tuned", str(tuned),
    ]  # fmt: skip
    assert main(arguments) == 0, [path.read_text()[-2000:] for path in (output / "logs").iterdir()]
    results = load_results(output)
    assert {r["settings"]["variant"] for r in results} == {"raptor", "nonprivate_lora"}
    for result in results:
        found = verify_result(result)
        private = result["settings"]["variant"] == "raptor"
        assert (found["claimed"] is not None) == private and result["statement"]["dataset_size"] == 400
        assert round(result["accuracy"] * 60) == pytest.approx(result["accuracy"] * 60)
    assert "ε = ∞" in (output / "report" / "tables.md").read_text(encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in (output / "runs").iterdir()}
    assert main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in (output / "runs").iterdir()} == before


def test_the_routing_table_needs_no_run(tmp_path, capsys):
    output = tmp_path / "out"
    arguments = ["--routing-only", "--methods", "raptor", "--train-size", "100", "--public-size", "40"]
    assert main([*arguments, "--output", str(output), "--tuned", str(_tuned(tmp_path / "tuned.json"))]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["block"]: row for row in found["table"]}
    assert set(rows) == {1, 3} and all(sum(row["counts"]) == 40 for row in rows.values())
    assert found["layer"] == max(rows, key=lambda block: rows[block]["entropy"]) and found["records"] == 40
    (figure,) = (output / "routing").glob("*.png")
    assert figure.stat().st_size > 1_000 and not (output / "runs").exists()
