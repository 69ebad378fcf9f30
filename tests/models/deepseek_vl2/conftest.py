"""Fixtures of this folder."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def float64(monkeypatch):
    """Every cast to float32 inside the shipped models (norms, routers, rotary tables) becomes one to float64."""
    double = torch.float64
    monkeypatch.setattr(torch, "float32", double)
    monkeypatch.setattr(torch, "float", double)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
