"""The formulas of the mechanism, by hand: stock transformers, stock PEFT, one record at a time, ordinary autograd.

Nothing here calls the code under test: the adapters are read from the files that the trainer saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from peft import PeftModel, get_peft_model_state_dict

from tests.helpers import EXPERTS, brute_owner, stock_dispatch, tiny_model

LAYER = 3
BLOCK = f"encoder.block.{LAYER}.layer.1.mlp.experts.expert_"


def load_peft(folder: str, **model_changes) -> PeftModel:
    """The base model with the saved adapters, by stock PEFT."""
    model = PeftModel.from_pretrained(tiny_model(**model_changes), folder, is_trainable=True)
    return model.eval()


def owners(records: Sequence[dict], layer: int = LAYER, **model_changes) -> list[int]:
    """Eq. 5 with top-1 routing: the expert with most of a record's tokens, by the shipped router."""
    model = tiny_model(**model_changes)
    return [brute_owner(stock_dispatch(model, record)[layer].sum(0).tolist()) for record in records]


def stream_of(name: str) -> int | None:
    """Expert that a PEFT parameter belongs to; None for the shared stream."""
    if BLOCK not in name:
        return None
    return int(name.split(BLOCK)[1].split(".")[0])


def loss_of(model: PeftModel, record: dict) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([record["input_ids"]])).logits[0]
    return -torch.log_softmax(logits, -1)[record["labels"]]


def record_gradient(
    model: PeftModel, record: dict, owner: int | None, weighted: bool = True, gamma: float = 1.0
) -> dict:
    """Gradient of one record's loss: of the shared tensors, or of its owner's with the residual weight."""
    chosen = {n: p for n, p in model.named_parameters() if p.requires_grad and stream_of(n) == owner}
    loss = loss_of(model, record)
    if owner is not None and weighted:
        loss = (1 - math.exp(-loss.item())) ** gamma * loss
    found = torch.autograd.grad(loss, list(chosen.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(chosen.items(), found, strict=True)}


def size(gradient: dict) -> float:
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradient.values()))


class HandTrainer:
    """Plain SGD on the released gradients without noise (Eqs. 7 to 9, 22)."""

    def __init__(self, folder: str, records: Sequence[dict], *, batch: int, norms: tuple[float, float],
                 rates: tuple[float, float], weighted: bool = True, gamma: float = 1.0):  # fmt: skip
        self.model, self.records = load_peft(folder), records
        self.owners = owners(records)
        self.batch, self.norms, self.rates, self.weighted, self.gamma = batch, norms, rates, weighted, gamma
        self.seen: dict[str, list[float]] = {"shared": [], "expert": []}

    def cycle(self, shared: Iterable[int], expert: Iterable[int]) -> None:
        self._step("shared", shared, self.norms[0], self.rates[0] / self.batch)
        self._step("expert", expert, self.norms[1], self.rates[1] / (self.batch / EXPERTS))

    def _step(self, stream: str, drawn: Iterable[int], bound: float, factor: float) -> None:
        total = {n: torch.zeros_like(p) for n, p in self.model.named_parameters() if p.requires_grad}
        for i in drawn:
            owner = None if stream == "shared" else self.owners[i]
            gradient = record_gradient(self.model, self.records[i], owner, self.weighted, self.gamma)
            length = size(gradient)
            self.seen[stream].append(length)
            for name, value in gradient.items():
                total[name] += value * min(1.0, bound / length if length else 1.0)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter -= factor * total[name]

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in get_peft_model_state_dict(self.model).items()}
