"""Settings that must be in the environment before any test imports torch or a Hugging Face library."""

from __future__ import annotations

import os

# No test may depend on the network: a model or dataset that is not shipped is a failure, not a download.
for _name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
    os.environ[_name] = "1"
# Tests run in several processes; one thread each, or they fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# A deadline measures the machine's load, not the code.
settings.register_profile("raptor", deadline=None)
settings.load_profile("raptor")


@pytest.fixture
def exact_norms(monkeypatch):
    """Switch's norms without their cast to float32: exact tests run in float64 throughout."""
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersLayerNorm

    from tests.helpers import exact_norm

    monkeypatch.setattr(SwitchTransformersLayerNorm, "forward", exact_norm)


@pytest.fixture
def float64(monkeypatch):
    """Every cast to float32 inside the shipped models (norms, routers, rotary tables) becomes one to float64."""
    import torch

    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
