"""DeepSpeed choices, run files and hostfiles come with the package: found by name from any folder, and inside a wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ds_finetune.cli.main import main
from ds_finetune.config.hostfile import read_hostfile
from ds_finetune.config.run_file import DS_CONFIGS, HOSTFILES, shipped_file, shipped_names
from ds_finetune.config.schema import read_config
from ds_finetune.errors import ConfigError, LaunchError
from ds_finetune.plan.deepspeed_config import read_choices
from tests.conftest import ROOT


def _tracked(folder: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT / folder)) for path in (ROOT / folder).rglob("*") if path.is_file())


def test_every_shipped_file_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (DS_CONFIGS, HOSTFILES):
        assert list(shipped_names(folder)) == _tracked(folder)
    for name in shipped_names(DS_CONFIGS):
        found = shipped_file(f"ds_configs/{name}")
        assert found is not None
        assert found.read_bytes() == (ROOT / "ds_configs" / name).read_bytes()
        if name.endswith(".json"):
            wanted = read_choices(str(ROOT / "ds_configs" / name))[0]
            for given in (name.removesuffix(".json"), name, f"ds_configs/{name}"):
                assert read_choices(given) == (wanted, given)
        if name.startswith("runs/"):
            assert read_config(f"ds_configs/{name}").model.path
    for name in shipped_names(HOSTFILES):
        assert read_hostfile(f"hostfiles/{name}") == read_hostfile(ROOT / "hostfiles" / name)


def test_a_local_file_comes_first_and_a_folder_of_that_name_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero3").mkdir()
    assert read_choices("zero3")[0]["zero_optimization"]["stage"] == 3
    (tmp_path / "zero1").write_text('{"zero_optimization": {"stage": 2}}')
    assert read_choices("zero1")[0]["zero_optimization"]["stage"] == 2
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="`other` cannot be read"):
        read_choices("other")
    with pytest.raises(ConfigError, match="`zero9` does not exist") as unknown:
        read_choices("zero9")
    assert "zero3_nvme" in unknown.value.hint


def test_a_hostfile_that_is_missing_is_never_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match="does not exist"):
        read_hostfile("two_nodes")
    with pytest.raises(ConfigError, match="does not exist"):
        read_config("ds_configs/../errors.py")


def test_a_wheel_holds_every_file(tmp_path: Path) -> None:
    """Built without a network, and used in an empty folder."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("ds_finetune", DS_CONFIGS, HOSTFILES):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for folder in ("ds_finetune", DS_CONFIGS, HOSTFILES):
        inside = installed / "ds_finetune" / ("" if folder == "ds_finetune" else f"config/{folder}")
        assert [name for name in _tracked(folder) if "__pycache__" not in name and not (inside / name).is_file()] == []
    empty.mkdir()
    (empty / "run.yaml").write_text("model: m\ndata: {train: a.jsonl}\noutput_dir: o\ndeepspeed: zero3\n")
    code = (
        "import sys; from ds_finetune.plan.deepspeed_config import read_choices as r; print(r('zero3')[0]['zero_optimization']['stage']);"
        "from ds_finetune.cli.main import main; sys.exit(main(['config', 'show', 'run.yaml']))"
    )
    environ = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=empty, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3\n")
    assert "deepspeed: zero3\n" in done.stdout


def test_a_run_names_its_choices_from_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "show", "ds_configs/runs/qwen3_8b.yaml", "deepspeed=zero3"]) == 0
    assert "deepspeed: zero3\n" in capsys.readouterr().out
