"""`raptor-hf calibrate`: noise multipliers of the two streams for a target epsilon.

raptor-hf calibrate --epsilon 1 --dataset-size 67349 --batch-size 1000 --epochs 20 --rho .9
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from raptor_hf.privacy import calibrate_noise_multipliers
from raptor_hf.privacy.calibration import RULES
from raptor_hf.scripts._plan import (
    epsilon_rows,
    format_table,
    plan_parser,
    read_plan,
    save_plot,
    second_opinion_hint,
)
from raptor_hf.validate import large_delta

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    parser = plan_parser(
        "raptor-hf calibrate",
        "Noise multipliers of the shared and the expert stream for a target epsilon, by both rules.",
    )
    parser.add_argument("--epsilon", type=float, required=True, help="target; the upper bound stays at or below it")
    parser.add_argument(
        "--rho", type=float, default=0.9, help="share of the shared stream, 0 to 1 (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table (and save the plot). Returns 0; raises `PrivacyConfigError` for values out of range."""
    args = make_parser().parse_args(argv)
    plan = read_plan(args)
    noise: dict[str, dict[str, float]] = {}
    for rule in RULES:
        found = calibrate_noise_multipliers(
            args.epsilon, plan.delta, plan.sample_rate, plan.cycles, budget_split=args.rho, rule=rule
        )
        pair = {"shared": found.shared, "expert": found.expert}
        noise[rule] = {name: sigma for name, sigma in pair.items() if sigma is not None}
    columns = [epsilon_rows(noise[rule], plan) for rule in RULES]
    names = [name for name, _ in columns[0]]
    rows = [[name, *(column[i][1] for column in columns)] for i, name in enumerate(names)]
    print(f"{plan.describe()}; target epsilon {args.epsilon:g}, rho {args.rho:g}\n")
    print(format_table(["", *RULES], rows))
    if hint := second_opinion_hint():
        print(hint)
    if args.delta is None and (warning := large_delta(plan.delta, plan.dataset_size)):
        print(f"warning: {warning}", file=sys.stderr)
    if args.plot is not None:
        save_plot(args.plot, noise, plan, args.epsilon)
        print(f"\nplot: {args.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
