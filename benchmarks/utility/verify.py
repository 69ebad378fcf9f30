"""Does a run's privacy statement describe what its settings asked for, and is its epsilon right?

The epsilon is computed again by the accountant that made the claim and by Opacus's PRV accountant, another
implementation. A run that fails is no result: nothing of it enters a table.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from benchmarks.utility.settings import VARIANTS, Settings
from raptor_hf import PrivacyStatement

__all__ = ["VerificationError", "verify"]

# Opacus's discretisation and ours each err by up to about 1 % of epsilon.
_TOLERANCE = 0.03


class VerificationError(RuntimeError):
    """A statement that does not fit the run."""


@functools.lru_cache(maxsize=256)
def _opacus_epsilon(mechanisms: tuple[tuple[float, float, int], ...], delta: float) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = list(mechanisms)
    return float(accountant.get_epsilon(delta, eps_error=0.005, delta_error=delta / 1000))


def verify(statement: PrivacyStatement, settings: Settings, records: int) -> dict[str, float | None]:
    """Recompute the epsilon of a statement and compare the statement with the settings.

    Args:
        records: n, the size of the training split.

    Returns:
        The epsilons spent: claimed, recomputed (upper bound) and Opacus's; None for a run without noise.

    Raises:
        VerificationError: anything that does not fit.
    """

    def check(holds: bool, what: str) -> None:
        if not holds:
            raise VerificationError(f"{settings.key}: {what}. The run is no result; find out why before any other.")

    variant = VARIANTS[settings.variant]
    noisy = variant.private and math.isfinite(settings.epsilon)
    named, _, changed = statement.method.partition(" (")  # an ablation names what it changes
    check(named == variant.method, f"the statement is about `{statement.method}`")
    check(
        bool(changed) == bool({"clipping", "alternating"} & set(variant.options)), f"it is about `{statement.method}`"
    )
    check(tuple(statement.streams) == variant.streams, f"the streams are {list(statement.streams)}")
    check(statement.noise_source == "os_entropy", "the noise came from a seed")
    check(not statement.research_diagnostics, "private diagnostics were on")
    check(statement.dataset_size == records, f"the statement counts {statement.dataset_size} records, not {records}")
    check(statement.private == noisy, f"the statement says {statement.verdict!r}")
    for name, stream in statement.streams.items():
        check(stream.steps_taken == settings.cycles, f"the {name} stream took {stream.steps_taken} steps")
        check(
            math.isclose(stream.sample_rate, settings.batch_size / records, rel_tol=1e-9),
            f"the {name} stream has a sample rate of {stream.sample_rate}",
        )
        check(stream.private == noisy, f"the {name} stream has sigma {stream.noise_multiplier}")
    if not noisy:
        check(statement.epsilon_spent is None, "a run without noise claims an epsilon")
        return {"claimed": None, "recomputed": None, "opacus": None}
    check(math.isclose(statement.delta, records**-1.1, rel_tol=1e-9), f"delta is {statement.delta}")
    claimed = statement.epsilon_spent
    assert claimed is not None  # a private statement has one
    check(claimed <= settings.epsilon * (1 + 1e-9), f"epsilon {claimed} was spent, more than {settings.epsilon}")
    check(claimed >= settings.epsilon * 0.97, f"epsilon {claimed} was spent: the noise is larger than the budget asks")
    bounds = statement.recompute()  # raises when a claim is too small
    mechanisms = tuple((s.noise_multiplier, s.sample_rate, s.steps_taken) for s in statement.streams.values())
    opacus = _opacus_epsilon(mechanisms, statement.delta)  # type: ignore[arg-type]
    check(abs(opacus - claimed) <= _TOLERANCE * claimed + 0.01, f"epsilon {claimed} was claimed, Opacus says {opacus}")
    return {"claimed": claimed, "recomputed": bounds.upper, "opacus": opacus}


def verify_result(result: dict[str, Any]) -> dict[str, float | None]:
    """`verify` for a run's JSON: nothing in it is taken on trust but the numbers of the mechanism."""
    import json

    statement = PrivacyStatement.from_json(json.dumps(result["statement"]))
    return verify(statement, Settings.from_dict(result["settings"]), result["train_records"])
