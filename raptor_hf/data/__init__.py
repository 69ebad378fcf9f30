"""Data for demonstrations: real sentences that install from PyPI and load offline."""

from raptor_hf.data.demo import imdb_sentences, rotten_tomatoes

__all__ = ["imdb_sentences", "rotten_tomatoes"]
