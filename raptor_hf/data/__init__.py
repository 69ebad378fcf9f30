"""Tasks: real sentences that install from PyPI and load offline, local files, and the Hub."""

from raptor_hf.data.choices import choice_log_likelihoods, choose
from raptor_hf.data.completion import CompletionCollator, completion_log_likelihoods, encode_completion
from raptor_hf.data.demo import imdb_sentences, rotten_tomatoes
from raptor_hf.data.metrics import classification_metrics
from raptor_hf.data.multimodal import MultimodalCollator, encode_multimodal
from raptor_hf.data.scienceqa import Question, ScienceQADataset, load_scienceqa
from raptor_hf.data.tasks import DataArguments, TextTask, load_task, tokenize_task

__all__ = [
    "CompletionCollator",
    "DataArguments",
    "MultimodalCollator",
    "Question",
    "ScienceQADataset",
    "TextTask",
    "choice_log_likelihoods",
    "choose",
    "classification_metrics",
    "completion_log_likelihoods",
    "encode_completion",
    "encode_multimodal",
    "imdb_sentences",
    "load_scienceqa",
    "load_task",
    "rotten_tomatoes",
    "tokenize_task",
]
