"""`push_release`: one commit that holds a release and nothing else, and what `RaptorTrainer` pushes."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from raptor_hf.errors import ReleaseError
from raptor_hf.hub import contents
from raptor_hf.hub.contents import CARD, MANIFEST
from raptor_hf.hub.model_card import merge_cards
from raptor_hf.hub.release import export_release, known_id, refuse
from raptor_hf.hub.remote import hub_errors, is_transient, open_release, status_of
from raptor_hf.hub.verify import verify_snapshot
from raptor_hf.methods import get_method

__all__ = ["HubMixin", "check_hub_arguments", "push_release"]

STRATEGIES = ("end", "every_save")


def push_release(
    trainer_or_dir: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    commit_message: str = "Release of a private adapter",
    create_pr: bool = False,
    attempts: int = 5,
    **export: Any,
) -> Any:
    """Export, check and upload a release, in one commit.

    All files become visible at once or none does: an upload that is interrupted leaves the repository as it was.
    Files of an earlier release are replaced, its card is updated, and a repository that holds anything else is
    refused. Lost connections, 5xx, 429 and commits of others in between are tried again.

    Args:
        trainer_or_dir: a trainer, a folder that `save_model` wrote, or a folder of `export_release`.
        repo_id: `owner/name`, created when missing. private: its visibility when it is created.
        revision: branch, created when missing. create_pr: open a pull request instead.
        attempts: how often the upload is started.
        **export: for `export_release`: base_model, labels, license, datasets, metrics, ...

    Returns:
        `huggingface_hub.CommitInfo`.

    Raises:
        ReleaseError: the release does not pass `verify_release`, or the Hub refuses.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "release"
        if isinstance(trainer_or_dir, (str, os.PathLike)) and (Path(trainer_or_dir) / MANIFEST).is_file():
            folder = Path(trainer_or_dir)
        else:
            export_release(trainer_or_dir, folder, repo_id=repo_id, **export)
        snapshot = open_release(folder)
    report = verify_snapshot(snapshot, accountants=False)
    refuse(report.findings)
    if report.statement is not None:
        report.statement.recompute()
    names = (snapshot.source, repo_id, json.loads(snapshot.files[MANIFEST])["base_model"]["id"])
    for name, data in snapshot.files.items():
        refuse(list(contents.scan(name, data, contents.own_names(), [n for n in names if n])))
    if names[2] is None:
        raise ReleaseError(
            "The release names no base model by Hub id",
            "Nobody could load it, and a local path names a person or a machine",
            'Give `base_model="owner/name"` and `base_revision`',
        )
    return _upload(dict(snapshot.files), repo_id, private, revision, token, commit_message, create_pr, attempts)


