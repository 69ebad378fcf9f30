"""Several processes train one model: every collective of the package, and what they must agree on.

Each process draws the coins of its own records and sums their clipped gradients. The sums are added up once a stream
on the main process, which alone adds the noise and sends the noisy gradient to all. So no process ever holds a sum of
all records without noise but the main one, and all hold the same adapters to the last bit. `DistributedDataParallel`
is not used: its reducer averages gradients behind its own `forward`, which per-sample engines do not call.

With one process every function here does nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from raptor_hf.errors import PrivacyConfigError, RaptorError
from raptor_hf.moe import owner_map
from raptor_hf.privacy.mechanism import ClippedSum, UnclippedSum

__all__ = [
    "ProcessError",
    "broadcast",
    "check_same",
    "digest",
    "from_main",
    "is_main",
    "one_copy",
    "reduce_to_main",
    "sharded_owner_map",
    "sum_over_processes",
    "together",
    "wait",
]

T = TypeVar("T")


class ProcessError(RaptorError):
    """Another process of the run failed, or the processes no longer agree."""


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    """True in the process that adds the noise and writes the files."""
    return _world() == 1 or dist.get_rank() == 0


def _device() -> torch.device:
    """Where the backend's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def wait() -> None:
    """Until every process is here."""
    if _world() > 1:
        dist.barrier()


@contextmanager
def together(what: str) -> Iterator[None]:
    """Run the block in every process; when one fails, all stop here instead of waiting for it for ever.

    The block must hold no collective. The other processes learn which process failed, and nothing of its message:
    that could quote a record.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if _world() > 1:
        failed = torch.zeros(_world(), dtype=torch.int32, device=_device())
        failed[dist.get_rank()] = failure is not None
        dist.all_reduce(failed)
        ranks = failed.nonzero().flatten().tolist()
        if failure is None and ranks:
            raise ProcessError(
                f"Process {', '.join(map(str, ranks))} of {_world()} failed in {what}",
                "The sum would lack its records, so this process stops too, before anything is released",
                "Read the message of that process",
            )
    if failure is not None:
        raise failure


def from_main(compute: Callable[[], T], what: str) -> T:
    """The value of `compute()` in the main process, in every process."""
    if _world() == 1:
        return compute()
    box: list[Any] = [None]
    with together(what):
        if is_main():
            box[0] = compute()
    dist.broadcast_object_list(box, src=0)
    return box[0]


def sum_over_processes(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all processes, in every process."""
    if _world() == 1:
        return value
    moved = value.to(_device())
    dist.all_reduce(moved)
    return moved.to(value.device)


def reduce_to_main(clipped: ClippedSum | UnclippedSum) -> None:
    """Add the processes' clipped sums up in the main process. What the others hold afterwards is not to be used."""
    if _world() == 1:
        return
    # a process without records keeps float32 where others have summed in float64: all take the widest
    widest = torch.tensor([max(value.element_size() for value in clipped.sums.values())], device=_device())
    dist.all_reduce(widest, op=dist.ReduceOp.MAX)
    dtype = torch.float64 if int(widest) == 8 else torch.float32

    def add_up(value: torch.Tensor) -> torch.Tensor:
        value = value.to(dtype).contiguous()
        dist.reduce(value, dst=0)
        return value

    clipped.reduce(add_up)


def broadcast(tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite the tensors by those of the main process."""
    if _world() > 1:
        with torch.no_grad():
            for value in tensors.values():
                dist.broadcast(value.data, src=0)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, shapes and every bit."""
    found = hashlib.blake2b(digest_size=16)
    for name, value in sorted(tensors.items()):
        found.update(f"{name} {tuple(value.shape)} {value.dtype};".encode())
        found.update(value.detach().flatten().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class _Share:
    """Every `step`-th record of a data set, from `first`."""

    def __init__(self, records: Any, first: int, step: int):
        self._records, self._indices = records, range(first, len(records), step)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._records[self._indices[index]]


def sharded_owner_map(model: nn.Module, records: Any, layer: int, **settings: Any) -> torch.Tensor:
    """`owner_map` with the work divided; a record's owner does not depend on which process computes it."""
    rank, world = (dist.get_rank(), _world()) if _world() > 1 else (0, 1)
    owners = torch.zeros(len(records), dtype=torch.long)
    with together("computing the owner map"):
        share: Any = records if world == 1 else _Share(records, rank, world)
        owners[rank::world] = owner_map(model, share, layer, **settings)
    return sum_over_processes(owners)


def check_same(what: str, value: Callable[[], str]) -> None:
    """Stop every process when `value()` is not the same in all of them."""
    if _world() == 1:
        return
    found: list[Any] = [None] * _world()
    dist.all_gather_object(found, value())
    other = [rank for rank, one in enumerate(found) if one != found[0]]
    if other:
        raise ProcessError(
            f"{what} of process {', '.join(map(str, other))} differ from those of process 0",
            "The processes no longer train one model",
            "Start every process with the same script, model, data and arguments, on devices of one kind",
        )


def one_copy(accelerator: Any) -> None:
    """Make `accelerator.prepare` leave the model as it is; refuse ways of running that shard or wrap it.

    With several processes it would wrap it in `DistributedDataParallel`, whose `forward` is never called here.
    """
    mode = str(accelerator.distributed_type).rpartition(".")[2]
    if mode not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise PrivacyConfigError(
            f"Training was started by accelerate in the mode `{mode}`",
            "Its processes hold parts of the model, or gradients pass through a wrapper that knows no records",
            "Launch plain data-parallel processes (`MULTI_GPU` or `MULTI_CPU`), each with a copy of the model",
        )
    if _world() > 1:
        accelerator.prepare_model = partial(type(accelerator).prepare_model, accelerator, evaluation_mode=True)
