"""`export_release`: a folder that may be published, made from a trainer or from what `save_model` wrote."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raptor_hf.errors import Finding, ReleaseError
from raptor_hf.hub import contents
from raptor_hf.hub.contents import ADAPTER_CONFIG, CARD, MANIFEST, STATEMENT, TOKENIZER_FILES, WEIGHTS
from raptor_hf.hub.model_card import CardOptions, update_card
from raptor_hf.hub.weights import AdapterContents, check_adapter, read_contents, read_header
from raptor_hf.privacy.statement import PrivacyStatement

__all__ = ["BUNDLED", "export_release", "known_id"]

MANIFEST_VERSION = 1
BUNDLED = "tiny-switch"
_ID = re.compile(r"^(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*$")


def export_release(
    trainer_or_dir: Any,
    path: str | os.PathLike,
    *,
    base_model: str | None = None,
    base_revision: str | None = None,
    labels: Sequence[str] | None = None,
    repo_id: str | None = None,
    **card: Any,
) -> Path:
    """Write a folder that holds what may be public, and nothing else.

    The adapter and head (serialised again, without metadata), PEFT's configuration with the base model as Hub id and
    revision, tokenizer or processor files, the privacy statement, a manifest with hashes, and the model card. An
    existing card in `path` is updated: text outside the package's section stays.

    Args:
        trainer_or_dir: a `RaptorTrainer` after training, or a folder that `save_model` or a checkpoint wrote.
        path: the folder; it may hold an earlier release, and nothing else.
        base_model: Hub id of the base model, where it was loaded from a local folder.
        base_revision: commit, tag or branch of the base model; default, the commit that was loaded.
        labels: names of the classes; default, those of the model (they are published).
        repo_id: where it will live, for the card's examples.
        **card: fields of `CardOptions`: license, language, tags, datasets (public ones), metrics, notes, ...

    Returns:
        The folder.

    Raises:
        ReleaseError: anything that must not be public would be written, the adapter is not what was trained, or a
            folder's statement claims less than its own numbers give.
    """
    target = Path(path)
    _check_target(target, trainer_or_dir)
    options = CardOptions(repo_id=repo_id, **card)
    with tempfile.TemporaryDirectory() as scratch:
        if isinstance(trainer_or_dir, (str, os.PathLike)):
            source, model = Path(trainer_or_dir), None
            _check_belongs(source)
        else:
            source, model = Path(scratch), trainer_or_dir.model
            _save(trainer_or_dir, source)
        files = _collect(source)
    config, statement = json.loads(files[ADAPTER_CONFIG]), PrivacyStatement.from_json(files[STATEMENT].decode())
    named = base_model or config.get("base_model_name_or_path")
    base = base_of(named, base_revision or _commit(model, config, named))
    if model is None:
        statement.recompute()  # a file may have been edited; a trainer makes its own
    statement = _name_base(statement, base)
    found = read_contents(read_header(files[WEIGHTS])[1], config.get("r"))
    files[WEIGHTS] = _serialise(files[WEIGHTS])
    files[ADAPTER_CONFIG] = _adapter_config(config, found, base)
    files[STATEMENT] = (statement.to_json() + "\n").encode()
    task = _task(
        model, found, labels, images=not {"processor_config.json", "preprocessor_config.json"}.isdisjoint(files)
    )
    manifest = {
        "schema_version": MANIFEST_VERSION,
        "base_model": base,
        "task": task,
        "files": {name: {"sha256": contents.sha256(data), "size": len(data)} for name, data in sorted(files.items())},
    }
    files[MANIFEST] = (json.dumps(manifest, indent=2) + "\n").encode()
    existing = (target / CARD).read_text(encoding="utf-8") if (target / CARD).is_file() else None
    files[CARD] = update_card(existing, statement, base, task, found, options).encode()
    refuse(check_files(files, secrets=contents.own_names(), public=(base["id"], repo_id)))
    target.mkdir(parents=True, exist_ok=True)
    for stale in {item.name for item in target.iterdir()} & contents.ALLOWED - set(files):
        (target / stale).unlink()
    for name, data in files.items():
        (target / name).write_bytes(data)
    return target


def check_files(
    files: Mapping[str, bytes], secrets: Sequence[str] = (), public: Sequence[str | None] = ()
) -> list[Finding]:
    """Findings about a release's files, the accountant apart."""
    findings = list(contents.check_names(files))
    for name, data in files.items():
        if name in contents.ALLOWED:
            findings += contents.scan(name, data, secrets, [word for word in public if word])
    if not any(name in files for name in (WEIGHTS, ADAPTER_CONFIG, STATEMENT)):
        return findings
    try:
        config = json.loads(files.get(ADAPTER_CONFIG, b"{}"))
        statement = PrivacyStatement.from_json(files[STATEMENT].decode("utf-8")) if STATEMENT in files else None
    except ReleaseError as problem:
        return [*findings, Finding.of(problem)]
    except (ValueError, TypeError, AttributeError, KeyError) as problem:
        return [*findings, contents.error(f"The statement is damaged ({problem})", "It claims nothing", "Export again")]
    if WEIGHTS in files and isinstance(config, dict):
        findings += check_adapter(files[WEIGHTS], config, statement)
    return findings


