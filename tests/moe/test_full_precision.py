"""Owners are computed without TF32 and without autocast, whatever the process has set."""

from __future__ import annotations

import pytest
import torch

from raptor_hf.moe import owner_map
from raptor_hf.moe.precision import full_precision
from tests.helpers import collate, tiny_model, tiny_records

RECORDS = tiny_records(12, seed=2)


@pytest.fixture
def coarse():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def test_the_base_model_runs_in_full_precision(coarse):
    model = tiny_model()
    expected = owner_map(tiny_model(), RECORDS, 3, data_collator=collate)
    seen = []

    def look(_module, _args, _output):
        seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))

    model.encoder.block[0].register_forward_hook(look)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = owner_map(model, RECORDS, 3, data_collator=collate)
        assert torch.is_autocast_enabled("cpu")
    assert seen and set(seen) == {("highest", False)}
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.equal(found, expected)


def test_settings_come_back_after_an_error(coarse):
    with pytest.raises(KeyError), full_precision(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"
        raise KeyError
    assert torch.get_float32_matmul_precision() == "medium"
