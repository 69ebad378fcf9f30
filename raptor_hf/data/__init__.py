"""Tasks: real sentences that install from PyPI and load offline, local files, and the Hub."""

from raptor_hf.data.completion import CompletionCollator, choose, completion_log_likelihoods, encode_completion
from raptor_hf.data.demo import imdb_sentences, rotten_tomatoes
from raptor_hf.data.metrics import classification_metrics
from raptor_hf.data.tasks import DataArguments, TextTask, load_task, tokenize_task

__all__ = [
    "CompletionCollator",
    "DataArguments",
    "TextTask",
    "choose",
    "classification_metrics",
    "completion_log_likelihoods",
    "encode_completion",
    "imdb_sentences",
    "load_task",
    "rotten_tomatoes",
    "tokenize_task",
]
