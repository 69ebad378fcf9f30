from __future__ import annotations

import pytest

from raptor_hf import export_release
from tests.hub.build import BASE, trained


@pytest.fixture(scope="session")
def trainer():
    return trained()


@pytest.fixture(scope="session")
def release(trainer, tmp_path_factory):
    """A released folder; copy it before changing it."""
    return export_release(trainer, tmp_path_factory.mktemp("release") / "adapter", **BASE)
