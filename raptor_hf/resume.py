"""Checkpoints: which are complete, what may differ when training goes on from one, and the private file beside them."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

from torch import nn
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from raptor_hf.binding import Binding
from raptor_hf.config import RaptorConfig
from raptor_hf.distributed import from_main, is_main, wait
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.moe.adapter_io import load_adapter, refuse_trained_model
from raptor_hf.moe.lora import adapter_plan
from raptor_hf.moe.weights import load_weights
from raptor_hf.plan import check_untrained
from raptor_hf.state import LEDGER_FILE, STATE_FILE, PrivacyLedger, PrivacyPlan, read_json

__all__ = ["DRIFT", "Start", "begin", "check_arguments", "checkpoint_written_last", "restore_adapter"]

logger = logging.get_logger(__name__)

_ACCOUNTING = "changes the accounting"
_FIXED = "must not change"
_FREE = "may change"

# What a resumed run may say differently from the one that wrote the checkpoint. Inherited arguments that are not
# named here may change.
DRIFT: dict[str, str] = {
    **dict.fromkeys(
        ("target_epsilon", "target_delta", "shared_noise_multiplier", "expert_noise_multiplier", "budget_split",
         "budget_rule", "accountant", "expected_batch_size", "dataset_size", "insecure_noise_seed",
         "research_diagnostics"), _ACCOUNTING),
    # the first: one statement describes the run, and names one value of each; then the tensors of the checkpoint;
    # then what the optimizer's state holds: another value given on resuming would have no effect, silently
    **dict.fromkeys(
        ("method", "shared_max_grad_norm", "expert_max_grad_norm", "max_grad_norm", "ownership", "expert_denominator",
         "clipping", "alternating", "residual_weighting", "residual_gamma", "secure_mode",
         "lora_rank", "lora_alpha", "shared_target_modules",
         "optim", "optim_args", "learning_rate", "expert_learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
         "adam_epsilon", "lr_scheduler_type"), _FIXED),
    # a layer name or "auto" may become the index it stood for: the plan compares the layers themselves
    **dict.fromkeys(("protected_layer", "grad_sample_mode", "clipping_quantile"), _FREE),
}  # fmt: skip

_WHY = {
    _ACCOUNTING: "The accounting composes the steps of one plan",
    _FIXED: "One run has one mechanism, one model and one optimizer; the checkpoint's state would not fit, or the new "
    "value would silently have no effect",
}


# ---- Arguments ----


def _plain(name: str, value: Any) -> Any:
    if name == "insecure_noise_seed":  # whether there is one; the seed itself stays out of checkpoints
        return value is not None
    return value.value if isinstance(value, enum.Enum) else value


def arguments(args: RaptorConfig) -> dict[str, Any]:
    """The arguments that a resumed run must repeat. All of them are public."""
    return {name: _plain(name, getattr(args, name)) for name, drift in sorted(DRIFT.items()) if drift != _FREE}


def check_arguments(saved: Mapping[str, Any], args: RaptorConfig, where: str = "the checkpoint") -> None:
    """Refuse arguments that differ from those of the training so far and must not."""
    for name, value in arguments(args).items():
        if name in saved and saved[name] != value:
            raise PrivacyConfigError(
                f"`{name}` is {value!r}, and was {saved[name]!r} in {where} ({DRIFT[name]})",
                _WHY[DRIFT[name]],
                f"Go on with `{name}={saved[name]!r}`, or start a new run in another `output_dir`",
            )


# ---- Checkpoints ----


def restore_adapter(model: nn.Module, checkpoint: str) -> None:
    """Load the adapter of a checkpoint of the run that goes on: what made it is counted."""
    if adapter_plan(model).weights == "adapters":
        load_adapter(model, checkpoint)
    else:
        load_weights(model, checkpoint)
    model.raptor_loaded = None  # type: ignore[assignment]


@contextmanager
def checkpoint_written_last(
    args: RaptorConfig, state: TrainerState, output_dir: str, ledger: PrivacyLedger, binding: Binding
) -> Iterator[None]:
    """Around the writing of a checkpoint: its state is written after all else, and older ones are deleted after that.

    So whenever the process dies, an earlier checkpoint, or this one, is complete.
    """
    folder = Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    from_main(lambda: open_checkpoint(folder), "saving a checkpoint")
    original = TrainerState.save_to_json
    written: list[str] = []

    def save_and_finish(self: TrainerState, path: str) -> None:
        original(self, path)
        written.append(path)
        wait()  # for the generator states of the other processes
        finish_checkpoint(folder, ledger, args, state.global_step, binding)

    # `Trainer` writes this file last and then deletes what `save_total_limit` says
    state.save_to_json = MethodType(save_and_finish, state)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del state.save_to_json  # type: ignore[method-assign]
    if not written:
        wait()
    wait()


def open_checkpoint(folder: Path) -> None:
    """Before a checkpoint is written (again): until it is finished, it is none."""
    (folder / STATE_FILE).unlink(missing_ok=True)


def finish_checkpoint(folder: Path, ledger: PrivacyLedger, args: RaptorConfig, cycle: int, binding: Binding) -> None:
    """Write the state, after all other files have reached the disk: what has it is complete."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sizes[path.name] = path.stat().st_size
    ledger.save(folder, cycle=cycle, arguments=arguments(args), base_model=binding.model, files=sizes)


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The state of a complete checkpoint."""
    state = read_json(folder / STATE_FILE)
    if state is None or not {"plan", "run", "arguments", "cycle", "files"} <= set(state):
        raise PrivacyConfigError(
            f"The checkpoint `{folder}` has no `{STATE_FILE}`, or not a whole one",
            "It was not written to its end, or not by RaptorTrainer: how much of the budget it spent is unknown",
            "Resume from a checkpoint that is complete, or with `resume_from_checkpoint=True` from the last such one",
        )
    for name, size in state["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise PrivacyConfigError(
                f"In the checkpoint `{folder}`, `{name}` is missing or is not {size} bytes long",
                "The checkpoint is damaged: a part of the training state would silently start from nothing",
                "Resume from another checkpoint, or with `resume_from_checkpoint=True` from the last complete one",
            )
    missing = [name for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json") if name not in state["files"]]
    if missing:
        raise PrivacyConfigError(
            f"The checkpoint `{folder}` has no `{missing[0]}`",
            "It was saved with `save_only_model=True`: optimizer and schedule would silently start from nothing",
            "Save whole checkpoints, or load its adapter with `load_adapter` and count what it has spent yourself",
        )
    return state


@dataclass(frozen=True)
class Start:
    """Where training goes on.

    Attributes: checkpoint: None to start from the base model; state: what was spent; output_dir: the run's.
    """

    checkpoint: str | None
    state: dict[str, Any] | None
    output_dir: str

    @property
    def folders(self) -> list[str]:
        """Where the run's journal and private file may lie."""
        return [self.output_dir, *([str(Path(self.checkpoint).parent)] if self.checkpoint else [])]


