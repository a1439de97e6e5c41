"""Saving takes little memory, whatever the size of the state."""

import json
import sys
from pathlib import Path

from tests.running import start

BUFFER = 16 * 2**20


def test_a_save_holds_two_tensors_and_a_buffer_beyond_the_copy(tmp_path: Path) -> None:
    done = start([sys.executable, str(Path(__file__).with_name("memory_worker.py")), str(tmp_path)], fork=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("FOUND")).removeprefix("FOUND")
    )
    bound = 2 * found["largest"] + BUFFER
    assert found["bytes"] > 20 * bound
    assert found["False"]["extra"] <= bound, found
    assert found["True"]["extra"] <= found["bytes"] + bound, found
