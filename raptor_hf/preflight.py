"""What the trainer refuses before it looks at model or data."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from raptor_hf.config import RaptorConfig
from raptor_hf.errors import PrivacyConfigError

__all__ = ["check_device", "check_trainer_arguments"]

# Methods of a `Trainer` that decide which records are drawn, and what is released from them.
_OWN_STEPS = ("_get_train_sampler", "get_train_dataloader", "get_batch_samples", "training_step")


def check_trainer_arguments(cls: type, args: Any, model_init: Any, compute_loss_func: Any) -> None:
    """Refuse what `RaptorTrainer`, or a subclass `cls` of it, must not be given."""
    if not isinstance(args, RaptorConfig):
        raise PrivacyConfigError(
            f"`args` is a `{type(args).__name__}`",
            "It holds no privacy budget, noise or clipping norms",
            "Pass a `RaptorConfig`: it takes every argument of `TrainingArguments`",
        )
    check_device(args.device)
    if model_init is not None:
        raise PrivacyConfigError(
            "`model_init` was passed",
            "It serves a search over hyper-parameters, in which every trial spends privacy",
            "Pass `model`",
        )
    if compute_loss_func is not None or cls.compute_loss is not Trainer.compute_loss:  # type: ignore[attr-defined]
        raise PrivacyConfigError(
            "A loss function of one's own was given (`compute_loss_func`, or `compute_loss` overridden)",
            "It sees a whole batch: nothing shows that it keeps the records apart",
            "Let the model compute the loss from `labels`",
        )
    for klass in cls.__mro__[: [k.__module__ for k in cls.__mro__].index("raptor_hf.trainer")]:
        if own := [name for name in _OWN_STEPS if name in vars(klass)]:
            raise PrivacyConfigError(
                f"`{klass.__name__}` overrides `{own[0]}`",
                "The accounting is that of Poisson draws, and one release a stream and cycle, as `RaptorTrainer` makes "
                "them; another sampler, loader or step is not accounted for",
                "Leave it as it is; use callbacks, the collator or the dataset for what you need",
            )


def check_device(device: torch.device) -> None:
    """Refuse a device without float64: norms, sums and noise are float64."""
    if device.type == "mps":
        raise PrivacyConfigError(
            "Training on the device `mps` was asked for",
            "It has no float64, and norms, sums or noise of fewer digits would not keep the guarantee",
            "Set `use_cpu=True`, or train on a CUDA device",
        )
