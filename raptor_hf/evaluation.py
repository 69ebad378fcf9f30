"""Evaluation never runs on the training records: their exact loss is private."""

from __future__ import annotations

from typing import Any

from raptor_hf.checks import check_evaluation

__all__ = ["EvaluationMixin"]


class EvaluationMixin:
    """`get_eval_dataloader` and `get_test_dataloader` of `Trainer`, which refuse the training records."""

    args: Any
    train_dataset: Any
    eval_dataset: Any

    def _refuse_training_records(self, dataset: Any) -> None:
        data = self.eval_dataset if dataset is None else dataset
        data = self.eval_dataset[data] if isinstance(data, str) else data
        checked = self.__dict__.setdefault("_evaluated", {})  # the datasets themselves: an id could be used again
        if checked.get(id(data)) is not data:
            check_evaluation(data, self.train_dataset, self.args.research_diagnostics)
            checked[id(data)] = data

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As in `Trainer`; the training records are refused."""
        self._refuse_training_records(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """As in `Trainer`; the training records are refused."""
        self._refuse_training_records(test_dataset)
        return super().get_test_dataloader(test_dataset)  # type: ignore[misc]