def find_start(resume_from: str | bool | None, output_dir: str, own_run: str | None = None) -> Start:
    """What `resume_from_checkpoint` means.

    True is the last complete checkpoint of the run that the folder's journal belongs to. A run that was stopped
    before its first one starts from the base model again, and what it had released by then stays counted.

    Args:
        own_run: the run of the trainer itself, whose journal is no surprise.
    """
    if not resume_from:
        journal = read_json(Path(output_dir) / LEDGER_FILE)
        made = 0 if journal is None else max(journal["shared_steps"], journal["expert_steps"])
        if journal is not None and journal["run"] != own_run and made:
            logger.warning(
                f"`{output_dir}` holds an earlier run of {made} cycles. A new one starts: its "
                "epsilon does not include what that one spent. To go on with it, pass `resume_from_checkpoint=True`."
            )
        return Start(None, None, output_dir)
    if resume_from is not True:
        return Start(str(resume_from), read_checkpoint(Path(resume_from)), output_dir)
    journal = read_json(Path(output_dir) / LEDGER_FILE)
    found = []
    for folder in Path(output_dir).glob("checkpoint-*"):
        if folder.is_dir() and re.fullmatch(r"checkpoint-\d+", folder.name):
            try:
                state = read_checkpoint(folder)
            except PrivacyConfigError as problem:
                logger.warning(f"Skipped: {problem.given}.")
                continue
            if journal is None or state["run"] == journal["run"]:
                spent = max(state["shared_steps"], state["expert_steps"])
                found.append((spent, int(folder.name.rpartition("-")[2]), str(folder), state))
    if found:
        *_, folder_name, state = max(found, key=lambda one: one[:2])
        return Start(folder_name, state, output_dir)
    if journal is None:
        raise ValueError(f"No valid checkpoint found in output directory ({output_dir})")
    logger.warning(
        f"The run in `{output_dir}` was stopped before its first complete checkpoint. It starts from the base model "
        "again; what it had released until then stays counted."
    )
    return Start(None, journal, output_dir)


