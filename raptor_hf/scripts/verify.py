"""`raptor-hf verify REPO_OR_PATH`: what can be checked about a release without trusting whoever made it.

Exit code 0: nothing was found against it. 1: it must not be relied on, or is not as private as was asked for. 2: it
cannot be read. For private repositories log in first (`hf auth login`) or set `HF_TOKEN`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="raptor-hf verify", description=description, epilog=epilog)
    parser.add_argument("release", metavar="REPO_OR_PATH", help="a folder, `owner/name` or `owner/name@revision`")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub (default: main)")
    parser.add_argument("--history", action="store_true", help="look at the file names of earlier commits too")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--require-private", action="store_true", help="fail for a release that has no guarantee")
    parser.add_argument("--max-epsilon", type=_epsilon, metavar="EPS", help="fail when more than this was spent")
    return parser


def _epsilon(text: str) -> float:
    value = float(text)
    if math.isnan(value):  # nothing is more than that: every release would pass
        raise ValueError(text)
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report. Returns 0 or 1; raises `ReleaseError` when there is nothing to read."""
    args = make_parser().parse_args(argv)
    from raptor_hf.hub.verify import verify_release

    report = verify_release(args.release, revision=args.revision, history=args.history)
    print(report.to_json()) if args.json else _print(report)
    spent = report.statement.epsilon_spent if report.statement is not None else None
    if not report.ok:
        return 1
    if (args.require_private or args.max_epsilon is not None) and not report.private:
        print("NOT PRIVATE, and a guarantee was asked for", file=sys.stderr)
        return 1
    if args.max_epsilon is not None and (spent is None or spent > args.max_epsilon):
        print(f"TOO LITTLE PRIVACY: epsilon {spent} was spent, more than {args.max_epsilon:g}", file=sys.stderr)
        return 1
    return 0


def _print(report: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"Release {report.source}", show_header=False)
    if report.revision:
        table.add_row("commit", report.revision)
    if report.statement is not None:
        table.add_row("claim", report.statement.verdict)
    for name, bounds in report.epsilon.items():
        table.add_row(f"epsilon spent, recomputed ({name}, upper bound)", f"{bounds.upper:.4f}")
    table.add_row("files", ", ".join(report.files))
    if report.digest:
        table.add_row("digest (SHA-256 of the manifest)", report.digest)
    console.print(table)
    for finding in report.findings:
        print(f"{finding.severity}: {finding.what}. {finding.why}. {finding.instead}.")
    if report.private:
        print("verified: the files hold what the statement says, and the claim follows from its own numbers")
    elif report.ok:
        print("verified, and NOT PRIVATE: the release says itself that it has no guarantee")
    else:
        print(f"NOT VERIFIED: {len(report.errors)} error(s)")


if __name__ == "__main__":
    raise SystemExit(main())
