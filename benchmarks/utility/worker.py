"""One process: trains the runs named on its command line, one after another, and writes a JSON file for each.

    python -m benchmarks.utility.worker OUTPUT KEY [KEY ...]

`OUTPUT/settings/KEY.json` holds the settings, `OUTPUT/runs/KEY.json` will hold the result. It is written whole or not
at all, and a run that has one is not repeated.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait crawl beside other work

import torch
from transformers import DataCollatorWithPadding, set_seed

from benchmarks.utility.files import write_json
from benchmarks.utility.settings import VARIANTS, Settings
from benchmarks.utility.tasks import load, load_base_model
from benchmarks.utility.verify import verify
from raptor_hf import RaptorConfig, RaptorTrainer, select_layer
from raptor_hf.analysis import plot_routing_table
from raptor_hf.data import TextTask, classification_metrics, tokenize_task
from raptor_hf.moe import check_disjoint

__all__ = ["base_model", "main", "prepared_task", "routing", "run", "trained"]


@functools.lru_cache(maxsize=1)
def _task(name: str, data_dir: str | None, sizes: tuple, model: str, max_length: int) -> TextTask:
    task = load(name, data_dir=data_dir, train_size=sizes[0], eval_size=sizes[1], public_size=sizes[2])
    _, tokenizer = load_base_model(model, len(task.labels))
    return tokenize_task(task, tokenizer, max_length)


def prepared_task(settings: Settings) -> TextTask:
    """The task of a run, tokenized; made once for all runs of a process that share it."""
    sizes = (settings.train_size, settings.eval_size, settings.public_size)
    return _task(settings.task, settings.data_dir, sizes, settings.model, settings.max_length)


def base_model(settings: Settings, task: TextTask) -> tuple[Any, Any]:
    """The base model of a run, on the GPU if there is one, and its tokenizer."""
    model, tokenizer = load_base_model(settings.model, len(task.labels), settings.dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def _layer_file(settings: Settings, cache: Path) -> Path:
    names = (settings.task, settings.model.replace("/", "_"), settings.ownership)
    return cache / f"{'-'.join(names)}-{settings.public_size}-{settings.max_length}.json"


def _layer(settings: Settings, task: TextTask, model: Any, tokenizer: Any, cache: Path) -> str:
    """The protected layer as a block index, from the public corpus once for a task and model (Eq. 4)."""
    if task.public is None:
        return "last"
    path = _layer_file(settings, cache)
    if not path.exists():
        disjoint = check_disjoint(task.public, task.train.remove_columns("labels"))
        found = select_layer(
            model,
            task.public,
            rule=settings.ownership,
            data_collator=DataCollatorWithPadding(tokenizer),
            batch_size=128,
        )
        write_json(
            path, {"layer": found.layer, "margin_nats": min(found.margin, 1e9), "records": found.records,
                   "disjoint_from_private": disjoint, "table": found.table},
        )  # fmt: skip
    return str(json.loads(path.read_text(encoding="utf-8"))["layer"])


def routing(settings: Settings, output: Path) -> Path:
    """The routing table of the task's public corpus as a JSON file and a figure; trains nothing, reads no label.

    Raises:
        ValueError: the task has no public corpus.
    """
    task = prepared_task(settings)
    if task.public is None:
        raise ValueError(f"`{settings.task}` has no public corpus. Put one into the data folder as public*.tsv.")
    model, tokenizer = base_model(settings, task)
    _layer(settings, task, model.eval(), tokenizer, output / "routing")
    path = _layer_file(settings, output / "routing")
    found = json.loads(path.read_text(encoding="utf-8"))
    plot_routing_table(found["table"], path.with_suffix(".png"), chosen=found["layer"])
    return path


def _config(settings: Settings, layer: str, folder: str) -> RaptorConfig:
    variant = VARIANTS[settings.variant]
    noise: dict[str, Any] = {}
    if variant.private and settings.epsilon != float("inf"):
        noise = {"target_epsilon": settings.epsilon}
    elif variant.private:  # clipping without noise, to tell the two apart: not private, and the statement says so
        noise = {f"{stream}_noise_multiplier": 0.0 for stream in variant.streams}
    return RaptorConfig(
        folder,
        **{
            "method": variant.method, "protected_layer": layer, "ownership": settings.ownership, "seed": settings.seed,
            "expected_batch_size": settings.batch_size, "max_steps": settings.cycles,
            "per_device_train_batch_size": settings.micro_batch, "per_device_eval_batch_size": 128,
            "learning_rate": settings.learning_rate, "expert_learning_rate": settings.expert_learning_rate,
            "shared_max_grad_norm": settings.clip, "expert_max_grad_norm": settings.clip,
            "budget_split": settings.budget_split, "lora_rank": settings.rank, "lora_alpha": float(settings.rank),
            "grad_sample_mode": variant.engine(settings.engine), "lr_scheduler_type": "cosine", "warmup_steps": 0.1,
            "save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 10**9,
            **noise, **variant.options,
        },
    )  # fmt: skip


@contextlib.contextmanager
def trained(settings: Settings, output: Path) -> Iterator[RaptorTrainer]:
    """The trainer of one run after training; its folder, and all that training wrote, is gone afterwards."""
    task = prepared_task(settings)
    set_seed(settings.seed)
    model, tokenizer = base_model(settings, task)
    layer = _layer(settings, task, model, tokenizer, output / "routing")
    set_seed(settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RaptorTrainer(
            model,
            _config(settings, layer, folder),
            train_dataset=task.train,
            eval_dataset=task.evaluation,
            processing_class=tokenizer,
            compute_metrics=classification_metrics(),
        )
        trainer.train()
        yield trainer


def run(settings: Settings, output: Path) -> dict[str, Any]:
    """Train and evaluate once; the result with its checked privacy statement."""
    began, cpu = time.perf_counter(), time.process_time()
    with trained(settings, output) as trainer:
        metrics, statement = trainer.evaluate(), trainer.privacy_statement()
        trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    task = prepared_task(settings)
    return {
        "key": settings.key,
        "settings": settings.to_dict(),
        "accuracy": metrics["eval_accuracy"],
        "eval_loss": metrics["eval_loss"],
        "epsilon": verify(statement, settings, len(task.train)),
        "protected_layer": statement.protected_layer,
        "trainable": trainable,
        "train_records": len(task.train),
        "eval_records": len(task.evaluation or ()),
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "peak_process_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "machine": {
            "architecture": platform.machine(),
            "gpu": torch.cuda.is_available(),
            "python": platform.python_version(),
        },
        "statement": json.loads(statement.to_json()),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the keys that have no result yet; stops at the first error."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    output, keys = Path(arguments[0]), arguments[1:]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for key in keys:
        target = output / "runs" / f"{key}.json"
        if not target.exists():
            settings = Settings.from_dict(json.loads((output / "settings" / f"{key}.json").read_text(encoding="utf-8")))
            result = run(settings, output)
            write_json(target, result)
            print(f"{key}: accuracy {result['accuracy']:.4f} in {result['seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
