"""Times the start of a run: from a new process to the end of the first optimizer step.

    python bench/first_step.py MODEL ROWS.jsonl --peer-python PYTHON [--rounds 3] [--tokens 512]

MODEL is a folder with weights and tokenizer, ROWS.jsonl has `prompt` and `completion` in each line, and PYTHON is that
of an environment with only transformers, accelerate, DeepSpeed and datasets. Candidates are ds_finetune and
transformers' Trainer with DeepSpeed, both at ZeRO-2 in bf16 in one process, with the same packed rows.
The tokens are cached for both: ds_finetune finds its cache, the Trainer loads a folder of `save_to_disk`. Candidates
take turns in fresh processes. Timed are the imports, the cached tokens, the weights, DeepSpeed's start and one step;
printed are seconds and CPU seconds of all processes of a start, by round, and the ratio of their medians. The first
round of each, in which caches of the disk are cold, is not counted.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PEER = Path(__file__).with_name("first_step_peer.py")
ROWS = 8
"""Packed rows of the step."""


def main() -> None:
    """Prepare both candidates, let them take turns, and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        commands = prepare(asked, Path(name))
        found: dict[str, list[tuple[float, float]]] = {candidate: [] for candidate in commands}
        for turn in range(asked.rounds + 1):
            for candidate, (command, mark) in commands.items():
                took = first_step([word.format(turn=turn) for word in command], mark)
                found[candidate] += [took] if turn else []
    for index, what in enumerate(("seconds", "CPU seconds")):
        medians = [statistics.median(each[index] for each in rounds) for rounds in found.values()]
        for candidate, rounds in found.items():
            say(f"{candidate}, {what}: {'  '.join(f'{each[index]:.2f}' for each in rounds)}")
        say(f"ratio of medians of {what}: {medians[0] / medians[1]:.2f}")


def prepare(asked: argparse.Namespace, folder: Path) -> dict[str, tuple[list[str], str]]:
    """The command of each candidate and what it prints after the first step; their tokens are cached."""
    data = {"train": str(asked.rows), "template": "plain", "cache_dir": str(folder / "cache")}
    train = {"for": "1 steps", "global_batch_size": ROWS, "micro_batch_size": ROWS, "max_seq_len": asked.tokens}
    train["activation_checkpointing"] = "none"
    tree = {"model": str(asked.model), "data": data, "train": train, "deepspeed": {"zero_optimization": {"stage": 2}}}
    tree |= {"checkpoint": {"every": "never"}, "log": {"trackers": []}, "export": {"at_end": False}}
    run_file = folder / "run.yaml"
    run_file.write_text(json.dumps(tree | {"output_dir": str(folder / "run")}))
    ours = [sys.executable, str(ROOT / "ds_finetune" / "train.py"), str(run_file)]
    ours.append(f"output_dir={folder}/run{{turn}}")
    peer = [asked.peer_python, str(PEER), str(asked.model), str(folder / "rows"), str(ROWS), str(folder / "peer")]
    subprocess.run([sys.executable, *peer[1:], "--save", str(run_file)], check=True, cwd=ROOT, env=environ())
    return {"ds_finetune": (ours, "step 1/1"), "transformers' Trainer": (peer, "first step done")}


def environ() -> dict[str, str]:
    """The environment of a candidate."""
    return os.environ | {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def first_step(command: list[str], mark: str) -> tuple[float, float]:
    """Seconds and CPU seconds from the start of `command` to the line with `mark`; it is killed then."""
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environ()
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if mark in line:
                seconds, cpu = time.perf_counter() - began, cpu_seconds(process.pid)
                os.killpg(process.pid, signal.SIGKILL)
                return seconds, cpu
    raise SystemExit("".join(lines[-40:]))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, of those it has waited for, and of its living children."""
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    times = [process.cpu_times() for process in tree]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
