"""`python -m bench.gpu SLICE...`: run slices of the GPU programme."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from bench.gpu.machine import device
from bench.gpu.results import ResultFile
from bench.gpu.slices import SLICES
from bench.gpu.supervise import quiet, run_part, run_slice


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 where a record has failed or, at full size, was skipped, and 2 at full size without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "slices", nargs="+", choices=[*SLICES, "all"], metavar="SLICE", help=", ".join([*SLICES, "all"])
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder of the JSON files")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: a rehearsal")
    parser.add_argument("--part", help="measure only this part of the slice, in this process")
    given = parser.parse_args(arguments)
    chosen = list(SLICES) if "all" in given.slices else given.slices
    if given.part:
        part = next(part for part in SLICES[chosen[0]] if part.name == given.part)
        with quiet(chosen[0], given.out) as lines:
            run_part(chosen[0], part, given.out, size=given.size, lines=lines)
        return 0
    if given.size == "full" and device().type == "cpu":
        sys.stderr.write("no GPU that torch can use, or DS_ACCELERATOR is cpu: only --size tiny runs on a CPU\n")
        return 2
    # Each slice runs, whatever came before it.
    incomplete = [name for name in chosen if not run_slice(name, given.out, size=given.size)]
    for name in chosen:
        records = ResultFile(given.out / f"{name}.json").read()["records"]
        counts = Counter(record["result"] for record in records)
        numbers = ", ".join(f"{counts[result]} {result}" for result in ("ok", "failed", "skipped"))
        sys.stdout.write(f"{name}: {numbers}\n")
    return 1 if incomplete else 0


if __name__ == "__main__":
    raise SystemExit(main())
