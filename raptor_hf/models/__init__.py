"""Model classes that `transformers` lacks. Importing this package registers them with the Auto classes."""

from raptor_hf.models.classifiers import (
    Dots1ForSequenceClassification,
    Ernie4_5_MoeForSequenceClassification,
    FlexOlmoForSequenceClassification,
    Glm4MoeForSequenceClassification,
    GraniteMoeForSequenceClassification,
    GraniteMoeSharedForSequenceClassification,
    OlmoeForSequenceClassification,
)
from raptor_hf.models.switch import SwitchTransformersForSequenceClassification

__all__ = [
    "Dots1ForSequenceClassification",
    "Ernie4_5_MoeForSequenceClassification",
    "FlexOlmoForSequenceClassification",
    "Glm4MoeForSequenceClassification",
    "GraniteMoeForSequenceClassification",
    "GraniteMoeSharedForSequenceClassification",
    "OlmoeForSequenceClassification",
    "SwitchTransformersForSequenceClassification",
]
