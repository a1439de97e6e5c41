"""Installation: which torch is kept, what pip is told, which Debian packages are installed, and on what tests run."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT

PYTHON = """#!/bin/sh
case "$*" in
*"import re, torch"*) exit "$NO_TORCH" ;;
*"print(version("*) echo 2.12.1+cu126 ;;
*"sys.exit(sys.version_info"*) exit 0 ;;
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


def _wheel(folder: Path, name: str, version: str, code: str = "") -> None:
    """A wheel with one module, and nothing but its version in its metadata."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (files | {f"{info}/RECORD": "".join(f"{path},,\n" for path in files)}).items():
            wheel.writestr(path, text)


BACKEND = """
import zipfile
def build_editable(folder, *_):
    info = "ds_finetune-0.1.0.dist-info"
    with zipfile.ZipFile(f"{folder}/ds_finetune-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: ds_finetune\\nVersion: 0.1.0\\nRequires-Dist: torch>=2.11")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return "ds_finetune-0.1.0-py3-none-any.whl"
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "ds_finetune"
version = "0.1.0"
dependencies = ["torch>=2.11,<2.14"]
"""


def _environment(folder: Path, wheels: Path) -> dict[str, str]:
    """Variables with which `python3` is that of a new environment, whose pip knows nothing but `wheels`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).glob("pip*"):
        (site / path.name).symlink_to(path)
    variables = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    return variables | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}


def test_a_torch_whose_metadata_has_another_version_is_kept(tmp_path: Path) -> None:
    """PyPI's builds for CUDA say 2.13.0+cu130 when they are imported, and 2.13.0 to pip."""
    for name, version in (("setuptools", "80.0"), ("wheel", "0.45"), ("ninja", "1.13.2"), ("torch", "2.13.0")):
        _wheel(tmp_path, name, version, "__version__ = '2.13.0+cu130'" if name == "torch" else "")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "constraints.txt").write_text("torch==2.12.0\nninja==1.13.2\n")
    environ = _environment(tmp_path / "environment", tmp_path)
    for command in (
        "python3 -m pip install -q torch",
        f'. {ROOT}/scripts/install.sh ""; python3 -m pip list',
    ):
        script = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(script, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "using torch 2.13.0, which is there" in done.stdout
    installed = dict(line.split()[:2] for line in done.stdout.splitlines() if len(line.split()) > 1)
    assert (installed["torch"], installed["ds_finetune"]) == ("2.13.0", "0.1.0")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.13.0+cu130", ""),
        ("2.11.0", ""),
        ("2.10.9", "torch 2.10.9 is here; tested are 2.11 to below 2.14: installing one"),
        ("2.14.1", "torch 2.14.1 is here; tested are 2.11 to below 2.14: installing one"),
    ],
)
def test_a_torch_that_was_not_tested_is_not_used(tmp_path: Path, version: str, said: str) -> None:
    _wheel(tmp_path, "torch", version)
    (wheel,) = tmp_path.glob("*.whl")
    code = (ROOT / "scripts" / "install.sh").read_text().partition("usable='")[2].partition("'\n")[0]
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(wheel)}, text=True, stderr=subprocess.PIPE, check=False
    )
    assert (done.stderr.strip(), done.returncode == 0) == (said, not said)


