"""A tiny task in a folder, and how tests start the program on it."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_finetune import read_config, train
from ds_finetune.cli.demo import MODEL, write_demo
from tests.conftest import ROOT
from tests.forks import PYTHON_PATH, Forkserver

ROWS = 32
EAGER = {"TORCH_COMPILE_DISABLE": "1"}
"""Runs functions of torch.compile as they are written: Muon's cost each rank seven seconds to compile."""
SECONDS = 300
BUILD_SECONDS = 900
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TINY |= {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
}


def tiny_task(folder: Path, **sections: Any) -> Path:
    """The embedded example cut down to seconds: two layers, 32 rows, three steps in fp32; returns the run file."""
    for name in ("run.yaml", "train.jsonl", "eval.jsonl", "model/config.json"):
        (folder / name).unlink(missing_ok=True)
    run_file = write_demo(folder)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL | TINY))
    for name in ("train.jsonl", "eval.jsonl"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:ROWS]))
    tree = yaml.safe_load(run_file.read_text())
    tree["data"] |= {"packing": False, "cache_dir": str(folder / "cache")}
    tree["train"] = {
        "for": "3 steps",
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "max_seq_len": 64,
        "precision": "fp32",
        "activation_checkpointing": "none",
    }
    tree["eval"] = {"keep_best": False}
    tree["deepspeed"] = {"zero_optimization": {"stage": 2}}
    tree["log"] = {"trackers": [], "seconds": 0}
    tree["export"] = {"verify": False}
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) and name != "deepspeed" else values
    run_file.write_text(yaml.safe_dump({name: value for name, value in tree.items() if value is not None}))
    return run_file


def resume_on_two_ranks(run_file: Path, *overrides: str, printed: Path) -> None:
    """Train two steps on one rank, and the others on two with ZeRO-3 and `overrides`, whose output goes into
    `printed`.
    """
    train(read_config(run_file, ["train.for=2 steps", "export.at_end=false"]))
    done = start(torchrun("ds_finetune/train.py", str(run_file), "deepspeed.zero_optimization.stage=3", *overrides))
    assert done.returncode == 0, done.stdout + done.stderr
    printed.write_text(done.stdout)


def start(
    command: Sequence[str], environ: Mapping[str, str] | None = None, *, timeout: float = SECONDS, fork: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository on the CPU accelerator and return what it printed.

    Ranks that torchrun would start and Python programs are forked from a process that has imported already;
    `fork=False` starts a new one.
    """
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    settings = {
        "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": PYTHON_PATH,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    where = clean | settings | dict(environ or {})
    skip_without(command[0])
    program, ranks = as_fork(command)
    if fork and program and where["DS_ACCELERATOR"] == "cpu" and where["PYTHONPATH"] == PYTHON_PATH:
        return Forkserver.get().run(program, where, ranks=ranks, timeout=timeout)
    return subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True, timeout=timeout, check=False)


def skip_without(launcher: str) -> None:
    """Skip a test whose launcher is a program that is not installed."""
    if launcher == "mpirun" and not shutil.which(launcher):
        pytest.skip(f"{launcher} is not installed (Debian: openmpi-bin)")


def as_fork(command: Sequence[str]) -> tuple[list[str], int]:
    """File (or `-m`, module) and arguments that a command runs in Python, and the ranks of it; no program where it is
    something else.
    """
    words = list(command)
    if words[: len(_TORCHRUN)] == _TORCHRUN:
        return words[len(_TORCHRUN) + 1 :], int(words[len(_TORCHRUN)].removeprefix("--nproc-per-node="))
    if words[0] == "ds-finetune":
        return ["-m", "ds_finetune", *words[1:]], 0
    is_python = words[0] == sys.executable and (
        words[1].endswith(".py") or words[1:3] in (["-m", "ds_finetune"], ["-m", "bench.gpu"])
    )
    return (words[1:] if is_python else []), 0


def build_ops(*names: str) -> None:
    """Compile DeepSpeed's operators, which takes minutes the first time, outside the time limit of a run."""
    command = [sys.executable, str(ROOT / "tests" / "build_worker.py"), *names]
    done = start(command, {"DS_ACCELERATOR": "cpu"}, timeout=BUILD_SECONDS)
    assert done.returncode == 0, done.stderr


def torchrun(*arguments: str, ranks: int = 2) -> list[str]:
    """The command that starts `ranks` ranks of a file with torchrun."""
    return [*_TORCHRUN, f"--nproc-per-node={ranks}", *arguments]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a full disk, a write is cut at this size and the next one fails.

    No module that is imported meanwhile, here or in a process that is started, leaves its first bytes as its .pyc file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
