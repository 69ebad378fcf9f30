"""The `functorch` engine: vmap(grad) over the records of a micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from transformers import masking_utils

from raptor_hf.grad_sample.losses import LossFn
from raptor_hf.grad_sample.owners import adapted_blocks, protected_block
from raptor_hf.moe.block import kernel_mode
from raptor_hf.moe.experts import AllAdapters, OwnerAdapters

__all__ = ["functorch_gradients"]

# What of `masking_utils` asks for the values of a mask, and the answer that needs none.
_ANSWERS = {"_ignore_bidirectional_mask_sdpa": False, "is_tracing": True}


def _answer(value: bool, *_args: object, **_kwargs: object) -> bool:
    return value


def _single(record: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.unsqueeze(0) for key, value in record.items()}


@contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """Attention as ordinary operations, with a mask even where no token is masked.

    The fused kernels, and the short cuts for masks without padding, look at the values of the mask, which vmap cannot.
    """
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(c, getattr(c, "_attn_implementation_internal", None)) for c in configs.values()]
    for config, name in before:
        if name is not None:
            config._attn_implementation_internal = "eager"
    functions = {name: getattr(masking_utils, name) for name in _ANSWERS if hasattr(masking_utils, name)}
    for name in functions:
        setattr(masking_utils, name, functools.partial(_answer, _ANSWERS[name]))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(masking_utils, name, function)
        for config, name in before:
            if name is not None:
                config._attn_implementation_internal = name


def functorch_gradients(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    loss_fn: LossFn,
    owner: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """See `per_sample_gradients`. Expert stream: the gradients of each record's owner, (b, *shape[1:])."""
    records = dict(batch)
    # An outer graph would be recorded for every parameter that requires grad; `grad` works at its own level.
    with torch.no_grad(), _plain_attention(model):
        if owner is None:
            blocks = adapted_blocks(model, parameters)
            of_experts = {name for values in blocks.values() for name in values}
            primals = {name: p.detach() for name, p in parameters.items()}

            def shared_loss(values, record):
                # the blocks keep their own adapters, as constants; what is differentiated goes to the kernel
                shared = {name: value for name, value in values.items() if name not in of_experts}
                wanted = {}
                for path, adapters in blocks.items():
                    a1, b1, a2, b2 = (values.get(name, value) for name, value in adapters.items())
                    wanted[path] = AllAdapters((a1, b1), (a2, b2))

                def forward(**inputs):
                    return functional_call(model, shared, (), inputs)

                with kernel_mode(model, wanted):
                    return loss_fn(forward, _single(record))

            return vmap(grad(shared_loss), in_dims=(None, 0), randomness="different")(primals, records)

        path, names = protected_block(model, parameters)
        owned = {name: parameters[name].detach().index_select(0, owner) for name in names}

        def expert_loss(values, record, record_owner):
            a1, b1, a2, b2 = (values[name].unsqueeze(0) for name in names)
            owners = {path: OwnerAdapters(record_owner.unsqueeze(0), (a1, b1), (a2, b2))}
            with kernel_mode(model, owners):
                return loss_fn(model, _single(record))

        return vmap(grad(expert_loss), in_dims=(0, 0, 0), randomness="different")(owned, records, owner)
