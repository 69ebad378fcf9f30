"""The real client against a Hub on the loopback interface: one commit or none, whatever fails."""

from __future__ import annotations

import pytest

from raptor_hf import PrivacyStatement, ReleaseError, export_release, load_release, push_release, verify_release
from raptor_hf.hub.model_card import privacy_section
from tests.helpers import collate, tiny_model, tiny_records
from tests.hub.build import BASE, copy, edit_json, rehash
from tests.hub.server import TOKEN
from tests.trainer.build import assert_refused, files

REPO = "example-org/adapter"
COMMIT, PREUPLOAD, LFS = r"/commit/", r"/preupload/", r"^/lfs/"


def push(source, **options):
    return push_release(source, REPO, **{"token": TOKEN, **options})


def assert_complete(hub, release, branch="main", repo=REPO):
    """The repository holds exactly the release."""
    found = hub.files(repo, branch)
    assert set(found) - {".gitattributes"} == set(files(release))
    for name in files(release):
        if name != "README.md":
            assert found[name] == (release / name).read_bytes()


def assert_nothing_visible(hub, branch="main"):
    assert REPO not in hub.repos or set(hub.files(REPO, branch)) == {".gitattributes"}


def test_one_commit_with_exactly_the_release(hub, release):
    info = push(release, commit_message="First release")
    assert_complete(hub, release)
    assert hub.repos[REPO].messages == ["initial commit", "First release"]
    assert info.oid == hub.repos[REPO].branches["main"] and not hub.repos[REPO].private
    assert hub.count("PUT", LFS) == 1, "weights went through LFS"


def test_from_a_trainer_the_card_names_the_repository(hub, trainer):
    push(trainer, license="mit", **BASE)
    card = hub.files(REPO)["README.md"].decode()
    assert f'load_release("{REPO}")' in card and "license: mit" in card


def test_private_repositories_and_branches(hub, release):
    push(release, private=True, revision="v1")
    assert hub.repos[REPO].private
    assert_complete(hub, release, "v1")
    assert_nothing_visible(hub, "main")
    push(release, revision="v1")
    assert hub.repos[REPO].messages.count("Release of a private adapter") == 1, "no empty commit"


def test_what_is_pushed_can_be_verified_and_loaded(hub, trainer, release):
    push(release, private=True)
    report = verify_release(REPO, token=TOKEN)
    assert report.ok and report.private and report.revision == hub.repos[REPO].branches["main"]
    batch = collate(tiny_records(5), 15)
    model = load_release(f"{REPO}@{report.revision}", tiny_model(), token=TOKEN)
    trainer.model.eval()
    assert (model(**batch).logits - trainer.model(**batch).logits).abs().max() == 0
    assert_refused(lambda: verify_release(REPO), ReleaseError, "404")


@pytest.mark.parametrize(
    ("change", "words"),
    [("pickle", "training_args"), ("weights", "no tensor"), ("path", "local path"), ("epsilon", "claims an epsilon")],
)
def test_a_folder_that_does_not_verify_is_not_pushed(hub, release, tmp_path, change, words):
    folder = copy(release, tmp_path / "copy")
    if change == "pickle":
        (folder / "training_args.bin").write_bytes(b"\x80\x04N.")
    elif change == "weights":
        with (folder / "adapter_model.safetensors").open("ab") as file:
            file.write(b"canary")
        rehash(folder)
    elif change == "epsilon":
        edit_json(folder / "privacy.json", lambda s: s["other_deltas"][0].update(epsilon_spent=0.1))
        old, new = (PrivacyStatement.from_json((f / "privacy.json").read_text()) for f in (release, folder))
        card = (folder / "README.md").read_text().replace(privacy_section(old), privacy_section(new))
        (folder / "README.md").write_text(card)
        rehash(folder)
    else:
        with (folder / "README.md").open("a") as file:
            file.write("Trained in /home/alice/x.")
    assert_refused(lambda: push(folder), ReleaseError, words)
    assert not hub.requests, "nothing was sent"


def test_a_release_without_a_base_model_is_not_pushed(hub, trainer, tmp_path):
    with pytest.warns(UserWarning, match="base_model="):
        folder = export_release(trainer, tmp_path / "made")
    assert_refused(lambda: push(folder), ReleaseError, "base_model=")
    assert not hub.requests


def test_a_repository_that_exists_keeps_its_card_and_loses_stale_files(hub, release):
    card = b"---\nlicense: mit\ntags:\n- mine\n---\n# My title\n\nMy text.\n"
    hub.put(REPO, {"README.md": card, "merges.txt": b"old"})
    push(release)
    assert_complete(hub, release)
    text = hub.files(REPO)["README.md"].decode()
    assert "My text." in text and "license: mit" in text and "- mine" in text and "raptor-hf: begin" in text
    push(release)
    assert hub.files(REPO)["README.md"].decode() == text, "a second push changes nothing"
    assert verify_release(REPO, token=TOKEN).ok