def refuse(findings: Sequence[Finding]) -> None:
    """Raise the first error among `findings`."""
    for finding in findings:
        if finding.severity == "error":
            raise finding.error()


def known_id(name: str | None) -> str | None:
    """The Hub id that `name` is, or the bundled model's; None for a local path."""
    from raptor_hf.assets import tiny_switch_path

    if name == BUNDLED or (name and Path(name).exists() and Path(name).resolve() == tiny_switch_path().resolve()):
        return BUNDLED
    return name if name and not os.path.exists(name) and _ID.match(name) else None


def base_of(name: str | None, revision: str | None) -> dict[str, str | None]:
    """The base model as {"id", "revision"}; never a local path."""
    found = known_id(name)
    if found is None:
        warnings.warn(
            "The base model is not known by a Hub id, so the release cannot say what it belongs to. Give "
            '`base_model="owner/name"` and `base_revision`; a release without them is not pushed.',
            stacklevel=3,
        )
        return {"id": None, "revision": None}
    return {"id": found, "revision": None if found == BUNDLED else revision}


def _commit(model: Any, config: Mapping[str, Any], name: str | None) -> str | None:
    """The base model's commit: as loaded or configured, else that of the only snapshot in the Hub's cache.

    transformers no longer notes the commit in the configuration. With several snapshots nothing tells which was loaded.
    """
    commit = getattr(getattr(model, "config", None), "_commit_hash", None) or config.get("revision")
    if commit or known_id(name) is None:
        return commit
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{str(name).replace('/', '--')}" / "snapshots"
    found = [path.name for path in snapshots.glob("*") if (path / "config.json").exists()]
    return found[0] if len(found) == 1 else None


