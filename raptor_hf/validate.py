"""One wording for all argument checks. Pure Python: the privacy core uses it."""

from __future__ import annotations

import math
from collections.abc import Collection

from raptor_hf.errors import PrivacyConfigError

__all__ = ["finite", "integer", "large_delta", "one_of", "positive", "probability"]


def finite(name: str, value: float) -> float:
    """Return `value` as a float; raise `PrivacyConfigError` unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise PrivacyConfigError(f"`{name}={value!r}` was given", "It must be a finite number", f"Set `{name}` to one")
    return float(value)


def positive(name: str, value: float) -> float:
    """Return `value` as a float; raise `PrivacyConfigError` unless it is finite and > 0."""
    if finite(name, value) <= 0:
        raise PrivacyConfigError(
            f"`{name}={value!r}` was given", "It must be greater than zero", f"Set `{name}` to a positive number"
        )
    return float(value)


def probability(name: str, value: float, *, zero: bool = False, one: bool = True) -> float:
    """Return `value` as a float; raise `PrivacyConfigError` unless it lies in the unit interval.

    Args:
        zero, one: whether the end points are allowed.
    """
    number = finite(name, value)
    if not (0 <= number <= 1) or (number == 0 and not zero) or (number == 1 and not one):
        low, high = "[" if zero else "(", "]" if one else ")"
        raise PrivacyConfigError(
            f"`{name}={value!r}` was given", f"It must lie in {low}0, 1{high}", f"Set `{name}` inside that range"
        )
    return number


def integer(name: str, value: int, *, minimum: int = 0) -> int:
    """Return `value` as an int; raise `PrivacyConfigError` unless it is a whole number >= `minimum`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < minimum:
        raise PrivacyConfigError(
            f"`{name}={value!r}` was given", f"It must be a whole number >= {minimum}", f"Set `{name}` to one"
        )
    return int(value)


def one_of(name: str, value: str, choices: Collection[str]) -> str:
    """Return `value`; raise `PrivacyConfigError` unless it is one of `choices`."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise PrivacyConfigError(f"`{name}={value!r}` was given", f"It must be one of {listed}", "Choose one of these")
    return value


_LARGE_DELTA = 1e-3


def large_delta(delta: float, dataset_size: int) -> str:
    """A warning where the default delta of so few records is large; else empty."""
    if delta <= _LARGE_DELTA:
        return ""
    return (
        f"The default delta, n^-1.1 of {dataset_size} records, is {delta:.2g}: a mechanism that publishes each record "
        f"with that probability, {dataset_size * delta:.1f} of the {dataset_size} on average, would be allowed by it. "
        "Set a smaller one, 1e-5 say."
    )
