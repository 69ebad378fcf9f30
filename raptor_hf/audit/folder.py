"""The folder of an audit: readable by its owner alone, bound to one set of settings, able to go on after a kill.

What an audit writes is private: it says which records were members, and how the models fit each of them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.hub.contents import AUDIT
from raptor_hf.state import read_json, write_durably

__all__ = ["MARKER", "bind", "digest_of", "open_folder", "read_arrays", "write_arrays", "write_text"]

# In every audit folder. `raptor-hf scrub-check` knows an audit by it.
MARKER = AUDIT


def open_folder(path: str | os.PathLike) -> Path:
    """Make `path` a folder of mode 0700, or go on with the audit in it.

    Raises:
        PrivacyConfigError: it holds something that is no audit.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise PrivacyConfigError(f"`{folder}` is a file", "An audit writes a folder", "Name a new folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise PrivacyConfigError(
            f"The folder `{folder}` holds something that is no audit",
            "An audit's files say which records were members; among other files they would be copied or published "
            "with them",
            "Name a new folder",
        )
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def subfolder(folder: Path, *names: str) -> Path:
    """A folder of mode 0700 below the audit's."""
    for name in names:
        folder = folder / name
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700)
    return folder


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def bind(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Write the settings of the audit, or compare them with those of the audit that is there.

    Returns:
        True when there was one: it goes on.

    Raises:
        PrivacyConfigError: the audit there has other settings; results of two audits would be mixed.
    """
    wanted = json.loads(json.dumps(dict(settings)))
    found = read_json(folder / MARKER)
    if found is None:
        if (folder / MARKER).exists():
            raise PrivacyConfigError(
                f"`{folder / MARKER}` cannot be read",
                "What the audit in this folder was made with is not known",
                "Name a new folder",
            )
        write_text(folder / MARKER, json.dumps(wanted, indent=2) + "\n")
        return False
    different = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    if different:
        key = different[0]
        raise PrivacyConfigError(
            f"`{key}` is not what it was when the audit in `{folder}` began ({_short(found.get(key))} then, "
            f"{_short(wanted.get(key))} now)",
            "Models trained with different settings would be compared as if only membership told them apart",
            "Repeat the command as it was to go on with that audit, or name a new folder",
        )
    return True


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def write_text(path: Path, text: str) -> None:
    """A file of mode 0600: the old one or the new one, whenever the process dies."""
    write_durably(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """As `write_text`."""
    write_durably(path, data)


def write_arrays(path: Path, **arrays: Any) -> None:
    """An .npz of mode 0600, whole or not there."""
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    write_durably(path, stream.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file of `write_arrays`; no pickles."""
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def close_permissions(folder: Path) -> None:
    """Every file below `folder` 0600, every folder 0700: also those that a library wrote."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(stat.S_IRWXU if path.is_dir() else stat.S_IRUSR | stat.S_IWUSR)
