"""Raptor's classifiers of decoder families, before adapters are attached."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers.modeling_layers import GenericForSequenceClassification

from raptor_hf.models import classifiers
from tests.families import FAMILIES, FLOAT64, LABELS, build, collate, records

OWN = [name for name in FAMILIES if type(build(name)).__module__ == classifiers.__name__]


def test_every_classifier_is_tested():
    assert sorted(type(build(name)).__name__ for name in OWN) == sorted(classifiers.__all__)


def by_default(model):
    """With the setting that transformers gives these experts when nothing is asked for."""
    for part in model.modules():
        if hasattr(getattr(part, "config", None), "_experts_implementation"):
            part.config._experts_implementation = "grouped_mm"
    return model


@pytest.mark.parametrize("family", OWN)
def test_float64_needs_no_setting(family):
    """As `experts_implementation="eager"`, to the last bit; gradients too."""
    batch = collate(records(4, seed=2))
    found = {}
    for name, model in (("asked", build(family, FLOAT64)), ("default", by_default(build(family, FLOAT64)))):
        output = model(**batch)
        output.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found[name] = (output.logits.detach(), gradients)
    (logits, gradients), (wanted, expected) = found["default"], found["asked"]
    assert logits.shape == (4, LABELS) and logits.dtype == FLOAT64 and torch.equal(logits, wanted)
    assert any("experts" in name for name in gradients) and gradients.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in gradients.items())


def test_other_types_keep_the_setting():
    model = by_default(build("olmoe"))
    model(**collate(records(2)))
    assert model.config._experts_implementation == "grouped_mm"
    model = by_default(model.double())
    model(**collate(records(2)))
    assert {m.config._experts_implementation for m in model.modules() if hasattr(m, "has_gate")} == {"eager"}


def test_the_inputs_are_those_of_the_generic_classifier():
    own = inspect.signature(build("olmoe").forward)
    inherited = inspect.signature(GenericForSequenceClassification.forward)
    assert list(own.parameters) == [name for name in inherited.parameters if name != "self"]
