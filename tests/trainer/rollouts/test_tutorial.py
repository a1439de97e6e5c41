"""The tutorial on rewards: its commands, cut down to seconds."""

import json
import re
from pathlib import Path

import pytest

from ds_finetune.cli.demo import write_demo
from tests.conftest import ROOT
from tests.running import start


@pytest.mark.slow
def test_the_tutorial_runs_as_it_is_written(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tutorial" / "teach-by-rewards.md").read_text()
    commands = re.findall(r"^ds-finetune (.*?)(?: +#.*)?$", text.split("```bash\n")[1].split("```")[0], re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["demo", "train", "rewards", "train"]
    (run_file,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (reward,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    write_demo(tmp_path / "demo", ranks=1, days=400)
    (tmp_path / "score.py").write_text(reward)
    held_out = (tmp_path / "demo" / "eval.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "demo" / "eval.jsonl").write_text("".join(held_out[:8]))
    smaller = {"150 steps": "2 steps", "30 steps": "1 steps", "10 steps": "1 steps", "_step: 32": "_step: 4"}
    for old, new in (smaller | {"micro_batch_size: 64": "micro_batch_size: 8"}).items():
        assert old in run_file
        run_file = run_file.replace(old, new)
    run_file = run_file.replace("[exact_match]", f"[exact_match, {tmp_path}/score.py:reward]")
    (tmp_path / "rewards.yaml").write_text(re.sub(r"(?<= )(demo|runs)/", rf"{tmp_path}/\1/", run_file))
    (tmp_path / "demo" / "run.yaml").write_text(
        (tmp_path / "demo" / "run.yaml").read_text().replace("prompts: 40", "prompts: 2")
    )
    for words in (
        ["train", f"{tmp_path}/demo/run.yaml", "train.for=3 steps", f"output_dir={tmp_path}/runs/start"],
        ["rewards", f"{tmp_path}/rewards.yaml"],
        ["train", f"{tmp_path}/rewards.yaml"],
    ):
        done = start(["ds-finetune", *words])
        assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "runs/rewards/metrics.jsonl").read_text().splitlines()]
    assert all({"rollout/reward", "eval/reward", "rollout/part/reward"} <= record.keys() for record in records)
    assert "Sampled answers and their rewards" in (tmp_path / "runs/rewards/report.html").read_text()
