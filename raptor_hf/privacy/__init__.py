"""The privacy core: what an auditor reads. It imports numerical libraries and accountants only."""

from raptor_hf.privacy.accounting import EpsilonBounds, Mechanism, compute_epsilon, default_delta, max_cycles
from raptor_hf.privacy.calibration import NoiseMultipliers, calibrate_noise_multipliers
from raptor_hf.privacy.statement import OtherDelta, PrivacyStatement, StreamStatement

__all__ = [
    "EpsilonBounds",
    "Mechanism",
    "NoiseMultipliers",
    "OtherDelta",
    "PrivacyStatement",
    "StreamStatement",
    "calibrate_noise_multipliers",
    "compute_epsilon",
    "default_delta",
    "max_cycles",
]
