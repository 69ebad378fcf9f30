"""`RaptorTrainer`: the Hugging Face `Trainer` with RAPTOR's two private streams. Wiring only, no maths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

import raptor_hf.models  # noqa: F401 (registers what transformers lacks with the Auto classes)
from raptor_hf.binding import Binding, establish_owners
from raptor_hf.callbacks import PrivacyBudgetCallback, RaptorProgressCallback
from raptor_hf.checks import check_collator, check_dataset, check_model, check_processing_class, check_sizes
from raptor_hf.config import RaptorConfig
from raptor_hf.distributed import broadcast, check_same, digest, from_main, one_copy, together
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.evaluation import EvaluationMixin
from raptor_hf.grad_sample import model_loss, residual_weighted
from raptor_hf.hub.push import HubMixin, check_hub_arguments
from raptor_hf.moe import LayerSelection, check_disjoint, select_layer
from raptor_hf.moe.lora import resolve_layer, stream_parameters
from raptor_hf.optim import check_optimizer, stream_optimizer
from raptor_hf.plan import (
    check_prepared,
    check_untrained,
    dataset_name,
    make_plan,
    make_statement,
    make_streams,
    method_of,
    prepare_model,
    stage_of,
    stages,
)
from raptor_hf.preflight import check_trainer_arguments
from raptor_hf.privacy import PrivacyStatement
from raptor_hf.privacy.noise import EntropySource, NoiseSource
from raptor_hf.privacy.sampling import Cycle, CycleLoader, PoissonSampler
from raptor_hf.records import RecordsMixin
from raptor_hf.resume import begin, checkpoint_written_last, restore_adapter
from raptor_hf.state import PrivacyLedger, PrivacyPlan
from raptor_hf.streams import Stream, noisy_gradients, secret_masks, stream_gradients, sum_gradients
from raptor_hf.watch import FirstCycle

__all__ = ["RaptorTrainer"]

logger = logging.get_logger(__name__)

# What the plain Trainer would log that is computed from private records.
_PRIVATE_LOGS = ("loss", "train_loss", "total_flos", "num_input_tokens_seen")
STATEMENT_FILE = "privacy.json"


class RaptorTrainer(RecordsMixin, EvaluationMixin, HubMixin, Trainer):
    """Drop-in for `transformers.Trainer` that trains a sparse MoE model with differential privacy (Algorithm 1).

    One step of the training loop is one cycle: a noisy update of the shared stream, then, on the updated shared
    parameters, a noisy update of all E experts of the protected layer by the records they own.

    Args:
        model: a sparse model with a task head. Adapters are attached in place (see `attach_adapters`).
        args: a `RaptorConfig`.
        public_dataset: public, unlabelled, format-matched records, prepared like `train_dataset`, from which
            `protected_layer="auto"` chooses the layer (Eq. 4). It must share no record with `train_dataset`.
        peft_config: a PEFT `LoraConfig` instead of the `lora_*` fields of `args`.
        Everything else as for `Trainer`.

    Raises:
        PrivacyConfigError, UnsupportedModelError: before any training, for anything that would break the guarantee.

    Formal guarantees:
        The adapters after any number of cycles are (epsilon, delta)-DP under adding or removing one record of
        `train_dataset`; `privacy_statement()` says for which epsilon and what is not covered.
    """

    args: RaptorConfig
    optimizer: Any
    # losses are per record here and never scaled for accumulation
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: nn.Module | None = None,
        args: RaptorConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        public_dataset: Any = None,
        peft_config: Any = None,
    ):
        check_trainer_arguments(type(self), args, model_init, compute_loss_func)
        assert isinstance(args, RaptorConfig) and model is not None  # as was checked
        layout = check_model(model).layout
        check_hub_arguments(args, model)
        check_processing_class(processing_class)
        if train_dataset is not None:
            check_dataset(train_dataset)
        self.public_dataset = public_dataset
        self.layer_selection: LayerSelection | None = None
        self.ledger: PrivacyLedger | None = None
        self._owners: torch.Tensor | None = None
        self._binding: Binding | None = None
        self._in_checkpoint = False
        self._disjointness: str | None = None
        self._stages: list[dict[str, Stream]] = []  # what a cycle does; one, but for several protected layers
        self._rates: dict[str, float] = {}
        self._peft_config = peft_config
        self._method = method_of(args)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        one_copy(self.accelerator)
        self._records, self._collate = self._private_records(train_dataset)
        self._refuse_training_records(eval_dataset)
        if getattr(model, "raptor_adapters", None) is None:
            layer, self.layer_selection, self._disjointness = from_main(
                lambda: (self._choose_layer(layout), self.layer_selection, self._disjointness), "choosing the layer"
            )
            prepare_model(model, peft_config or args, self._method, layer)
            model.to(args.device)
        elif public_dataset is not None and train_dataset is not None:
            self._disjointness = check_disjoint(self._public_records(), self._records)
        check_prepared(model, self._method)
        if train_dataset is not None:
            self._choose_from_public()
            check_sizes(
                train_dataset, args.dataset_size or len(train_dataset), self.expected_batch_size,
                batch_from=args.batch_from, target_delta=args.target_delta, private=self._method.private,
            )  # fmt: skip
            check_collator(
                self._collate, [self._records[i] for i in range(min(2, len(self._records)))], self.label_names
            )
        seed = args.insecure_noise_seed
        self.entropy = EntropySource(None if seed is None else seed + 1_000_003 * args.process_index)
        self.noise = NoiseSource(self.entropy, secure_mode=args.secure_mode)
        self._budget_callback = PrivacyBudgetCallback()
        self.add_callback(self._budget_callback)
        self._first_cycle = FirstCycle()
        self.add_callback(self._first_cycle)
        if any(type(cb) is ProgressCallback for cb in self.callback_handler.callbacks):
            self.remove_callback(ProgressCallback)
            self.add_callback(RaptorProgressCallback())

    @property
    def expected_batch_size(self) -> int:
        """B, the expected number of records in each stream's draw."""
        assert self.args.expected_batch_size is not None  # set by the config
        return self.args.expected_batch_size

    # ---- Data ----

    def _choose_layer(self, layout: Any) -> int | str:
        wanted = self.args.protected_layer
        if wanted != "auto":
            return wanted
        if self.public_dataset is None:
            return resolve_layer(layout, "last")
        public, collate = self._without_unused_columns(self.public_dataset, "public")
        check_dataset(public)
        if self.train_dataset is not None:
            self._disjointness = check_disjoint(public, self._records)
        self.layer_selection = select_layer(
            self.model, public, rule=self.args.ownership, data_collator=collate,
            batch_size=self.args.per_device_eval_batch_size, layout=layout,
        )  # fmt: skip
        return self.layer_selection.layer

    def get_train_dataloader(self) -> CycleLoader:  # type: ignore[override]
        """Fresh Poisson cycles, ceil(n / B) of them an epoch; each item is a `Cycle` of record indices."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        n, batch = len(self._records), self.expected_batch_size
        sampler = PoissonSampler(
            n, batch / n, rank=self.args.process_index, world_size=self.args.world_size, entropy=self.entropy
        )
        return CycleLoader(sampler, math.ceil(n / batch))

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, None]:
        """The next cycle, without the count of its items: that count is private. None when all are made, or spent."""
        made = self.is_in_train and self.state.global_step >= self.state.max_steps
        if made or (self.ledger is not None and self.ledger.exhausted()):
            self.control.should_training_stop = True
            return [], None
        return [cycle for _, cycle in zip(range(num_batches), epoch_iterator, strict=False)], None

    # ---- Plan ----

    def _plan(self, cycles: int) -> PrivacyPlan:
        return make_plan(self.args, self.model, len(self._records), cycles)

    def planned_cycles(self) -> int:
        """T: cycles that the arguments ask for, `max_steps` or else ceil(epochs * n / B)."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(self.args.num_train_epochs * len(self._records) / self.expected_batch_size - 1e-9)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple:
        """As in `Trainer`, with exactly the planned cycles, n / B an epoch, and B samples for each of their draws."""
        *values, _, batch, steps_in_epoch, _ = super().set_initial_training_values(args, dataloader)
        cycles = self.planned_cycles()
        return (*values, cycles * batch * len(self._method.mechanisms), batch, steps_in_epoch, cycles)

    def get_total_train_batch_size(self, args: Any) -> int:
        """B, whatever the micro-batch."""
        return self.expected_batch_size

    def _start(self, resume_from: str | bool | None) -> str | None:
        """Plan, ledger, streams and owner map of this training. Returns the checkpoint from which it goes on."""
        with together("the checks before training"):
            check_model(
                self.model, records=[self._records[i] for i in range(min(3, len(self._records)))],
                collate=self._collate, mode=self.engine, label_names=self.label_names,
            )  # fmt: skip
            if not self._method.owners:
                self._check_all_batches()
        cycles = self.planned_cycles()
        start, self.ledger = begin(self.args, self.model, self.ledger, resume_from, self._plan, cycles)
        self._budget_callback.ledger = self.ledger
        self._stages = [
            make_streams(self.args, self.model, self.ledger.plan, stage)
            for stage in range(len(stages(self._method, self.model)))
        ]
        if self._binding is None or start.state is not None:
            self._binding, self._owners = establish_owners(
                self.args, self.model, self._records, self._checked_batch, start.state, start.folders,
                self.ledger.plan, needed=self._method.owners,
            )  # fmt: skip
        broadcast(self._trainables())
        return start.checkpoint

    def _trainables(self) -> dict[str, torch.Tensor]:
        return {name: p for stream in stream_parameters(self.model).values() for name, p in stream.items()}

    # ---- Training ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`. The returned training loss is NaN: the true one is private."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        if kwargs.get("trial") is not None:
            self.hyperparameter_search()
        checkpoint = self._start(resume_from_checkpoint)
        output = super().train(resume_from_checkpoint=checkpoint, **kwargs)
        check_same("The trained parameters", lambda: digest(self._trainables()))
        metrics = {key: value for key, value in output.metrics.items() if key not in _PRIVATE_LOGS}
        return TrainOutput(output.global_step, float("nan"), metrics)

    def training_step(
        self,
        model: nn.Module,
        inputs: Cycle,
        num_items_in_batch: Any = None,  # type: ignore[override]
    ) -> torch.Tensor:
        """One cycle. Leaves the last stream's noisy gradient for the training loop's own `optimizer.step()`."""
        model.train()
        # before the scheduler's step: what this cycle's updates use
        self._rates = {group.get("stream"): float(group["lr"]) for group in self.optimizer.param_groups}
        done: list[Stream] = []
        n = len(self._records)
        stage = stage_of(self.state.global_step, self.state.max_steps, len(self._stages))
        streams = self._stages[stage]
        for name, stream in streams.items():
            assert self.ledger is not None
            owners = None if stream.num_owners is None or self._owners is None else self._owners.view(-1, n)[stage]
            with (
                together(f"the {name} stream of a cycle"),
                self.compute_loss_context_manager(),
                secret_masks(self.entropy, self.args.device),
            ):
                self.ledger.spend(name)
                clipped = sum_gradients(
                    self.model,
                    stream,
                    self._micro_batches(getattr(inputs, name), owners),
                    self.record_gradients,
                    self._records_at_once(stream),
                )
            noisy_gradients(stream, clipped, self.noise)
            done.append(stream)
            last = name == list(streams)[-1]
            if last or self._method.alternating:
                self._first_cycle.before_step(done, self.optimizer)
            if not last and self._method.alternating:
                done = []
                # the other stream's gradients are None, so the optimizer leaves its parameters and state alone
                self.optimizer.step()
                self._first_cycle.after_step()
                model.zero_grad(set_to_none=True)
        if self.args.research_diagnostics:
            return self._private_loss(inputs)
        return torch.zeros((), device=self.args.device)

    def record_gradients(
        self, stream: Stream, batch: Mapping[str, torch.Tensor], owner: torch.Tensor | None
    ) -> Mapping[str, Any]:
        """Per-sample gradients of one micro-batch: `{name: (b, *shape)}`, or forms that `ClippedSum.add` takes.

        For subclasses that audit. Each row is clipped; that it is of one record alone is the subclass's word.
        """
        weighted = self.args.residual_weighting
        owned_loss = residual_weighted(model_loss, self.args.residual_gamma) if weighted else model_loss
        return stream_gradients(self.model, stream, batch, owner, mode=self.engine, owned_loss=owned_loss)

    @torch.no_grad()
    def _private_loss(self, cycle: Cycle) -> torch.Tensor:
        """Mean loss of the shared draw: a research diagnostic, private."""
        total, count = torch.zeros((), device=self.args.device), 0
        for batch, _ in self._micro_batches(cycle.shared, None):
            size = next(iter(batch.values())).shape[0]
            total, count = total + self.model(**batch).loss * size, count + size
        return total / max(1, count)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer that `args.optim` names, with parameter groups for the two streams."""
        streams = stream_parameters(self.model)
        if self.optimizer is not None:
            check_optimizer(self.optimizer, streams)
        else:
            cls, kwargs = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            decay = set(self.get_decay_parameter_names(self.model))
            self.optimizer = stream_optimizer(cls, kwargs, streams, self.args, decay)
        return self.optimizer

    # ---- What is logged and saved ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log public quantities only: epsilon spent, not the training loss."""
        if not self.args.research_diagnostics:
            logs = {key: value for key, value in logs.items() if key not in _PRIVATE_LOGS}
        if self.is_in_train and self.ledger is not None and "learning_rate" in logs:
            epsilon = self.ledger.epsilon()
            if epsilon is not None:
                logs["epsilon"] = epsilon
            if "expert" in self._rates:
                logs["expert_learning_rate"] = self._rates["expert"]
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Zero: the true count follows the realised batch sizes, which are private."""
        return 0

    def privacy_statement(self) -> PrivacyStatement:
        """What the plan spends and what has been spent so far."""
        if self.ledger is None:
            self.ledger = PrivacyLedger(self._plan(self.planned_cycles()))
        check_untrained(self.model, self.ledger)
        return make_statement(
            self.args,
            self.model,
            self.ledger,
            secure=self.entropy.secure,
            public_corpus=None if self._disjointness is None else dataset_name(self.public_dataset),
            disjointness=self._disjointness,
        )

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """The adapter in PEFT's format, the tokenizer, the state of the budget and the privacy statement."""
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        statement = None if self.ledger is None else self.privacy_statement()  # or refuses, before anything is written
        super()._save(output_dir, state_dict=state_dict)
        if self.args.should_save and self.ledger is not None and statement is not None:
            if not self._in_checkpoint:  # a checkpoint's state is written last
                self.ledger.save(output_dir)
            text = statement.to_json()
            (Path(output_dir) / STATEMENT_FILE).write_text(text + "\n", encoding="utf-8")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As in `Trainer`; what makes it a checkpoint is written last, and only then are older ones deleted."""
        assert self.ledger is not None and self._binding is not None
        check_same("The trained parameters", lambda: digest(self._trainables()))
        self._in_checkpoint = True
        try:
            folder = self._get_output_dir(trial)
            with checkpoint_written_last(self.args, self.state, folder, self.ledger, self._binding):
                super()._save_checkpoint(model, trial)
        finally:
            self._in_checkpoint = False

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        restore_adapter(self.model if model is None else model, resume_from_checkpoint)
        broadcast(self._trainables())

    def _load_best_model(self) -> None:
        logger.info(f"Loading the adapter of {self.state.best_model_checkpoint}.")
        restore_adapter(self.model, self.state.best_model_checkpoint)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: every trial spends privacy, and the choice among them is not accounted for."""
        raise PrivacyConfigError(
            "A hyper-parameter search on the private set was asked for",
            "Each trial is a release of its own; the budget of one run does not cover the search",
            "Tune on public data, then train once",
        )