def _save(trainer: Any, folder: Path) -> None:
    from raptor_hf.moe.adapter_io import save_adapter

    statement = trainer.privacy_statement()
    save_adapter(trainer.model, folder)
    processor: Any = getattr(trainer, "processing_class", None)
    if hasattr(processor, "save_pretrained"):
        processor.save_pretrained(folder)
    (folder / STATEMENT).write_text(statement.to_json(), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_belongs(source: Path) -> None:
    """Refuse a folder whose statement was not written for the adapter beside it."""
    if not all((source / name).is_file() for name in (WEIGHTS, ADAPTER_CONFIG, STATEMENT)):
        return  # `_collect` says which is missing
    state, manifest = _read_json(source / contents.STATE), _read_json(source / MANIFEST)
    digest = contents.sha256((source / WEIGHTS).read_bytes())
    if state:
        statement = PrivacyStatement.from_json((source / STATEMENT).read_text(encoding="utf-8"))
        streams = {"shared": statement.shared, "expert": statement.expert}
        same = state.get("adapter_sha256") == digest and all(
            stream is None or stream.steps_taken == state.get(f"{name}_steps") for name, stream in streams.items()
        )
    else:  # a release has a manifest instead
        same = manifest.get("files", {}).get(WEIGHTS, {}).get("sha256") == digest
    if not same:
        raise ReleaseError(
            f"`{STATEMENT}` in the folder `{source.name}` was not written for the `{WEIGHTS}` beside it",
            f"Neither `{contents.STATE}` nor `{MANIFEST}` fits them both: the adapter may have spent more than stated",
            "Save again with `trainer.save_model`, or export from the trainer",
        )


def _check_target(target: Path, source: Any) -> None:
    if isinstance(source, (str, os.PathLike)) and target.resolve() == Path(source).resolve():
        raise ReleaseError(
            "The training output folder itself was given as `path`",
            "It holds training state beside the adapter",
            "Give a new folder",
        )
    if target.exists() and not target.is_dir():
        raise ReleaseError(
            f"The file `{target.name}` was given as `path`", "A release is a folder", "Give a new folder"
        )
    held = {item.name for item in target.iterdir()} if target.is_dir() else set()
    foreign = sorted(held - contents.ALLOWED - contents.HUB_FILES - {".git"})
    if foreign:
        raise ReleaseError(
            f"The folder `{target.name}` holds `{foreign[0]}`",
            "A release folder is uploaded as it is, and that file is not on the allow-list",
            "Give a new folder",
        )


def _collect(source: Path) -> dict[str, bytes]:
    """The allowed files of a folder, read; tokenizer configurations without what names the machine."""
    missing = [name for name in (WEIGHTS, ADAPTER_CONFIG, STATEMENT) if not (source / name).is_file()]
    if missing:
        raise ReleaseError(
            f"The folder `{source.name}` has no `{missing[0]}`",
            "A release is an adapter with the statement of what it spent",
            "Give a folder that `RaptorTrainer.save_model` wrote, or the trainer",
        )
    names = {WEIGHTS, ADAPTER_CONFIG, STATEMENT} | {n for n in TOKENIZER_FILES if (source / n).is_file()}
    links = [name for name in names if (source / name).is_symlink() and not _inside_cache(source / name)]
    if links:
        raise ReleaseError(f"`{links[0]}` is a link", "What it points to may not be what was saved", "Copy the file")
    files = {name: (source / name).read_bytes() for name in names}
    for name in names & TOKENIZER_FILES:
        if name.endswith("_config.json") or name == "special_tokens_map.json":
            files[name] = contents.clean_json(files[name])
    return files


def _inside_cache(path: Path) -> bool:
    """A link of the Hub's cache: snapshots/<commit>/name -> blobs/<hash>."""
    return path.resolve().parent.name == "blobs"


def _serialise(data: bytes) -> bytes:
    from safetensors.torch import load, save

    tensors = load(data)
    broken = sorted(name for name, value in tensors.items() if not value.isfinite().all())
    if broken:
        raise ReleaseError(
            f"`{broken[0]}` holds values that are not finite", "The model cannot be used", "Train again, e.g. slower"
        )
    return save({name: value.contiguous() for name, value in tensors.items()}, metadata={"format": "pt"})


def _adapter_config(config: Mapping[str, Any], found: AdapterContents, base: Mapping[str, str | None]) -> bytes:
    """PEFT's configuration, written anew from what the weights hold."""
    from peft import LoraConfig

    parameters = sorted(config.get("target_parameters") or [])
    modules = {*found.shared, *(() if found.stacked else found.experts)}
    modules -= {path.removesuffix(".weight") for path in parameters}
    made = LoraConfig(
        r=found.rank,
        lora_alpha=config["lora_alpha"],
        target_modules=sorted(modules),
        target_parameters=parameters or None,
        modules_to_save=[found.head] if found.head else None,
        base_model_name_or_path=base["id"],
        revision=base["revision"],
        inference_mode=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        made.save_pretrained(scratch)
        values = json.loads((Path(scratch) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    values["target_modules"] = sorted(modules)
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def _name_base(statement: PrivacyStatement, base: Mapping[str, str | None]) -> PrivacyStatement:
    stated, name = statement.base_model, base["id"]
    if stated and name and "/" in stated and stated != name:
        raise ReleaseError(
            f"`base_model={name!r}` was given",
            f"The statement says that the adapter was trained on {stated!r}",
            "Leave `base_model` out",
        )
    return dataclasses.replace(statement, base_model=name)


def _task(model: Any, found: AdapterContents, labels: Sequence[str] | None, images: bool) -> dict[str, Any]:
    """What the head is for: enough to build the base model with a head of that size."""
    if found.head is None:  # the head of a language model is not trained
        return {"pipeline_tag": "image-text-to-text" if images else "text-generation", "head": None}
    config = getattr(model, "config", None)
    count = found.num_outputs
    names = (
        list(labels) if labels else [dict(getattr(config, "id2label", None) or {}).get(i) for i in range(count or 0)]
    )
    if labels and len(names) != count:
        raise ReleaseError(
            f"{len(names)} labels were given", f"The head has {count} outputs", "Give a name for each output"
        )
    return {
        "pipeline_tag": "text-classification",
        "head": found.head,
        "labels": [name if name is not None else f"LABEL_{i}" for i, name in enumerate(names)],
        "problem_type": getattr(config, "problem_type", None),
    }
