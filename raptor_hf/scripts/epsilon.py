"""`raptor-hf epsilon`: what given noise multipliers spend.

raptor-hf epsilon --shared-noise 2.305 --expert-noise 16.51 --dataset-size 67349 --batch-size 1000 --epochs 20
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.privacy.accounting import check_noise_multiplier
from raptor_hf.scripts._plan import (
    epsilon_rows,
    format_table,
    plan_parser,
    read_plan,
    save_plot,
    second_opinion_hint,
)

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    parser = plan_parser("raptor-hf epsilon", "Epsilon that the given noise multipliers spend over a run.")
    parser.add_argument("--shared-noise", type=float, metavar="SIGMA", help="noise multiplier of the shared stream")
    parser.add_argument("--expert-noise", type=float, metavar="SIGMA", help="noise multiplier of the expert stream")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table (and save the plot). Returns 0; raises `PrivacyConfigError` for values out of range."""
    args = make_parser().parse_args(argv)
    plan = read_plan(args)
    pair = {"shared": args.shared_noise, "expert": args.expert_noise}
    noise = {name: check_noise_multiplier(f"{name}_noise", sigma) for name, sigma in pair.items() if sigma is not None}
    if not noise:
        raise PrivacyConfigError(
            "Neither `--shared-noise` nor `--expert-noise` was given",
            "Without noise epsilon is infinite",
            "Give at least one of them",
        )
    print(f"{plan.describe()}\n")
    print(format_table(["", "value"], epsilon_rows(noise, plan)))
    if hint := second_opinion_hint():
        print(hint)
    if args.plot is not None:
        save_plot(args.plot, {"spent": noise}, plan)
        print(f"\nplot: {args.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
