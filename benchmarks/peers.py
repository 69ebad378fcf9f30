"""Other ways to per-sample gradients, on the work that they can do: LoRA (stock PEFT) on attention, and the head.

Only the shared stream can be compared. On the routed experts of a Switch layer Opacus keeps one gradient row for every
routed *token* instead of every record, and clips tokens; on stacked experts it has no rule. `vmap(grad)` over a model
as shipped needs experts that are computed without data-dependent shapes (`batched_mm`, which gathers every pair's
weights); Switch as shipped has none, and its router moves a module in its forward pass, which crashes the interpreter.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable

import peft
import torch
from jobs import Records, share_weights
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from torch import nn
from torch.func import functional_call, grad, vmap

from raptor_hf.moe.layout import find_moe_layout

__all__ = ["peers"]


def _peft_model(base: nn.Module, rank: int) -> nn.Module:
    targets = list(find_moe_layout(base).family.shared_targets)
    config = peft.LoraConfig(r=rank, target_modules=targets, modules_to_save=["score"], lora_dropout=0.0)
    return peft.get_peft_model(share_weights(base), config).train()


def _clipped(samples: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Clip at 1 and sum, in the gradients' precision."""
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in samples.values()]).norm(dim=0)
    factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    return {name: torch.einsum("i,i...", factors, sample) for name, sample in samples.items()}


def opacus_variants(base: nn.Module, records: Records, rank: int) -> dict[str, Callable[[], object]]:
    """variant -> one micro-batch: per-sample gradients, clipping at 1, and their sum (returned), without noise."""
    inputs = {key: value for key, value in records.batch.items() if key != "labels"}

    def losses(model: nn.Module) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(**inputs).logits, records.batch["labels"], reduction="none")

    hooked = GradSampleModule(_peft_model(base, rank), loss_reduction="sum", strict=False)

    def hooks() -> dict[str, torch.Tensor]:
        losses(hooked).sum().backward()
        sums = _clipped({n: p.grad_sample for n, p in hooked.named_parameters() if p.requires_grad})
        hooked.zero_grad(set_to_none=True)
        for parameter in hooked.parameters():
            if parameter.requires_grad:
                parameter.grad_sample = None
        return {name.removeprefix("_module."): value for name, value in sums.items()}

    ghosted = GradSampleModuleFastGradientClipping(
        _peft_model(base, rank), loss_reduction="sum", strict=False, max_grad_norm=1.0, use_ghost_clipping=True
    )

    def ghost() -> dict[str, torch.Tensor]:
        per_record = losses(ghosted)
        per_record.sum().backward(retain_graph=True)
        ghosted.zero_grad(set_to_none=True)
        factors = ghosted.get_clipping_coef()
        ghosted.disable_hooks()
        (factors * per_record).sum().backward()
        ghosted.enable_hooks()
        sums = {n.removeprefix("_module."): p.grad for n, p in ghosted.named_parameters() if p.grad is not None}
        ghosted.zero_grad(set_to_none=True)
        return sums

    return {"opacus hooks": hooks, "opacus ghost": ghost}


def _as_shipped(base: nn.Module, records: Records, rank: int) -> tuple[Callable, dict[str, torch.Tensor], tuple]:
    """(values, ids (T,), label) -> loss of one record of stock OLMoE; the trained values; the records' ids and labels.

    The experts are `batched_mm`, attention is eager, and the mask is a ready 4-D one: the others fail under `vmap`.
    """
    model = _peft_model(base, rank)
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), type(base.config)):
            module.config = copy.deepcopy(config)
            module.config._experts_implementation = "batched_mm"
            module.config._attn_implementation = "eager"
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    tokens = records.batch["input_ids"].shape[1]
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, tokens, tokens), lowest, device=records.owner.device).triu(1)

    def loss(values, ids, label):
        out = functional_call(model, values, (), {"input_ids": ids[None], "attention_mask": mask})
        return torch.nn.functional.cross_entropy(out.logits, label[None])

    return loss, trained, (records.batch["input_ids"], records.batch["labels"])


def vmap_as_shipped(base: nn.Module, records: Records, rank: int) -> dict[str, Callable[[], object]]:
    """`vmap(grad)` without raptor's kernel, on OLMoE."""
    loss, trained, data = _as_shipped(base, records, rank)
    rows = vmap(grad(loss), in_dims=(None, 0, 0))

    def run() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return _clipped(rows(trained, *data))

    return {"vmap as shipped (batched_mm)": run}


def opake_variant(base: nn.Module, records: Records, rank: int) -> dict[str, Callable[[], object]]:
    """opake's clipped gradients of the same loss, on OLMoE."""
    from opake.dpsgd.clipping import clipped_grad

    loss, trained, data = _as_shipped(base, records, rank)
    clipped, state = clipped_grad(loss, clipping_norm=1.0, batch_argnums=(1, 2), normalize_by=len(records))

    def run() -> object:
        with torch.no_grad():
            return clipped(trained, *data, state=state)

    return {"opake (batched_mm)": run}


def peers(base: nn.Module, records: Records, rank: int) -> tuple[dict[str, Callable[[], object]], list[str]]:
    """All that can run on this model with what is installed: variant -> one micro-batch; and why others cannot."""
    found, absent = opacus_variants(base, records, rank), []
    if base.config.model_type != "olmoe":
        absent.append("vmap as shipped, opake: a Switch router as shipped cannot run under torch.func.vmap")
    else:
        found |= vmap_as_shipped(base, records, rank)
        if importlib.util.find_spec("opake") is None:
            absent.append("opake: not installed")
        else:
            found |= opake_variant(base, records, rank)
    if importlib.util.find_spec("dptrainer") is None:
        absent.append("DPTrainer: not installed (0.1.2 requires opacus==1.5.4.post13, which no index offers)")
    else:
        absent.append("DPTrainer: installed, but no release of it could be when this was written: no variant for it")
    return found, absent
