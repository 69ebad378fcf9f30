"""`raptor-hf <command> ...`: finds the command's script and hands it the rest of the line.

Nothing is imported before the command is known: `raptor-hf --help` must not wait for torch.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, str] = {
    "train": "fine-tune a Mixture-of-Experts model privately, from a YAML file and flags",
    "quickstart": "the whole job on a small bundled model and real sentences, offline, in minutes",
    "calibrate": "noise multipliers of the two streams for a target epsilon",
    "epsilon": "epsilon of given noise multipliers",
    "check": "look in a model, or the one of a training configuration, for what would break the guarantee",
    "audit": "attack what a configuration trains: shadow models, or canaries against the claimed epsilon",
    "export": "make a folder that may be published from a training output folder",
    "verify": "check a release, in a folder or on the Hub: files, adapters, epsilon, card",
    "scrub-check": "list what every file of a training output folder would leak",
}
"""Command -> one line of help. The command's code is `raptor_hf.scripts.<command>.main(argv)`, with "_" for "-"."""


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: raptor-hf <command> [arguments]",
            "",
            "Differentially private fine-tuning of Mixture-of-Experts transformers.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            f"  {'--help':<{width}}  show this text; `raptor-hf <command> --help` shows a command's arguments",
            f"  {'--version':<{width}}  show the version",
        ]
    )


def _unknown(command: str) -> str:
    close = difflib.get_close_matches(command, COMMANDS, n=2, cutoff=0.5)
    suggestion = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"raptor-hf: there is no command {command!r}. {suggestion}The commands are: {', '.join(COMMANDS)}."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after `raptor-hf`; None takes those of the process.

    Returns:
        The exit status: 0 on success, 2 when the arguments cannot be used, else what the command returned.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_help(), file=sys.stderr)
        return 2
    command, *rest = arguments
    if command in ("-h", "--help", "help"):
        print(_help())
        return 0
    if command == "--version":
        from raptor_hf import __version__

        print(f"raptor-hf {__version__}")
        return 0
    if command not in COMMANDS:
        print(_unknown(command), file=sys.stderr)
        return 2
    return _run(command, rest)


def _run(command: str, arguments: list[str]) -> int:
    # before torch is imported: threads that wait for one another by spinning crawl on a machine with other work
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from raptor_hf.errors import RaptorError

    # An ImportError in here is a broken installation: its traceback says where, so it is left to surface.
    script = importlib.import_module(f"raptor_hf.scripts.{command.replace('-', '_')}")
    try:
        status = script.main(arguments)
    except RaptorError as error:
        # The message already says what to do; a traceback in front of it would only hide it.
        print(f"raptor-hf {command}: {error}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0
