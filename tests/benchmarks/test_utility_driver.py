"""The utility benchmark: what is done once only, and how far it is."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks.utility.console import Progress, format_seconds
from benchmarks.utility.driver import execute, last_words, load_results, seconds_left
from benchmarks.utility.files import write_json
from benchmarks.utility.settings import (
    Settings,
)
from tests.benchmarks.runs import RUN

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
    whole = output / f"{key}.part"  # the driver reads a result as soon as it is there
    whole.write_text(json.dumps({"key": key, "seconds": 2.0}))
    whole.replace(output / "runs" / f"{key}.json")
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
    assert last_words(tmp_path / "out", bad.key) == "no luck"
    assert last_words(tmp_path / "out", good.key) == last_words(tmp_path / "out", "never run") == ""


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
