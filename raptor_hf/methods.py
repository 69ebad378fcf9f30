"""A training method as data: which streams, which denominators, which loss the experts see."""

from __future__ import annotations

from dataclasses import dataclass

from raptor_hf.validate import one_of

__all__ = ["METHODS", "Method", "get_method"]


@dataclass(frozen=True)
class Method:
    """One method of mechanism section 6.

    Attributes:
        name: as in `RaptorConfig.method`. streams: the streams of a cycle, in the order of their updates.
        description: one line for statements and cards.
    """

    name: str
    streams: tuple[str, ...]
    description: str


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "raptor",
            ("shared", "expert"),
            "Two alternating streams: the shared parameters, then the routed experts of one layer by owner (Alg. 1).",
        ),
    )
}


def get_method(name: str) -> Method:
    """The method called `name`; raises `PrivacyConfigError` for an unknown one."""
    return METHODS[one_of("method", name, tuple(METHODS))]
