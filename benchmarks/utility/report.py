"""Finished runs as tables (CSV, Markdown), plots, and notes on what contradicts itself."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.utility.settings import VARIANTS
from benchmarks.utility.verify import verify_result
from raptor_hf.analysis import plot_accuracy_vs_epsilon

__all__ = ["Cell", "csv_text", "markdown_table", "monotonicity_notes", "plot", "summarise", "write_report"]

RUN_FIELDS = (
    "task", "model", "variant", "epsilon", "seed", "accuracy", "eval_loss", "epsilon_spent", "epsilon_opacus", "delta",
    "sigma_shared", "sigma_expert", "protected_layer", "trainable", "train_records", "eval_records", "batch_size",
    "cycles", "learning_rate", "clip", "budget_split",
    "rank", "max_length", "seconds", "cpu_seconds", "peak_process_mb", "key",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """The seeds of a task, model, variant and budget.

    Attributes:
        mean: of the accuracies, in percent. error: standard error of that mean over the runs (sample standard deviation
            over the root of their number), NaN for one run. runs: their number.
        sampling_error: of one accuracy on the evaluation split, sqrt(a (1 - a) / m), in points: what another split of
            that size would move it by. All cells of a task share the split.
    """

    mean: float
    error: float
    runs: int
    sampling_error: float


def summarise(results: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str, float], Cell]:
    """Cells by (task, model, variant, epsilon).

    Raises:
        ValueError: runs of one cell with settings that differ in more than the seed.
    """
    grouped: dict[tuple[str, str, str, float], list[Mapping[str, Any]]] = {}
    for result in results:
        settings = result["settings"]
        cell = (settings["task"], settings["model"], settings["variant"], float(settings["epsilon"]))
        grouped.setdefault(cell, []).append(result)
    found = {}
    for cell, members in grouped.items():
        shared = [{k: v for k, v in m["settings"].items() if k not in ("seed", "data_dir")} for m in members]
        if any(settings != shared[0] for settings in shared):
            raise ValueError(
                f"The runs of {cell} have different settings, so their mean is of no one method. Report the runs of "
                "one command: other settings go to another folder."
            )
        scores = [100 * m["accuracy"] for m in members]
        mean, count = statistics.mean(scores), len(scores)
        error = statistics.stdev(scores) / math.sqrt(count) if count > 1 else float("nan")
        sampling = math.sqrt(max(0.0, mean * (100 - mean)) / members[0]["eval_records"])
        found[cell] = Cell(mean, error, count, sampling)
    return found


def _number(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"{cell.mean:.2f}" if math.isnan(cell.error) else f"{cell.mean:.2f} ± {cell.error:.2f}"


def _epsilon_name(epsilon: float) -> str:
    return "ε = ∞" if math.isinf(epsilon) else f"ε = {epsilon:g}"


def markdown_table(cells: Mapping[tuple[str, str, str, float], Cell], task: str, model: str) -> str:
    """Methods in rows, budgets in columns: mean accuracy ± standard error over the seeds."""
    mine = {(variant, epsilon): cell for (t, m, variant, epsilon), cell in cells.items() if (t, m) == (task, model)}
    epsilons = sorted({epsilon for _, epsilon in mine})
    lines = ["| method | " + " | ".join(_epsilon_name(e) for e in epsilons) + " | runs a cell |"]
    lines.append("|---|" + "---|" * (len(epsilons) + 1))
    for variant in VARIANTS:
        row = [mine.get((variant, epsilon)) for epsilon in epsilons]
        if any(row):
            counts = sorted({cell.runs for cell in row if cell})
            runs = "-".join(str(c) for c in (counts[:1] + counts[-1:] if len(counts) > 1 else counts))
            lines.append(f"| {VARIANTS[variant].label} | " + " | ".join(_number(c) for c in row) + f" | {runs} |")
    return "\n".join(lines)


def monotonicity_notes(cells: Mapping[tuple[str, str, str, float], Cell]) -> list[str]:
    """Where a smaller budget did better than a larger one, by more than twice the error of the difference.

    The same method at epsilon 8 sees less noise than at epsilon 1, and without noise none: a significant reversal
    is a fault or needs a reason. Cells with one run have no error and are left out. `nonprivate_lora` stands for
    epsilon = inf of RAPTOR, its ablations and its scope with one clip, where they were not run without noise.
    """
    notes = []
    for task, model, variant, epsilon in sorted(cells):
        low = cells[task, model, variant, epsilon]
        larger = {e: c for (t, m, v, e), c in cells.items() if (t, m, v) == (task, model, variant) and e > epsilon}
        if VARIANTS[variant].method in ("raptor", "matched_global") and not any(math.isinf(e) for e in larger):
            stand_in = cells.get((task, model, "nonprivate_lora", math.inf))
            larger.update({math.inf: stand_in} if stand_in is not None else {})
        for other, high in sorted(larger.items()):
            error = math.hypot(low.error, high.error)
            if low.mean - high.mean > 2 * error:  # False for NaN
                notes.append(
                    f"{task}, {model}, {VARIANTS[variant].label}: {low.mean:.2f} at {_epsilon_name(epsilon)} is above "
                    f"{high.mean:.2f} at {_epsilon_name(other)} by more than twice the error of the difference "
                    f"({error:.2f})"
                )
    return notes


def _run_row(result: Mapping[str, Any]) -> dict[str, Any]:
    statement, settings = result["statement"], result["settings"]
    sigma = {name: (statement[name] or {}).get("noise_multiplier") for name in ("shared", "expert")}
    values = {
        **settings, **result, "epsilon": settings["epsilon"], "epsilon_spent": result["epsilon"]["claimed"],
        "epsilon_opacus": result["epsilon"]["opacus"], "delta": statement["delta"], "sigma_shared": sigma["shared"],
        "sigma_expert": sigma["expert"],
    }  # fmt: skip
    return {name: values[name] for name in RUN_FIELDS}


def csv_text(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plot(results: Sequence[Mapping[str, Any]], path: Path, *, chance: float | None = None) -> Path:
    """Accuracy over epsilon, one line a method, bars of one standard deviation over the seeds, as a PNG file."""
    order = list(VARIANTS)
    rows = [
        {
            "method": VARIANTS[r["settings"]["variant"]].label,
            "epsilon": float(r["settings"]["epsilon"]),
            "accuracy, %": 100 * r["accuracy"],
        }
        for r in sorted(results, key=lambda r: order.index(r["settings"]["variant"]))
    ]
    plot_accuracy_vs_epsilon(rows, path, value="accuracy, %", chance=chance)
    return path


def write_report(results: Sequence[dict[str, Any]], output: Path) -> list[Path]:
    """Verify every run, then write `runs.csv`, `summary.csv`, `tables.md` and a plot for each task and model.

    Raises:
        VerificationError: a run whose privacy statement does not hold.
    """
    for result in results:
        verify_result(result)
    cells = summarise(results)
    output.mkdir(parents=True, exist_ok=True)
    rows = sorted((_run_row(r) for r in results), key=lambda row: tuple(str(row[f]) for f in RUN_FIELDS[:5]))
    paths = [output / name for name in ("runs.csv", "summary.csv", "tables.md")]
    paths[0].write_text(csv_text(rows, RUN_FIELDS), encoding="utf-8")
    fields = ("task", "model", "variant", "epsilon", "mean", "standard_error", "runs", "sampling_error")
    order = list(VARIANTS)
    summary = [
        dict(zip(
            fields,
            (*cell[:3], f"{cell[3]:g}", f"{c.mean:.4f}", f"{c.error:.4f}", c.runs, f"{c.sampling_error:.4f}"),
            strict=True,
        ))
        for cell, c in sorted(cells.items(), key=lambda item: (*item[0][:2], order.index(item[0][2]), item[0][3]))
    ]  # fmt: skip
    paths[1].write_text(csv_text(summary, fields), encoding="utf-8")
    sections = []
    for task, model in sorted({cell[:2] for cell in cells}):
        of_task = [r for r in results if (r["settings"]["task"], r["settings"]["model"]) == (task, model)]
        sizes = sorted({(r["train_records"], r["eval_records"]) for r in of_task})
        cpu = statistics.mean(r["cpu_seconds"] for r in of_task)
        about = "; ".join(f"{a:,} records to train, {b:,} to evaluate" for a, b in sizes)
        text = f"## {task}, {model}\n\nAccuracy in percent, mean ± standard error over the seeds; {about}; "
        sections.append(
            f"{text}{len(of_task)} runs, {cpu:.0f} s of CPU time each.\n\n{markdown_table(cells, task, model)}\n"
        )
        name = f"{task}-{model.replace('/', '_')}.png"
        ablations = [r for r in of_task if VARIANTS[r["settings"]["variant"]].tuned_as == "raptor"]
        methods = [r for r in of_task if r not in ablations or r["settings"]["variant"] == "raptor"]
        if methods:
            paths.append(plot(methods, output / f"accuracy-{name}"))
        if any(r["settings"]["variant"] != "raptor" for r in ablations):
            paths.append(plot(ablations, output / f"ablations-{name}"))
    notes = monotonicity_notes(cells)
    heading = "## A smaller budget that did better\n\n"
    sections.append(heading + ("".join(f"* {note}\n" for note in notes) or "None, beyond twice the standard error.\n"))
    paths[2].write_text("\n".join(sections), encoding="utf-8")
    return paths