def _tools(folder: Path, **scripts: str) -> dict[str, str]:
    """Variables with which no program is found but these shell scripts, bash and python3."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
        (folder / name).chmod(0o755)
    for name in {"bash", "python3", "dirname"} - scripts.keys():
        (folder / name).symlink_to(str(shutil.which(name)))
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("option", "has_compiler", "code"), [("", True, 0), ("", False, 2), ("--system-packages", False, 0)]
)
def test_system_packages_are_named_and_installed_where_that_is_asked_for(
    tmp_path: Path, option: str, has_compiler: bool, code: int
) -> None:
    log = tmp_path / "log"
    log.touch()
    environ = _tools(
        tmp_path / "bin", **{"apt-get": f'echo "$@" >> {log}', **({"g++": "exit 0"} if has_compiler else {})}
    )
    script = ["bash", "-euo", "pipefail", "-c", f'. {ROOT}/scripts/system_packages.sh "{option}"']
    done = subprocess.run(script, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    if option:
        assert done.stdout.startswith("installing Debian packages: g++ ")
        assert " openmpi-bin " in done.stdout
        assert log.read_text().startswith("update -qq\ninstall -y -qq g++ ")
        return
    assert not log.read_text()
    assert ("install g++ (Debian)" in done.stderr) == (not has_compiler)
    assert ("  openmpi-bin                          launches by mpirun\n" in done.stdout) == has_compiler


@pytest.mark.parametrize(("wanted", "expected"), [(None, "cpu"), ("cuda", "cuda")])
@pytest.mark.parametrize("script", ["test.sh", "test_all.sh"])
def test_the_suite_runs_on_cpus_beside_gpus(tmp_path: Path, script: str, wanted: str | None, expected: str) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / script).write_bytes((ROOT / "scripts" / script).read_bytes())
    for name in ("install.sh", "system_packages.sh"):
        (tmp_path / "scripts" / name).touch()
    python = 'case "$*" in *is_available*) echo cuda ;; *pytest*|*slow_slices*) echo "$DS_ACCELERATOR" > log ;; esac'
    environ = _tools(tmp_path / "bin", python=python, **{name: "exit 0" for name in ("ruff", "mypy", "lint-imports")})
    environ |= {} if wanted is None else {"DS_ACCELERATOR": wanted}
    subprocess.run(["bash", tmp_path / "scripts" / script], env=environ, capture_output=True, check=True)
    assert (tmp_path / "log").read_text() == f"{expected}\n"


@pytest.mark.parametrize(
    ("script", "arguments", "option", "of_pytest"),
    [
        (".ci/run", [], "--system-packages", "--durations=15"),
        ("scripts/test.sh", ["--system-packages", "-k", "one"], "--system-packages", "-k one"),
        ("scripts/test.sh", ["-k", "one"], "", "-k one"),
    ],
)
def test_only_the_flag_that_ci_gives_asks_for_system_packages(
    tmp_path: Path, script: str, arguments: list[str], option: str, of_pytest: str
) -> None:
    for path in (tmp_path / "scripts" / "test.sh", tmp_path / ".ci" / "run"):
        path.parent.mkdir()
        path.write_bytes((ROOT / path.relative_to(tmp_path)).read_bytes())
    (tmp_path / "scripts" / "install.sh").touch()
    (tmp_path / "scripts" / "system_packages.sh").write_text(f'echo "$1" > {tmp_path}/option')
    python = f'case "$*" in *pytest*) echo "$*" > {tmp_path}/log ;; esac'
    environ = _tools(tmp_path / "bin", python=python, **{name: "exit 0" for name in ("ruff", "mypy", "lint-imports")})
    subprocess.run(["bash", tmp_path / script, *arguments], env=environ, capture_output=True, check=True)
    assert (tmp_path / "option").read_text().strip() == option
    assert (tmp_path / "log").read_text().strip().endswith(of_pytest)


OTHER_PYTHON = """
case "$*" in
*"sysconfig"*) mkdir -p site; echo "$PWD/site" ;;
*"print(version("*) echo 2.13.0 ;;
"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip"*) cat .cache/next_versions/kept.txt .cache/next_versions/wanted.txt > installed ;;
*check_citations.py) ;;
"-m pytest"*) echo "$*" > tested; printf '/test_x.py:3: AssertionError: 1 is not 2\\nFAILED test_x.py::test_x\\n1 failed\\n'; exit 1 ;;
*) exec REAL "$@" ;;
esac
"""


def test_other_releases_are_tried_with_all_extras_and_failures_have_their_reasons(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/next_versions.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = OTHER_PYTHON.replace("REAL", sys.executable)
    environ = _tools(tmp_path / "bin", python3=python) | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", tmp_path / "scripts" / "next_versions.sh", "newest"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "/test_x.py:3: AssertionError: 1 is not 2\nFAILED test_x.py::test_x\n1 failed\nTESTS FAILED\n" in done.stdout
    assert {f"tests/{name}" for name in ("engine", "export", "parity", "trainer")} < set(
        (tmp_path / "tested").read_text().split()
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    names = {Requirement(line).name for lines in (project["dependencies"], *extras) for line in lines}
    torch, *installed = map(Requirement, (tmp_path / "installed").read_text().splitlines())
    assert str(torch) == "torch==2.13.0"
    assert {each.name for each in installed} == names - {"torch", "ds_finetune"}
    assert not any(each.specifier for each in installed), "the newest, whatever pyproject.toml allows"


@pytest.mark.parametrize("fails", [False, True])
def test_the_suite_runs_with_the_instructions_of_every_cpu_that_this_one_has(tmp_path: Path, fails: bool) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "test_cpus.sh").write_bytes((ROOT / "scripts" / "test_cpus.sh").read_bytes())
    names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS")
    python = f"echo {' '.join(f'${name}' for name in names)} >> {tmp_path}/log; echo '3 passed in 1 s'"
    python += "; echo FAILED test_x.py::test_x" * fails
    environ = _tools(tmp_path / "bin", python=python) | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", tmp_path / "scripts" / "test_cpus.sh", "-k", "one"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "FAILED test_x.py::test_x" in done.stdout) == (int(fails), fails), done.stderr
    flags = set(Path("/proc/cpuinfo").read_text().split())
    wanted = [("avx2", "avx2 AVX2 2"), ("avx512f", "avx512 AVX512_CORE 2")]
    wanted += [("avx512_bf16", "avx512 AVX512_CORE_BF16 1"), ("amx_tile", "avx512 AVX512_CORE_AMX 1")]
    wanted += [("avx2", "avx2 AVX2 1")]
    runs = ["default SSE41 1", *(run for flag, run in wanted if flag in flags)]
    assert (tmp_path / "log").read_text().splitlines() == runs
    assert done.stdout.count(": skipped, this CPU has no ") == 6 - len(runs)
