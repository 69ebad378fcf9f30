"""`raptor-hf audit`: from a training configuration to a private folder with figures."""

from __future__ import annotations

import csv
import json
import random
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from raptor_hf import PrivacyConfigError, ReleaseError, export_release
from raptor_hf.audit.folder import MARKER
from raptor_hf.audit.shadows import Task, result_path
from raptor_hf.hub import scrub_check
from raptor_hf.scripts import _audit_lira, _shadow, audit
from raptor_hf.scripts._audit import cell_settings, cells_of, read_settings
from tests.trainer.build import assert_refused

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

WORDS = ["story", "actor", "scene", "plot", "music", "end", "hero", "joke", "war", "love", "night", "city", "voice"]
CANARY = "zephyrcanary"


@pytest.fixture
def config(tmp_path):
    rng = random.Random(0)
    rows = [(f"{CANARY} {' '.join(rng.choices(WORDS, k=6))} number {i}", "pn"[i % 2]) for i in range(40)]
    for name, some in (("train", rows), ("test", [(text[13:], label) for text, label in rows[:10]])):
        with (tmp_path / f"{name}.csv").open("w", newline="") as handle:
            writer = csv.writer(handle)
            writer.writerow(("text", "label"))
            writer.writerows(some)
    (tmp_path / "config.yaml").write_text(
        f"""
train_file: {tmp_path}/train.csv
validation_file: {tmp_path}/test.csv
class_names: [n, p]
output_dir: {tmp_path}/never
max_seq_length: 24
target_epsilon: 2
target_delta: 1e-3
expected_batch_size: 10
per_device_train_batch_size: 64
max_steps: 2
learning_rate: 1e-3
lora_rank: 2
protected_layer: last
"""
    )
    return tmp_path


def assert_private(folder: Path) -> None:
    assert len(list(folder.rglob("*"))) > 5
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes(), "the text of a record lies in the audit's folder"


def lira(config, *more):
    flags = ["--attack", "lira", "--output", str(config / "audit"), "--shadows", "6", "--members", "12"]
    return audit.main([str(config / "config.yaml"), *flags, *more])


def in_process(folder, tasks, command, *, jobs, on_done):
    """Workers as functions: importing torch in each would take longer than the shadows."""
    for number, task in enumerate(tasks):
        result_path(folder, task).parent.mkdir(parents=True, exist_ok=True)
        assert command([task])[1:] == ["-m", "raptor_hf.scripts._shadow", str(folder), str(task)]
        _shadow.main([str(folder), str(task)])
        on_done(number + 1)


def test_shadow_models_attacks_and_report(config, capsys, monkeypatch):
    monkeypatch.setattr(_audit_lira, "run_processes", in_process)
    more = ["--methods", "nonprivate_lora,raptor", "--epsilons", "3", "--set", "nonprivate_lora.max_steps=1",
            "--publish-summary", str(config / "public.json")]  # fmt: skip
    assert lira(config, *more) == 0
    folder = config / "audit"
    assert_private(folder)
    report = json.loads((folder / "results.json").read_text())
    assert [row["name"] for row in report["cells"]] == ["nonprivate_lora", "raptor-eps3"]
    assert report["cells"][0]["epsilon"] is None and 2.5 < report["cells"][1]["epsilon"] <= 3
    assert report["members"] == 12 and report["pool"] == 24 and report["blocks"] == 3
    assert "| nonprivate_lora | inf |" in capsys.readouterr().out
    assert (folder / "roc.png").read_bytes().startswith(b"\x89PNG")
    assert not list((folder / "work").iterdir()) and not (config / "never").exists()
    plan, shadow = np.load(folder / "plan.npz"), np.load(result_path(folder, Task("raptor-eps3", 4)))
    assert np.array_equal(plan["masks"][4], shadow["masks"]) and plan["masks"].sum(0).tolist() == [3] * 24
    assert len(shadow["losses"]) == 24 and 0 <= shadow["accuracies"] <= 1
    summary = json.loads((config / "public.json").read_text())
    assert summary["cells"] == report["cells"] and "not covered" in summary["note"]
    # repeated: nothing is trained again, and other settings or records are refused
    monkeypatch.setattr(_shadow, "train_shadow", lambda *_: pytest.fail("trained again"))
    assert lira(config, *more) == 0
    assert_refused(lambda: lira(config, *more, "--learning_rate", "5e-3"), PrivacyConfigError, "settings")
    assert_refused(lambda: lira(config, "--shadows", "8"), PrivacyConfigError, "began")
    text = (config / "train.csv").read_text().replace("number", "No")
    (config / "train.csv").write_text(text)
    assert_refused(lambda: lira(config, *more), PrivacyConfigError, "training set is not what it was")


