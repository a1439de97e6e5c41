"""A run in a process whose address space may grow by so many MiB: `limited_worker.py MIB RUN.yaml [KEY=VALUE...]`."""

import resource
import sys
from pathlib import Path

from ds_finetune.cli.main import run_and_exit
from ds_finetune.config.units import MIB


def main() -> None:
    """Set the limit that `ulimit -v` sets, and train."""
    status = Path("/proc/self/status").read_text()
    size = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[1]) * MIB,) * 2)
    run_and_exit(["train", *sys.argv[2:]])


if __name__ == "__main__":
    main()
