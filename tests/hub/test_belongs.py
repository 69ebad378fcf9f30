"""A folder is exported only with the statement that was written for its adapter."""

from __future__ import annotations

import shutil

import pytest

from raptor_hf import PrivacyConfigError, PrivacyStatement, ReleaseError, export_release, load_release
from raptor_hf.errors import RaptorError
from tests.helpers import tiny_model
from tests.hub.build import BASE, edit_json, problems, trained
from tests.trainer.build import assert_refused, make_trainer


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory):
    """The folder of one run after two cycles and after four."""
    folder = tmp_path_factory.mktemp("saves")
    trainer = trained()
    trainer.save_model(str(folder / "two"))
    trainer.train()
    trainer.save_model(str(folder / "four"))
    return folder


def stated(folder) -> int:
    return PrivacyStatement.from_json((folder / "privacy.json").read_text()).shared.steps_taken


def test_what_fits_is_exported(two_saves, tmp_path):
    made = export_release(two_saves / "four", tmp_path / "made", **BASE)
    assert stated(made) == 4 and problems(made) == []
    assert stated(export_release(made, tmp_path / "again", **BASE)) == 4  # a release says it by its manifest


def test_a_checkpoint_is_exported(tmp_path):
    trained(output_dir=str(tmp_path / "out"), save_strategy="steps", save_steps=1)
    assert stated(export_release(tmp_path / "out" / "checkpoint-1", tmp_path / "made", **BASE)) == 1


@pytest.mark.parametrize(
    "mixed", [["privacy.json"], ["privacy.json", "raptor_state.json"], ["raptor_state.json"], ["-"]]
)
def test_an_older_statement_beside_a_newer_adapter(two_saves, tmp_path, mixed):
    folder = tmp_path / "mixed"
    shutil.copytree(two_saves / "four", folder)
    for name in mixed:
        if name == "-":
            (folder / "raptor_state.json").unlink()
        else:
            shutil.copy(two_saves / "two" / name, folder / name)
    assert_refused(
        lambda: export_release(folder, tmp_path / "made", **BASE), ReleaseError, "not written for", "save_model"
    )
    assert not (tmp_path / "made").exists()


def test_a_state_that_does_not_name_its_adapter(two_saves, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(two_saves / "four", folder)
    edit_json(folder / "raptor_state.json", lambda s: s.pop("adapter_sha256"))
    assert_refused(lambda: export_release(folder, tmp_path / "made", **BASE), ReleaseError, "not written for")


def test_the_adapter_of_save_pretrained_is_not_exported_with_what_was_there(two_saves, tmp_path):
    shutil.copytree(two_saves / "two", tmp_path / "out")
    trained().model.save_pretrained(tmp_path / "out")
    assert_refused(lambda: export_release(tmp_path / "out", tmp_path / "made", **BASE), ReleaseError, "privacy.json")


@pytest.mark.parametrize("merge", [False, True])
def test_a_loaded_release_is_not_claimed_by_a_new_trainer(release, tmp_path, merge):
    model = load_release(release, tiny_model(), merge=merge)
    trainer = make_trainer(model=model)
    for action in (trainer.privacy_statement, lambda: export_release(trainer, tmp_path / "made", **BASE)):
        assert_refused(action, PrivacyConfigError, "base model again")
    with pytest.raises(RaptorError):  # frozen as it is, and otherwise for what it holds
        trainer.train()
    model.requires_grad_(True)
    assert_refused(lambda: trainer.save_model(str(tmp_path / "saved")), PrivacyConfigError, "base model again")
    assert not (tmp_path / "saved" / "privacy.json").exists()
