"""Parameters that no loss reaches stay as they are under weight decay, in checkpoints and in what is exported."""

import json
from pathlib import Path

from tests.running import start, torchrun


def test_parameters_without_a_gradient_do_not_shrink(tmp_path: Path) -> None:
    """The indexer of DeepSeek-V3.2, at stages whose weights are whole, in flat parts and partitioned."""
    done = start(torchrun(str(Path(__file__).with_name("frozen_worker.py")), str(tmp_path)))
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert [*found] == ["0-bf16", "2-fp32", "3-bf16"]
    for name, case in found.items():
        assert [
            note for note in case["notes"] if note.startswith("frozen: 10 parameters that the loss does not reach")
        ], name
        assert case["changed"], name
        assert not [changed for changed in case["changed"] if ".indexer." in changed], name
        assert case["resumed"], name
