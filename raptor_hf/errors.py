"""The errors of the package. Every message has three parts: what was given, why it cannot work, what to do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding", "PrivacyConfigError", "RaptorError", "ReleaseError", "UnsupportedModelError"]


class RaptorError(ValueError):
    """Base class: a `ValueError` with a three-part message.

    Args:
        given: what was passed or found, e.g. "`max_grad_norm=1.0` was set".
        why: why it cannot work, or what it would do to the privacy guarantee.
        instead: what to do instead.
    """

    def __init__(self, given: str, why: str, instead: str):
        self.given, self.why, self.instead = given, why, instead
        super().__init__(" ".join(part.rstrip(".") + "." for part in (given, why, instead)))


class PrivacyConfigError(RaptorError):
    """A setting that would break, weaken or misstate the privacy guarantee."""


class UnsupportedModelError(RaptorError):
    """A model whose structure cannot be told, or that mixes records."""


class ReleaseError(RaptorError):
    """A release that would publish what must stay private, or a claim that does not hold."""


@dataclass(frozen=True)
class Finding:
    """Something that a check found. The three parts of a `RaptorError`, before it is raised.

    Attributes:
        what: was found. why: it matters for privacy. instead: what to do.
        severity: "error" (training would break the guarantee, and is refused) or "warning".
        kind: class of the error that `error()` makes.
    """

    what: str
    why: str
    instead: str
    severity: str = "error"
    kind: type[RaptorError] = PrivacyConfigError

    def error(self) -> RaptorError:
        """The finding as an exception."""
        return self.kind(self.what, self.why, self.instead)

    @classmethod
    def of(cls, error: RaptorError) -> Finding:
        """An exception as a finding."""
        return cls(error.given, error.why, error.instead, kind=type(error))
