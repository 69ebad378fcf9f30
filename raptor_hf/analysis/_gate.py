"""Who may measure on private records: a run whose privacy statement says so."""

from __future__ import annotations

from torch import nn

from raptor_hf.errors import PrivacyConfigError

__all__ = ["private_unless"]


def private_unless(public_data: bool, model: nn.Module) -> bool:
    """Whether a measurement of `model` is private; refuses one that its run's privacy statement would not own up to.

    A trainer binds the ledger of its run to the model that it trains (`model.raptor_ledger`). A run has
    `research_diagnostics` from its first cycle to its last or not at all, whatever is assigned to the arguments later,
    and resuming cannot change it. So a model that was trained without it stays refused.

    Args:
        public_data: the caller's statement that the records are public. Anything but True is taken as no.

    Returns:
        False for public records. True for others, under `research_diagnostics`.

    Raises:
        PrivacyConfigError: records that were not declared public, and a model of no run, or of a run without
            `research_diagnostics`.
    """
    if public_data is True:
        return False
    plan = getattr(getattr(model, "raptor_ledger", None), "plan", None)
    if getattr(plan, "research_diagnostics", False) is True:
        return True
    of = "a model that belongs to no run" if plan is None else "a model of a run without `research_diagnostics`"
    raise PrivacyConfigError(
        f"Records were given that were not declared public, and {of}",
        "What is measured is an exact function of them that no epsilon covers, and no privacy statement would say so",
        "Measure on a public corpus and pass `public_data=True`. To look into a run that need not be private, make its "
        "trainer with `RaptorConfig(research_diagnostics=True)` and measure once `train()` or `privacy_statement()` "
        'was called: its statement then begins "NOT PRIVATE"',
    )
