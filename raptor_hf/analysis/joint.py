"""The experts' signal-to-noise ratio under one joint mechanism: the rows of Table 8 that have no expert stream.

A joint block clips a record's gradients of all trainables by one norm, sums them over all records, whichever expert
they use, and adds one noise. What it releases of an expert is that expert's part of the sum. Privacy: as in
`diagnostics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from raptor_hf.analysis._gate import private_unless
from raptor_hf.analysis._records import Collator, evaluation_mode, prepare
from raptor_hf.analysis.theory import expert_snr_summary
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.grad_sample import engine_gradients
from raptor_hf.moe.layout import EXPERT_ADAPTERS, MoEFamily, SparseLayer
from raptor_hf.moe.lora import adapter_plan, stream_parameters
from raptor_hf.privacy.clipping import clip_and_sum
from raptor_hf.validate import positive

__all__ = ["JointDiagnostics", "joint_diagnostics"]


@dataclass(frozen=True)
class JointDiagnostics:
    """Table 8 for a joint block.

    Attributes:
        snr: (E,) float64, SNR_e of the experts of one layer. mean_snr, snr_cv: its mean and coefficient of variation.
        dimension: trained parameters of one of these experts. private: was it measured on private records?
    """

    snr: np.ndarray = field(repr=False)
    mean_snr: float
    snr_cv: float
    dimension: int
    private: bool = True


def joint_diagnostics(
    model: nn.Module,
    data: Iterable,
    *,
    noise_multiplier: float,
    max_norm: float,
    expected_batch_size: float,
    data_collator: Collator = None,
    batch_size: int = 32,
    mode: str = "functorch",
    public_data: bool = False,
) -> JointDiagnostics:
    """SNR of the protected layer's experts under one clipping norm and one noise for all trainables.

    As `expert_diagnostics` defines it: ||E gbar_e||^2 / V_DP, of the released gradient of one expert. With m records
    that stand for the dataset it is (B / m)^2 ||sum_i h_ie||^2 / (sigma^2 C^2 d), where h_ie is the part of record i's
    clipped gradient that belongs to expert e; the denominator and n cancel. A method that trains several layers'
    experts is measured on the plan's protected layer, the one that RAPTOR would train.

    Args:
        noise_multiplier, max_norm: sigma and C of the block. expected_batch_size: B.
        batch_size: records whose gradients are held at once; 1 where base weights are trained.
        mode: engine, "reference" where base weights are trained. public_data: state that the records are public.

    Raises:
        PrivacyConfigError: records not declared public and no `research_diagnostics`; no labelled records; a model
            whose experts are not trained.
    """
    private = private_unless(public_data, model)
    sigma, norm = positive("noise_multiplier", noise_multiplier), positive("max_norm", max_norm)
    batch = positive("expected_batch_size", expected_batch_size)
    records, plan = prepare(model, data, data_collator, batch_size), adapter_plan(model)
    streams = stream_parameters(model)
    if not streams["expert"]:
        raise PrivacyConfigError(
            "A model was given of whose experts nothing is trained",
            "They have no gradient, and no ratio of signal and noise",
            "Measure a method that trains experts",
        )
    sums: Mapping[str, torch.Tensor] | None = None
    with evaluation_mode(model):
        for micro_batch in records.batches:
            found = engine_gradients(model, micro_batch, {**streams["shared"], **streams["expert"]}, mode=mode)
            sums, _ = clip_and_sum(found, norm, into=sums)
    assert sums is not None  # `prepare` refuses no records
    power, dimension = _by_expert(sums, plan.layout.family, plan.protected)
    snr = (batch / records.size) ** 2 * power / ((sigma * norm) ** 2 * dimension)
    return JointDiagnostics(snr, *expert_snr_summary(snr), dimension, private)


def _by_expert(sums: Mapping[str, torch.Tensor], family: MoEFamily, layer: SparseLayer) -> tuple[np.ndarray, int]:
    """(E,) float64 squared norm of each expert's part of the sums, and how many numbers it has."""
    adapters = f"{layer.name}.{EXPERT_ADAPTERS}."
    stacked = [name for name in sums if name.startswith(adapters)]
    if not stacked and family.expert_parameters is not None:
        stacked = [f"{layer.name}.{path}" for path in family.expert_parameters]
    parts = []
    for expert in range(layer.num_experts):
        modules = tuple(
            f"{layer.name}.{family.expert_module.format(expert=expert, projection=projection)}."
            for projection in family.expert_projections
        )
        own = [sums[name][expert] for name in stacked]  # the experts are the first dimension
        parts.append(own or [value for name, value in sums.items() if name.startswith(modules)])
    power = [float(sum(value.square().sum() for value in mine)) for mine in parts]
    return np.array(power), sum(value.numel() for value in parts[0])
