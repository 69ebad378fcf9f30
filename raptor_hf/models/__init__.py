"""Model classes that `transformers` lacks. Importing this package registers them with the Auto classes."""

from raptor_hf.models.classifiers import (
    AriaTextForSequenceClassification,
    DeepseekOcr2TextForSequenceClassification,
    Dots1ForSequenceClassification,
    Ernie4_5_MoeForSequenceClassification,
    FlexOlmoForSequenceClassification,
    Glm4MoeForSequenceClassification,
    GraniteMoeForSequenceClassification,
    GraniteMoeSharedForSequenceClassification,
    OlmoeForSequenceClassification,
    Qwen3VLMoeTextForSequenceClassification,
)
from raptor_hf.models.deepseek_vl2 import (
    DeepseekVL2Config,
    DeepseekVL2ForConditionalGeneration,
    DeepseekVL2ImageProcessor,
    DeepseekVL2Processor,
)
from raptor_hf.models.switch import SwitchTransformersForSequenceClassification

__all__ = [
    "AriaTextForSequenceClassification",
    "DeepseekOcr2TextForSequenceClassification",
    "DeepseekVL2Config",
    "DeepseekVL2ForConditionalGeneration",
    "DeepseekVL2ImageProcessor",
    "DeepseekVL2Processor",
    "Dots1ForSequenceClassification",
    "Ernie4_5_MoeForSequenceClassification",
    "FlexOlmoForSequenceClassification",
    "Glm4MoeForSequenceClassification",
    "GraniteMoeForSequenceClassification",
    "GraniteMoeSharedForSequenceClassification",
    "OlmoeForSequenceClassification",
    "Qwen3VLMoeTextForSequenceClassification",
    "SwitchTransformersForSequenceClassification",
]
