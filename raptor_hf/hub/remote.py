"""Reading a release from a folder or from the Hub, file by allowed file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from raptor_hf.errors import ReleaseError
from raptor_hf.hub.contents import ALLOWED, HUB_FILES

__all__ = ["Snapshot", "foreign_history", "hub_errors", "is_transient", "open_release", "status_of"]

_TRANSPORTS = frozenset({"httpx", "httpx2", "httpcore", "requests", "urllib3"})
_TOOLS = (".git/", ".cache/huggingface/download/", ".cache/huggingface/.gitignore", ".cache/huggingface/CACHEDIR.TAG")


@dataclass(frozen=True)
class Snapshot:
    """A release at one moment.

    Attributes:
        source: as given. revision: commit on the Hub, None for a folder. folder: where the allowed files lie.
        names: of all files, foreign ones too. files: contents of the allowed ones.
        history: (commit, name) of foreign files in earlier commits, where that was asked for.
    """

    source: str
    revision: str | None
    folder: Path
    names: tuple[str, ...]
    files: dict[str, bytes]
    history: tuple[tuple[str, str], ...] = ()


def _chain(problem: BaseException) -> Iterator[BaseException]:
    """An error and its causes: the client wraps a failed upload of a large file in a `RuntimeError`."""
    cause: BaseException | None = problem
    while cause is not None:
        yield cause
        cause = cause.__cause__


def status_of(problem: BaseException) -> int | None:
    """HTTP status of an error of the Hub's client."""
    found = (getattr(getattr(cause, "response", None), "status_code", None) for cause in _chain(problem))
    return next((status for status in found if status is not None), None)


def _offline(problem: BaseException) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return any(isinstance(cause, OfflineModeIsEnabled) for cause in _chain(problem))


def is_transient(problem: BaseException) -> bool:
    """True for what may succeed when it is tried again: lost connections, timeouts, 5xx, 429."""
    status = status_of(problem)
    if status is not None:
        return status >= 500 or status in (408, 429)
    if _offline(problem):
        return False
    # the client's own transport errors; the library under it has changed its name before
    return any(
        isinstance(cause, (ConnectionError, TimeoutError)) or type(cause).__module__.split(".")[0] in _TRANSPORTS
        for cause in _chain(problem)
    )


@contextmanager
def hub_errors(repo_id: str, doing: str) -> Iterator[None]:
    """Errors of the Hub's client as three-part errors."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except HFValidationError as problem:
        raise ReleaseError(
            f"`{repo_id}` was given", "It is no folder here and no valid Hub id", "Give a folder or `owner/name`"
        ) from problem
    except LocalEntryNotFoundError as problem:
        raise ReleaseError(
            f"{doing} `{repo_id}` failed",
            "It is no folder here, and as a repository of the Hub it cannot be reached and is not in the cache",
            "Check the path of a folder, or try again with a connection",
        ) from problem
    except OfflineModeIsEnabled as problem:
        raise ReleaseError(
            f"{doing} `{repo_id}` failed: offline mode is on", "The Hub cannot be asked", "Unset `HF_HUB_OFFLINE`"
        ) from problem
    except Exception as problem:
        status = status_of(problem)
        if status is None:
            if not is_transient(problem):
                raise
            raise ReleaseError(
                f"{doing} `{repo_id}` failed ({type(problem).__name__})", "The connection was lost", "Try again later"
            ) from problem
        advice = {
            401: "Log in (`hf auth login`) or pass `token`; check the name, as a private repository looks missing",
            403: "Use a token with write access to this repository, and accept its terms if it is gated",
            404: "Check the name and the revision; for a private repository log in or pass `token`",
        }
        raise ReleaseError(
            f"{doing} `{repo_id}` failed with HTTP status {status}",
            f"The Hub answered: {str(problem).strip().splitlines()[-1][:200]}",
            advice.get(status or 0, "Try again later"),
        ) from problem


def open_release(
    path_or_repo: str | os.PathLike,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cached: bool = False,
) -> Snapshot:
    """Read a release. From the Hub only files on the allow-list are downloaded, all at one commit.

    Args:
        cached: take the copy in the Hub's cache where the Hub cannot be reached (foreign files are not seen then).

    Raises:
        ReleaseError: it cannot be found or read.
    """
    path = Path(path_or_repo)
    if path.is_dir():
        return _read_folder(str(path_or_repo), path)
    repo_id = str(path_or_repo)
    if revision is None and "@" in repo_id:
        repo_id, _, revision = repo_id.partition("@")
    from huggingface_hub import HfApi, snapshot_download

    with hub_errors(repo_id, "Reading"):
        # at one commit; the cache's copy where the Hub cannot be reached
        folder = Path(
            snapshot_download(repo_id, revision=revision, token=token, allow_patterns=sorted(ALLOWED | HUB_FILES))
        )
        local = _read_folder(repo_id, folder)
        try:
            entries = list(HfApi(token=token).list_repo_tree(repo_id, recursive=True, revision=folder.name))
        except Exception as problem:
            if not (cached and status_of(problem) is None and (_offline(problem) or is_transient(problem))):
                raise
            return replace(local, revision=folder.name)
    names = tuple(sorted(entry.path for entry in entries if hasattr(entry, "size")))
    files = {name: data for name, data in local.files.items() if name in names}
    return Snapshot(repo_id, folder.name, folder, names, files)


def foreign_history(repo_id: str, commit: str, token: str | bool | None) -> tuple[tuple[str, str], ...]:
    """(commit, name) of every file not on the allow-list in `commit` and the commits before it; one request each."""
    from huggingface_hub import HfApi

    found: dict[str, str] = {}
    with hub_errors(repo_id, "Reading the history of"):
        api = HfApi(token=token)
        for earlier in api.list_repo_commits(repo_id, revision=commit):
            for entry in api.list_repo_tree(repo_id, recursive=True, revision=earlier.commit_id):
                if hasattr(entry, "size") and entry.path not in ALLOWED | HUB_FILES:
                    found.setdefault(entry.path, earlier.commit_id)
    return tuple((where, name) for name, where in found.items())


def _read_folder(source: str, path: Path) -> Snapshot:
    names = sorted(
        item.relative_to(path).as_posix() for item in path.rglob("*") if item.is_symlink() or not item.is_dir()
    )
    names = [name for name in names if not name.startswith(_TOOLS)]
    files = {name: (path / name).read_bytes() for name in names if name in ALLOWED}
    return Snapshot(source, None, path, tuple(n for n in names if n not in HUB_FILES), files)
