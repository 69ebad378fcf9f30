"""`raptor-hf export`, `verify` and `scrub-check`: exit codes, what they print and what `export` writes."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest

from raptor_hf import ReleaseError, export_release, load_release, verify_release
from raptor_hf.cli import main
from raptor_hf.hub import scrub_check
from raptor_hf.hub.contents import ALLOWED
from raptor_hf.hub.model_card import CardOptions
from raptor_hf.scripts import export, verify
from tests.hub.build import BASE, copy, edit_json, trained


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = trained(
        output_dir=str(tmp_path_factory.mktemp("run") / "output"), save_strategy="steps", save_steps=1,
        logging_strategy="steps", logging_steps=1,
    )  # fmt: skip
    trainer.save_model()
    return trainer


@pytest.fixture(scope="module")
def release(trainer, tmp_path_factory):
    return export_release(trainer, tmp_path_factory.mktemp("release") / "adapter", **BASE)


NAMED = ["--base-model", BASE["base_model"], "--base-revision", BASE["base_revision"]]


def test_export_makes_the_release_of_the_function(trainer, tmp_path, capsys):
    flags = ["--labels", "bad", "so so", "good", "--license", "mit", "--metrics", "accuracy=0.75", "macro f1=0.5",
             "--metrics-dataset", "Other films", "--tags", "films", "english", "--notes", "For tests."]  # fmt: skip
    assert main(["export", trainer.args.output_dir, str(tmp_path / "made"), *NAMED, *flags]) == 0
    assert "(1.491, 0.0304)-differentially private" in capsys.readouterr().out
    expected = export_release(
        trainer.args.output_dir, tmp_path / "expected", labels=["bad", "so so", "good"], license="mit",
        notes="For tests.", metrics={"accuracy": 0.75, "macro f1": 0.5}, metrics_dataset="Other films",
        tags=["films", "english"], **BASE,
    )  # fmt: skip
    made = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert made == {path.name: path.read_bytes() for path in expected.iterdir()}
    assert main(["verify", str(tmp_path / "made"), "--require-private"]) == 0


@pytest.mark.parametrize(
    ("source", "target", "flags", "words"),
    [
        ("{output}", "{output}", [], ("training output folder itself", "Give a new folder")),
        ("{tmp}/none", "{tmp}/made", [], ("adapter", "save_model")),
        ("{output}", "{tmp}/made", ["--notes", "seen in /home/alice/data"], ("local path", "export again")),
        ("{output}", "{tmp}/made", ["--labels", "one"], ("1 labels", "3 outputs")),
        ("{output}", "{tmp}/file", [], ("`file`", "A release is a folder")),
    ],
)
def test_export_refuses_and_writes_nothing(trainer, tmp_path, source, target, flags, words, capsys):
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    paths = [text.format(output=trainer.args.output_dir, tmp=tmp_path) for text in (source, target)]
    assert main(["export", *paths, *NAMED, *flags]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("raptor-hf export: ") and not printed.out
    assert all(word in printed.err for word in words)
    assert sorted(tmp_path.rglob("*")) == before


def test_export_has_a_flag_for_everything_that_the_function_takes():
    flags = {action.dest for action in export.make_parser()._actions} - {"help", "directory", "release"}
    named = {n for n, p in inspect.signature(export_release).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert flags == named | {field.name for field in dataclasses.fields(CardOptions)}
    assert all(action.help for action in export.make_parser()._actions)


@pytest.mark.parametrize("text", ["accuracy", "=0.5", "accuracy=", "accuracy=good", "accuracy=nan"])
def test_export_wants_metrics_with_values(text, capsys):
    with pytest.raises(SystemExit) as ended:
        export.main(["out", "release", "--metrics", text])
    assert ended.value.code == 2 and "--metrics" in capsys.readouterr().err


def test_verify_a_true_release(release, capsys):
    assert main(["verify", str(release), "--max-epsilon", "1.5", "--require-private"]) == 0
    text = capsys.readouterr().out
    assert "verified: the files hold" in text and "(1.491, 0.0304)" in text and "pld" in text


def test_verify_above_the_epsilon_asked_for(release, capsys):
    assert main(["verify", str(release), "--json", "--max-epsilon", "1.4"]) == 1
    printed = capsys.readouterr()
    values = json.loads(printed.out)
    assert values["ok"] and values["private"] and 1.4 < values["epsilon_claimed"] < 1.5
    assert "TOO LITTLE PRIVACY" in printed.err and "1.4" in printed.err


def test_verify_against_no_number(release, capsys):
    """Nothing is more than NaN, and every release would pass."""
    with pytest.raises(SystemExit) as ended:
        verify.main([str(release), "--max-epsilon", "nan"])
    assert ended.value.code == 2 and "--max-epsilon" in capsys.readouterr().err


def test_verify_a_training_folder(trainer, capsys):
    """Nobody is told to delete what a resumed run needs."""
    folder = trainer.args.output_dir
    assert main(["verify", folder]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "no release" in text and "Delete nothing" in text and "NOT VERIFIED: 1 error(s)" in text
    assert not verify_release(folder).ok
    with pytest.raises(ReleaseError, match="no release"):
        load_release(folder)


def test_verify_a_tampered_release(release, tmp_path, capsys):
    folder = copy(release, tmp_path / "copy")
    (folder / "training_args.bin").write_bytes(b"\x80\x04N.")
    edit_json(folder / "privacy.json", lambda s: s.update(epsilon_spent=0.1))
    assert main(["verify", str(folder)]) == 1
    text = capsys.readouterr().out
    assert "training_args.bin" in text and "NOT VERIFIED" in text and "verified:" not in text
    assert main(["verify", str(folder), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert not values["ok"] and not values["private"]
    assert {"severity", "what", "why", "instead"} == set(values["findings"][0])


def test_verify_nothing(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_verify_a_run_that_is_not_private(tmp_path, capsys):
    with pytest.warns(UserWarning, match="NOT private"):
        folder = export_release(trained(research_diagnostics=False, insecure_noise_seed=7), tmp_path / "made", **BASE)
    assert main(["verify", str(folder)]) == 0
    assert "verified, and NOT PRIVATE" in capsys.readouterr().out
    assert main(["verify", str(folder), "--require-private"]) == 1
    assert "a guarantee was asked for" in capsys.readouterr().err
    assert main(["verify", str(folder), "--max-epsilon", "100"]) == 1


def test_scrub_check_of_a_training_folder(trainer, capsys):
    output = trainer.args.output_dir
    assert main(["scrub-check", output]) == 1
    assert main(["scrub-check", output, "--fail-on", "never"]) == 0
    capsys.readouterr()
    main(["scrub-check", output, "--json"])
    found = {leak["path"]: leak for leak in json.loads(capsys.readouterr().out)}
    severities = {path: leak["severity"] for path, leak in found.items()}
    expected = {
        "training_args.bin": "high", "checkpoint-1/training_args.bin": "high", "checkpoint-1/rng_state.pth": "high",
        "checkpoint-1/trainer_state.json": "high", "checkpoint-1/optimizer.pt": "medium", "raptor_state.json": "medium",
        "checkpoint-1/scheduler.pt": "low", "adapter_model.safetensors": "none", "privacy.json": "none",
    }  # fmt: skip
    assert {path: severities[path] for path in expected} == expected
    owners = [path for path in severities if "owner" in path]
    assert owners and all(severities[path] == "high" for path in owners)
    order = [("high", "medium", "low", "none").index(s) for s in severities.values()]
    assert order == sorted(order), "the worst first"


def test_scrub_check_of_a_release(release, capsys):
    assert main(["scrub-check", str(release), "--fail-on", "low"]) == 0
    assert "0 high, 0 medium, 0 low" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "data", "severity", "words"),
    [
        ("rows.csv", b"text,label\n", "high", "rows"),
        ("notes.md", b"see /home/alice/x", "high", "local path"),
        ("config.yaml", b"token: hf_abcdefghijklmnopqrstuv", "high", "token"),
        ("eval.json", b'{"loss": 1.2}', "high", "losses"),
        ("README.md", b"- seed: 42\n", "high", "seed: 42"),
        ("adapter_model.safetensors", b"\x02\0\0\0\0\0\0\0{}canary", "high", "no tensor"),
        ("wandb/run/x.txt", b"x", "medium", "wandb"),
        ("events.out.tfevents.1.host", b"x", "medium", "host name"),
        ("something.xyz", b"x", "medium", "not on the allow-list"),
        ("plot.png", b"x", "low", "picture"),
        (".cache/huggingface/raptor_private/owner_map.npz", b"x", "high", "owner map"),
    ],
)
def test_scrub_check_of_one_file(tmp_path, name, data, severity, words):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    (leak,) = scrub_check(tmp_path)
    assert (leak.path, leak.severity) == (name, severity) and words in leak.what
    assert ("leaves it out" in leak.instead) == (severity != "low" and name not in ALLOWED)


def test_scrub_check_of_nothing(tmp_path, capsys):
    assert main(["scrub-check", str(tmp_path / "none")]) == 2
    assert "no folder" in capsys.readouterr().err
