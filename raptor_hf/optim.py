"""The optimizer of the two streams."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from raptor_hf.config import RaptorConfig
from raptor_hf.errors import PrivacyConfigError

__all__ = ["check_optimizer", "stream_optimizer"]

Streams = Mapping[str, Mapping[str, nn.Parameter]]


def check_optimizer(optimizer: torch.optim.Optimizer, streams: Streams) -> None:
    """Refuse an optimizer that does not hold exactly the trainable parameters."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(p) for stream in streams.values() for p in stream.values()}:
        raise PrivacyConfigError(
            "The optimizer passed in `optimizers` does not hold exactly the trainable parameters",
            "The adapters are attached by the trainer: an optimizer made before would train nothing, or parameters "
            "whose gradients have no noise",
            "Call `attach_adapters` first and build it on `stream_parameters(model)`, or leave it out",
        )


def stream_optimizer(
    cls: Any, kwargs: Mapping[str, Any], streams: Streams, args: RaptorConfig, decay: Collection[str]
) -> torch.optim.Optimizer:
    """An optimizer with parameter groups (marked by `"stream"`) for both streams.

    Args:
        cls, kwargs: what `args.optim` names. decay: names of parameters with weight decay.

    Raises:
        PrivacyConfigError: an optimizer that is no ordinary `torch.optim.Optimizer`.
    """
    ordinary = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    if not ordinary or {"params", "model", "optimizer_dict"} & set(kwargs):
        raise PrivacyConfigError(
            f"`optim={args.optim}` was set",
            "It takes gradients apart by layer, or projects them, before they carry noise",
            "Use an ordinary optimizer such as `adamw_torch`",
        )
    groups = []
    for name, parameters in streams.items():
        rate = args.learning_rate
        if name == "expert" and args.expert_learning_rate is not None:
            rate = args.expert_learning_rate
        for decayed in (True, False):
            members = [p for n, p in parameters.items() if (n in decay) == decayed]
            if members:
                weight_decay = args.weight_decay if decayed else 0.0
                groups.append({"params": members, "weight_decay": weight_decay, "lr": rate, "stream": name})
    return cls(groups, **kwargs)
