"""What one process of the distributed tests runs: `torchrun worker.py FOLDER SCENARIO...`; writes FOLDER/rank-N.pt."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from datasets import Dataset

from tests.helpers import tiny_model, tiny_records
from tests.trainer.build import fix_draws, make_trainer, perturb_adapters, values

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
RECORDS = 10


def trainer(folder: Path, **changes):
    # the model of every process starts elsewhere: LoRA's initialisation must be that of process 0 all the same
    torch.manual_seed(1000 + RANK)
    settings = dict(output_dir=str(folder), per_device_train_batch_size=3, expected_batch_size=RECORDS)
    if WORLD > 1:
        settings["ddp_backend"] = "gloo"
    return make_trainer(changes.pop("records", RECORDS), seed=42 + RANK, **{**settings, **changes})


def quiet(folder: Path) -> dict:
    """No noise and every record in every draw: what a single process computes, up to the order of sums."""
    made = trainer(folder, shared_noise_multiplier=0.0, expert_noise_multiplier=0.0, max_steps=3)
    perturb_adapters(made.model)
    made.train()
    return {"model": values(made.model), "owners": made._owners}


def noisy(folder: Path) -> dict:
    """Noise, real coins, Adam with decay, evaluation and checkpoints; then training goes on from one of them."""
    settings = dict(
        max_steps=4, expected_batch_size=4, optim="adamw_torch", weight_decay=0.01, save_strategy="steps",
        save_steps=2, lr_scheduler_type="linear", logging_strategy="steps", logging_steps=1, target_epsilon=8.0,
        eval_strategy="steps", eval_steps=2, eval_dataset=Dataset.from_list(tiny_records(5, seed=9)),
        target_delta=1e-3,
    )  # fmt: skip
    first = trainer(folder, **settings)
    first.train()
    again = trainer(folder, **settings)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    logs = [{k: v for k, v in entry.items() if "per_second" not in k and "runtime" not in k}
            for entry in again.state.log_history]  # fmt: skip
    return {
        "first": values(first.model), "logs": json.dumps(logs),
        "step": again.state.global_step, "epsilon": first.ledger.epsilon(), "owners": again._owners,
        "steps": (first.ledger.shared_steps, first.ledger.expert_steps, again.ledger.shared_steps),
        "wrapped": type(first.model_wrapped).__name__, "model": values(again.model),
    }  # fmt: skip


def noise(folder: Path) -> dict:
    """Empty draws: every release is noise alone. Its deviation is sigma C / denominator, however many processes."""
    made = trainer(folder, max_steps=6, learning_rate=1.0, shared_noise_multiplier=2.0, expert_noise_multiplier=3.0)
    updates, before = [], values(made.model)
    fix_draws(made, [([], [])] * 6).train()
    after = values(made.model)
    for stream in before:
        updates.append(torch.cat([(after[stream][n] - before[stream][n]).flatten() for n in before[stream]]))
    return {"updates": updates, "model": after}


def lopsided(folder: Path) -> dict:
    """All records drawn by one process, in float64; the others' batches are empty."""
    made = trainer(folder, model=tiny_model(torch.float64), shared_noise_multiplier=0.0, expert_noise_multiplier=0.0)
    perturb_adapters(made.model)
    mine = range(RECORDS) if RANK == WORLD - 1 else []
    fix_draws(made, [(mine, mine)] * 2).train()
    return {"model": values(made.model)}


def failing(folder: Path) -> dict:
    """The collator of the last process fails on a record in the second cycle."""
    made = trainer(folder, max_steps=3, lr_scheduler_type="constant")
    inner = made._collate

    def breaks(records):
        if RANK == WORLD - 1 and made.state.global_step == 1:
            raise KeyError("the secret of record 7")
        return inner(records)

    made._collate = breaks
    try:
        made.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "step": made.state.global_step}
    return {"error": None}


def other_data(folder: Path) -> dict:
    """The last process holds the records in another order."""
    records = tiny_records(RECORDS, seed=5)
    made = trainer(folder, records=records[::-1] if RANK == WORLD - 1 else records)
    try:
        made.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "step": made.state.global_step}
    return {"error": None}


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    results = {scenario: globals()[scenario](target / scenario) for scenario in sys.argv[2:]}
    torch.save(results, target / f"rank-{RANK}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
