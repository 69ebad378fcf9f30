"""`scrub_check`: what everything in a training output folder would leak if it were published."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

from raptor_hf.errors import ReleaseError
from raptor_hf.hub import contents

__all__ = ["SEVERITIES", "Leak", "scrub_check"]

SEVERITIES = ("high", "medium", "low", "none")
_LIMIT = 8 << 20

# (pattern of the path, severity, what it would leak); the first that fits decides.
_RULES: tuple[tuple[str, str, str], ...] = (
    ("training_args.bin", "high", "a pickle of all arguments: seeds, local paths, tokens; it can run code when loaded"),
    (
        "rng_state*",
        "high",
        "states of the public random generators (coins, noise and dropout come from the operating system); a pickle",
    ),
    ("raptor_*", "medium", "the state of the budget, for resuming only"),
    ("trainer_state.json", "high", "the log of the run: where it holds losses or norms, they are of private records"),
    ("optimizer*", "medium", "optimizer moments: functions of the noisy gradients, of no use to anybody else"),
    ("scheduler*", "low", "the schedule's state"),
    ("scaler*", "medium", "loss scaling: it follows overflows in private gradients"),
    ("events.out.tfevents*", "medium", "a log of the run, with the host name in the file's name"),
    ("*.arrow", "high", "training rows"),
    ("*.parquet", "high", "training rows"),
    ("*.csv", "high", "rows of data"),
    ("*.tsv", "high", "rows of data"),
    ("*.jsonl", "high", "rows of data"),
    ("*predictions*", "high", "predictions on records"),
    ("*_results.json", "medium", "metrics; those of private records are outside the guarantee"),
    ("*.safetensors", "low", "weights: public after private training; check that they are the adapter alone"),
    ("*.pkl", "high", "a pickle: anything, and it can run code when loaded"),
    ("*.pickle", "high", "a pickle: anything, and it can run code when loaded"),
    ("*.pt", "high", "a pickle: anything, and it can run code when loaded"),
    ("*.pth", "high", "a pickle: anything, and it can run code when loaded"),
    ("*.bin", "high", "a pickle: anything, and it can run code when loaded"),
    ("*.ckpt", "high", "a pickle: anything, and it can run code when loaded"),
    ("*.npy", "high", "an array of unknown origin"),
    ("*.npz", "high", "arrays of unknown origin"),
    ("*.log", "medium", "output of the run: paths, hosts, whatever was printed"),
    ("*.png", "low", "a picture: check what it shows"),
    ("*.pdf", "low", "a document: check what it shows"),
)
_DIRECTORIES = {"wandb": "medium", "runs": "medium", "mlruns": "medium", ".cache": "high", "logs": "medium"}


@dataclass(frozen=True)
class Leak:
    """One file: what it would leak, how bad that is ("high", "medium", "low", "none"), and what to do."""

    path: str
    severity: str
    what: str
    instead: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def scrub_check(directory: str | os.PathLike) -> list[Leak]:
    """Every file below `directory`, the worst first.

    Raises:
        ReleaseError: it is no folder.
    """
    root = Path(directory)
    if not root.is_dir():
        raise ReleaseError(
            f"`{root.name}` is no folder", "There is nothing to look at", "Give a training output folder"
        )
    names = contents.own_names()
    found = [_judge(root, path, names) for path in sorted(root.rglob("*")) if not path.is_dir()]
    return sorted(found, key=lambda leak: (SEVERITIES.index(leak.severity), leak.path))


def _judge(root: Path, path: Path, names: tuple[str, ...]) -> Leak:
    name = path.relative_to(root).as_posix()
    severity, what = _by_name(path.name, Path(name).parent.parts)
    if _in_audit(root, path):
        severity, what = "high", "part of a privacy audit: which records were members, and how models fit each of them"
    inside = list(_inside(path, names))
    if inside:
        severity, what = "high", "; ".join([*([what] if severity != "none" else []), *inside])
    instead = {
        "none": "Nothing: `export_release` takes it along",
        "low": "Leave it out, or look at it first",
    }.get(severity, "Never upload it; `export_release` leaves it out")
    if inside and name in contents.ALLOWED:
        instead = "Do not upload it as it is; `export_release` writes it without that, or stops"
    return Leak(name, severity, what, instead)


def _in_audit(root: Path, path: Path) -> bool:
    """Whether the file lies in an audit's folder, at any depth."""
    below = [root, *(root / parent for parent in path.relative_to(root).parents)]
    return any((folder / contents.AUDIT).is_file() for folder in below)


def _by_name(name: str, parents: tuple[str, ...]) -> tuple[str, str]:
    if not parents and name in contents.ALLOWED:
        return "none", "a file of a release"
    if "owner" in name.lower() or "raptor_private" in parents:
        return "high", "the owner map, or what belongs to it: which expert each private record trained"
    for part in parents:
        if part in _DIRECTORIES:
            return _DIRECTORIES[part], f"part of `{part}`, a log or cache of the run"
    if name in contents.ALLOWED:
        return "low", "a file of a release, in a checkpoint"
    for pattern, severity, what in _RULES:
        if fnmatch(name.lower(), pattern):
            return severity, what
    return "medium", "not on the allow-list: nobody has said what is in it"


def _inside(path: Path, names: tuple[str, ...]) -> Iterator[str]:
    """What the file's bytes give away."""
    if path.is_symlink() and not path.exists():
        yield "a broken link, whose target names a path"
        return
    if path.suffix == ".safetensors":
        from raptor_hf.hub.weights import read_header

        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                text = file.read(min(size, _LIMIT)).decode("utf-8", "replace")
            metadata = set(re.findall(r'"__metadata__":\{"([^"]+)"', text)) - {"format"}
            if path.stat().st_size < 64 * _LIMIT:
                read_header(path.read_bytes())
        except ReleaseError as problem:
            yield problem.given
            return
        if metadata:
            yield f"metadata beside the tensors ({', '.join(sorted(metadata))})"
        return
    data = path.open("rb").read(_LIMIT)
    if path.name in contents.ALLOWED:
        for finding in contents.scan(path.name, data, names):
            yield finding.what
        return
    text = data.decode("latin-1")
    if contents._PATH.search(text):
        yield "holds a local path"
    if contents._TOKEN.search(text):
        yield "holds an access token"
    if any(re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", text, re.I) for word in names):
        yield "holds the name of this user or machine"
    if path.suffix == ".json" and re.search(r'"(?:train_)?loss"', text):
        yield "holds losses"
