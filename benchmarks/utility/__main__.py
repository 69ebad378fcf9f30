"""The command of the utility benchmark.

    python -m benchmarks.utility --task rt --model tiny --methods all --epsilons 1,4,8 --seeds 3 --output DIR

Runs what has no result in the output folder yet, verifies every run's privacy statement, and writes tables and plots.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.utility.command import add_run_flags, plan
from benchmarks.utility.console import Progress
from benchmarks.utility.driver import execute, last_words, load_results
from benchmarks.utility.report import write_report

__all__ = ["main", "make_parser", "plan"]


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.utility", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_flags(parser)
    parser.add_argument("--output", type=Path, default=Path("outputs/utility"))
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, one core each")
    parser.add_argument("--launcher", default="", help="command before each process, e.g. 'nice -n 10'")
    parser.add_argument("--routing-only", action="store_true", help="the routing table of the public corpus, no run")
    parser.add_argument("--report-only", action="store_true", help="tables of the results that are there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 when a run failed or there is nothing to report, 130 when interrupted."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        runs = plan(args)
    except (KeyError, ValueError) as error:
        parser.error(str(error.args[0]))
    if args.routing_only:
        from benchmarks.utility.worker import routing

        path = routing(runs[0], args.output)
        print(path.read_text(encoding="utf-8"))
        return 0
    failed: tuple[str, ...] = ()
    if not args.report_only:
        try:
            with Progress(f"{args.task}, {args.model}") as progress:
                failed = execute(runs, args.output, jobs=args.jobs, launcher=args.launcher, progress=progress).failed
        except KeyboardInterrupt:
            print(f"Interrupted. Finished runs stay in {args.output}; the same command goes on with the others.")
            return 130
    results = load_results(args.output, [settings.key for settings in runs])
    if results:
        for path in write_report(results, args.output / "report"):
            print(path)
        print((args.output / "report" / "tables.md").read_text(encoding="utf-8"))
    elif args.report_only:
        print(f"No result of these {len(runs)} runs is in {args.output}: the settings are part of a run's name.")
    for key in failed:
        print(f"No result: {key}. Its log, or that of its cell's first seed, is in {args.output / 'logs'}.")
        if words := last_words(args.output, key):
            print(f"    {words}")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    raise SystemExit(main())
