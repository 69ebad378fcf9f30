"""A native port of DeepSeek-VL2, which `transformers` lacks. Importing it registers it with the Auto classes."""

from raptor_hf.models.deepseek_vl2 import conversion as _conversion
from raptor_hf.models.deepseek_vl2 import family as _family
from raptor_hf.models.deepseek_vl2.configuration import (
    DeepseekVL2Config,
    DeepseekVL2ProjectorConfig,
    DeepseekVL2VisionConfig,
)
from raptor_hf.models.deepseek_vl2.image_processing import DeepseekVL2ImageProcessor
from raptor_hf.models.deepseek_vl2.modeling import DeepseekVL2ForConditionalGeneration
from raptor_hf.models.deepseek_vl2.processing import DeepseekVL2Processor

_ = (_conversion, _family)

__all__ = [
    "DeepseekVL2Config",
    "DeepseekVL2ForConditionalGeneration",
    "DeepseekVL2ImageProcessor",
    "DeepseekVL2Processor",
    "DeepseekVL2ProjectorConfig",
    "DeepseekVL2VisionConfig",
]
