"""The table at the end of a run: public quantities and the evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from raptor_hf.privacy._card import round_up_delta

__all__ = ["print_summary"]


def print_summary(trainer: Any, metrics: Mapping[str, float], extra: Mapping[str, str] | None = None) -> None:
    """Print what a run spent and reached.

    Args:
        trainer: a `RaptorTrainer` after training. metrics: of `evaluate`. extra: further rows.
    """
    statement = trainer.privacy_statement()
    table = Table(title="Private fine-tuning" if statement.private else statement.verdict, show_header=False)
    if "eval_accuracy" in metrics:
        table.add_row("accuracy (evaluation split)", f"{metrics['eval_accuracy']:.2%}")
    if statement.epsilon_spent is not None:
        table.add_row("epsilon spent (upper bound)", f"{statement.epsilon_spent:.4f}")
    if statement.private:
        table.add_row("delta", round_up_delta(statement.delta))
    for name, stream in (("shared", statement.shared), ("expert", statement.expert)):
        if stream is not None and stream.noise_multiplier is not None:
            table.add_row(f"noise multiplier, {name} stream", f"{stream.noise_multiplier:.4f}")
            table.add_row(f"clipping norm, {name} stream", f"{stream.max_grad_norm:.4g}")
    if trainer.args.target_epsilon is not None and len(statement.streams) > 1:
        table.add_row("budget split", f"{float(trainer.args.budget_split):.3g}")
    if statement.method != "raptor":
        table.add_row("method", statement.method)
    table.add_row("cycles", str(trainer.state.global_step))
    if statement.protected_layer is not None:
        table.add_row("protected layer", f"block {statement.protected_layer} ({statement.num_experts} experts)")
    for key, value in (extra or {}).items():
        table.add_row(key, value)
    table.add_row("guarantee", statement.verdict)
    Console().print(table)
