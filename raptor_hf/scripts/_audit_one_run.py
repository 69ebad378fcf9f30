"""`raptor-hf audit --attack one-run`: canaries through the real trainer, and the bound against the claim."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raptor_hf import __version__
from raptor_hf.audit import folder as store
from raptor_hf.audit import report as reports
from raptor_hf.audit.canaries import CanaryTrainer, Observer, draw_canaries
from raptor_hf.audit.verdict import CanaryResult, bound_run, one_run_markdown
from raptor_hf.errors import PrivacyConfigError
from raptor_hf.methods import METHODS
from raptor_hf.scripts._audit import Records, cell_settings, cells_of, check_cells, parse_cell, write_cells
from raptor_hf.scripts._audit_lira import publish
from raptor_hf.validate import integer, probability

__all__ = ["run"]

# A cycle's update is then its release times a constant. The guarantee is about releases: the optimizer comes after.
_PLAIN_SGD = {
    "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "weight_decay": 0.0, "warmup_steps": 0,
}  # fmt: skip
_DROPPED = ("expert_learning_rate", "optim_args", "warmup_ratio", "lr_scheduler_kwargs", "optim_target_modules")
# The bound loses 2 m delta: n^-1.1 of a few thousand records is too large to audit with hundreds of canaries.
_DELTA = 1e-5
# The same in every run, on purpose: noise that came from it would be the same too, and found.
_SEED = 10_000
_CANDIDATES, _LENGTH = 4, (8, 24)


def run(args: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    """Train `--runs` times with canaries, bound epsilon, compare with the claim. 1 when a bound exceeds it."""
    integer("--canaries", args.canaries, minimum=2)
    integer("--lone-canaries", args.lone_canaries)
    integer("--runs", args.runs, minimum=1)
    probability("--confidence", args.confidence, one=False)
    cells = cells_of(settings, args.methods, args.epsilons)
    for cell in cells:
        if not METHODS[cell.method].private:
            raise PrivacyConfigError(
                f"A one-run audit of `{cell.method}` was asked for",
                "It claims no epsilon, so there is nothing to hold a bound against",
                "Choose a private method, or `--attack lira`",
            )
    found = {cell.name: _settings(settings, cell, args.overrides) for cell in cells}
    folder = store.open_folder(args.output)
    check_cells(found)
    store.bind(
        folder,
        {
            "kind": "one-run",
            "version": __version__,
            "settings": found,
            "canaries": args.canaries,
            "lone_canaries": args.lone_canaries,
            "records": args.records,
            "directions": args.directions,
        },
    )
    write_cells(folder, found)
    rows = []
    for cell in cells:
        audit = _Audit(args, folder, cell.name)
        results = [audit.result(number) for number in range(args.runs)]
        for number, one in enumerate(results):
            verdict = bound_run(one, args.confidence, others=results[:number])
            rows.append({"name": cell.name, "method": cell.method, **verdict})
    report = {
        "schema_version": reports.SCHEMA_VERSION,
        "kind": "one-run",
        "canaries": args.canaries,
        "confidence": args.confidence,
        "packages": reports.versions(),
        "runs": rows,
    }
    markdown = one_run_markdown(report)
    reports.write_report(folder, report, markdown)
    publish(args.publish_summary, report)
    print(markdown)
    return int(any(not row["holds"] for row in rows))


def _settings(settings: Mapping[str, Any], cell: Any, overrides: Sequence[str]) -> dict[str, Any]:
    found = {**cell_settings(settings, cell, overrides), **_PLAIN_SGD}
    found.setdefault("target_delta", _DELTA)
    return {name: value for name, value in found.items() if name not in _DROPPED}


class _Audit:
    """The runs of one cell."""

    def __init__(self, args: argparse.Namespace, folder: Path, cell: str):
        self.options, self.folder, self.cell = args, folder, cell
        self._prepared: tuple[Any, ...] | None = None

    def result(self, number: int) -> CanaryResult:
        """The result of a run: read where it is there, else made and kept."""
        path = store.subfolder(self.folder, "runs", self.cell) / f"{number:04d}.npz"
        if not path.is_file():
            print(f"{self.cell}, run {number + 1} of {self.options.runs}", flush=True)
            self._run(number).save(path)
        return CanaryResult.load(path)

    def _prepare(self) -> tuple[Any, ...]:
        """Real records, layer, owners and canary candidates: the same in every run. From the base model alone."""
        from raptor_hf.moe import owner_map
        from raptor_hf.moe.lora import adapter_plan
        from raptor_hf.trainer import RaptorTrainer

        work = store.subfolder(self.folder, "work")
        model_args, data_args, args = parse_cell(self.folder, self.cell, output_dir=str(work / "base"))
        if args.world_size > 1:
            raise PrivacyConfigError(
                f"A one-run audit in {args.world_size} processes was asked for",
                "Each would flip coins of its own",
                "Run it in one process",
            )
        data = Records(model_args, data_args)
        model, tokenizer = data.model()
        text = data.task(tokenizer)
        real = [dict(row) for row in text.train]
        real = real[: self.options.records] if self.options.records else real
        trainer = RaptorTrainer(
            model, args, train_dataset=_dataset(real), public_dataset=text.public, data_collator=_collator(tokenizer)
        )
        layer = adapter_plan(trainer.model).layer
        made = _candidates(tokenizer, _CANDIDATES * self.options.canaries + 200, real[0])

        def owners(rows: list[dict]) -> np.ndarray:
            return owner_map(
                trainer.model, rows, layer, rule=args.ownership, data_collator=_collator(tokenizer),
                batch_size=args.per_device_eval_batch_size,
            ).numpy()  # fmt: skip

        whose, mine = owners(made), owners(real)
        if self.options.lone_canaries and METHODS[args.method].owners:
            empty = _expert_to_empty(mine, whose, self.options.lone_canaries)
            real = [row for row, owner in zip(real, mine, strict=True) if owner != empty]
            mine = mine[mine != empty]
        return data, real, mine, made, whose, layer

    def _run(self, number: int) -> CanaryResult:
        from transformers import set_seed

        if self._prepared is None:
            self._prepared = self._prepare()
        data, real, mine, made, whose, layer = self._prepared
        output = self.folder / "work" / f"{self.cell}-{number}"
        _, _, args = parse_cell(self.folder, self.cell, output_dir=str(output), protected_layer=layer, seed=_SEED)
        set_seed(args.seed)
        model, tokenizer = data.model()
        canaries = draw_canaries(made, whose, mine, self.options.canaries, lone=self.options.lone_canaries)
        trainer = CanaryTrainer(
            model, args, train_dataset=_dataset(canaries.training_set(real)), data_collator=_collator(tokenizer),
            canaries=canaries, directions=self.options.directions,
        )  # fmt: skip
        observer = Observer(trainer)
        trainer.add_callback(observer)
        trainer.train()
        found = CanaryResult.of(trainer, observer)
        shutil.rmtree(output)  # the owner map
        return found


def _dataset(rows: list[dict]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def _collator(tokenizer: Any) -> Any:
    from transformers import DataCollatorWithPadding

    return DataCollatorWithPadding(tokenizer)


def _candidates(tokenizer: Any, count: int, like: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records of random tokens, no two alike, with the columns of `like`."""
    rng = np.random.default_rng()
    ids = np.array(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)))
    found: dict[tuple, dict[str, Any]] = {}
    while len(found) < count:
        tokens = rng.choice(ids, int(rng.integers(*_LENGTH))).tolist()
        row: dict[str, Any] = {name: [0] * len(tokens) for name, value in like.items() if isinstance(value, list)}
        row.update(input_ids=tokens, attention_mask=[1] * len(tokens), labels=int(rng.integers(2)))
        found[tuple(tokens)] = row
    return list(found.values())


def _expert_to_empty(real: np.ndarray, candidates: np.ndarray, wanted: int) -> int:
    """The expert with the fewest real records of those that own enough candidates; its real records are left out."""
    counts = {int(e): int((real == e).sum()) for e in np.unique(candidates) if (candidates == e).sum() >= wanted}
    left = {e: count for e, count in counts.items() if count < len(real)}
    if not left:
        raise PrivacyConfigError(
            f"{wanted} canaries alone in an otherwise empty expert were asked for",
            "No expert owns so many of the made-up records without owning all real ones",
            "Ask for fewer `--lone-canaries`, or none",
        )
    return min(left, key=lambda e: (left[e], e))
