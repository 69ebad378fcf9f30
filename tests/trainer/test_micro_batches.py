"""A logical batch is cut by length, each part padded to its own longest record, and the update is the same."""

from __future__ import annotations

import pytest
import torch

from raptor_hf.grad_sample import batches
from tests.helpers import collate, tiny_records
from tests.trainer.build import fix_draws, make_trainer, perturb_adapters, run

RECORDS = tiny_records(16, seed=5)
DRAWN = [3, 0, 11, 7, 5, 14, 2]
LENGTHS = [len(record["input_ids"]) for record in RECORDS]


def test_micro_batches_are_sorted_by_length_and_padded_to_their_own_longest():
    trainer = make_trainer(RECORDS, per_device_train_batch_size=3)
    assert [LENGTHS[i] for i in DRAWN] != sorted(LENGTHS[i] for i in DRAWN), "sorted already: nothing to see"
    owners = torch.arange(16) * 10
    found, widths = [], []
    for batch, owner in trainer._micro_batches(DRAWN, owners):
        assert owner is not None
        found += [(ids[: int(mask.sum())].tolist(), int(o) // 10)
                  for ids, mask, o in zip(batch["input_ids"], batch["attention_mask"], owner, strict=True)]  # fmt: skip
        widths.append(batch["input_ids"].shape[1])
    lengths = [len(ids) for ids, _ in found]
    assert lengths == sorted(lengths) and widths == [max(lengths[i : i + 3]) for i in (0, 3, 6)]
    # every record once, with its own owner
    assert sorted(i for _, i in found) == sorted(DRAWN)
    assert all(RECORDS[i]["input_ids"] == ids for ids, i in found)


def as_drawn(trainer, size: int):
    """Micro-batches of `size` in reverse order of their numbers, whatever their lengths."""

    def micro_batches(indices, owners):
        order = sorted((int(i) for i in indices), reverse=True)
        for start in range(0, len(order), size):
            part = order[start : start + size]
            yield collate([RECORDS[i] for i in part]), None if owners is None else owners[part]

    trainer._micro_batches = micro_batches


@pytest.mark.parametrize("engine", ["functorch", "hooks"])
def test_the_update_does_not_depend_on_the_cut(engine):
    """Micro-batches of one, of three and all together, sorted by length; and of three that are not sorted."""
    updates = []
    for size, by_length in ((1, True), (3, True), (16, True), (3, False)):
        trainer = make_trainer(
            RECORDS, per_device_train_batch_size=size, expected_batch_size=8, grad_sample_mode=engine,
            shared_noise_multiplier=0.0, expert_noise_multiplier=0.0, shared_max_grad_norm=5.0,
            expert_max_grad_norm=0.05, learning_rate=1.0, seed=1,
        )  # fmt: skip
        perturb_adapters(trainer.model)
        if not by_length:
            as_drawn(trainer, size)
        updates.append(run(fix_draws(trainer, [(DRAWN, DRAWN)]))[0])
    for stream, first in updates[0].items():
        scale = max(float(value.abs().max()) for value in first.values())
        assert scale > 1e-4
        for other in updates[1:]:
            for name, value in first.items():
                assert float((other[stream][name] - value).abs().max()) <= 2e-5 * scale, (stream, name)


@pytest.mark.parametrize(
    ("engine", "cut"), [("functorch", {"shared", "expert"}), ("hooks", {"expert"}), ("reference", set())]
)
def test_little_memory_changes_no_update(engine, cut, monkeypatch):
    """`cut`: the streams in which the engine forms gradients of several records at once."""
    updates, largest = [], []
    for free in (2**40, 1):
        monkeypatch.setattr(batches, "free_memory", lambda _device, free=free: free)
        trainer = make_trainer(
            RECORDS, per_device_train_batch_size=4, expected_batch_size=8, grad_sample_mode=engine,
            shared_noise_multiplier=0.0, expert_noise_multiplier=0.0, shared_max_grad_norm=5.0,
            expert_max_grad_norm=0.05, learning_rate=1.0, seed=1,
        )  # fmt: skip
        perturb_adapters(trainer.model)
        sizes: dict[str, int] = {}

        def look(stream, batch, owner, own=trainer.record_gradients, sizes=sizes):
            sizes[stream.name] = max(sizes.get(stream.name, 0), len(batch["input_ids"]))
            return own(stream, batch, owner)

        trainer.record_gradients = look
        updates.append(run(fix_draws(trainer, [(DRAWN, DRAWN)]))[0])
        largest.append(sizes)
    wide, single = {"shared": 4, "expert": 4}, {"shared": 1, "expert": 1}
    assert largest[0] == (single if engine == "reference" else wide)
    assert largest[1] == {**largest[0], **{name: 1 for name in cut}}
    for stream, first in updates[0].items():
        scale = max(float(value.abs().max()) for value in first.values())
        assert scale > 1e-4
        for name, value in first.items():
            assert float((updates[1][stream][name] - value).abs().max()) <= 2e-5 * scale, (stream, name)
