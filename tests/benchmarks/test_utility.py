"""The utility benchmark: what decides a run, and the whole command."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from benchmarks.utility.__main__ import main, make_parser, plan
from benchmarks.utility.driver import load_results
from benchmarks.utility.files import write_json
from benchmarks.utility.settings import (
    GROUPS,
    TUNED_FILE,
    VARIANTS,
    Settings,
    rank_of,
    resolve_names,
)
from benchmarks.utility.verify import verify_result
from raptor_hf.config import RaptorConfig
from tests.benchmarks.runs import RUN

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


def test_a_method_not_tuned_on_a_model_takes_the_bundled_models_settings_but_for_the_rank(tmp_path):
    path = tmp_path / "tuned.json"
    rows = {name: {"learning_rate": 0.25, "cycles": 7, "rank": 5} for name in ("raptor", "monolithic_lora")}
    write_json(path, {"chosen": {"tiny": rows, "minilm": {"raptor": {"learning_rate": 0.5, "cycles": 9, "rank": 3}}}})

    def planned(model: str) -> dict[str, tuple]:
        arguments = ["--model", model, "--methods", "raptor,monolithic_lora", "--seeds", "1", "--tuned", str(path)]
        return {s.variant: (s.learning_rate, s.cycles, s.rank) for s in plan(make_parser().parse_args(arguments))}

    assert planned("tiny") == {"raptor": (0.25, 7, 5), "monolithic_lora": (0.25, 7, 5)}
    assert planned("minilm") == {
        "raptor": (0.5, 9, 3),
        "monolithic_lora": (0.25, 7, rank_of("minilm", "monolithic_lora")),
    }
    assert planned("switch-base-8")["raptor"] == (0.25, 7, 128)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "cola"], "sst2, qnli"),
        (["--methods", "raptor,magic"], "monolithic_lora"),
        (["--task", "sst2", "--data-dir", "/not/there"], "train*"),
        (["--seeds", "0"], "1 or more"),
        (["--model", "switch-base"], "no run could load it. Choose from tiny, switch-base-8, olmoe and minilm"),
        (["--model", "a/b/c"], "`--model a/b/c` was given"),
        (["--model", ""], "owner/name"),
    ],
)
def test_a_command_that_asks_for_nothing_there_is_says_so_at_once(tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit):
        main([*arguments, "--output", str(tmp_path / "out")])
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["tiny", "minilm", "olmoe", "google/switch-base-8", "folder"])
def test_a_model_is_a_short_name_an_id_or_a_folder(tmp_path, model):
    name = str(tmp_path) if model == "folder" else model
    assert {settings.model for settings in _planned(tmp_path, "--model", name, "--methods", "raptor")} == {name}


def test_an_interruption_is_no_traceback(tmp_path, capsys, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.utility.__main__.execute", interrupted)
    assert main(["--methods", "raptor", "--output", str(tmp_path / "out")]) == 130
    assert "same command" in capsys.readouterr().out


def test_a_report_of_nothing_says_so(tmp_path, capsys):
    assert main(["--report-only", "--methods", "raptor", "--output", str(tmp_path / "out")]) == 1
    assert "No result" in capsys.readouterr().out


def test_what_was_never_tuned_is_an_error(tmp_path, capsys):
    path = tmp_path / "tuned.json"
    write_json(path, {"chosen": {"tiny": {}}})
    with pytest.raises(SystemExit):
        main(["--methods", "raptor", "--tuned", str(path), "--output", str(tmp_path / "out")])
    assert "benchmarks.utility.tune" in capsys.readouterr().err


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
