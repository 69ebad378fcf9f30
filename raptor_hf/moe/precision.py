"""Matrix products in the precision of their operands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["full_precision"]


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products in the precision of their operands: no autocast, no TF32, no bf16 kernels for float32."""
    before = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.allow_tf32 if device.type == "cuda" else None
    torch.set_float32_matmul_precision("highest")
    if cudnn:
        torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        if cudnn:
            torch.backends.cudnn.allow_tf32 = cudnn
