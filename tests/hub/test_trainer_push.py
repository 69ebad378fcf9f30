"""`push_to_hub` and its arguments, through the trainer."""

from __future__ import annotations

import pytest

from raptor_hf import PrivacyStatement, ReleaseError, verify_release
from raptor_hf.hub.push import HubMixin
from tests.helpers import tiny_model
from tests.hub.build import BASE, tiny_tokenizer
from tests.hub.server import TOKEN
from tests.trainer.build import assert_refused, make_config, make_trainer

REPO = "example-org/adapter"
NAMES = {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors", "privacy.json",
         "release.json", "tokenizer.json", "tokenizer_config.json"}  # fmt: skip


def named_model():
    model = tiny_model()
    model.name_or_path = BASE["base_model"]
    model.config._commit_hash = BASE["base_revision"]
    return model


def hub_trainer(tmp_path, **changes):
    options = dict(push_to_hub=True, hub_model_id=REPO, hub_token=TOKEN, output_dir=str(tmp_path / "alice-output"))
    return make_trainer(model=named_model(), processing_class=tiny_tokenizer(), **{**options, **changes})


def statement(hub) -> PrivacyStatement:
    return PrivacyStatement.from_json(hub.files(REPO)["privacy.json"].decode())


def test_end_pushes_once_and_only_the_release(hub, tmp_path):
    trainer = hub_trainer(tmp_path, hub_strategy="end", save_strategy="steps", save_steps=1, hub_private_repo=True)
    trainer.train()
    assert hub.repos[REPO].private and set(hub.files(REPO)) == {".gitattributes"}, "created, nothing pushed yet"
    info = trainer.push_to_hub(license="mit")
    assert set(hub.files(REPO)) == NAMES and info.oid == hub.repos[REPO].branches["main"]
    assert hub.repos[REPO].messages[1:] == ["End of training"]
    assert "license: mit" in hub.files(REPO)["README.md"].decode()
    assert (tmp_path / "alice-output" / "training_args.bin").exists(), "beside what was pushed"
    assert not any(b"alice-output" in body for body in hub.uploads)
    report = verify_release(REPO, token=TOKEN)
    assert report.ok and not report.findings


def test_every_save_pushes_a_release_with_what_was_spent_so_far(hub, tmp_path):
    trainer = hub_trainer(tmp_path, hub_strategy="every_save", save_strategy="steps", save_steps=1, max_steps=2)
    trainer.train()
    assert hub.repos[REPO].messages[1:] == ["Training in progress, step 1", "Training in progress, step 2"]
    for sha in hub.repos[REPO].commits:
        assert set(hub.repos[REPO].commits[sha]) in (NAMES, {".gitattributes"})
    spent = [PrivacyStatement.from_json(files["privacy.json"].decode()).shared.steps_taken
             for files in hub.repos[REPO].commits.values() if "privacy.json" in files]  # fmt: skip
    assert spent == [1, 2], "the later statement counts the steps of the earlier release too"
    assert "all versions together are covered" in hub.files(REPO)["README.md"].decode()


def test_save_model_pushes_as_in_the_plain_trainer(hub, tmp_path):
    trainer = hub_trainer(tmp_path, hub_strategy="end")
    trainer.train()
    trainer.save_model()
    assert hub.repos[REPO].messages[1:] == ["Model save"] and statement(hub).shared.steps_taken == 2


def test_without_push_to_hub_and_in_the_background(hub, tmp_path):
    trainer = hub_trainer(tmp_path, push_to_hub=False)
    trainer.train()
    assert not hub.requests
    trainer.push_to_hub(token=TOKEN, revision="v1", commit_message="Later", blocking=False).result(60)
    assert set(hub.files(REPO, "v1")) == NAMES and hub.repos[REPO].messages[-1] == "Later"


def test_a_failed_push_does_not_end_the_training(hub, tmp_path):
    trainer = hub_trainer(tmp_path, hub_strategy="every_save", save_strategy="steps", save_steps=1)
    hub.fail("POST", "/commit/", 403, times=10**6)
    with pytest.warns(UserWarning, match="checkpoint was not pushed"):
        trainer.train()
    assert trainer.state.global_step == 2 and set(hub.files(REPO)) == {".gitattributes"}
    assert_refused(trainer.push_to_hub, ReleaseError, "403")


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_strategies_that_upload_training_state_are_refused(hub, tmp_path, strategy):
    assert_refused(lambda: hub_trainer(tmp_path, hub_strategy=strategy), ReleaseError, strategy, "every_save")
    assert not hub.requests
    assert make_config(hub_strategy=strategy), "without a push it does nothing"


def test_a_base_model_without_an_id_is_refused_before_training(hub, tmp_path):
    options = dict(push_to_hub=True, hub_model_id=REPO, hub_token=TOKEN)
    assert_refused(lambda: make_trainer(**options), ReleaseError, "Hub id")
    model = tiny_model()
    model.name_or_path = str(tmp_path)
    message = assert_refused(lambda: make_trainer(model=model, **options), ReleaseError, "Hub id")
    assert str(tmp_path.parent) not in message and not hub.requests


def test_other_processes_send_nothing(hub, tmp_path, monkeypatch):
    trainer = hub_trainer(tmp_path, push_to_hub=False, hub_strategy="every_save", save_strategy="steps", save_steps=1)
    trainer.train()
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    assert trainer.push_to_hub(token=TOKEN) is None
    trainer._push_from_checkpoint(str(tmp_path))
    assert not hub.requests


def test_the_plain_card_is_never_written(hub, tmp_path):
    trainer = hub_trainer(tmp_path, push_to_hub=False, seed=739391)
    trainer.train()
    trainer.create_model_card(license="mit")
    text = (tmp_path / "alice-output" / "README.md").read_text()
    assert "739391" not in text and trainer.privacy_statement().verdict in text and "license: mit" in text


def test_every_upload_of_the_plain_trainer_is_replaced():
    from transformers import Trainer

    names = {"push_to_hub", "_push_from_checkpoint", "create_model_card"}
    assert names <= set(vars(HubMixin)) and names <= set(vars(Trainer)), "read the new version of transformers"
