"""Callbacks: the budget's stop, and epsilon in the progress bar."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from raptor_hf.state import PrivacyLedger

__all__ = ["PrivacyBudgetCallback", "RaptorProgressCallback"]

logger = logging.get_logger(__name__)


class PrivacyBudgetCallback(TrainerCallback):
    """Stops training before the cycle that would cross `target_epsilon`. `RaptorTrainer` adds it by itself.

    The ledger refuses that cycle in any case; with this callback training ends in the ordinary way instead: the
    model is valid, the last logs and saves are made.
    """

    def __init__(self, ledger: PrivacyLedger | None = None):
        self.ledger = ledger

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.ledger is not None and self.ledger.exhausted() and state.global_step < state.max_steps:
            logger.warning(
                f"Training stops after cycle {state.global_step} of {state.max_steps}: one more cycle would cross "
                f"the budget of epsilon {self.ledger.plan.target_epsilon}. The model is valid as it is."
            )
            control.should_training_stop = True
            if args.save_strategy == SaveStrategy.STEPS:
                control.should_save = True  # as at the last planned cycle: nothing that was paid for is lost
        return control


class RaptorProgressCallback(ProgressCallback):
    """The usual progress bar, with the epsilon spent as of the last log."""

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if state.is_world_process_zero and self.training_bar is not None and logs and "epsilon" in logs:
            self.training_bar.set_postfix_str(f"epsilon <= {logs['epsilon']:.3f}", refresh=False)
        super().on_log(args, state, control, logs=logs, **kwargs)
