"""`load_release`: base model and adapter, ready for `pipeline`."""

from __future__ import annotations

import json
import os
from typing import Any

from torch import nn

from raptor_hf.errors import ReleaseError
from raptor_hf.hub.contents import MANIFEST
from raptor_hf.hub.release import BUNDLED
from raptor_hf.hub.remote import Snapshot, open_release
from raptor_hf.hub.verify import verify_snapshot

__all__ = ["load_release"]


def load_release(
    path_or_repo: str | os.PathLike,
    base_model: Any = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    merge: bool = False,
    **base_options: Any,
) -> nn.Module:
    """The base model with the released adapter and head, in evaluation mode and frozen.

    The release's files are checked first (all of `verify_release` but the accountants), so a release with a foreign
    file or an adapter on a router is not loaded. Nothing in it is unpickled or run.

    Args:
        path_or_repo: a folder or a repository of the Hub, also `owner/name@revision`.
        base_model: the base model, or where to load it from; default, the Hub id and revision that the release names.
        merge: add the adapter to the weights, by stock PEFT: a model of the plain class, which any server loads.
        **base_options: for `from_pretrained` of the base model: `dtype`, `device_map`, ...

    Raises:
        ReleaseError: the release is damaged, or names no base model and none was given.

    Example:
        >>> model = load_release("owner/name")
        >>> classify = pipeline("text-classification", model=model, tokenizer="owner/name")
    """
    snapshot = open_release(path_or_repo, revision=revision, token=token, cached=True)
    verify_snapshot(snapshot, accountants=False).raise_on_error()
    base = base_model if isinstance(base_model, nn.Module) else _base(snapshot, base_model, token, base_options)
    if merge:
        from peft import PeftModel

        from raptor_hf.moe.adapter_io import check_loaded

        wrapped = PeftModel.from_pretrained(base, str(snapshot.folder))
        check_loaded(wrapped, snapshot.folder)
        model = wrapped.merge_and_unload()
    else:
        from raptor_hf.moe.adapter_io import load_adapter

        model = load_adapter(base, snapshot.folder)
    model.raptor_loaded = str(snapshot.source)  # merged as well: a trainer's statement would not count the release
    return model.requires_grad_(False).eval()


def _base(snapshot: Snapshot, base_model: str | os.PathLike | None, token: Any, options: dict[str, Any]) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    import raptor_hf.models  # noqa: F401 (registers what transformers lacks with the Auto classes)
    from raptor_hf.assets import tiny_switch_path

    manifest = json.loads(snapshot.files[MANIFEST])
    named, task = manifest["base_model"], manifest["task"]
    options = {"token": token, **options}
    if base_model is None:
        base_model = named["id"]
        if base_model is not None and named["revision"] is not None:
            options.setdefault("revision", named["revision"])
    if base_model is None:
        raise ReleaseError(
            f"`{snapshot.source}` names no base model", "An adapter alone is no model", "Pass `base_model`"
        )
    if base_model == BUNDLED:
        base_model = tiny_switch_path()
    if task["pipeline_tag"] == "text-generation":
        return AutoModelForCausalLM.from_pretrained(base_model, **options)
    if task["pipeline_tag"] == "image-text-to-text":
        return AutoModelForImageTextToText.from_pretrained(base_model, **options)
    labels = task["labels"]
    return AutoModelForSequenceClassification.from_pretrained(
        base_model,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
        problem_type=task["problem_type"],
        **options,
    )
