"""The script for Slurm of the how-to page, and the Dockerfile for training. tests/cluster/test_slurm.py and test_pods.py
run what the page says.
"""

import io
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.cluster.training import documented
from tests.conftest import ROOT

DOCKERFILE = ROOT / "docs" / "Dockerfile.train"


def _check(script: str, folder: Path) -> None:
    """What bash and shellcheck say of a script."""
    (folder / "job.sh").write_text(script)
    assert subprocess.run(["bash", "-n", "job.sh"], cwd=folder, capture_output=True, check=False).returncode == 0
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    said = subprocess.run(
        ["shellcheck", "--severity=warning", "job.sh"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stdout


def test_script_of_slurm(tmp_path: Path) -> None:
    _check(documented("Slurm"), tmp_path)


def test_container_file() -> None:
    parse = pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is not installed")
    parser = parse.DockerfileParser(fileobj=io.BytesIO(DOCKERFILE.read_bytes()))
    steps = [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]
    assert steps[0][0] == "FROM"
    assert {kind for kind, _ in steps} <= {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}
    assert parser.baseimage.startswith("nvidia/cuda:")
    copied = [source for kind, value in steps if kind == "COPY" for source in value.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extras,) = re.findall(r'-e "\.\[([^]]*)\]"', DOCKERFILE.read_text())
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])


def test_the_shells_of_the_container_file(tmp_path: Path) -> None:
    """Each RUN as a script of its own."""
    joined = DOCKERFILE.read_text().replace("\\\n", " ")
    _check("#!/bin/sh\nset -e\n" + "\n".join(re.findall(r"^RUN (.*)$", joined, re.MULTILINE)) + "\n", tmp_path)
