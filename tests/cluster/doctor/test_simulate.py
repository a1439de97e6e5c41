"""Plans on hosts that are not there: ranks, groups, refusals and unequal hosts; and the command itself on this machine."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from ds_finetune.cli.doctor import checked_run
from ds_finetune.cli.main import main
from ds_finetune.cluster.doctor.needs import group_checks, simulate
from ds_finetune.cluster.host_checks import ranks_of
from ds_finetune.config.hostfile import Host, read_hostfile
from ds_finetune.config.schema import read_config
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.plan.mesh import Mesh
from tests.conftest import ROOT
from tests.running import tiny_task

NODES = ROOT / "hostfiles" / "nodes64"


@pytest.fixture(scope="module")
def deepseek_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of DeepSeek-V3, which is transformers' default."""
    folder = tmp_path_factory.mktemp("v3")
    AutoConfig.for_model("deepseek_v3", architectures=["DeepseekV3ForCausalLM"]).save_pretrained(folder)
    return folder


def test_deepseek_v3_on_64_nodes(deepseek_v3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_file = ROOT / "ds_configs" / "runs" / "deepseek_v3.yaml"
    config = read_config(run_file, [f"model={deepseek_v3}", "train.global_batch_size=512"])
    found = {(check.name, check.host): check for check in simulate(read_hostfile(NODES), checked_run(config))}
    assert not [check for check in found.values() if check.state != "ok"]
    assert found["hosts", ""].found == "512 ranks on 64 hosts"
    assert found["ranks", "node01"].found == "0-7"
    assert found["ranks", "node64"].found == "504-511"
    assert found["plan", ""].found == "dp 512 x ep 32, ZeRO-3, 512 ranks on cuda"
    assert "a rank needs" in found["memory", ""].found
    refused = simulate(read_hostfile(NODES), checked_run(read_config(run_file, [f"model={deepseek_v3}"])))
    assert [(check.name, check.state) for check in refused if check.state != "ok"] == [("plan", "fail")]
    assert "256" in next(check.found for check in refused if check.state == "fail")


@pytest.mark.parametrize(
    ("sizes", "slots", "span", "state"),
    [
        ({"tp": 8}, (8, 8), "stay within a host", "ok"),
        ({"tp": 4}, (6, 6), "lie on 2 hosts, e.g. ranks 4, 5, 6, 7", "warn"),
        ({"sp": 16}, (8, 8), "lie on 2 hosts", "warn"),
        ({"pp": 2}, (8, 8), "lie on 2 hosts, e.g. ranks 0, 8", "ok"),
        ({"ep": 8}, (4, 4), "lie on 2 hosts", "ok"),
    ],
)
def test_groups_that_leave_their_host(sizes: dict[str, int], slots: tuple[int, ...], span: str, state: str) -> None:
    hosts = [Host(f"h{line}", count, line) for line, count in enumerate(slots)]
    mesh = Mesh.of(ParallelConfig(**sizes), world_size=sum(slots), rank=0)
    check = next(check for check in group_checks(mesh, hosts) if f" of {next(iter(sizes))} " in check.found)
    assert span in check.found
    assert check.state == state


def test_unequal_hosts_are_said_and_their_ranks_counted() -> None:
    hosts = read_hostfile(ROOT / "hostfiles" / "unequal")
    assert ranks_of(hosts) == [range(8), range(8, 12)]
    assert [check.found for check in simulate(hosts, None) if check.state == "warn"] == [
        "worker-2 with fewer slots than 8"
    ]


def test_the_command_simulates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--simulate", "--hostfile", str(NODES), "--exclude", "node64"]) == 0
    assert "504 ranks on 63 hosts" in capsys.readouterr().out
    assert main(["doctor", "--simulate"]) == 2
    assert "--hostfile" in capsys.readouterr().err
    assert main(["doctor", "--hostfile", "/no/such/hosts"]) == 2


def test_this_machine_and_what_a_run_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a hostfile: the operator the run needs is built, disk and memory are held against the plan, and no mark
    is left.
    """
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(ROOT)
    run_file = tiny_task(
        tmp_path, deepspeed={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    )
    options = ["--json", "--port", "29731"]
    assert main(["doctor", str(run_file), *options]) == 0
    states = {check["name"]: check["state"] for check in json.loads(capsys.readouterr().out)}
    assert {"ssh", "plan", "cpu_adam", "disk", "memory", "versions", "port"} <= states.keys()
    assert not list(tmp_path.rglob(".ds_finetune-doctor-*"))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(run_file), "train.global_batch_size=7", *options])
    assert ended.value.code == 2
    assert [check["name"] for check in json.loads(capsys.readouterr().out) if check["state"] == "fail"] == ["plan"]


def test_files_that_hosts_must_have_are_those_that_exist_here(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "template.jinja"):
        (tmp_path / name).touch()
    data = {"train": f"{tmp_path}/rows.jsonl:train", "eval": "hub/rows", "template": f"{tmp_path}/template.jinja"}
    run = checked_run(read_config({"model": "hub/model", "data": data, "output_dir": str(tmp_path / "run")}))
    assert run.files == (f"{tmp_path}/rows.jsonl", f"{tmp_path}/template.jinja")
    assert run.folders["output_dir"] == str(tmp_path / "run")
