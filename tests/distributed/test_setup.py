"""How processes may be started, and what one process does not need."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.utils import DistributedType

from raptor_hf import PrivacyConfigError
from raptor_hf.distributed import broadcast, check_same, digest, from_main, one_copy, together

CONFIGS = sorted((Path(__file__).parents[2] / "examples" / "accelerate_configs").glob("*.yaml"))
PLAIN = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


@pytest.mark.parametrize("mode", list(DistributedType))
def test_only_plain_copies_of_the_model(mode):
    """`accelerate launch --use_fsdp` says so to accelerate only, not in the training arguments."""
    accelerator = SimpleNamespace(distributed_type=mode)
    if mode in PLAIN:
        one_copy(accelerator)
    else:
        with pytest.raises(PrivacyConfigError, match=mode.value):
            one_copy(accelerator)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configurations_are_of_that_kind(path):
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert DistributedType(settings["distributed_type"]) in PLAIN
    assert settings["mixed_precision"] == "no" and (settings["num_processes"] > 1) == ("MULTI" in
        settings["distributed_type"])  # fmt: skip


def test_one_process_needs_nobody():
    value = {"a": torch.ones(2)}
    broadcast(value)
    check_same("nothing", lambda: pytest.fail("not compared"))
    assert from_main(lambda: 3, "counting") == 3
    with pytest.raises(KeyError, match="its own"), together("a block"):
        raise KeyError("its own")


def test_the_digest_sees_every_bit():
    one = {"a": torch.zeros(3), "b": torch.ones(2, dtype=torch.float64)}
    found = {digest(one)}
    found.add(digest({**one, "a": torch.tensor([0.0, 0.0, 1e-45])}))
    found.add(digest({**one, "a": torch.zeros(3, 1)}))
    found.add(digest({"c": one["a"], "b": one["b"]}))
    found.add(digest({**one, "a": -torch.zeros(3)}))
    assert len(found) == 5 and digest({"b": one["b"], "a": one["a"]}) == digest(one)
