"""Which attack catches which broken trainer.

    python -m tests.audit.matrix             # the table of docs/audit.md
    python -m tests.audit.matrix --seeds 20  # the true code, 20 times in a row: no bound may exceed the claim

Every variant claims the same epsilon. "caught": a lower bound above the claim (one-run), noise or sensitivity that the
statement excludes (measured), or an AUC above the largest that the claim allows (loss, LiRA). T1 to T3 are the exact
tests of tests/trainer/audits.py.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import warnings

import numpy as np
from datasets import Dataset
from transformers import set_seed

from raptor_hf.audit.report import attack_cell, largest_auc
from raptor_hf.audit.scores import record_scores
from raptor_hf.audit.shadows import Cell, ShadowResults, make_design
from raptor_hf.audit.verdict import bound_run
from tests.audit.canary_runs import canary_run
from tests.helpers import collate, tiny_model, tiny_records
from tests.trainer.build import make_trainer
from tests.trainer.mutations import MUTATIONS, broken_by, catches

# Those that docs/audit.md names: trained with shadow models too, which takes longest.
CHIEF = (
    "Noise divided by the batch size twice",
    "Noise of half the scale",
    "No noise on an expert without records",
    "The same noise at every step",
    "Noise from the global generator, seeded by `args.seed`",
    "No clipping",
    "Clipping by the largest entry instead of the Euclidean norm",
)
COLUMNS = ("T1", "T2", "T3", "one-run", "measured", "loss", "LiRA")
POOL = tiny_records(40, seed=9, shortest=4)
# An epsilon of about 1.3, and a learning rate by which a model without noise learns its records by heart.
SHADOW = dict(
    optim="adamw_torch", learning_rate=0.05, expected_batch_size=20, per_device_train_batch_size=20, max_steps=25,
    shared_noise_multiplier=14.0, expert_noise_multiplier=25.0, lora_rank=4, target_delta=1e-3,
)  # fmt: skip


@contextlib.contextmanager
def quietly(name: str):
    """The variant called `name` (or the true code) in force, without its output."""
    with (
        broken_by(name) if name in MUTATIONS else contextlib.nullcontext(),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        yield


def canaries(confidence: float = 0.95) -> dict:
    """Verdict of two canary runs with the same seed, as that of the second."""
    first = canary_run()
    return bound_run(canary_run(), confidence, others=[first])


def shadows(count: int = 6) -> dict:
    """The line of a table of shadow models of the trainer as it is now."""
    design = make_design(count, len(POOL), len(POOL) // 2, np.random.default_rng())
    rows: list[tuple] = []
    epsilon = delta = 0.0
    for number, mask in enumerate(design.masks):
        set_seed(number)
        members = [record for record, there in zip(POOL, mask, strict=True) if there]
        trainer = make_trainer(model=tiny_model(), train_dataset=Dataset.from_list(members), seed=number, **SHADOW)
        trainer.train()
        found = record_scores(trainer.model, POOL, collate)
        rows.append((found.loss, found.confidence))
        statement = trainer.privacy_statement()
        epsilon, delta = statement.epsilon_spent, statement.delta
    same = np.full(count, 1.0)
    losses, confidences = (np.stack(part) for part in zip(*rows, strict=True))
    results = ShadowResults(losses, confidences, design.masks, same, same * epsilon, same * delta, same)
    return attack_cell(Cell("raptor", "raptor", None, ()), results, design, 0.95)


def judge(name: str, columns: tuple[str, ...] = COLUMNS) -> dict[str, str]:
    """Column -> "caught", "-" or "" (not tried), for one variant."""
    found = dict.fromkeys(columns, "")
    with quietly(name):
        for column in ("T1", "T2", "T3"):
            if column in columns:
                found[column] = "caught" if catches(column) else "-"
        if "one-run" in columns:
            verdict = canaries()
            found["one-run"] = "caught" if verdict["exceeded"] else "-"
            found["measured"] = "caught" if not verdict["holds"] and _alarms(verdict) else "-"
        if "LiRA" in columns and (name in CHIEF or name not in MUTATIONS):
            row = shadows()
            limit = largest_auc(row["epsilon"], row["delta"])
            for column in ("loss", "LiRA"):
                value = row["attacks"][column.lower()]["auc"]
                found[column] = "caught" if value["interval"][0] > limit else f"- ({value['mean']:.2f})"
    return found


def _alarms(verdict: dict) -> bool:
    return any(words in verdict["verdict"] for words in ("too little noise", "counts for more", "the noise"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, help="only the canaries on the true code, so often")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if args.seeds:
        return _null(args.seeds)
    wrong = 0
    print("| variant | " + " | ".join(args.columns) + " |")
    print("|---" * (len(args.columns) + 1) + "|")
    for name in [*MUTATIONS, "the true code"]:
        found = judge(name, tuple(args.columns))
        wrong += name not in MUTATIONS and "caught" in found.values()
        print(f"| {name} | " + " | ".join(found[column] for column in args.columns) + " |", flush=True)
    return wrong


def _null(seeds: int) -> int:
    exceeded = 0
    for seed in range(seeds):
        with quietly(""):
            verdict = canaries()
        exceeded += not verdict["holds"]
        rows = ", ".join(f"{row['name']} {row['epsilon']:.2f} <= {row['claim']:.2f}" for row in verdict["bounds"])
        print(f"run {seed}: {rows}; {verdict['verdict']}", flush=True)
    print(f"{exceeded} of {seeds} runs exceed")
    return exceeded


if __name__ == "__main__":
    sys.exit(main())
