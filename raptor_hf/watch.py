"""Silence is a bug: after the first cycle that can show it, check that training does what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from raptor_hf.binding import parameter_digests
from raptor_hf.errors import RaptorError
from raptor_hf.streams import Stream

__all__ = ["FirstCycle", "SilentFailureError"]

logger = logging.get_logger(__name__)


class SilentFailureError(RaptorError):
    """Training ran and spent budget, but did not do what was asked for."""


def _plain(optimizer: Any) -> Any:
    """The optimizer below accelerate's wrapper."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


class FirstCycle(TrainerCallback):
    """Looks at the first cycle with positive learning rates, and raises `SilentFailureError` unless

    every trainable tensor with a gradient moved, in both streams; no frozen parameter changed; and the learning
    rates of all parameter groups are those of the schedule. Only what is released anyway is looked at.
    """

    def __init__(self) -> None:
        self._armed = False
        self._frozen: dict[str, str] = {}
        self._cycles = 0
        self._positive = True
        self._pending: tuple[str, list[tuple[str, torch.nn.Parameter, torch.Tensor, torch.Tensor, float]]] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._armed, self._cycles, self._positive, self._pending = True, 0, True, None
        self._frozen = parameter_digests(model, sample=64)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Warn of a resumed run whose first cycle moves nothing: the checkpoint's schedule had ended at 0."""
        resumed = self._armed and self._cycles == 0 and state.global_step > 0 and optimizer is not None
        if resumed and not any(float(group["lr"]) for group in _plain(optimizer).param_groups):
            logger.warning(
                "The first cycle after resuming has a learning rate of 0, as the checkpoint's schedule had ended: it "
                "spends a release of each stream and changes nothing. Set the length of a run at its start."
            )

    def before_step(self, streams: Sequence[Stream], optimizer: Any) -> None:
        """Remember the streams' parameters before the optimizer's step on their noisy gradients."""
        if not self._armed:
            return
        rates = {id(p): float(group["lr"]) for group in _plain(optimizer).param_groups for p in group["params"]}
        seen = []
        for name, p in ((name, p) for stream in streams for name, p in stream.parameters.items()):
            rate = rates.get(id(p), 0.0)
            self._positive &= rate > 0
            if p.grad is not None:
                seen.append((name, p, p.detach().clone(), p.grad.detach().clone(), rate))
        self._pending = (" and ".join(stream.name for stream in streams), seen)

    def after_step(self) -> None:
        """Check that the step moved them."""
        if self._pending is None:
            return
        stream, seen = self._pending
        self._pending = None
        for name, p, before, grad, rate in seen:
            # a step too small for the parameter's precision is no failure: warm-up may begin so
            visible = (rate * grad.abs().clamp(max=1)) > before.abs() * torch.finfo(before.dtype).eps
            if bool(visible.any()) and torch.equal(before, p.detach()):
                raise SilentFailureError(
                    f"The optimizer's step of the {stream} stream left `{name}` exactly as it was (lr {rate:g})",
                    "Its gradient was not zero: the budget is spent and nothing is learnt",
                    "Look for an optimizer or a callback that drops or zeroes gradients",
                )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.after_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None,
        optimizer: Any = None, lr_scheduler: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if not self._armed:
            return
        self._cycles += 1
        self._check_schedule(_plain(optimizer), lr_scheduler)
        self._check_frozen(model)
        if self._positive:
            self._armed, self._frozen = False, {}
        self._positive = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._armed and self._cycles:
            raise SilentFailureError(
                f"The learning rate of a parameter group was 0 in each of the {self._cycles} cycles",
                "The budget is spent and a stream has learnt nothing",
                "Check the schedule, its warm-up and its number of steps",
            )

    def _check_schedule(self, optimizer: Any, scheduler: Any) -> None:
        if hasattr(scheduler, "optimizer") and _plain(scheduler.optimizer) is not optimizer:
            raise SilentFailureError(
                "The learning-rate scheduler drives another optimizer than the one that trains",
                "The learning rate would never follow the schedule",
                "Build the scheduler on the optimizer that is passed beside it, or leave both out",
            )
        if not hasattr(scheduler, "get_last_lr"):
            return
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        due = [float(rate) for rate in scheduler.get_last_lr()]
        if rates != due:
            raise SilentFailureError(
                f"The optimizer's learning rates are {rates}, and the schedule's {due}",
                "Something else sets them: the schedule has no effect",
                "Look for a callback or optimizer that overwrites `lr`, or leave the scheduler out",
            )

    def _check_frozen(self, model: Any) -> None:
        now = parameter_digests(model, sample=64)
        changed = sorted(name for name in {*now, *self._frozen} if now.get(name) != self._frozen.get(name))
        if changed:
            raise SilentFailureError(
                f"The frozen parameter `{changed[0]}` changed in the first cycle"
                + f" (and {len(changed) - 1} more)" * (len(changed) > 1),
                "It is not among the parameters whose gradients are clipped and noised, and it is not saved: the "
                "adapter would not fit the base model",
                "Look for a callback or hook that writes to the base model or changes `requires_grad`",
            )
