"""The bundled tiny Switch encoder: see the README in `tiny-switch/`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["tiny_switch_path"]


def tiny_switch_path() -> Path:
    """Directory of the bundled pretrained model and its tokenizer, for `from_pretrained`."""
    return Path(__file__).parent / "tiny-switch"
