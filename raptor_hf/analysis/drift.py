"""Ownership drift during training (App. B.9): how many of a fixed set of records would have another owner by now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from raptor_hf.analysis._gate import private_unless
from raptor_hf.analysis._records import Collator
from raptor_hf.analysis.diagnostics import OwnershipDrift, base_owners, drift_from
from raptor_hf.moe.routing import iterate_batches
from raptor_hf.validate import integer

__all__ = ["OwnershipDriftCallback"]


class OwnershipDriftCallback(TrainerCallback):
    """Logs `ownership_drift`, the share of `records` whose owner by the present model is not that by the base model.

    The owners that training uses stay those of the base model. With several protected layers, the first is looked at.
    Each measurement is one forward pass over the records; it draws no random number and leaves the model as it was.

        trainer.add_callback(OwnershipDriftCallback(public, trainer.log, data_collator=collate, public_data=True))

    Args:
        records: dataset of records, without labels or with; or ready batches. They are collated once and kept.
        log: what takes `{"ownership_drift": share}`, `trainer.log` as a rule.
        every: cycles between two measurements; default: the trainer's logging steps. The last cycle is always one.
        rule, data_collator, batch_size: as in `ownership_drift`.
        public_data: state that the records are public. Others are measured in runs of `research_diagnostics` only;
            what is logged of them is private.

    Raises:
        PrivacyConfigError: when training begins, before its first cycle: records not declared public in a run without
            `research_diagnostics`, or a method that trains base weights.
    """

    def __init__(
        self,
        records: Iterable,
        log: Callable[[dict[str, float]], None],
        *,
        every: int | None = None,
        rule: str = "gate",
        data_collator: Collator = None,
        batch_size: int = 32,
        public_data: bool = False,
    ):
        self.batches = list(iterate_batches(records, data_collator, integer("batch_size", batch_size, minimum=1)))
        self.every = None if every is None else integer("every", every, minimum=1)
        self.log, self.rule, self.public_data = log, rule, public_data
        self.history: list[tuple[int, OwnershipDrift]] = []
        self._base = torch.zeros(0, dtype=torch.long)
        self._private = True

    def on_train_begin(  # type: ignore[override]
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        self._private = private_unless(self.public_data, model)
        self._base = base_owners(model, self.batches, self.rule)

    def on_step_end(  # type: ignore[override]
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        cycle = state.global_step
        if cycle % (self.every or state.logging_steps) and cycle != state.max_steps:
            return
        found = drift_from(self._base, model, self.batches, self.rule, private=self._private)
        self.history.append((cycle, found))
        self.log({"ownership_drift": found.changed})
