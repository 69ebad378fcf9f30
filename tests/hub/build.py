"""One trained release that the tests of this folder copy and tamper with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from raptor_hf.hub.contents import MANIFEST, sha256
from raptor_hf.hub.remote import open_release
from raptor_hf.hub.verify import verify_snapshot
from tests.helpers import VOCAB
from tests.trainer.build import make_trainer

BASE = dict(base_model="example-org/tiny", base_revision="a" * 40)


def tiny_tokenizer(folder: Path | None = None) -> PreTrainedTokenizerFast:
    """Whitespace-separated words w0 ... of the tiny models' vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    if folder is not None:
        found.save_pretrained(folder)
    return found


def trained(**changes):
    """A trainer after two cycles."""
    trainer = make_trainer(processing_class=tiny_tokenizer(), **changes)
    trainer.train()
    return trainer


def copy(release: Path, target: Path) -> Path:
    shutil.copytree(release, target)
    return target


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values, indent=2) + "\n")


def rehash(folder: Path) -> None:
    """What an attacker does who has read the code: all hashes fit again."""

    def change(manifest: dict) -> None:
        for name in manifest["files"]:
            data = (folder / name).read_bytes()
            manifest["files"][name] = {"sha256": sha256(data), "size": len(data)}

    edit_json(folder / MANIFEST, change)


def problems(folder: Path) -> list[str]:
    """Errors about a folder, the accountants left out (they are slow)."""
    return [f.what for f in verify_snapshot(open_release(folder), accountants=False).errors]
