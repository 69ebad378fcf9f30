"""Train, push; in another process with an empty cache verify, load and predict. Planted secrets are in no upload."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import tiny_model
from tests.hub.build import tiny_tokenizer
from tests.hub.server import TOKEN, LoopbackHub
from tests.hub.train_and_push import BASE, REPO, TEXTS

HERE = Path(__file__).parent
CANARY, SEED, USER = "w50 w51 the canary sings at dawn w52", 739391853, "alicexample"


def environment(hub: LoopbackHub, home: Path) -> dict[str, str]:
    home.mkdir()
    own = dict(
        HF_ENDPOINT=hub.url, HF_HOME=str(home / "hf"), HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0",
        TRANSFORMERS_OFFLINE="0", HF_HUB_DISABLE_TELEMETRY="1", HOME=str(home), USER=USER, LOGNAME=USER,
        PYTHONPATH=str(HERE.parents[1]), OMP_NUM_THREADS="1",
    )  # fmt: skip
    return {**os.environ, **own}


def run(command: list, env: dict[str, str]) -> str:
    done = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def publish_base(hub: LoopbackHub, folder: Path) -> str:
    tiny_model().save_pretrained(folder)
    tiny_tokenizer(folder)
    return hub.put(BASE, {path.name: path.read_bytes() for path in folder.iterdir()})


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    with LoopbackHub() as hub:
        commit = publish_base(hub, folder / "base")
        output = folder / f"{USER}-secret-project" / "output"
        train = [sys.executable, HERE / "train_and_push.py", CANARY, SEED, output, folder / "predictions.json"]
        run(train, environment(hub, folder / f"home-{USER}"))
        sent = list(hub.uploads)
        out = run([sys.executable, HERE / "verify_and_load.py", json.dumps(TEXTS)], environment(hub, folder / "empty"))
        yield hub, commit, output, sent, out, json.loads((folder / "predictions.json").read_text())


def test_another_process_verifies_loads_and_predicts_the_same(job):
    *_, out, predictions = job
    report, _, rest = out.partition("VERIFY")[2].partition("LOAD")
    report, found = json.loads(report), json.loads(rest.strip().splitlines()[-1])
    assert report["ok"] and report["private"] and report["findings"] == [] and set(report["epsilon_recomputed"])
    assert found["status"] == 0 and found["logits"] == predictions
    best = [max(range(3), key=row.__getitem__) for row in predictions]
    assert found["labels"] == [("bad", "so so", "good")[index] for index in best]


def test_the_release_names_the_base_and_its_commit(job):
    hub, commit, *_ = job
    config = json.loads(hub.files(REPO)["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == (BASE, commit)
    assert hub.repos[REPO].private
    assert hub.repos[REPO].messages[1:] == [
        "Training in progress, step 1", "Training in progress, step 2", "End of training"
    ]  # fmt: skip


def test_no_planted_secret_is_in_what_was_sent(job):
    hub, _, output, sent, *_ = job
    secrets = [CANARY, "canary", "sings", str(SEED), USER, "secret-project", str(output), str(output.parents[1]),
               "training_args", "optimizer", "rng_state", "trainer_state", "\"grad_norm\"", "train_loss"]  # fmt: skip
    needles = [word.encode() for word in secrets] + [struct.pack("<I", SEED), struct.pack(">I", SEED)]
    stored = [data for repo in [hub.repos[REPO]] for files in repo.commits.values() for data in files.values()]
    haystack = b"\n".join([*sent, *stored, *hub.lfs.values()]).lower()
    assert len(sent) > 10 and len(haystack) > 20_000
    assert [needle for needle in needles if needle.lower() in haystack] == []
    assert TOKEN.encode() not in haystack


def test_the_search_would_find_them(job):
    """The same needles are in the output folder: the plain upload would have published them."""
    output = job[2]
    assert struct.pack("<I", SEED) in next(output.rglob("training_args.bin")).read_bytes()
    assert any(b"secret-project" in path.read_bytes() for path in output.rglob("*.bin"))


@pytest.mark.slow
def test_two_processes_push_once(tmp_path):
    with LoopbackHub() as hub:
        publish_base(hub, tmp_path / "base")
        launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1",
                  "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip
        script = [HERE / "train_and_push.py", CANARY, SEED, tmp_path / "output", tmp_path / "predictions.json"]
        run([sys.executable, *launch, *script], environment(hub, tmp_path / "home"))
        assert hub.repos[REPO].messages[1:].count("End of training") == 1
        assert len(hub.repos[REPO].messages) == 4 and hub.count("POST", "/commit/") == 3
        assert not any(re.search(rb"training_args|optimizer", body) for body in hub.uploads)
