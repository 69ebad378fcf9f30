"""A cycle at the size of the paper's Table 11: seconds, peak memory, and the largest micro-batch that fits.

    python benchmarks/table11.py --device cuda --output out

Switch-base-8 with random weights (encoder, 12 blocks of width 768, E = 8), B = 1000 records of T = 128 tokens, rank
128, in fp32 and under bf16 autocast; `raptor`, and `monolithic_lora` at rank 32. A cycle is everything: both streams'
micro-batches, clipped sums, noise, and AdamW. For every engine the micro-batch is doubled until memory runs out or it
holds the whole batch; a row is the largest that ran. The paper, on a B200 with `functorch`: 4.51 s and 112.16 GB
(raptor), 4.07 s and 130.74 GB (monolithic_lora, 14.16 M trainables).
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import meter
import torch
from jobs import JOBS, Records, attach, switch
from variants import cycle

PAPER = {"raptor": (4.51, 112.16), "monolithic_lora": (4.07, 130.74)}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
ENGINES = ("functorch", "hooks")


def fits(run: Callable[[], None]) -> bool:
    """Whether `run` ends without running out of the GPU's memory."""
    try:
        run()
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return True


def largest_micro_batch(make: Callable[[int], Callable[[], None]], records: int, start: int) -> int:
    """The largest of start, 2 start, 4 start, .. (at most `records`) whose cycle runs; 0: none does."""
    largest, size = 0, min(start, records)
    while size > largest and fits(make(size)):
        largest, size = size, min(2 * size, records)
    return largest


def rows_of(base, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    records = Records.draw(base, args.records, args.tokens, device)
    rows = []
    for method, rank in (("raptor", args.rank), ("monolithic_lora", max(1, args.rank // 4))):
        monolithic = method == "monolithic_lora"
        model, streams = attach(base, rank, monolithic=monolithic)
        if monolithic:
            streams = {"joint": {**streams["shared"], **streams["expert"]}}
        trainables = sum(p.numel() for group in streams.values() for p in group.values())
        for precision in args.precisions:
            for engine in (*ENGINES, None):
                make = partial(
                    _cycle, model, streams, records, engine, owners=not monolithic, autocast=PRECISIONS[precision]
                )
                size = largest_micro_batch(make, len(records), args.start)
                row: dict[str, Any] = {
                    "method": method, "trainables": trainables, "precision": precision,
                    "engine": engine or "same passes", "micro-batch": size, "s": "", "peak GB": "",
                    "paper s": PAPER[method][0], "paper GB": PAPER[method][1],
                }  # fmt: skip
                if size:
                    found = meter.interleaved({"cycle": make(size)}, args.repeats, device, memory=False)
                    row["s"] = round(sorted(found["cycle"]["seconds"])[args.repeats // 2], 3)
                    peak = meter.peak(found, "cycle") * 2**20 / 1e9
                    row["peak GB"] = "" if math.isnan(peak) else round(peak, 2)  # a CPU's is not known from timed calls
                rows.append(row)
        del model, streams
    return rows


def _cycle(model, streams, records, engine, micro_batch: int, **options) -> Callable[[], None]:
    return cycle(model, streams, records, micro_batch, engine, **options)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    meter.common_arguments(parser)
    parser.set_defaults(device="cuda", repeats=3)
    parser.add_argument("--records", type=int, default=1000, help="B")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--start", type=int, default=8, help="the smallest micro-batch")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--small", action="store_true", help="a model of width 16 instead, to try the code")
    args = parser.parse_args(arguments)
    device = meter.prepare(args.device)
    base = JOBS["smoke-switch"].make() if args.small else switch(768, blocks=12, vocabulary=32128)
    rows = rows_of(base.to(device), args, device)
    meter.show(rows, f"One cycle, B={args.records}, T={args.tokens}, r={args.rank}")
    if args.output:
        meter.write(rows, args.output / "table11.csv")


if __name__ == "__main__":
    main()
