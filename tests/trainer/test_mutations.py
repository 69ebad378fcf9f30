"""Broken variants of the core: every one is caught. `python -m tests.trainer.mutations` prints by what."""

from __future__ import annotations

import pytest

from tests.trainer.audits import AUDITS
from tests.trainer.mutations import MUTATIONS, broken_by, catches

# The cheapest audits first.
ORDER = ("T2", "T1", "T3")


def test_there_are_enough_of_them():
    assert len(MUTATIONS) >= 12 and set(ORDER) == set(AUDITS)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_variant_is_caught(name):
    with broken_by(name):
        assert any(catches(audit) for audit in ORDER)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_true_code_passes(seed):
    """Twenty times in a row: the audits cry wolf less than once in a million runs."""
    for audit in ORDER:
        AUDITS[audit]()