@pytest.mark.slow
def test_real_worker_processes(config):
    assert lira(config, "--jobs", "2", "--shadows", "6") == 0
    assert_private(config / "audit")


@pytest.mark.slow
def test_workers_of_two_processes_each(config):
    """Both train one model; the main one scores it."""
    launcher = f"{sys.executable} -m accelerate.commands.launch --cpu --num_processes 2 --num_machines 1 " \
        "--mixed_precision no --dynamo_backend no"  # fmt: skip
    assert lira(config, "--launcher", launcher, "--shadows", "6", "--max_steps", "1") == 0
    assert_private(config / "audit")


def one_run(config, *more):
    flags = ["--attack", "one-run", "--output", str(config / "audit"), "--canaries", "24", "--lone-canaries", "2"]
    return audit.main([str(config / "config.yaml"), *flags, *more])


def test_canaries_and_verdict(config, capsys):
    assert one_run(config, "--lora_rank", "4") == 0
    folder = config / "audit"
    assert_private(folder)
    report = json.loads((folder / "results.json").read_text())
    (row,) = report["runs"]
    assert row["holds"] and 1.5 < row["claimed_epsilon"] <= 2 and row["delta"] == 1e-3
    assert {bound["name"] for bound in row["bounds"]} == {"joint", "shared", "expert", "final", "lone"}
    assert "nothing that was measured alarms" in capsys.readouterr().out
    assert not [path for path in (folder / "work").rglob("*") if path.is_file()], "owner maps are left behind"
    found = np.load(folder / "runs" / "raptor" / "0000.npz")
    assert found["included"].shape == (24,) and found["lone"].sum() == 2


def test_exit_code_of_a_false_claim(config):
    from tests.trainer.mutations import broken_by

    with broken_by("Noise divided by the batch size twice"):
        assert one_run(config, "--lora_rank", "4") == 1


# ---- Settings ----


def test_the_command_line_wins_over_the_file_and_one_method_can_differ(config):
    settings = read_settings(str(config / "config.yaml"), ["--learning_rate", "0.5", "--lora_rank=8"])
    assert (settings["learning_rate"], settings["lora_rank"], settings["max_steps"]) == (0.5, 8, 2)
    plain, eight = cells_of(settings, ["nonprivate_lora", "raptor"], [8.0])
    overrides = ["nonprivate_lora.learning_rate=0.25", "raptor-eps8.max_steps=7"]
    one, two = (cell_settings(settings, cell, overrides) for cell in (plain, eight))
    assert one["learning_rate"] == 0.25 and "target_epsilon" not in one and one["max_steps"] == 2
    assert two["target_epsilon"] == 8.0 and two["max_steps"] == 7 and two["learning_rate"] == 0.5
    assert "output_dir" not in two and two["save_strategy"] == "no"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--learning_rat", "1"], "learning_rate"),
        (["--output_dir", "x"], "--output"),
        (["--methods", "raptr"], "raptor"),
        (["--set", "raptor:x"], "METHOD.field=value"),
        (["--set", "raptor.learning_rat=1"], "learning_rat"),
        (["--members", "39"], "40 records"),
        (["--shadows", "4"], "shadow models"),
        (["--epsilons", "1,1"], "twice"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(config, flags, words):
    assert_refused(lambda: lira(config, *flags), PrivacyConfigError, words)
    assert not (config / "audit" / MARKER).exists()


def test_a_method_without_a_claim_has_no_one_run_audit(config):
    assert_refused(lambda: one_run(config, "--methods", "nonprivate_lora"), PrivacyConfigError, "claims no epsilon")


# ---- Releases ----


def test_an_audit_is_named_by_scrub_check_and_never_released(tmp_path):
    output = tmp_path / "output"
    (output / "audit" / "shadows" / "raptor").mkdir(parents=True)
    (output / "audit" / MARKER).write_text("{}")
    for name in ("shadows/raptor/0000.npz", "RESULTS.md", "README.md"):
        (output / "audit" / name).write_bytes(b"x")
    (output / "privacy.json").write_text("{}")
    leaks = {leak.path: leak for leak in scrub_check(output)}
    for name in ("raptor_audit.json", "shadows/raptor/0000.npz", "RESULTS.md", "README.md"):
        assert leaks[f"audit/{name}"].severity == "high" and "audit" in leaks[f"audit/{name}"].what
    assert "audit" not in leaks["privacy.json"].what
    assert all("audit" in leak.what for leak in scrub_check(output / "audit"))
    assert_refused(lambda: export_release(output, output / "audit"), ReleaseError, "allow-list")
