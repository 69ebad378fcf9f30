"""Differentially private fine-tuning of sparse Mixture-of-Experts models: the Hugging Face Trainer, privately.

The public names are imported on first use, so that `import raptor_hf` and the command line start at once. The first of
them that is about models or training also registers the classifiers of `raptor_hf.models` with the Auto classes.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LayerSelection": "moe.selection",
    "MoEFamily": "moe.layout",
    "MoELayout": "moe.layout",
    "PrivacyBudgetCallback": "callbacks",
    "PrivacyConfigError": "errors",
    "PrivacyStatement": "privacy.statement",
    "RaptorConfig": "config",
    "RaptorTrainer": "trainer",
    "ReleaseError": "errors",
    "SwitchTransformersForSequenceClassification": "models",
    "UnsupportedModelError": "errors",
    "VerificationReport": "hub",
    "attach_adapters": "moe",
    "calibrate_noise_multipliers": "privacy",
    "check_model": "checks",
    "clip_and_sum": "privacy.clipping",
    "compute_epsilon": "privacy",
    "export_release": "hub",
    "find_moe_layout": "moe",
    "load_adapter": "moe",
    "load_release": "hub",
    "owner_distribution": "moe",
    "owner_map": "moe",
    "per_sample_gradients": "grad_sample",
    "push_release": "hub",
    "register_moe_layout": "moe",
    "routing_table": "moe",
    "select_layer": "moe",
    "stream_parameters": "moe",
    "verify_release": "hub",
}

# Homes of names that are used without a model.
_WITHOUT_MODELS = {"errors", "privacy"}

__all__ = [
    "LayerSelection",
    "MoEFamily",
    "MoELayout",
    "PrivacyBudgetCallback",
    "PrivacyConfigError",
    "PrivacyStatement",
    "RaptorConfig",
    "RaptorTrainer",
    "ReleaseError",
    "SwitchTransformersForSequenceClassification",
    "UnsupportedModelError",
    "VerificationReport",
    "__version__",
    "attach_adapters",
    "calibrate_noise_multipliers",
    "check_model",
    "clip_and_sum",
    "compute_epsilon",
    "export_release",
    "find_moe_layout",
    "load_adapter",
    "load_release",
    "owner_distribution",
    "owner_map",
    "per_sample_gradients",
    "push_release",
    "register_moe_layout",
    "routing_table",
    "select_layer",
    "stream_parameters",
    "verify_release",
]

if TYPE_CHECKING:
    from raptor_hf.callbacks import PrivacyBudgetCallback
    from raptor_hf.checks import check_model
    from raptor_hf.config import RaptorConfig
    from raptor_hf.errors import PrivacyConfigError, ReleaseError, UnsupportedModelError
    from raptor_hf.grad_sample import per_sample_gradients
    from raptor_hf.hub import VerificationReport, export_release, load_release, push_release, verify_release
    from raptor_hf.models import SwitchTransformersForSequenceClassification
    from raptor_hf.moe import (
        LayerSelection,
        MoEFamily,
        MoELayout,
        attach_adapters,
        find_moe_layout,
        load_adapter,
        owner_distribution,
        owner_map,
        register_moe_layout,
        routing_table,
        select_layer,
        stream_parameters,
    )
    from raptor_hf.privacy import calibrate_noise_multipliers, compute_epsilon
    from raptor_hf.privacy.clipping import clip_and_sum
    from raptor_hf.privacy.statement import PrivacyStatement
    from raptor_hf.trainer import RaptorTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"raptor_hf.{_HOME[name]}")
    if "transformers" in sys.modules and _HOME[name].split(".")[0] not in _WITHOUT_MODELS:
        # registers what transformers lacks with the Auto classes: whoever uses a name of these loads a model next
        importlib.import_module("raptor_hf.models")
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
