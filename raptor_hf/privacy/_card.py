"""The privacy section of a model card, from a statement."""

from __future__ import annotations

import decimal
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raptor_hf.privacy.statement import PrivacyStatement

__all__ = ["NOISE_SOURCES", "round_up", "round_up_delta", "statement_markdown"]

NOISE_SOURCES = {"os_entropy": "operating-system entropy", "insecure_seed": "seeded (insecure)"}


def statement_markdown(statement: PrivacyStatement) -> str:
    """The privacy section of a model card: the verdict, a table, and what is not covered."""
    rows = [
        ("Method", statement.method),
        ("Unit, adjacency", f"{statement.unit}; {statement.adjacency}"),
        (
            "Epsilon (upper bound), spent / planned",
            f"{_show(statement.epsilon_spent)} / {_show(statement.epsilon_planned)}",
        ),
        ("Delta", round_up_delta(statement.delta, 4)),
    ]
    for row in statement.other_deltas:
        spent, planned = (_show(value, "not certified") for value in (row.epsilon_spent, row.epsilon_planned))
        rows.append((f"Epsilon at delta = {row.delta:g}, spent / planned", f"{spent} / {planned}"))
    if statement.target_epsilon is not None:
        rows.append(("Target epsilon", f"{statement.target_epsilon:g}"))
    for name, stream in statement.streams.items():
        rows.append(
            (
                f"{name.capitalize()} stream",
                f"noise multiplier {_plain(stream.noise_multiplier)}, clip norm {_plain(stream.max_grad_norm)}, "
                f"sample rate {stream.sample_rate:.6g}, denominator {stream.denominator:g}, "
                f"steps {stream.steps_taken} of {stream.steps_planned}",
            )
        )
    version = f" {statement.accountant_version}" if statement.accountant_version else ""
    error = "" if statement.accountant_error is None else f", numerical error {statement.accountant_error:.2g} included"
    rows += [
        ("Records (public), expected batch", f"{statement.dataset_size}, {statement.expected_batch_size:g}"),
        ("Sampling", statement.sampling),
        ("Experts", statement.parallel_composition),
        ("Noise", NOISE_SOURCES[statement.noise_source]),
        ("Accountant", f"{statement.accountant}{version}{error}"),
        ("Base model", statement.base_model or "not stated"),
        ("Public corpus", statement.public_corpus or "none"),
    ]
    if statement.public_corpus:
        rows.append(("Disjointness from the private data", statement.disjointness or "not checked"))
    rows.append(("Private diagnostics", "computed and shown" if statement.research_diagnostics else "not computed"))
    table = ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)]
    uncovered = [f"- {_cell(text)}" for text in statement.not_covered]
    return "\n".join([f"**{statement.verdict}**", "", *table, "", "Not covered:", "", *uncovered, ""])


def round_up(value: float | None) -> str:
    """Four significant digits, never below the value: a rounded claim must still hold."""
    if not value:
        return "0"
    places = 3 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10**places) / 10**places:.{max(places, 0)}f}"


def round_up_delta(value: float, digits: int = 3) -> str:
    """As `%g`, never below the value."""
    up = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{float(up):.{digits}g}"


def _show(value: float | None, missing: str = "infinite") -> str:
    return missing if value is None else round_up(value)


def _plain(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