def test_what_was_deleted_is_found_in_the_history(hub, release):
    hub.put(REPO, {"training_args.bin": b"\x80\x04N."})
    hub.put(REPO, {})
    push(release)
    assert verify_release(REPO, token=TOKEN).ok, "the newest commit is as it should be"
    (found,) = verify_release(REPO, token=TOKEN, history=True).errors
    assert "training_args.bin" in found.what and "history" in found.what
    hub.put("example-org/clean", hub.files(REPO))
    assert verify_release("example-org/clean", token=TOKEN, history=True).ok


@pytest.mark.parametrize("name", ["training_args.bin", "last-checkpoint/optimizer.pt"])
def test_a_repository_with_training_state_is_refused(hub, release, name):
    hub.put(REPO, {name: b"\x80\x04N."})
    assert_refused(lambda: push(release), ReleaseError, name, "history")
    assert set(hub.files(REPO)) == {name}


def test_the_card_of_the_plain_trainer_is_not_carried_on(hub, release):
    hub.put(REPO, {"README.md": b"# Model\n\n- learning_rate: 0.1\n- seed: 42\n"})
    assert_refused(lambda: push(release), ReleaseError, "seed: 42")


@pytest.mark.parametrize(
    ("method", "path", "how"),
    [
        ("POST", "/api/repos/create", 500), ("POST", PREUPLOAD, 503), ("PUT", LFS, 500), ("PUT", LFS, "drop"),
        ("POST", COMMIT, 500), ("POST", COMMIT, 429), ("POST", COMMIT, "drop"), ("POST", COMMIT, "slow"),
        ("GET", "/tree/", 502), ("POST", "objects/batch", 500), ("GET", "/api/models/", "drop"),
    ],
)  # fmt: skip
def test_a_passing_failure_is_survived(hub, release, method, path, how):
    hub.fail(method, path, how)
    push(release)
    assert_complete(hub, release)
    assert hub.failures[0].times == 0, "the failure did happen"
    assert len(hub.repos[REPO].messages) == 2


def test_an_answer_that_is_lost_makes_no_second_commit(hub, release):
    hub.fail("POST", COMMIT, "drop-after")
    info = push(release)
    assert len(hub.repos[REPO].messages) == 2 and info.oid == hub.repos[REPO].branches["main"]
    assert_complete(hub, release)


@pytest.mark.parametrize(("path", "method"), [(COMMIT, "POST"), (LFS, "PUT"), (PREUPLOAD, "POST")])
def test_an_upload_that_never_succeeds_leaves_nothing_visible(hub, release, path, method):
    hub.fail(method, path, 500, times=10**6)
    assert_refused(lambda: push(release, attempts=2), ReleaseError, "500", "Uploading")
    assert_nothing_visible(hub)


def test_an_update_that_fails_leaves_the_release_before_it(hub, release, trainer):
    push(release)
    before = hub.files(REPO)
    hub.fail("POST", COMMIT, "drop", times=10**6)
    assert_refused(lambda: push(trainer, attempts=2, notes="New.", **BASE), ReleaseError, "connection")
    assert hub.files(REPO) == before


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_not_tried_again(hub, release, status):
    hub.fail("POST", COMMIT, status)
    assert_refused(lambda: push(release), ReleaseError, str(status), "token")
    assert hub.count("POST", COMMIT) == 1
    assert_nothing_visible(hub)


def test_a_wrong_token_is_said(hub, release):
    assert_refused(lambda: push(release, token="hf_wrong"), ReleaseError, "401", "log in")
    assert REPO not in hub.repos


def test_a_commit_in_between_is_not_lost(hub, release, trainer):
    """Somebody edits the card while we upload: our commit is refused, and made again on top of theirs."""
    push(release)
    old = dict(hub.files(REPO))
    edited = old["README.md"] + b"\n## Theirs\n\nIn between.\n"
    hub.before_commit = lambda: hub.repos[REPO].commit("main", {**old, "README.md": edited}, "theirs")
    push(trainer, license="mit", labels=["a", "b", "c"], **BASE)
    card = hub.files(REPO)["README.md"].decode()
    assert "In between." in card and "license: mit" in card
    assert b'"a"' in hub.files(REPO)["release.json"]
    assert hub.repos[REPO].messages[-2:] == ["theirs", "Release of a private adapter"]
