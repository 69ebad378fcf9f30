"""Layout, routing, ownership and adapters of sparse models."""

from raptor_hf.moe.adapter_io import load_adapter, save_adapter
from raptor_hf.moe.layout import MoEFamily, MoELayout, SparseLayer, find_moe_layout, register_moe_layout
from raptor_hf.moe.lora import attach_adapters, stream_parameters
from raptor_hf.moe.ownership import owner_distribution, owner_map
from raptor_hf.moe.selection import LayerSelection, check_disjoint, routing_table, select_layer

__all__ = [
    "LayerSelection",
    "MoEFamily",
    "MoELayout",
    "SparseLayer",
    "attach_adapters",
    "check_disjoint",
    "find_moe_layout",
    "load_adapter",
    "owner_distribution",
    "owner_map",
    "register_moe_layout",
    "routing_table",
    "save_adapter",
    "select_layer",
    "stream_parameters",
]
