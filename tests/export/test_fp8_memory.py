"""A conversion holds a few rows of blocks for each thread, whatever the size of the folder."""

import json
import sys
from pathlib import Path

from ds_finetune.export.convert import num_workers
from tests.running import start


def test_memory_does_not_grow_with_the_folder(tmp_path: Path) -> None:
    """60 MB of FP8, whose largest tensor is 3 MB: converted to bf16 and back, with the base."""
    # Freed blocks return to the system at once, so that the resident set is what is held.
    done = start(
        [sys.executable, "tests/export/fp8_memory_worker.py", str(tmp_path), "4"],
        {"MALLOC_MMAP_THRESHOLD_": "65536"},
        fork=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    limit = num_workers() * 10 * 2**20
    assert found["bytes"] > 60 * 10**6
    assert found["to_bf16"][0] < limit
    assert found["to_fp8"][0] < limit
