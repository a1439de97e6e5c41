"""`python -m bench.gpu SLICE`: run a slice of the GPU programme, or print the tables of all."""

import argparse
import sys
from pathlib import Path

from bench.gpu.table import tables

from bench.gpu.machine import device
from bench.gpu.slices import SLICES
from bench.gpu.supervise import run_part, run_slice


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 where a record has failed or, at full size, was skipped, and 2 at full size without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument("slice", choices=[*SLICES, "all", "table"])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder of the JSON files")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: a rehearsal")
    parser.add_argument("--part", help="measure only this part, in this process")
    given = parser.parse_args(arguments)
    if given.slice == "table":
        sys.stdout.write(tables(given.out, list(SLICES)))
        return 0
    if given.part:
        part = next(part for part in SLICES[given.slice].parts if part.name == given.part)
        run_part(given.slice, part, given.out, size=given.size)
        return 0
    if given.size == "full" and device().type == "cpu":
        sys.stderr.write("no GPU that torch can use, or DS_ACCELERATOR is cpu: only --size tiny runs on a CPU\n")
        return 2
    chosen = list(SLICES) if given.slice == "all" else [given.slice]
    # Each slice runs, whatever came before it.
    incomplete = [name for name in chosen if not run_slice(name, given.out, size=given.size)]
    for name in incomplete:
        sys.stderr.write(f"{name}: not all was measured and within its limits:\n{tables(given.out, [name])}\n")
    return 1 if incomplete else 0


if __name__ == "__main__":
    raise SystemExit(main())
