"""The commands `calibrate` and `epsilon`: their tables agree with the library and with each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy import calibrate_noise_multipliers, compute_epsilon
from raptor_hf.scripts import calibrate, epsilon
from raptor_hf.scripts._plan import format_table, plan_cycles

PLAN = ["--dataset-size", "2000", "--batch-size", "100", "--epochs", "3"]
DELTA = 2000**-1.1


def _row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line[len(name) :].split()


def test_calibrate_prints_what_the_library_finds(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate.main(["--epsilon", "2", *PLAN]) == 0
    text = capsys.readouterr().out
    assert "60 cycles" in text
    joint, basic = (calibrate_noise_multipliers(2.0, DELTA, 0.05, 60, rule=rule) for rule in ("joint", "basic"))
    shared, expert = _row(text, "noise multiplier, shared"), _row(text, "noise multiplier, expert")
    assert [float(cell) for cell in shared] == pytest.approx([joint.shared, basic.shared], abs=1e-4)
    assert [float(cell) for cell in expert] == pytest.approx([joint.expert, basic.expert], abs=1e-4)
    upper = [float(cell) for cell in _row(text, "epsilon, upper bound (prv)")]
    assert 1.99 <= upper[0] <= 2.0 and upper[1] < upper[0]
    for delta in ("1e-06", "1e-08"):
        assert len(_row(text, f"epsilon at delta = {delta}")) == 2


def test_printed_multipliers_still_meet_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    calibrate.main(["--epsilon", "2", *PLAN])
    text = capsys.readouterr().out
    sigmas = [_row(text, f"noise multiplier, {name}")[0] for name in ("shared", "expert")]
    epsilon.main(["--shared-noise", sigmas[0], "--expert-noise", sigmas[1], *PLAN])
    (upper,) = _row(capsys.readouterr().out, "epsilon, upper bound (prv)")
    assert 1.99 <= float(upper) <= 2.0


def test_a_large_default_delta_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--epsilon", "2", "--dataset-size", "100", "--batch-size", "10", "--steps", "5"]
    calibrate.main(small)
    assert "default delta" in capsys.readouterr().err
    calibrate.main([*small, "--delta", "1e-5"])
    calibrate.main(["--epsilon", "2", *PLAN])
    assert not capsys.readouterr().err


def test_one_stream(capsys: pytest.CaptureFixture[str]) -> None:
    calibrate.main(["--epsilon", "2", "--rho", "1", *PLAN])
    text = capsys.readouterr().out
    assert "noise multiplier, shared" in text and "expert" not in text
    epsilon.main(["--expert-noise", "1.5", *PLAN])
    (upper,) = _row(capsys.readouterr().out, "epsilon, upper bound (prv)")
    assert float(upper) == pytest.approx(compute_epsilon([(1.5, 0.05, 60)], DELTA).upper, rel=1e-3)


def test_plot_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "epsilon.png"
    epsilon.main(["--shared-noise", "1.5", "--plot", str(path), *PLAN])
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    assert str(path) in capsys.readouterr().out


def test_an_epsilon_above_the_range_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    epsilon.main(["--shared-noise", "0.3", "--dataset-size", "2000", "--batch-size", "1000", "--epochs", "50"])
    assert "above 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "0", *PLAN], "target_epsilon"),
        (["--epsilon", "1", "--rho", "2", *PLAN], "budget_split"),
        (
            ["--epsilon", "1", "--dataset-size", "10", "--batch-size", "20", "--epochs", "1"],
            "batch_size / dataset_size",
        ),
        (["--epsilon", "1", "--dataset-size", "10", "--batch-size", "2", "--epochs", "-1"], "epochs"),
        (["--epsilon", "1", "--dataset-size", "10", "--batch-size", "2", "--steps", "0"], "steps"),
    ],
)
def test_arguments_out_of_range(arguments: list[str], message: str) -> None:
    with pytest.raises(PrivacyConfigError, match=message):
        calibrate.main(arguments)


def test_no_noise_at_all_is_an_error() -> None:
    with pytest.raises(PrivacyConfigError, match="epsilon is infinite"):
        epsilon.main(PLAN)


def test_cycles_of_the_published_runs() -> None:
    assert [plan_cycles(67349, 1000, 20), plan_cycles(67349, 64, 3), plan_cycles(392702, 1000, 20)] == [
        1347,
        3157,
        7855,
    ]
    assert plan_cycles(10, 3, 3) == 10


def test_table_is_aligned() -> None:
    text = format_table(["", "a", "bb"], [["x", "1", "2"], ["long", "333", "4"]])
    assert text.splitlines() == ["        a  bb", "----  ---  --", "x       1   2", "long  333   4"]
