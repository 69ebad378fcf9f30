"""Original checkpoints have one tensor an expert and projection; the native experts are stacked.

All other names are the port's own, so that a model is saved under the names it was loaded from.
"""

from __future__ import annotations

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from raptor_hf.models.deepseek_vl2.configuration import DeepseekVL2Config

__all__: list[str] = []

register_checkpoint_conversion_mapping(
    DeepseekVL2Config.model_type,
    [
        WeightConverter(
            source_patterns=["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
            target_patterns="mlp.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns="mlp.experts.*.down_proj.weight",
            target_patterns="mlp.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ],
    overwrite=True,
)