def begin(
    args: RaptorConfig,
    model: nn.Module,
    ledger: PrivacyLedger | None,
    resume_from: str | bool | None,
    make_plan: Callable[[int], PrivacyPlan],
    cycles: int,
) -> tuple[Start, PrivacyLedger]:
    """Where training goes on, and the ledger of what the run has spent and may spend; as the main process finds it.

    Args:
        ledger: the trainer's own, from an earlier call of `train`. make_plan: number of cycles -> plan.
    """

    def find() -> tuple[Start, PrivacyLedger]:
        if adapter_plan(model).weights == "adapters":
            refuse_trained_model(args.output_dir)
        start = find_start(resume_from, args.output_dir, None if ledger is None else ledger.run)
        if start.state is not None:
            check_arguments(start.state.get("arguments", {}), args)
            going = PrivacyLedger.load(start.state, make_plan(cycles))
            lost = _count_lost_work(going, start)
        else:
            going, lost = _own_ledger(args, ledger, lambda: make_plan(cycles)), False
        if start.checkpoint is None:
            check_untrained(model, going)
        going.arguments = arguments(args)
        _check_cycles_left(start, going, cycles, lost)
        return start, going

    start, going = from_main(find, "the start of training")
    model.raptor_ledger = going
    if is_main():
        going.open_journal(args.output_dir)
    return start, going


def _own_ledger(
    args: RaptorConfig, ledger: PrivacyLedger | None, make_plan: Callable[[], PrivacyPlan]
) -> PrivacyLedger:
    """The trainer's own ledger, when it has counted a release; else a new one."""
    if ledger is None or not (ledger.shared_steps or ledger.expert_steps):
        return PrivacyLedger(make_plan())
    check_arguments(ledger.arguments, args, "the training so far")
    ledger.go_on(make_plan())
    return ledger


def _check_cycles_left(start: Start, ledger: PrivacyLedger, cycles: int, lost: bool) -> None:
    """Refuse, or from a checkpoint warn of, a training that the budget has no cycle for."""
    done = start.checkpoint is not None and start.state is not None and start.state["cycle"] >= cycles
    if ledger.cycles_left(cycles) != 0 or done:
        return
    if start.checkpoint is None:
        raise PrivacyConfigError(
            f"Training was started with epsilon {ledger.epsilon()} already spent",
            f"One more cycle would cross `target_epsilon={ledger.plan.target_epsilon}`",
            "Start a new run from the base model, or raise the target",
        )
    reason = "the lost work took the last ones" if lost else "the budget is spent"
    logger.warning(f"No cycle is left: {reason}. Training ends with the checkpoint's model.")


def _without_journal(start: Start) -> None:
    folder = start.folders[-1]
    if any(Path(folder).glob(LEDGER_FILE.replace(".json", "*.json"))):
        raise PrivacyConfigError(
            f"`{folder}` holds the journal of another run, and none of the run of `{start.checkpoint}`",
            "What that run released after the checkpoint would be forgotten",
            "Put its own `raptor_ledger.json` beside the checkpoint, or start a new run from the base model",
        )
    logger.warning(
        f"`{folder}` holds no `{LEDGER_FILE}`. Only the checkpoint's own counters are known: what the run released "
        "after it is not counted."
    )


def _count_lost_work(ledger: PrivacyLedger, start: Start) -> bool:
    """Count what was released and is in no checkpoint, and say so."""
    before = (ledger.shared_steps, ledger.expert_steps) if start.checkpoint else (0, 0)
    if not any([ledger.count_lost_work(folder) for folder in start.folders]):
        _without_journal(start)
    lost = (ledger.shared_steps - before[0], ledger.expert_steps - before[1])
    if any(lost):
        logger.warning(
            f"The run had released {lost[0]} shared and {lost[1]} expert steps that no checkpoint holds. They are lost "
            "but stay counted: under a `target_epsilon`, training makes so many fewer cycles."
        )
    return any(lost)
