"""Installed packages beside the tested ranges: what a command, the doctor and an extra say of another version."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from ds_finetune.errors import DependencyError
from ds_finetune.foreign.guard import TESTED
from ds_finetune.system import versions
from tests.conftest import ROOT

COMMAND = (
    "import sys; from ds_finetune.cli.main import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
)
EXPORTS = ("accelerate", "gguf", "huggingface_hub", "onnx", "onnx-ir", "onnxruntime", "safetensors", "tokenizers")


@pytest.fixture(autouse=True)
def _read_again() -> Iterator[None]:
    """What is read once a process is not another test's."""
    versions.requirements_of.cache_clear()
    versions.check_versions.cache_clear()
    versions.installed_version.cache_clear()
    yield
    versions.requirements_of.cache_clear()
    versions.check_versions.cache_clear()
    versions.installed_version.cache_clear()


def install(folder: Path, name: str, version: str, *more: str) -> Path:
    """A folder for PYTHONPATH in which a package has this version."""
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *more]))
    return folder


def _python(*arguments: str, path: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    given = os.environ | {"PYTHONPATH": path} | environ
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "version", "wanted"),
    [
        ("transformers", "4.57.0", ">=5.20,<5.25"),
        ("deepspeed", "0.16.9", ">=0.19.8,<0.20"),
        ("torch", "2.99.0+cu130", ">=2.11,<2.14"),
    ],
)
def test_an_untested_version_is_the_first_error(tmp_path: Path, name: str, version: str, wanted: str) -> None:
    path = f"{install(tmp_path, name, version)}:{ROOT}"
    done = _python("-c", COMMAND, "train", "absent.yaml", path=path)
    assert done.stdout == "2 False\n"
    assert done.stderr.splitlines() == [
        f"error: packages outside the tested ranges: {name} {version} (tested: {wanted})",
        f"  hint: pip install '{name}{wanted}'; or set DS_FINETUNE_UNTESTED_VERSIONS=1 to compute with "
        "untested versions",
    ]


def test_who_wants_another_version_is_warned(tmp_path: Path) -> None:
    path = f"{install(tmp_path, 'transformers', '4.57.0')}:{ROOT}"
    done = _python("-c", COMMAND, "train", "absent.yaml", path=path, DS_FINETUNE_UNTESTED_VERSIONS="1")
    warning, error = done.stderr.splitlines()[:2]
    assert warning == (
        "warning: packages outside the tested ranges: transformers 4.57.0 (tested: >=5.20,<5.25); these versions "
        "are not tested (DS_FINETUNE_UNTESTED_VERSIONS=1)"
    )
    assert "absent.yaml" in error


def test_the_doctor_says_it_before_the_plan(tmp_path: Path) -> None:
    path = f"{install(tmp_path, 'transformers', '4.57.0')}:{ROOT}"
    run = tmp_path / "run.yaml"
    run.write_text(f"{{model: m, data: {{train: a.jsonl}}, output_dir: {tmp_path / 'run'}}}")
    done = _python("-m", "ds_finetune", "doctor", str(run), "--json", path=path)
    assert done.returncode == 2
    failed = {check["name"]: check for check in json.loads(done.stdout) if check["state"] == "fail"}
    assert set(failed) == {"versions", "plan"}
    assert failed["versions"]["found"] == "transformers 4.57.0 (tested: >=5.20,<5.25)"
    assert failed["versions"]["hint"] == "pip install 'transformers>=5.20,<5.25'"
    assert "transformers 4.57.0" in failed["plan"]["found"]


def test_a_package_of_an_extra_matters_where_the_extra_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, "onnx", "1.99.0"))
    versions.check_versions()
    with pytest.raises(DependencyError, match=r"onnx 1\.99\.0 \(tested: >=1\.19,<"):
        versions.check_versions("onnx")
    monkeypatch.syspath_prepend(install(tmp_path / "pages", "bokeh", "2.4.3"))
    with pytest.raises(DependencyError, match=r"bokeh 2\.4\.3 \(tested: >=3\.7,<4\)"):
        versions.require_extra("pages", "a page")


def test_an_installed_wheel_has_the_ranges_of_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_FILE", tmp_path / "pyproject.toml")
    lines = ("rich<99,>=1", 'onnx<1.24,>=1.19; extra == "onnx"', 'gguf>=0.19; extra == "gguf"')
    more = [*(f"Requires-Dist: {line}" for line in lines), "Provides-Extra: onnx", "Provides-Extra: gguf"]
    monkeypatch.syspath_prepend(install(tmp_path, "ds_finetune", "0.1.0", *more))
    assert [str(line) for line in versions.requirements_of()] == ["rich<99,>=1"]
    assert [str(line) for line in versions.requirements_of("onnx")] == ['onnx<1.24,>=1.19; extra == "onnx"']
    # A project of another name is beside many installed packages.
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\ndependencies = ['rich<1']")
    versions.requirements_of.cache_clear()
    assert [str(line) for line in versions.requirements_of()] == ["rich<99,>=1"]


def test_files_that_nothing_tells_of_are_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "_FILE", tmp_path / "pyproject.toml")
    monkeypatch.setattr(versions, "requires", requires)
    for _ in range(2):
        versions.check_versions()
    assert capsys.readouterr().err.count("versions of packages are not checked") == 1


def test_the_pinned_versions_are_tested_ones_and_bounds_follow_them() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    extras = ("test", *versions.EXTRAS, "")
    lines = {line.name: line for extra in extras for line in versions.requirements_of(extra)}
    for line in lines.values():
        version = pinned.get(canonicalize_name(line.name))
        assert version is None or line.specifier.contains(version), f"{line}, and constraints.txt has {version}"
    for name in (*TESTED, *EXPORTS, "compressed-tensors", "math-verify", "numpy", "optuna", "peft", "pyarrow"):
        assert any(each.operator in ("<", "==") for each in lines[name].specifier), f"{name} has no upper bound"
