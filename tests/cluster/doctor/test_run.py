"""The command on this machine, without a hostfile."""

import json
from pathlib import Path

import pytest

from ds_finetune.cli.doctor import run_needs
from ds_finetune.cli.main import main
from ds_finetune.config.schema import read_config
from tests.conftest import ROOT
from tests.running import tiny_task


def test_this_machine_and_what_a_run_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler that the run needs, disk and memory are compared with the plan, and no file is left."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(ROOT)
    run_file = tiny_task(
        tmp_path, deepspeed={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    )
    options = ["--json", "--port", "29731"]
    assert main(["doctor", str(run_file), *options]) == 0
    states = {check["name"]: check["state"] for check in json.loads(capsys.readouterr().out)}
    assert {"ssh", "plan", "kernels", "disk", "memory", "versions", "port"} <= states.keys()
    assert not list(tmp_path.rglob(".ds_finetune-doctor-*"))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(run_file), "train.global_batch_size=7", *options])
    assert ended.value.code == 2
    assert [check["name"] for check in json.loads(capsys.readouterr().out) if check["state"] == "fail"] == ["plan"]


def test_a_hostfile_with_an_error_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("worker-1 slots=8\nworker-2 slots=8\nworker-1 slots=4\n")
    assert main(["doctor", "--hostfile", str(hosts)]) == 2
    assert f"{hosts} line 3: host `worker-1` is already in line 1" in capsys.readouterr().err
    assert main(["doctor", "--hostfile", "/no/such/hosts"]) == 2


def test_files_that_hosts_must_have_are_those_that_exist_here(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "template.jinja"):
        (tmp_path / name).touch()
    data = {"train": f"{tmp_path}/rows.jsonl:train", "eval": "hub/rows", "template": f"{tmp_path}/template.jinja"}
    needs = run_needs(read_config({"model": "hub/model", "data": data, "output_dir": str(tmp_path / "run")}))
    assert needs["files"] == (f"{tmp_path}/rows.jsonl", f"{tmp_path}/template.jinja")
    assert needs["folders"]["output_dir"] == str(tmp_path / "run")
