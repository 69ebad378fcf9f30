"""`raptor-hf audit CONFIG.yaml --output DIR [options] [--field value ...]`: attack what a configuration trains.

--attack lira: shadow models on random halves of the records, the loss-threshold attack and LiRA (how much an attacker
learns about typical records). --attack one-run: gradient canaries through the real trainer, and a lower bound on
epsilon that is held against the claimed one (does the code keep its promise). CONFIG.yaml is a configuration of
`raptor-hf train`, and every further flag is one of its fields. A killed audit goes on when the command is repeated.

Exit code 0: nothing was found. 1: a bound exceeds the claimed epsilon, or less noise or more of a record than stated
was measured. 130: stopped.

Everything in DIR is private, readable by its owner alone, and outside any epsilon.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from raptor_hf.errors import PrivacyConfigError

__all__ = ["main", "make_parser"]


def _list(kind: type) -> Any:
    def read(text: str) -> list:
        return [kind(part) for part in text.split(",") if part]

    return read


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's own flags; those of the training configuration pass through."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="raptor-hf audit", description=description, epilog=epilog, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG.yaml", help="a configuration of `raptor-hf train`")
    parser.add_argument("--attack", choices=("lira", "one-run"), default="lira", help="default: %(default)s")
    parser.add_argument("--output", required=True, metavar="DIR", help="the audit's private folder")
    parser.add_argument("--methods", type=_list(str), default=[], help="comma-separated; default: the configuration's")
    parser.add_argument("--epsilons", type=_list(float), default=[], help="comma-separated; default: the same")
    parser.add_argument(
        "--set", action="append", default=[], metavar="METHOD.FIELD=VALUE", dest="overrides",
        help="a field of one method (or of one line, e.g. raptor-eps8) only; may be repeated",
    )  # fmt: skip
    parser.add_argument("--confidence", type=float, default=0.95, help="of all intervals; default: %(default)s")
    parser.add_argument(
        "--publish-summary", metavar="FILE",
        help="also write a summary without anything about single records, meant to be published: your choice",
    )  # fmt: skip
    lira = parser.add_argument_group("--attack lira")
    lira.add_argument("--shadows", type=int, default=16, help="shadow models a method; default: %(default)s")
    lira.add_argument("--members", type=int, help="records each is trained on; default: half of the training set")
    lira.add_argument("--non-members", type=int, help="records each is not trained on; default: as many")
    lira.add_argument("--jobs", type=int, default=1, help="processes at a time; default: %(default)s")
    lira.add_argument(
        "--launcher", metavar="COMMAND", help="run workers by this instead of python, e.g. 'accelerate launch'"
    )
    one = parser.add_argument_group("--attack one-run")
    one.add_argument("--canaries", type=int, default=400, help="canary records; default: %(default)s")
    one.add_argument(
        "--lone-canaries", type=int, default=8, metavar="K",
        help="how many of them are alone in an expert without real records (0: none); default: %(default)s",
    )  # fmt: skip
    one.add_argument("--records", type=int, metavar="N", help="real records of the run; default: all")
    one.add_argument("--runs", type=int, default=1, help="independent runs; default: %(default)s")
    one.add_argument("--directions", choices=("random", "dirac"), default="random", help="default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the audit; returns the exit code."""
    parser = make_parser()
    args, flags = parser.parse_known_args(list(sys.argv[1:] if argv is None else argv))
    for flag in flags:
        if flag.partition("=")[0] in ("--output_dir", "--output-dir"):
            raise PrivacyConfigError(
                f"`{flag}` was given", "An audit writes to its own private folder", "Give `--output DIR` alone"
            )
    from raptor_hf.scripts._audit import read_settings

    settings = read_settings(args.config, flags)
    if args.attack == "lira":
        from raptor_hf.scripts._audit_lira import run
    else:
        from raptor_hf.scripts._audit_one_run import run
    try:
        return run(args, settings)
    except KeyboardInterrupt:
        print(f"Stopped. Repeat the command to go on: what is finished lies in `{args.output}`.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
