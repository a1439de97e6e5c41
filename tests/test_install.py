"""The installation script keeps a torch that is there: which environment it makes, and what it tells pip."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PYTHON = """#!/bin/sh
case "$*" in
*"import sys, torch"*) exit "$NO_TORCH" ;;
*"print(torch.__version__)"*) echo 2.12.1+cu126 ;;
*"sys.exit(sys.prefix"*) exit "$NOT_IN_ENVIRONMENT" ;;
*"print(sys.prefix)"*) echo "$PWD" ;;
"-m venv"*) echo "$*" >> log; mkdir -p .venv/bin; touch .venv/bin/activate ;;
"-m pip"*" -c "*) echo "pip $(grep ^torch== "$6")" >> log ;;
*) exit 9 ;;
esac
"""


@pytest.mark.parametrize(
    ("has_torch", "in_environment", "made", "pinned"),
    [
        (False, False, ["-m venv .venv"], "torch==2.13.0"),
        (False, True, ["-m venv .venv"], "torch==2.13.0"),
        (True, False, ["-m venv --system-site-packages .venv"], "torch==2.12.1+cu126"),
        (True, True, [], "torch==2.12.1+cu126"),
    ],
)
def test_a_torch_that_is_there_is_used(
    tmp_path: Path, has_torch: bool, in_environment: bool, made: list[str], pinned: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NO_TORCH": str(int(not has_torch))}
    environ |= {"NOT_IN_ENVIRONMENT": str(int(not in_environment))}
    command = ["bash", "-euo", "pipefail", "-c", f'. {ROOT}/scripts/install.sh ""; . {ROOT}/scripts/install.sh ""']
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The second time everything is there.
    assert (tmp_path / "log").read_text().splitlines() == [*made, *[f"pip {pinned}"] * 3]
    assert ("using torch 2.12.1+cu126, which is there" in done.stdout) == has_torch


@pytest.mark.parametrize(
    ("version", "is_usable"), [("2.13.0+cu130", True), ("2.11.0", True), ("2.10.9", False), ("1.13.1", False)]
)
def test_a_torch_that_is_too_old_is_not_used(tmp_path: Path, version: str, is_usable: bool) -> None:
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}")
    (line,) = [
        line for line in (ROOT / "scripts" / "install.sh").read_text().splitlines() if line.startswith("usable=")
    ]
    code = line.removeprefix("usable='").removesuffix("'")
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, check=False)
    assert (done.returncode == 0) == is_usable
