"""What a release may contain, and what must appear in none of its files.

An allow-list: a file, a field or a metadata entry that is not named here does not leave the machine.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from raptor_hf.errors import Finding, ReleaseError

__all__ = ["ADAPTER_CONFIG", "CARD", "MANIFEST", "STATEMENT", "TOKENIZER_FILES", "WEIGHTS"]

WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
STATEMENT, CARD, MANIFEST = "privacy.json", "README.md", "release.json"
STATE = "raptor_state.json"  # beside a saved adapter, never in a release
AUDIT = "raptor_audit.json"  # in the private folder of an audit (`raptor_hf.audit`), never in a release
TOKENIZER_FILES = frozenset({
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
})  # fmt: skip
REQUIRED = (WEIGHTS, ADAPTER_CONFIG, STATEMENT, CARD, MANIFEST)
ALLOWED = frozenset(REQUIRED) | TOKENIZER_FILES
# The Hub's own; it holds patterns of file names.
HUB_FILES = frozenset({".gitattributes"})
# Files that are words of a language, not values that a run wrote: paths and names are looked for elsewhere.
_VOCABULARY = frozenset({"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"})
_BINARY = frozenset({WEIGHTS, "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"})

_ROOTS = (
    "home|Users|root|tmp|var|mnt|media|opt|srv|data|scratch|work|workspace|private|etc|usr|content|kaggle|gpfs|lustre"
)
_PATH = re.compile(
    rf"(?<![\w./:-])(?:/(?:{_ROOTS})/[\w.@+-]+|~/[\w.@+-]+|[A-Za-z]:\\+[\w.@+-]+|\\\\[\w.-]+\\\w+|file:/)"
)
_TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{20,}|ghp_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b")
# Keys of a JSON file under which something private, or the environment of the run, would stand.
_KEYS = re.compile(
    r"(?:^|_)(?:seed|rng|loss|losses|grad_norm|owner_map|owners|owner_counts|counts|batch_sizes|train_batch_size|"
    r"log_history|output_dir|logging_dir|hostname|username|hub_token|name_or_path|cache_dir|local_files_only|"
    r"tokenizer_file|vocab_file|special_tokens_map_file)(?:$|_)"
)
_KEYS_ALLOWED = frozenset({"base_model_name_or_path"})
# The card that the plain Trainer writes: its seed and its table of losses.
_TRAINER_CARD = re.compile(r"^[-*| ]*(?:seed|(?:total_)?train_batch_size|training loss)\b.*[:|].*", re.I | re.M)
_COMMON_NAMES = frozenset({"root", "user", "ubuntu", "admin", "runner", "localhost", "jovyan", "model", "lora", "moe"})


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def error(what: str, why: str, instead: str, severity: str = "error") -> Finding:
    return Finding(what, why, instead, severity=severity, kind=ReleaseError)


def own_names() -> tuple[str, ...]:
    """User and host name of this machine, as far as they say something."""
    found = []
    for read in (getpass.getuser, socket.gethostname, lambda: Path.home().name):
        try:
            found.append(read())
        except (OSError, KeyError, RuntimeError, ImportError):
            continue
    return tuple({name for name in found if len(name) > 3 and name.lower() not in _COMMON_NAMES})


def check_names(names: Iterable[str]) -> Iterator[Finding]:
    """Findings about the list of files: foreign ones, and required ones that are missing."""
    names = set(names)
    for name in sorted(names - ALLOWED - HUB_FILES):
        yield error(
            f"The file `{name}` is in the release",
            "Only the adapter, its configuration, tokenizer or processor files, the statement, the manifest and the "
            "card are allowed; anything else may carry training state, records or code that runs on loading",
            "Delete it, and if it was ever uploaded treat what it holds as public",
        )
    for name in sorted(set(REQUIRED) - names):
        yield error(f"The file `{name}` is missing", "Every release has it", "Make the release by `export_release`")


def scan(name: str, data: bytes, secrets: Iterable[str] = (), public: Iterable[str] = ()) -> Iterator[Finding]:
    """Findings about the text of one file.

    Args:
        secrets: words that must not occur, such as the user's name. public: Hub ids, which may contain them.
    """
    if name in _BINARY:
        if data.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04", b"\x1f\x8b")):
            yield error(f"`{name}` is a pickle or an archive", "It can run code when loaded", "Do not load it")
        return
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        yield error(f"`{name}` is not text", "It could hold anything", "Make the release by `export_release`")
        return
    if name.endswith(".json"):
        try:
            values = json.loads(text, object_pairs_hook=_no_duplicates)
        except ValueError as problem:
            yield error(f"`{name}` is not valid JSON ({problem})", "It could hold anything", "Export again")
            return
        if name not in _VOCABULARY and name != STATEMENT:  # whose fields are fixed by its schema
            keys = sorted({key for key in _keys(values) if _KEYS.search(key) and key not in _KEYS_ALLOWED})
            for key in keys:
                yield error(
                    f"`{name}` has the field `{key}`",
                    "It describes the private run or the machine it ran on",
                    "Make the release by `export_release`, which leaves it out",
                )
    if name in _VOCABULARY:
        return
    hidden = text
    for word in sorted(filter(None, public), key=len, reverse=True):
        hidden = hidden.replace(word, "")
    for pattern, what in ((_PATH, "a local path"), (_TOKEN, "an access token")):
        match = pattern.search(hidden)
        if match:
            shown = match.group() if pattern is _PATH else match.group()[:6] + "..."
            yield error(f"`{name}` holds {what}: `{shown}`", "It names a person, a machine or opens an account",
                        "Remove it and export again")  # fmt: skip
    for word in secrets:
        # `name/model` is a Hub id, and public; in a path the name has a slash before it
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9]|(?<!/{re.escape(word)})/\w)", hidden, re.I):
            yield error(
                f"`{name}` holds the name of this user or machine", "It says who trained, or where", "Remove it"
            )
    if name == CARD and (match := _TRAINER_CARD.search(hidden)):
        yield error(
            f"The card holds `{match.group().strip()}`",
            "The plain Trainer's card prints seeds, batch sizes and losses of the run",
            "Remove that section from the card",
        )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field stands twice")
    return found


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)


def clean_json(data: bytes) -> bytes:
    """A tokenizer's or processor's configuration without fields and values that name the machine."""
    return (json.dumps(_cleaned(json.loads(data)), indent=2, ensure_ascii=False) + "\n").encode()


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: _cleaned(v) for k, v in value.items() if not (_KEYS.search(k) and k not in _KEYS_ALLOWED)}
        return {k: v for k, v in kept.items() if not (isinstance(v, str) and (_PATH.search(v) or _TOKEN.search(v)))}
    if isinstance(value, list):
        return [_cleaned(inner) for inner in value]
    return value
