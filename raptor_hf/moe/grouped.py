"""Products of the tokens of all experts at once by PyTorch's `grouped_mm`, and the rule by which it is used.

The rule, in one place (`runs_grouped`):

* Experts are walked one by one ("loop") on every device but CUDA: on a CPU that is the fastest, and each expert's
  tokens fit a cache.
* On CUDA (compute capability 8.0 or more, as transformers requires) their products are grouped, if `obstacle` finds
  nothing that `grouped_mm` cannot take, and if the model's own setting is `"grouped_mm"`. That is transformers' default
  for experts that it can dispatch; `model.set_experts_implementation("eager")`, or `experts_implementation="eager"`
  when it is loaded, asks for the loop here too.
* Experts with separate weights (Switch Transformers) are looped over: stacking them would hold a second copy.

Both ways compute the same numbers but for rounding. `experts_backend` overrides the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from raptor_hf.validate import one_of

__all__ = ["Group", "Spans", "experts_backend", "grouped_mm", "obstacle", "runs_grouped"]

BACKENDS = ("auto", "loop", "grouped_mm")
# The kernel's own types, and the alignment of its operands.
_DTYPES, _BYTES = (torch.float32, torch.bfloat16, torch.float16), 16
_CAPABILITY = (8, 0)

_FORCED: ContextVar[str] = ContextVar("raptor_experts_backend", default="auto")


Spans = list[tuple[int, int, int]]
"""(expert, start, end) of every expert that has rows, in their order."""


@dataclass(frozen=True)
class Group:
    """N rows in the order of their experts, perhaps followed by rows of none.

    Attributes:
        ends: (E,) int32, on the device: where each expert's rows end. experts: (N,) int64, each row's expert, some
            expert's for a row of none.
    """

    ends: torch.Tensor
    experts: torch.Tensor


@contextmanager
def experts_backend(name: str) -> Iterator[None]:
    """Use `"loop"` or `"grouped_mm"` whatever the rule says, or the rule again (`"auto"`).

    A forced `"grouped_mm"` that cannot be is refused, not replaced.
    """
    token = _FORCED.set(one_of("name", name, BACKENDS))
    try:
        yield
    finally:
        _FORCED.reset(token)


def grouped_mm(x: torch.Tensor, weights: torch.Tensor, group: Group) -> torch.Tensor:
    """x (N, in), weights (E, in, out) -> (N, out), each row by its expert's matrix; rows of no expert are arbitrary."""
    return F.grouped_mm(x, weights, offs=group.ends)


def obstacle(operands: Iterable[torch.Tensor]) -> str | None:
    """What `grouped_mm` cannot take of the weights and adapters (E, p, q) of all projections; None: it takes all."""
    if not hasattr(F, "grouped_mm"):
        return f"PyTorch {torch.__version__} has no `torch.nn.functional.grouped_mm`"
    for value in operands:
        if value.dtype not in _DTYPES:
            return f"the experts have {value.dtype}, and it takes float32, bfloat16 and float16"
        # its products have either side as their rows, so both must be aligned
        if any(size * value.element_size() % _BYTES for size in value.shape[-2:]):
            return f"sizes {tuple(value.shape[-2:])} of {value.dtype} are not multiples of {_BYTES} bytes"
        # where the storage itself begins is aligned by every allocator of a GPU
        if 1 not in value.stride()[-2:] or value.storage_offset() * value.element_size() % _BYTES:
            return f"the experts' tensors are not laid out in rows of {_BYTES} bytes"
    return None


def runs_grouped(operands: tuple[torch.Tensor, ...] | None, implementation: str | None) -> bool:
    """The rule above.

    Args:
        operands: stacked weights and adapters of both projections; None where the experts have separate weights.
        implementation: what transformers' `experts_implementation` is for this model.

    Raises:
        ValueError: `"grouped_mm"` is forced and cannot be used.
    """
    forced = _FORCED.get()
    if forced == "loop":
        return False
    if forced == "auto" and (operands is None or implementation != "grouped_mm" or not _able(operands[0].device)):
        return False
    reason = "every expert has weights of its own" if operands is None else obstacle(operands)
    if forced == "grouped_mm" and reason is not None:
        raise ValueError(f"`experts_backend('grouped_mm')` was given. It cannot be used: {reason}. Use 'auto'.")
    return reason is None


def _able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY
