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


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub on the loopback interface, for the real client in this process."""
    import huggingface_hub.constants as constants

    from raptor_hf.hub import push
    from tests.hub.server import LoopbackHub

    with LoopbackHub() as server:
        for name, value in dict(
            ENDPOINT=server.url, HF_HUB_OFFLINE=False, HF_HUB_DISABLE_XET=True, HF_HUB_CACHE=str(tmp_path / "cache"),
            HUGGINGFACE_CO_URL_TEMPLATE=server.url + "/{repo_id}/resolve/{revision}/{filename}",
        ).items():  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "")
        # the client's own pauses between attempts, and ours
        import time

        real = time.sleep
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda s: real(min(s, 0.01)))
        assert push.time is time
        yield server
