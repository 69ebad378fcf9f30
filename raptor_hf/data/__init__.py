"""Tasks: real sentences that install from PyPI and load offline, local files, and the Hub."""

from raptor_hf.data.demo import imdb_sentences, rotten_tomatoes
from raptor_hf.data.metrics import classification_metrics
from raptor_hf.data.tasks import DataArguments, TextTask, load_task, tokenize_task

__all__ = [
    "DataArguments",
    "TextTask",
    "classification_metrics",
    "imdb_sentences",
    "load_task",
    "rotten_tomatoes",
    "tokenize_task",
]
