"""Metrics that load without the Hub, as `evaluate` metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import evaluate
import numpy as np

__all__ = ["Accuracy", "classification_metrics"]


class Accuracy(evaluate.Metric):
    """Fraction of predictions equal to the references."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Fraction of predictions equal to the references.",
            citation="",
            inputs_description="predictions and references: lists of int",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


def classification_metrics() -> Callable[[Any], dict[str, float]]:
    """A `compute_metrics` for the Trainer: accuracy of the largest logit."""
    metric = Accuracy(keep_in_memory=True)

    def compute(prediction: Any) -> dict[str, float]:
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        return metric.compute(predictions=logits.argmax(-1), references=prediction.label_ids) or {}

    return compute
