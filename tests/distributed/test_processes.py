"""Two and three processes on CPU (gloo) train the model that one process would train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raptor_hf.privacy.accounting import Mechanism, compute_epsilon

WORKER = Path(__file__).with_name("worker.py")
STREAMS = ("shared", "expert")


CONFIG = WORKER.parents[2] / "examples" / "accelerate_configs" / "cpu_two_processes.yaml"
LAUNCHERS = {
    1: (),
    2: ("-m", "accelerate.commands.launch", "--config_file", str(CONFIG)),
    3: ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"),
}
SCENARIOS = {
    1: ("quiet", "lopsided"),
    2: ("quiet", "noisy", "failing", "other_data"),
    3: ("quiet", "noise", "lopsided"),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """(number of processes) -> folder and results of all of them; a process that hangs fails the test."""
    done: dict[int, tuple[Path, list[dict]]] = {}

    def launch(processes: int) -> tuple[Path, list[dict]]:
        if processes not in done:
            folder = tmp_path_factory.mktemp(f"world{processes}")
            run = (
                []
                if processes == 1
                else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            )
            command = [sys.executable, *run, str(WORKER), str(folder), *SCENARIOS[processes]]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
            done[processes] = (
                folder,
                [torch.load(folder / f"rank-{r}.pt", weights_only=False) for r in range(processes)],
            )
        return done[processes]

    return launch


def results_of(launched, processes: int, scenario: str) -> list[dict]:
    return [one[scenario] for one in launched(processes)[1]]


def largest_gap(one: dict, two: dict) -> float:
    return max(float((one[s][n] - two[s][n]).abs().max()) for s in STREAMS for n in one[s])


def assert_identical(results: list[dict], key: str = "model") -> None:
    for other in results[1:]:
        for stream in STREAMS:
            for name, value in results[0][key][stream].items():
                assert torch.equal(value, other[key][stream][name]), name


@pytest.mark.parametrize("processes", [2, 3])
def test_equals_a_single_process(launched, processes):
    """At noise 0 and p = 1; the owner map too, though each process computes a part of it."""
    (alone,) = results_of(launched, 1, "quiet")
    many = results_of(launched, processes, "quiet")
    assert_identical(many)
    assert largest_gap(alone["model"], many[0]["model"]) < 2e-6
    assert all(torch.equal(alone["owners"], one["owners"]) for one in many)
    assert len(set(alone["owners"].tolist())) > 1


def test_ranks_stay_identical_through_noise_checkpoints_and_resuming(launched):
    results = results_of(launched, 2, "noisy")
    assert_identical(results)
    assert_identical(results, "first")
    assert len({one["logs"] for one in results}) == 1 and '"epsilon"' in results[0]["logs"]
    first = results[0]
    # counted as in one process, resumed from 2 when 4 were spent: nothing is left of a budget for 4
    assert first["steps"] == (4, 4, 4) and first["step"] == 2
    assert largest_gap(first["first"], first["model"]) > 0
    plan = json.loads((launched(2)[0] / "noisy" / "raptor_ledger.json").read_text())["plan"]
    noise = [plan[f"{stream}_noise_multiplier"] for stream in STREAMS]
    alone = compute_epsilon([Mechanism(sigma, 4 / 10, 4) for sigma in noise], 1e-3).upper
    assert first["epsilon"] == pytest.approx(alone, rel=1e-9) and 0.97 * 8 < alone <= 8
    assert first["wrapped"] == "SwitchTransformersForSequenceClassification"
    saved = {path.name for path in (launched(2)[0] / "noisy" / "checkpoint-4").iterdir()}
    assert {"raptor_state.json", "rng_state_0.pth", "rng_state_1.pth"} <= saved


def test_noise_is_added_once(launched):
    """Twice as many processes, the same variance; with the noise of every process it would be three times as large."""
    results = results_of(launched, 3, "noise")
    assert_identical(results)
    shared, expert = results[0]["updates"]
    # six steps of SGD: the standard deviation of their sum is sqrt(6) sigma C / denominator
    for update, due in ((shared, 2.0 / 10), (expert, 3.0 / (10 / 4))):
        ratio = float(update.std()) / (due * 6**0.5)
        assert abs(ratio - 1) < 6 / (2 * update.numel()) ** 0.5, ratio


def test_empty_batches_of_some_processes(launched):
    """In float64, where an empty sum would be narrower than the others'."""
    (alone,) = results_of(launched, 1, "lopsided")
    many = results_of(launched, 3, "lopsided")
    assert_identical(many)
    assert largest_gap(alone["model"], many[0]["model"]) < 1e-6


def test_an_error_in_one_process_stops_all(launched):
    one, two = results_of(launched, 2, "failing")
    assert two["error"] == "KeyError: 'the secret of record 7'"
    assert one["error"].startswith("ProcessError: Process 1 of 2 failed in the shared stream")
    assert "secret" not in one["error"] and one["step"] == two["step"] == 1


def test_records_in_another_order_are_refused(launched):
    """Each process draws its own share by index: two orders would give a record two coins, and twice the clip."""
    results = results_of(launched, 2, "other_data")
    for one in results:
        assert one["error"].startswith("ProcessError") and "training set" in one["error"] and one["step"] == 0
