"""Export: an allow-list, and what is written says nothing about the machine or the run."""

from __future__ import annotations

import getpass
import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from raptor_hf import PrivacyStatement, ReleaseError, export_release
from raptor_hf.hub import contents
from raptor_hf.hub.contents import sha256
from raptor_hf.moe import adapter_io
from tests.hub.build import BASE, copy, edit_json, problems, tiny_tokenizer
from tests.trainer.build import assert_refused, files

NAMES = ["README.md", "adapter_config.json", "adapter_model.safetensors", "privacy.json", "release.json",
         "tokenizer.json", "tokenizer_config.json"]  # fmt: skip


def test_a_release_holds_the_allowed_files_and_passes(release):
    assert files(release) == NAMES
    assert problems(release) == []


def test_from_a_training_folder_with_everything_in_it(trainer, tmp_path):
    """What `save_model` and checkpoints leave is not taken along, and the release is the same."""
    output = tmp_path / "output"
    trainer.save_model(str(output))
    for name in ("optimizer.pt", "rng_state.pth", "trainer_state.json", "events.out.tfevents.1.host", "rows.csv"):
        (output / name).write_bytes(b"secret-canary")
    (output / "runs").mkdir()
    (output / "runs" / "log").write_bytes(b"secret-canary")
    made = export_release(output, tmp_path / "made", **BASE)
    assert files(made) == NAMES
    assert not any(b"secret-canary" in path.read_bytes() for path in made.iterdir())
    statement = PrivacyStatement.from_json((made / "privacy.json").read_text())
    assert statement.epsilon_spent == trainer.privacy_statement().epsilon_spent
    assert "training_args.bin" in files(output), "the folder did hold what was to be left out"


