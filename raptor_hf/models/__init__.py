"""Model classes that `transformers` lacks. Importing this package registers them with the Auto classes."""

from raptor_hf.models.switch import SwitchTransformersForSequenceClassification

__all__ = ["SwitchTransformersForSequenceClassification"]
