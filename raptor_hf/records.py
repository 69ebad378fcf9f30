"""The trainer's way to its private records: columns, collation, micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from raptor_hf.auto import choose_from_public, needs_public
from raptor_hf.checks import check_batch
from raptor_hf.distributed import from_main
from raptor_hf.grad_sample.batches import records_at_once
from raptor_hf.limits import Limits, check_lengths, limits_of
from raptor_hf.methods import Method
from raptor_hf.moe import check_disjoint
from raptor_hf.streams import Stream

__all__ = ["RecordsMixin"]


class RecordsMixin:
    """What `RaptorTrainer` does with single records before the engines see them."""

    args: Any
    model: Any
    public_dataset: Any
    data_collator: Any
    label_names: list[str]
    processing_class: Any
    _records: Any
    _collate: Callable
    _limits: Limits
    _method: Method
    _disjointness: str | None
    planned_cycles: Callable[[], int]
    _prepare_inputs: Callable
    _remove_unused_columns: Callable
    _get_collator_with_removed_columns: Callable

    @property
    def engine(self) -> str:
        """The per-sample gradient engine: methods that train base weights have the one-record engine only."""
        return self.args.grad_sample_mode if self._method.weights == "adapters" else "reference"

    def _records_at_once(self, stream: Stream) -> int | None:
        """How many records' gradients fit into memory; None: what is formed takes no more than the activations do."""
        formed = stream.parameters
        if self.engine == "hooks":  # it forms the owners' slices; of other tensors small ones, or none
            formed = {name: formed[name] for name in stream.owned}
        return records_at_once(formed, owned=stream.owned) if formed else None

    def _private_records(self, dataset: Any) -> tuple[Any, Callable]:
        """The training set without columns the model does not take, and its collator."""
        if dataset is None:
            return [], self.data_collator
        records, collate = self._without_unused_columns(dataset, "training")
        self._limits = limits_of(self.model, self.processing_class)
        check_lengths(records, self._limits, collate)
        return records, collate

    def _public_records(self) -> Any:
        return self._without_unused_columns(self.public_dataset, "public")[0]

    def _without_unused_columns(self, dataset: Any, description: str) -> tuple[Any, Callable]:
        if hasattr(dataset, "remove_columns"):
            return self._remove_unused_columns(dataset, description=description), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description=description)

    def _choose_from_public(self) -> None:
        """Set the arguments that are left to public records."""
        if not needs_public(self.args):
            return
        public = None if self.public_dataset is None else self._public_records()
        if public is not None and self._disjointness is None:
            self._disjointness = check_disjoint(public, self._records)
        chosen = from_main(
            lambda: choose_from_public(
                self.args, self.model, public, self._collate, label_names=self.label_names,
                dataset_size=len(self._records), cycles=self.planned_cycles(),
            ), "measuring on public records",
        )  # fmt: skip
        self.args = copy.copy(self.args)  # another trainer may take the same, for other records
        for name, value in chosen.items():
            setattr(self.args, name, value)

    def _checked_batch(self, records: list) -> dict:
        batch = self._collate(records)
        check_batch(batch, len(records), self.label_names, self._limits)
        return batch

    def _check_all_batches(self) -> None:
        """Look at every record's batch before training, for methods that compute no owner map, which does so too."""
        size = self.args.per_device_eval_batch_size
        for start in range(0, len(self._records), size):
            self._checked_batch([self._records[i] for i in range(start, min(start + size, len(self._records)))])

    def _micro_batches(self, indices: Any, owners: torch.Tensor | None) -> Iterator[tuple[dict, torch.Tensor | None]]:
        """Collated micro-batches of a logical batch, shortest records first (their order does not change the sum)."""
        drawn = [(self._records[int(i)], int(i)) for i in indices]
        drawn.sort(key=lambda pair: len(pair[0]["input_ids"]) if "input_ids" in pair[0] else 0)
        # one record at a time is what that engine computes: it need hold no more gradients than one
        size = 1 if self.engine == "reference" and self._method.private else self.args.per_device_train_batch_size
        for start in range(0, len(drawn), size):
            chunk = drawn[start : start + size]
            batch = self._checked_batch([record for record, _ in chunk])
            owner = None if owners is None else owners[[i for _, i in chunk]].to(self.args.device)
            yield dict(self._prepare_inputs(batch)), owner