def test_weights_are_serialised_again_without_metadata(trainer, release, tmp_path):
    output = tmp_path / "output"
    trainer.save_model(str(output))
    path = output / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path, metadata={"format": "pt", "note": "secret-canary"})
    edit_json(output / "raptor_state.json", lambda s: s.update(adapter_sha256=sha256(path.read_bytes())))
    made = export_release(output, tmp_path / "made", **BASE)
    assert b"secret-canary" not in (made / "adapter_model.safetensors").read_bytes()
    with safe_open(made / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(torch.equal(file.get_tensor(name), value) for name, value in tensors.items())
        assert set(file.keys()) == set(tensors)


def test_the_base_model_is_a_hub_id_and_a_revision(release):
    config = json.loads((release / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "example-org/tiny" and config["revision"] == "a" * 40
    assert json.loads((release / "release.json").read_text())["base_model"]["id"] == "example-org/tiny"
    assert json.loads((release / "privacy.json").read_text())["base_model"] == "example-org/tiny"


def test_a_local_base_model_is_never_written(trainer, tmp_path):
    output = tmp_path / "alice-laptop"
    trainer.save_model(str(output))
    edit_json(output / "adapter_config.json", lambda c: c.update(base_model_name_or_path=str(output)))
    with pytest.warns(UserWarning, match="base_model="):
        made = export_release(output, tmp_path / "made")
    assert not any(b"alice-laptop" in path.read_bytes() for path in made.iterdir())
    assert json.loads((made / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    named = export_release(output, tmp_path / "named", **BASE)
    assert json.loads((named / "adapter_config.json").read_text())["base_model_name_or_path"] == "example-org/tiny"


def test_another_base_than_the_statements_is_refused(trainer, tmp_path):
    output = tmp_path / "output"
    trainer.save_model(str(output))
    edit_json(output / "privacy.json", lambda s: s.update(base_model="other-org/base"))
    assert_refused(lambda: export_release(output, tmp_path / "made", **BASE), ReleaseError, "other-org/base")


def test_tokenizer_files_lose_what_names_the_machine(trainer, tmp_path):
    output = tmp_path / "output"
    trainer.save_model(str(output))
    secrets = dict(name_or_path="/home/alice/model", cache="/home/alice/cache", hub_token="x", deep={"p": "C:\\alice"})
    edit_json(output / "tokenizer_config.json", lambda c: c.update(secrets))
    made = export_release(output, tmp_path / "made", **BASE)
    text = (made / "tokenizer_config.json").read_text()
    assert "alice" not in text and "hub_token" not in text
    assert json.loads(text)["pad_token"] == tiny_tokenizer().pad_token


def test_a_folder_without_a_statement_or_adapter_is_refused(trainer, tmp_path):
    assert_refused(lambda: export_release(tmp_path, tmp_path / "made"), ReleaseError, "adapter")
    trainer.save_model(str(tmp_path / "output"))
    (tmp_path / "output" / "privacy.json").unlink()
    assert_refused(lambda: export_release(tmp_path / "output", tmp_path / "made"), ReleaseError, "privacy.json")


def test_a_lowered_epsilon_is_not_exported(trainer, tmp_path):
    trainer.save_model(str(tmp_path / "output"))

    def lower(statement):
        for name in ("epsilon_spent", "epsilon_planned"):
            statement[name] *= 0.9
        statement["verdict"] = statement["verdict"].replace("1.491", "1.342")

    edit_json(tmp_path / "output" / "privacy.json", lower)
    assert_refused(
        lambda: export_release(tmp_path / "output", tmp_path / "x", **BASE), ReleaseError, "claims an epsilon"
    )


def test_a_target_with_other_files_is_refused(trainer, tmp_path):
    trainer.save_model(str(tmp_path))
    assert_refused(lambda: export_release(trainer, tmp_path, **BASE), ReleaseError, "allow-list")
    assert_refused(lambda: export_release(tmp_path, tmp_path, **BASE), ReleaseError, "output folder")


def test_weights_that_are_not_finite_are_refused(trainer, tmp_path, monkeypatch):
    state = adapter_io.adapter_state_dict(trainer.model)
    next(iter(state.values()))[0, 0] = float("nan")
    monkeypatch.setattr(adapter_io, "adapter_state_dict", lambda model: state)
    assert_refused(lambda: export_release(trainer, tmp_path / "made", **BASE), ReleaseError, "finite")


@pytest.mark.parametrize(
    "text",
    ["seen in /home/alice/data", "see C:\\Users\\alice", "token hf_abcdefghijklmnopqrstuv", "- seed: 42",
     "| Training Loss | Epoch |\n", "~/models/x", "file:///x"],
)  # fmt: skip
def test_notes_that_name_the_machine_or_the_run_are_refused(trainer, tmp_path, text):
    assert_refused(
        lambda: export_release(trainer, tmp_path / "made", notes=text, **BASE), ReleaseError, "card|`README"[:0]
    )
    assert not (tmp_path / "made").exists(), "nothing was written"


def test_the_users_name_is_refused(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "alicexample")
    assert "alicexample" in contents.own_names()
    action = lambda: export_release(trainer, tmp_path / "made", notes="Made by alicexample.", **BASE)  # noqa: E731
    assert_refused(action, ReleaseError, "name of this user")
    made = export_release(trainer, tmp_path / "made", **{**BASE, "base_model": "alicexample/tiny"})
    assert "alicexample/tiny" in (made / "README.md").read_text(), "a Hub id is public"
    ids = dict(datasets=["alicexample/reviews"], notes="See `alicexample/other`.")
    assert export_release(trainer, tmp_path / "made", **ids, **BASE)
    again = lambda: export_release(trainer, tmp_path / "x", notes="In backup/alicexample/runs.", **BASE)  # noqa: E731
    assert_refused(again, ReleaseError, "name of this user")


def test_public_addresses_and_plain_words_are_not_mistaken(trainer, tmp_path):
    text = "See https://example.org/home/data and and/or seeds of trees; epsilon is below."
    assert export_release(trainer, tmp_path / "made", notes=text, **BASE)


def test_labels_are_written_once_given(trainer, tmp_path):
    made = export_release(trainer, tmp_path / "made", labels=["bad", "so so", "good"], **BASE)
    assert json.loads((made / "release.json").read_text())["task"]["labels"] == ["bad", "so so", "good"]
    assert "in order: `bad`, `so so`, `good`." in (made / "README.md").read_text()
    assert_refused(lambda: export_release(trainer, tmp_path / "x", labels=["one"], **BASE), ReleaseError, "labels")


def test_an_existing_card_is_updated_not_overwritten(trainer, release, tmp_path):
    folder = copy(release, tmp_path / "again")
    card = (folder / "README.md").read_text()
    own = card.replace("# A private", "# My own title: a private").replace("tags:\n", "tags:\n- mine\n")
    own = own.replace("library_name: peft", "library_name: peft\nlicense: mit").replace("1.49", "9.99")
    (folder / "README.md").write_text(own + "\n## My own section\n\nText.\n")
    export_release(trainer, folder, **BASE)
    text = (folder / "README.md").read_text()
    assert "# My own title" in text and "## My own section\n\nText." in text
    assert "license: mit" in text and "- mine" in text and "9.99" not in text
    assert text.count("raptor-hf: begin") == 1
    assert problems(folder) == []


def test_a_card_of_another_make_gets_the_section_first(trainer, tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Old title\n\nOld text.\n")
    export_release(trainer, folder, **BASE)
    text = (folder / "README.md").read_text()
    assert text.index("raptor-hf: begin") < text.index("# Old title") and "Old text." in text
    assert re.search(r"^license: mit$", text, re.M) and problems(folder) == []


def test_a_run_that_is_not_private_says_so_at_the_top(tmp_path):
    from tests.hub.build import trained

    with pytest.warns(UserWarning, match="NOT private"):
        trainer = trained(insecure_noise_seed=7)
    made = export_release(trainer, tmp_path / "made", **BASE)
    body = (made / "README.md").read_text().split("---", 2)[2]
    first = [line for line in body.splitlines() if line.strip()][2:4]
    assert first[0] == "> [!WARNING]" and first[1].startswith("> **NOT PRIVATE: the noise comes from a seed")
    assert problems(made) == []


def test_a_stale_tokenizer_file_is_removed(trainer, release, tmp_path):
    folder = copy(release, tmp_path / "again")
    (folder / "merges.txt").write_text("a b")
    export_release(trainer, folder, **BASE)
    assert files(folder) == NAMES
