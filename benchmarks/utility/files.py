"""Writing a file whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["write_json"]


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as handle:
        json.dump(value, handle, indent=1, allow_nan=False)
        handle.write("\n")
    os.chmod(handle.name, 0o644)
    os.replace(handle.name, path)
