"""What the `calibrate` and `epsilon` commands share: the plan of a run, a plain table, a plot."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from raptor_hf.privacy import Mechanism, compute_epsilon, default_delta
from raptor_hf.privacy._card import round_up
from raptor_hf.privacy._pld import pld_installed
from raptor_hf.privacy.accounting import EpsilonRangeError, check_delta
from raptor_hf.validate import integer, positive, probability

__all__ = [
    "Plan",
    "epsilon_rows",
    "format_table",
    "plan_cycles",
    "plan_parser",
    "read_plan",
    "save_plot",
    "second_opinion_hint",
]

_PLOT_POINTS = 16
OTHER_DELTAS = (1e-6, 1e-8)


class Plan(NamedTuple):
    """n records, expected batch B, p = B / n, T cycles (one release of each stream a cycle), delta."""

    dataset_size: int
    batch_size: int
    sample_rate: float
    cycles: int
    delta: float

    def describe(self) -> str:
        return (
            f"{self.dataset_size:,} records, expected batch {self.batch_size:,} (sample rate {self.sample_rate:.6g}), "
            f"{self.cycles:,} cycles, delta {self.delta:.4g}"
        )


def plan_cycles(dataset_size: int, batch_size: int, epochs: float) -> int:
    """ceil(epochs * n / B): one epoch is n / B cycles. Rounded first, so that 3 * 10 / 3 does not become 11."""
    return math.ceil(round(epochs * dataset_size / batch_size, 9))


def plan_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with the flags of a plan."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "--dataset-size", type=int, required=True, metavar="N", help="number of private records (public)"
    )
    parser.add_argument("--batch-size", type=int, required=True, metavar="B", help="expected batch size")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=float, help="length of the run: N / B cycles an epoch")
    length.add_argument("--steps", type=int, help="length of the run in cycles")
    parser.add_argument("--delta", type=float, help="default: N ** -1.1")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="save a plot of epsilon over cycles")
    return parser


def read_plan(args: argparse.Namespace) -> Plan:
    """The checked plan.

    Raises:
        PrivacyConfigError: for values out of range.
    """
    n = integer("dataset_size", args.dataset_size, minimum=2)
    batch = integer("batch_size", args.batch_size, minimum=1)
    rate = probability("batch_size / dataset_size", batch / n)
    if args.steps is None:
        cycles = plan_cycles(n, batch, positive("epochs", args.epochs))
    else:
        cycles = integer("steps", args.steps, minimum=1)
    delta = default_delta(n) if args.delta is None else check_delta("delta", args.delta)
    return Plan(n, batch, rate, cycles, delta)


def epsilon_rows(noise_multipliers: Mapping[str, float], plan: Plan) -> list[tuple[str, str]]:
    """(quantity, value) for one choice of noise multipliers (stream -> sigma): both accountants, parts, deltas."""
    mechanisms = {name: Mechanism(sigma, plan.sample_rate, plan.cycles) for name, sigma in noise_multipliers.items()}

    def show(streams: Sequence[Mechanism], delta: float, accountant: str = "prv") -> str:
        try:
            return round_up(compute_epsilon(streams, delta, accountant=accountant).upper)
        except EpsilonRangeError:
            return "above 20"

    together = list(mechanisms.values())
    # Rounded up, as every number below: whoever copies them gets no less privacy than is printed.
    rows = [
        (f"noise multiplier, {name}", f"{math.ceil(sigma * 1e4) / 1e4:.4f}")
        for name, sigma in noise_multipliers.items()
    ]
    rows.append(("epsilon, upper bound (prv)", show(together, plan.delta)))
    second = show(together, plan.delta, "pld") if pld_installed() else "not installed"
    rows.append(("epsilon, cross-check (pld)", second))
    if len(mechanisms) > 1:
        rows += [(f"epsilon of the {name} stream alone", show([one], plan.delta)) for name, one in mechanisms.items()]
    rows += [(f"epsilon at delta = {delta:g}", show(together, delta)) for delta in OTHER_DELTAS]
    return rows


def second_opinion_hint() -> str:
    """How to get the second accountant; empty when it is there."""
    return "" if pld_installed() else "\ncross-check: pip install 'raptor-hf[pld]'"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def save_plot(path: Path, curves: Mapping[str, Mapping[str, float]], plan: Plan, target: float | None = None) -> None:
    """Save a PNG of the epsilon spent over cycles, one curve for each choice of noise multipliers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    cycles = sorted({math.ceil(plan.cycles * (i + 1) / _PLOT_POINTS) for i in range(_PLOT_POINTS)})
    for name, noise_multipliers in curves.items():
        spent = [
            compute_epsilon([(s, plan.sample_rate, count) for s in noise_multipliers.values()], plan.delta).upper
            for count in cycles
        ]
        axes.plot([0, *cycles], [0.0, *spent], marker=".", label=name)
    if target is not None:
        axes.axhline(target, color="grey", linestyle="--", label="target")
    axes.set(xlabel="cycles", ylabel=f"epsilon spent (upper bound, delta = {plan.delta:.3g})", xlim=(0, None))
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
