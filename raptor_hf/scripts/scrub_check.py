"""`raptor-hf scrub-check DIR`: what every file of a training output folder would leak if it were published.

Exit code 1 when a file is at least as bad as `--fail-on`, 2 when there is no such folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

__all__ = ["main", "make_parser"]

_SEVERITIES = ("high", "medium", "low")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="raptor-hf scrub-check", description=description, epilog=epilog)
    parser.add_argument("directory", metavar="DIR", help="a training output folder, or any other")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument(
        "--fail-on", default="high", choices=(*_SEVERITIES, "never"), help="severity for exit code 1 (%(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list, the worst first."""
    args = make_parser().parse_args(argv)
    from raptor_hf.hub.scrub import scrub_check

    leaks = scrub_check(args.directory)
    if args.json:
        print(json.dumps([leak.to_dict() for leak in leaks], indent=2))
    else:
        for leak in leaks:
            print(f"{leak.severity:<7} {leak.path}: {leak.what}. {leak.instead}.")
        worst = [f"{sum(leak.severity == s for leak in leaks)} {s}" for s in _SEVERITIES]
        print(f"{len(leaks)} files: {', '.join(worst)}. `export_release` makes a folder that may be published.")
    if args.fail_on == "never":
        return 0
    failing = _SEVERITIES[: _SEVERITIES.index(args.fail_on) + 1]
    return int(any(leak.severity in failing for leak in leaks))


if __name__ == "__main__":
    raise SystemExit(main())
