"""The verdict of a one-run audit: lower bounds from the canaries, held against what the trainer claims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raptor_hf.audit.canaries import CanaryTrainer, Observer, canary_scores
from raptor_hf.audit.folder import read_arrays, write_arrays
from raptor_hf.audit.measured import ALARM, Measured, measure, repetition
from raptor_hf.audit.one_run import one_run_audit
from raptor_hf.privacy.accounting import Mechanism, compute_epsilon

__all__ = ["CanaryResult", "bound_run", "one_run_markdown"]


@dataclass(frozen=True)
class CanaryResult:
    """One run: coins, scores and claims. **Private**.

    Attributes:
        included: (m,) bool. lone: (m,) bool. scores: name -> (m,) (see `canary_scores`).
        claims: name -> claimed epsilon at delta: "joint" as in the privacy statement, each stream's own beside it.
        measured: stream (or "lone", in the expert stream) -> noise and sensitivity along the canaries.
        quiet: (T, m) the releases in the lone expert over sigma, zero along the canaries planted there: noise alone,
            in the same directions in every run. (0, m) without such an expert.
    """

    included: np.ndarray
    lone: np.ndarray
    scores: dict[str, np.ndarray]
    claims: dict[str, float]
    delta: float
    measured: dict[str, Measured]
    quiet: np.ndarray

    @classmethod
    def of(cls, trainer: CanaryTrainer, observer: Observer) -> CanaryResult:
        """The result of a trainer after training."""
        statement = trainer.privacy_statement()
        claims = {"joint": math.inf if statement.epsilon_spent is None else statement.epsilon_spent}
        for name, stream in statement.streams.items():
            if stream.noise_multiplier is not None and stream.max_grad_norm is not None:
                spent = Mechanism(stream.noise_multiplier, stream.sample_rate, stream.steps_taken)
                claims[name] = compute_epsilon([spent], statement.delta, accountant=statement.accountant).upper
            else:
                claims[name] = math.inf
        rate = next(iter(statement.streams.values())).sample_rate
        canaries = trainer.canaries
        measured, quiet = {}, np.zeros((0, len(canaries.included)))
        for name, rows in observer.seen.items():
            sigma = observer.streams[name].noise_multiplier
            if sigma:
                measured[name] = measure(np.stack(rows), canaries.included, sigma, rate)
                if name == "expert" and observer.lone:
                    here = canaries.included & (canaries.owners == observer.lone_owner)
                    measured["lone"] = measure(np.stack(observer.lone), here, sigma, rate)
                    quiet = np.stack(observer.lone) / sigma * ~here
        scores = canary_scores(observer, rate)
        return cls(canaries.included, canaries.lone, scores, claims, statement.delta, measured, quiet)

    def save(self, path: Path) -> None:
        """Write it, readable by its owner alone."""
        named = {f"score_{name}": value for name, value in self.scores.items()}
        named |= {f"claim_{name}": np.float64(value) for name, value in self.claims.items()}
        named |= {f"measured_{name}": np.array(astuple(value)) for name, value in self.measured.items()}
        write_arrays(
            path, included=self.included, lone=self.lone, quiet=self.quiet, delta=np.float64(self.delta), **named
        )

    @classmethod
    def load(cls, path: Path) -> CanaryResult:
        """The inverse of `save`."""
        found = read_arrays(path)

        def under(prefix: str) -> dict[str, np.ndarray]:
            return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}

        claims = {name: float(value) for name, value in under("claim_").items()}
        measured = {name: Measured(*map(float, value)) for name, value in under("measured_").items()}
        delta, quiet = float(found["delta"]), found["quiet"]
        return cls(found["included"], found["lone"], under("score_"), claims, delta, measured, quiet)


def bound_run(result: CanaryResult, confidence: float, others: Sequence[CanaryResult] = ()) -> dict[str, Any]:
    """Lower bounds on epsilon by the whole run, by each stream, and by the canaries alone in an expert.

    Args:
        confidence: that *none* of the run's bounds is above the true epsilon: shared out by Bonferroni. Not shared
            among several runs: the bounds pay for m delta, and would be zero at a much higher confidence.
        others: further runs, with the same `args.seed`: their noise must not be this run's.

    Returns:
        `bounds`: rows of name, claim, epsilon, guesses, correct; `measured`: rows of stream, noise, shift and their
        tail probabilities; `holds`: whether no bound exceeds its claim and nothing that was measured alarms.
    """
    everyone = np.ones(len(result.included), dtype=bool)
    wanted = [(name, name, everyone) for name in result.claims if name != "joint" and len(result.claims) > 2]
    wanted = [("joint", "joint", everyone), *wanted, ("final", "joint", everyone)]
    if result.lone.any() and "expert" in result.claims:
        wanted.append(("lone", "expert", result.lone))
    level = 1 - (1 - confidence) / len(wanted)
    bounds = []
    for name, claim, chosen in wanted:
        scores, coins = result.scores["expert" if name == "lone" else name][chosen], result.included[chosen]
        row: dict[str, Any] = {"name": name, "claim": result.claims[claim], "canaries": int(chosen.sum())}
        if coins.all() or not coins.any():  # all coins fell alike: nothing can be told
            bounds.append({**row, "epsilon": 0.0, "guesses": 0, "correct": 0})
            continue
        found = one_run_audit(scores, coins, delta=result.delta, confidence=level)
        bounds.append({**row, "epsilon": found.epsilon, "guesses": found.guesses, "correct": found.correct})
    exceeded = [f"bound ({row['name']})" for row in bounds if row["epsilon"] > row["claim"]]
    alarms = []
    for name, value in result.measured.items():
        alarms += [f"too little noise ({name})"] if value.noise_tail < ALARM else []
        alarms += [f"a record counts for more than its norm ({name})"] if value.shift_tail < ALARM else []
    if repetition(result.quiet[:-1], result.quiet[1:]) < ALARM:
        alarms.append("the noise of one cycle is in the next")
    if any(repetition(result.quiet, other.quiet) < ALARM for other in others):
        alarms.append("the noise is that of another run with the same seed")
    return {
        "claimed_epsilon": result.claims["joint"],
        "delta": result.delta,
        "bounds": bounds,
        "measured": [{"name": name, **_finite(asdict(value))} for name, value in result.measured.items()],
        "exceeded": bool(exceeded),
        "holds": not exceeded and not alarms,
        "verdict": "; ".join([*exceeded, *alarms]) or "nothing was found",
    }


def _finite(row: Mapping[str, float]) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in row.items()}


_MEANING = {
    "joint": "both streams, every release seen",
    "shared": "shared stream",
    "expert": "expert stream",
    "final": "the last adapter alone",
    "lone": "canaries alone in an expert",
}


def one_run_markdown(report: Mapping[str, Any]) -> str:
    """A line for every method and view, over all its runs."""
    lines = [
        "# One-run audit with gradient canaries",
        "",
        f"{report['canaries']} canaries a run, each put in by a fair coin. Lower bounds on epsilon, all those of "
        f"one run together at confidence {report['confidence']:.0%}, against what the trainer claims.",
        "",
        "| method | view | claimed epsilon | delta | runs | bound, mean | bound, largest | exceeded |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = list(dict.fromkeys(run["name"] for run in report["runs"]))
    for name in names:
        runs = [run for run in report["runs"] if run["name"] == name]
        for place, view in enumerate(runs[0]["bounds"]):
            rows = [run["bounds"][place] for run in runs]
            values = [row["epsilon"] for row in rows]
            over = sum(row["epsilon"] > row["claim"] for row in rows)
            lines.append(
                f"| {name} | {_MEANING.get(view['name'], view['name'])} | {max(row['claim'] for row in rows):.3f} "
                f"| {runs[0]['delta']:.2g} | {len(runs)} | {np.mean(values):.3f} | {max(values):.3f} | {over} |"
            )
    lines += [
        "",
        "Measured along the canaries' directions, in units of what the statement says (noise 1, shift 1):",
        "",
        "| method | stream | noise, mean | noise, least tail | shift, mean | shift, least tail | alarms |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        runs = [run for run in report["runs"] if run["name"] == name]
        for place, row in enumerate(runs[0]["measured"]):
            rows = [run["measured"][place] for run in runs]
            alarms = sum(one["noise_tail"] < ALARM or one["shift_tail"] < ALARM for one in rows)
            lines.append(
                f"| {name} | {row['name']} | {_mean(rows, 'noise')} | {min(one['noise_tail'] for one in rows):.2g} "
                f"| {_mean(rows, 'shift')} | {min(one['shift_tail'] for one in rows):.2g} | {alarms} |"
            )
    broken = sum(not run["holds"] for run in report["runs"])
    verdict = (
        "No bound exceeds its claim, and nothing that was measured alarms. That proves nothing."
        if not broken
        else f"**{broken} of {len(report['runs'])} runs contradict the statement: the claim is false.**"
    )
    return "\n".join([*lines, "", verdict, ""])


def _mean(rows: Sequence[Mapping[str, float | None]], key: str) -> str:
    values = [row[key] for row in rows if row[key] is not None]
    return f"{np.mean(values):.3f}" if values else "-"
