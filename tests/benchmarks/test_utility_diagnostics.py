"""Tables 8 and 10: what is measured after training, against stock autograd and a stock model's router."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.utility.diagnostics import main, measure, public_records, write_tables
from benchmarks.utility.tasks import labelled_public, load_base_model
from benchmarks.utility.worker import trained
from raptor_hf.errors import PrivacyConfigError
from tests.benchmarks.runs import RUN
from tests.helpers import brute_owner, stock_dispatch

SMALL = dataclasses.replace(
    RUN, train_size=400, eval_size=40, public_size=40, max_length=12, batch_size=100, cycles=2, learning_rate=0.05,
    clip=0.5, rank=4, micro_batch=8,
)  # fmt: skip
RECORDS = 24
FLAGS = [
    "--task", "rt", "--train-size", "400", "--eval-size", "40", "--public-size", "40", "--max-length", "12",
    "--cycles", "2", "--batch-size", "100", "--rank", "4", "--records", "16", "--draws", "2",
]  # fmt: skip


def by_autograd(model, records, weighted: bool) -> list[dict[str, torch.Tensor]]:
    """Of every record, alone and without padding: gradients of its loss, times 1 - p(label) where `weighted`."""
    trained_ones = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for record in records:
        logits = model(input_ids=torch.tensor([record["input_ids"]])).logits[0].double()
        loss = -logits.log_softmax(-1)[record["labels"]]
        scaled = loss * (1 - torch.exp(-loss.detach())) if weighted else loss
        grads = torch.autograd.grad(scaled, list(trained_ones.values()), allow_unused=True)
        rows.append(
            {
                name: (torch.zeros_like(p) if g is None else g).double()
                for (name, p), g in zip(trained_ones.items(), grads, strict=True)
            }
        )
    return rows


@pytest.fixture(scope="module")
def raptor(tmp_path_factory):
    """A trained run, what was measured on it, and its public records."""
    public = public_records(SMALL, RECORDS)
    with trained(SMALL, tmp_path_factory.mktemp("raptor")) as trainer:
        found = measure(trainer, SMALL, public, draws=3)
        yield trainer, found, public


def test_role_mismatch_and_snr_by_hand(raptor):
    trainer, found, public = raptor
    model, statement = trainer.model.eval(), trainer.privacy_statement()
    base, _ = load_base_model("tiny", 2)
    block = statement.protected_layer
    owners = [brute_owner(stock_dispatch(base, record, [block])[block].sum(0).tolist()) for record in public]
    assert len(set(owners)) >= 3
    shared, weighted = by_autograd(model, public, False), by_autograd(model, public, True)
    adapters = [name for name in shared[0] if "expert_adapters" in name]
    norms = dict.fromkeys(("shared", "router", "head", "expert"), 0.0)
    sums: dict[int, torch.Tensor] = {}
    for owner, row, own in zip(owners, shared, weighted, strict=True):
        mine = torch.cat([own[name][owner].flatten() for name in adapters])
        norms["expert"] += float(mine.norm()) / RECORDS
        for role in ("shared", "head"):
            parts = [
                g.flatten() for n, g in row.items() if n not in adapters and n.startswith("score.") == (role == "head")
            ]
            norms[role] += float(torch.cat(parts).norm()) / RECORDS
        sums[owner] = sums.get(owner, 0) + mine * min(1.0, SMALL.clip / float(mine.norm()))
    assert found["norms"] == pytest.approx(norms, rel=1e-3)
    counts = found["parameters"]
    total, size = sum(norms.values()), sum(counts.values())
    assert size == sum(p.numel() for p in model.parameters() if p.requires_grad)
    mismatch = sum(abs(norms[role] / total - counts[role] / size) for role in norms) / 2
    assert found["m_role"] == pytest.approx(mismatch, rel=1e-3) and 0 < mismatch < 1
    sigma, dimension = statement.expert.noise_multiplier, counts["expert"] // 8
    snr = [
        (SMALL.batch_size / RECORDS) ** 2 * float(sums[e].square().sum()) / ((sigma * SMALL.clip) ** 2 * dimension)
        if e in sums
        else 0.0
        for e in range(8)
    ]
    assert found["snr"] == pytest.approx(snr, rel=1e-2)
    assert found["mean_snr"] == pytest.approx(np.mean(snr), rel=1e-2)
    assert found["snr_cv"] == pytest.approx(np.std(snr) / np.mean(snr), rel=1e-2)


def test_the_noise_is_that_of_a_released_gradient(raptor):
    trainer, found, public = raptor
    statement = trainer.privacy_statement()
    shared, expert = found["sensitivity"]
    assert (shared["stream"], expert["stream"]) == ("shared", "expert")
    assert shared["noise_std"] == pytest.approx(statement.shared.noise_multiplier * 0.5 / 100)
    assert expert["noise_std"] == pytest.approx(statement.expert.noise_multiplier * 0.5 * 8 / 100)
    assert expert["parameters"] == found["parameters"]["expert"]
    for row in found["sensitivity"]:
        unit = row["noise_std"] ** 2 * row["parameters"]
        assert row["lambda_plus"] == pytest.approx(max(row["loss_change"], 0) / unit)
    louder = measure(trainer, SMALL, public, draws=2, noise_std=0.3)["sensitivity"][0]
    assert louder["noise_std"] == 0.3 and abs(louder["loss_change"]) > abs(shared["loss_change"])


def test_one_command_trains_measures_and_resumes(tmp_path, capsys):
    output = tmp_path / "out"
    arguments = [*FLAGS, "--methods", "monolithic_lora,shared_only", "--output", str(output)]
    assert main(arguments) == 0
    files = sorted((output / "diagnostics").iterdir())
    assert len(files) == 2
    before = [path.stat().st_mtime_ns for path in files]
    assert main(arguments) == 0 and [path.stat().st_mtime_ns for path in files] == before
    with (output / "report" / "table8.csv").open(encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["variant"] for row in rows] == ["monolithic_lora", "shared_only"]
    for row in rows:
        assert 0 < float(row["m_role"]) < 1 and float(row["norm_router"]) == 0
        trains_experts = row["variant"] == "monolithic_lora"
        assert (float(row["norm_expert"]) > 0) == (row["mean_snr"] != "") == trains_experts
    with (output / "report" / "table10.csv").open(encoding="utf-8") as handle:
        streams = [(row["variant"], row["stream"]) for row in csv.DictReader(handle)]
    assert streams == [("monolithic_lora", "shared"), ("monolithic_lora", "expert"), ("shared_only", "shared")]
    assert "monolithic LoRA" in capsys.readouterr().out


def test_the_tables_have_means_over_the_seeds(tmp_path):
    def result(seed: int, mismatch: float) -> dict:
        return {
            "settings": dataclasses.replace(RUN, seed=seed).to_dict(), "records": 10, "m_role": mismatch,
            "mean_snr": 1e-5, "snr_cv": None, "norms": dict.fromkeys(("shared", "router", "head", "expert"), 1.0),
            "parameters": dict.fromkeys(("shared", "router", "head", "expert"), 7), "train_seconds": 1.0,
            "measure_seconds": 1.0, "sensitivity": [
                {"stream": "shared", "parameters": 1234, "noise_std": 0.1, "loss_change": -1e-3,
                 "standard_error": 2e-4, "lambda_plus": 0.0, "measured": False}
            ],
        }  # fmt: skip

    *_, tables = write_tables([result(0, 0.2), result(1, 0.5)], tmp_path)
    text = tables.read_text(encoding="utf-8")
    # mean 0.35, standard deviation 0.3 / sqrt 2, over sqrt 2
    assert "| rt | tiny | RAPTOR | 8 | 0.35 ± 0.1 | 1e-05 ± 0 |  | 2 |" in text
    assert "| 1 | shared | 1,234 | 0.1 | -0.001 ± 0.0002 | 0 |" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "nonprivate_lora"], "no noise"),
        (["--epsilons", "inf"], "no noise"),
        (["--methods", "global_clip"], "one clipping norm"),
        (["--draws", "1"], "draws"),
        (["--noise-std", "-1"], "noise_std"),
        (["--task", "imdb", "--train-size", "50", "--eval-size", "10"], "no labels"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit):
        main([*arguments, "--output", str(tmp_path / "out")])
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


# ---- Labelled public records ----


def _pairs(folder: Path, stem: str, rows: list[tuple[str, str, str]], label: bool = True) -> None:
    folder.mkdir(exist_ok=True)
    lines = [["question", "sentence", *(["label"] if label else [])], *([*row][: 2 + label] for row in rows)]
    (folder / f"{stem}.tsv").write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")


def test_public_files_bring_labels_of_the_task(tmp_path):
    _pairs(tmp_path, "public", [("why?", "because", "not_entailment"), ("who?", "he", "entailment")])
    found = labelled_public("qnli", ["entailment", "not_entailment"], size=9, data_dir=str(tmp_path))
    assert dict(zip(found["question"], found["labels"], strict=True)) == {"why?": 1, "who?": 0}
    assert len(labelled_public("qnli", ["entailment", "not_entailment"], size=1, data_dir=str(tmp_path))) == 1
    with pytest.raises(ValueError, match="labels that no training"):
        labelled_public("qnli", ["entailment", "other"], size=9, data_dir=str(tmp_path))
    _pairs(tmp_path, "public", [("why?", "because", "")], label=False)
    with pytest.raises(ValueError, match=r"public files .* lack the columns \['label'\]"):
        labelled_public("qnli", ["entailment"], size=9, data_dir=str(tmp_path))


def test_a_corpus_without_labels_is_refused():
    with pytest.raises(PrivacyConfigError, match=r"no labels of its classes.*private.*sst2"):
        labelled_public("qnli", ["entailment", "not_entailment"], size=5)


def test_public_records_among_the_private_are_refused(tmp_path):
    rows = [(f"what is {i}?", f"it is {i}", ("entailment", "not_entailment")[i % 2]) for i in range(8)]
    for stem, part in (("train", rows), ("dev", rows), ("public", rows[:1])):
        _pairs(tmp_path, stem, part)
    settings = dataclasses.replace(SMALL, task="qnli", data_dir=str(tmp_path))
    with pytest.raises(PrivacyConfigError, match="shares at least one record"):
        public_records(settings, 4)


def test_imdb_sentences_have_both_labels_of_their_reviews():
    found = labelled_public("sst2", ["negative", "positive"], size=60)
    assert found.column_names == ["sentence", "labels"] and len(found) == 60
    assert 0.2 < sum(found["labels"]) / 60 < 0.8 and math.isfinite(sum(map(len, found["sentence"])))
