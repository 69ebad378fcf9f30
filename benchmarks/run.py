"""All benchmarks of time and memory: tables on the screen, CSV files and figures in a directory.

    python benchmarks/run.py --output out                   # step.py and growth.py, on the CPU
    python benchmarks/run.py --output out --device cuda     # and table11.py

Each is a command of its own with more options.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import growth
import step
import table11


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the smallest models only, to try the code")
    args = parser.parse_args(arguments)
    common = ["--output", str(args.output), "--device", args.device, "--repeats", str(args.repeats)]
    step.main([*common, *(["--jobs", "smoke-switch", "smoke-olmoe"] if args.quick else [])])
    growth.main([*common, *(["--axes", "batch", "experts", "--points", "2", "--width", "16"] if args.quick else [])])
    if args.device.startswith("cuda") or args.quick:
        table11.main(
            [
                *common,
                *(["--small", "--records", "6", "--tokens", "8", "--rank", "4", "--start", "2"] if args.quick else []),
            ]
        )


if __name__ == "__main__":
    main()