def _upload(
    files: dict[str, bytes],
    repo_id: str,
    private: bool | None,
    revision: str | None,
    token: str | bool | None,
    message: str,
    create_pr: bool,
    attempts: int,
) -> Any:
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    for attempt in range(1, attempts + 1):
        try:
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision not in (None, "main"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)  # type: ignore[arg-type]
            return _commit(api, dict(files), repo_id, revision, message, create_pr)
        except ReleaseError:
            raise
        except Exception as problem:
            # 409 and 412: another commit came first; the next attempt starts from it
            again = is_transient(problem) or status_of(problem) in (409, 412)
            if not again or attempt == attempts:
                with hub_errors(repo_id, "Uploading to"):
                    raise
            time.sleep(min(8.0, 0.25 * 2**attempt) * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")


def _commit(api: Any, files: dict[str, bytes], repo_id: str, revision: str | None, message: str, pr: bool) -> Any:
    """One commit on the branch's present head; `parent_commit` refuses a head that has moved since."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    head = api.model_info(repo_id, revision=revision).sha
    entries = api.list_repo_tree(repo_id, recursive=True, revision=head)
    present = {entry.path for entry in entries if hasattr(entry, "size")}
    foreign = sorted(present - contents.ALLOWED - contents.HUB_FILES)
    if foreign:
        raise ReleaseError(
            f"The repository `{repo_id}` holds `{foreign[0]}`" + f" and {len(foreign) - 1} more" * (len(foreign) > 1),
            "It is not on the allow-list; deleting it would not take it out of the repository's history",
            "Push to a new repository, and treat what was uploaded there as public",
        )
    if CARD in present:
        theirs = Path(api.hf_hub_download(repo_id, CARD, revision=head)).read_text(encoding="utf-8")
        files[CARD] = merge_cards(theirs, files[CARD].decode()).encode()
        refuse(list(contents.scan(CARD, files[CARD], (), (repo_id,))))
    operations: list[Any] = [CommitOperationAdd(name, data) for name, data in sorted(files.items())]
    operations += [CommitOperationDelete(name) for name in sorted(present & contents.ALLOWED - set(files))]
    return api.create_commit(
        repo_id, operations, commit_message=message, revision=revision, parent_commit=head, create_pr=pr
    )


def check_hub_arguments(args: Any, model: Any) -> None:
    """Refuse, before training, hub arguments with which no release could be pushed."""
    if not args.push_to_hub:
        return
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if strategy not in STRATEGIES:
        raise ReleaseError(
            f"`hub_strategy={strategy!r}` was set",
            "It uploads checkpoints with optimizer state, generator states and the trainer's log",
            'Use "end" or "every_save": they push releases, and every one of them is covered by the statement',
        )
    if get_method(args.method).weights != "adapters":
        raise ReleaseError(
            f"`push_to_hub=True` was set with `method={args.method!r}`",
            "It trains base weights, and a release holds adapters only",
            "Leave it out, and save the whole model with `trainer.save_model()`",
        )
    name = getattr(model, "name_or_path", None)
    if known_id(name) is None:
        raise ReleaseError(
            f"`push_to_hub=True` was set for a base model without a Hub id ({os.path.basename(name or '') or 'none'})",
            "A release names its base model by Hub id and revision, never by a local path",
            'Load the base model by its id, or set `model.name_or_path = "owner/name"` before',
        )


class HubMixin:
    """`Trainer`'s uploads, as releases."""

    def push_to_hub(
        self: Any,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Push a release of the present adapter (see `push_release`); never the output folder.

        Args:
            blocking: False returns a `Future`; what is pushed is the adapter at the time of the call.
            **kwargs: for `export_release`: base_model, labels, license, language, tags, datasets, metrics, ...

        Returns:
            `CommitInfo` in the main process, None in the others.
        """
        self.save_model(_internal_call=True)  # in every process, as the plain one does
        if not self.is_world_process_zero():
            return None
        return self._push_release(commit_message or "End of training", blocking, token, revision, private, **kwargs)

    def _push_release(
        self: Any,
        message: str,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        args = self.args
        self.callback_handler.on_push_begin(args, self.state, self.control)
        kwargs.pop("model_name", None)
        name = getattr(self, "hub_model_id", None) or args.hub_model_id or Path(args.output_dir).absolute().name
        settings: dict[str, Any] = dict(
            token=token or args.hub_token,
            revision=revision or args.hub_revision,
            private=args.hub_private_repo if private is None else private,
            commit_message=message,
        )
        if blocking:
            return push_release(self, name, **settings, **kwargs)
        from huggingface_hub import HfApi

        scratch = tempfile.TemporaryDirectory()
        folder = export_release(self, Path(scratch.name) / "release", repo_id=name, **kwargs)
        future = HfApi().run_as_future(push_release, folder, name, **settings)
        future.add_done_callback(lambda _: scratch.cleanup())
        return future

    def _push_from_checkpoint(self: Any, checkpoint_folder: str) -> None:
        """`hub_strategy="every_save"`: a release of the adapter as it is now. A failure does not end the training."""
        strategy = str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy))
        if strategy != "every_save" or not self.is_world_process_zero():
            return
        try:
            self._push_release(f"Training in progress, step {self.state.global_step}")
        except ReleaseError as problem:
            warnings.warn(f"The checkpoint was not pushed. {problem}", stacklevel=2)

    def create_model_card(self: Any, **kwargs: Any) -> None:
        """Write a release's card into the output folder. The plain Trainer's would print the seed and losses."""
        if self.is_world_process_zero():
            kwargs.pop("model_name", None)
            with tempfile.TemporaryDirectory() as scratch:
                folder = export_release(self, Path(scratch) / "release", **kwargs)
                text = (folder / CARD).read_bytes()
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            (Path(self.args.output_dir) / CARD).write_bytes(text)
