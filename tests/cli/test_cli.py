"""The command line finds its commands, says what they are, and hides nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from raptor_hf import __version__, cli
from raptor_hf.errors import PrivacyConfigError


@pytest.fixture
def script(monkeypatch):
    """A stand-in for the script of `train`; `script.modules` are the modules that were asked for."""
    stand_in = SimpleNamespace(argv=None, modules=[], result=None)

    def main(argv):
        stand_in.argv = argv
        if isinstance(stand_in.result, Exception):
            raise stand_in.result
        return stand_in.result

    def import_module(name):
        stand_in.modules.append(name)
        return SimpleNamespace(main=main)

    monkeypatch.setattr(cli, "importlib", SimpleNamespace(import_module=import_module))
    return stand_in


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_lists_every_command(flag, capsys):
    assert cli.main([flag]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and line in text for name, line in cli.COMMANDS.items())


def test_no_command_shows_help_as_an_error(capsys):
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "usage: raptor-hf <command>" in captured.err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"raptor-hf {__version__}\n"


@pytest.mark.parametrize(("typed", "meant"), [("trian", "'train'"), ("calibrat", "'calibrate'"), ("eps", "'epsilon'")])
def test_unknown_command_suggests_the_closest(typed, meant, capsys):
    assert cli.main([typed]) == 2
    assert f"Did you mean {meant}" in capsys.readouterr().err


def test_unknown_command_far_from_all_lists_them(capsys):
    assert cli.main(["xyzzy"]) == 2
    message = capsys.readouterr().err
    assert "Did you mean" not in message
    assert all(name in message for name in cli.COMMANDS)


def test_the_rest_of_the_line_goes_to_the_script_unread(script):
    assert cli.main(["train", "config.yaml", "--help", "--version"]) == 0
    assert script.argv == ["config.yaml", "--help", "--version"]
    assert script.modules == ["raptor_hf.scripts.train"]


def test_arguments_default_to_those_of_the_process(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["raptor-hf", "train", "--x", "1"])
    cli.main()
    assert script.argv == ["--x", "1"]


@pytest.mark.parametrize(("result", "status"), [(None, 0), (0, 0), (3, 3)])
def test_exit_status_is_the_scripts(script, result, status):
    script.result = result
    assert cli.main(["train"]) == status


def test_a_bad_setting_is_a_message_not_a_traceback(script, capsys):
    script.result = PrivacyConfigError("`x=1` was given", "It would leak", "Set `x=2`")
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "raptor-hf train: `x=1` was given. It would leak. Set `x=2`.\n"


def test_any_other_error_surfaces(script):
    script.result = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["train"])


def test_import_errors_are_not_hidden(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'somewhere'", name="somewhere")

    monkeypatch.setattr(cli, "importlib", SimpleNamespace(import_module=broken))
    with pytest.raises(ModuleNotFoundError, match="somewhere"):
        cli.main(["train"])


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_script_with_a_parser(command):
    module = importlib.import_module(f"raptor_hf.scripts.{command.replace('-', '_')}")
    assert callable(module.main)
    assert callable(module.make_parser)


def test_importing_the_command_line_is_fast():
    heavy = ("torch", "transformers", "datasets", "matplotlib")
    code = f"import raptor_hf.cli, sys; sys.exit(', '.join(m for m in {heavy} if m in sys.modules) or None)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"importing raptor_hf.cli imports {result.stderr}"


def test_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "raptor_hf.cli", "nonsense"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    assert "no command 'nonsense'" in result.stderr
