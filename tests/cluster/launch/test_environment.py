"""Which variables travel to the hosts, and which never do."""

import subprocess
from pathlib import Path

import pytest

from ds_finetune.cli.main import main
from ds_finetune.cluster.launch.environment import (
    CarriedVariables,
    carried_variables,
    environment_files,
    read_environment_file,
)
from ds_finetune.errors import LaunchError


def test_the_list_travels_and_nothing_else() -> None:
    travels = {
        "CUDA_HOME": "/cuda",
        "NCCL_SOCKET_IFNAME": "ib0",
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "/here",
        "PATH": "/bin",
        "WANDB_PROJECT": "p",
        "no_proxy": "a,b",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    stays = {
        "HOME": "/root",
        "EDITOR": "vi",
        "PWD": "/",
        "TMPDIR": "/tmp/job",
        "PATHS": "x",
        "DS_ENV_FILE": "e",
        "DS_FINETUNE_SSH_ARGS": "-i key",
    }
    assert carried_variables(travels | stays) == CarriedVariables(dict(sorted(travels.items())), ())


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GROUP_RANK",
        "CROSS_SIZE",
        "SLURM_JOB_ID",
        "SSH_AUTH_SOCK",
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "PET_NNODES",
        "TORCHELASTIC_RUN_ID",
        "ACCELERATE_USE_DEEPSPEED",
    ],
)
def test_what_a_launcher_says_to_its_own_ranks_never_travels(name: str, tmp_path: Path) -> None:
    assert carried_variables({name: "7"}) == CarriedVariables({}, ())
    (tmp_path / "env").write_text(f"\n{name}=7\n")
    for ask in (
        lambda: carried_variables({name: "7"}, [name]),
        lambda: carried_variables({}, [f"{name}=7"]),
        lambda: carried_variables({}, files=[tmp_path / "env"]),
    ):
        with pytest.raises(LaunchError, match=f"{name}, which the launcher sets for each rank"):
            ask()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "x"),
        ("WANDB_API_KEY", "x"),
        ("MLFLOW_TRACKING_PASSWORD", "x"),
        ("DS_SECRET_NAME", "x"),
        ("NCCL_AUTH", "x"),
        ("MLFLOW_ACCESSKEY", "x"),
        ("MLFLOW_TRACKING_URI", "https://me:pass@host/"),
        ("https_proxy", "http://me:pass@proxy:3128"),
        ("HF_PASS", "x"),
        ("WANDB_PWD", "x"),
        ("MLFLOW_CREDENTIALS", "x"),
        ("MLFLOW_USERPASS", "x"),
        ("MLFLOW_DBPASS", "x"),
        ("HF_PASSWD", "x"),
        ("MLFLOW_PASSPHRASE", "x"),
        ("HF_API_KEYS", "x"),
        ("NCCL_PRIVATEKEY", "x"),
        ("HF_CREDS", "x"),
        ("HF_JWT", "x"),
        ("WANDB_COOKIE", "x"),
        ("MLFLOW_AUTHORIZATION", "x"),
    ],
)
def test_secrets_travel_only_by_name_and_are_never_shown(name: str, value: str) -> None:
    assert carried_variables({name: value}) == CarriedVariables({}, (name,))
    assert carried_variables({name: value}).lines()[1:] == [
        f"withheld: {name} (looks like a secret; --env {name} passes it)"
    ]
    by_name = carried_variables({name: value}, [name])
    assert by_name == CarriedVariables({name: value}, ())
    assert by_name.lines() == [f"environment variables of the ranks: {name}"]


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "NCCL_IB_PKEY",
        "UCX_IB_PKEY",
        "PYTHONPATH",
        "NCCL_DEBUG",
        "PYTHONUNBUFFERED",
        "HF_HUB_DISABLE_TELEMETRY",
        "PATH",
        "NCCL_BYPASS",
    ],
)
def test_what_is_no_secret(name: str) -> None:
    assert not carried_variables({name: "https://user@host/path:1"}).withheld


def test_devices_of_this_host_stay_here() -> None:
    assert carried_variables({"CUDA_VISIBLE_DEVICES": "2,3"}).withheld == ("CUDA_VISIBLE_DEVICES",)
    assert "--include" in carried_variables({"CUDA_VISIBLE_DEVICES": "2,3"}).lines()[1]
    with pytest.raises(LaunchError, match="would choose the same devices on every host"):
        carried_variables({"CUDA_VISIBLE_DEVICES": "2,3"}, ["CUDA_VISIBLE_DEVICES"])


def test_ranks_of_this_host_use_the_devices_that_are_visible_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a shared machine the first GPUs may be another user's."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "model: m\ndata: {train: t}\noutput_dir: o\ntrain: {global_batch_size: 2, micro_batch_size: 1}\n"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,MIG-3")
    words = ["launch", str(run_file), "--nproc", "2", "--dry-run"]
    assert main(words) == 0
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().out.partition("withheld")[0]
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    assert main([*words[:2], "--hostfile", str(tmp_path / "hosts"), "--dry-run"]) == 0
    assert "withheld: CUDA_VISIBLE_DEVICES" in capsys.readouterr().out


def test_named_variables_win_over_files_and_files_over_the_environment(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("NCCL_DEBUG=WARN\nA=1\nB=1\nC=1\n")
    second.write_text("B=2\nC=2\n")
    found = carried_variables({"NCCL_DEBUG": "INFO", "MINE": "x=y", "C": "0"}, ["MINE", "C=3=3"], [first, second])
    assert found.values == {"A": "1", "B": "2", "C": "3=3", "MINE": "x=y", "NCCL_DEBUG": "WARN"}
    assert list(found.values) == sorted(found.values)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("GONE", "GONE, which is not set in this shell"),
        ("a-b=1", "`a-b` cannot name an environment variable"),
        ("=1", "`` cannot name an environment variable"),
    ],
)
def test_names_that_cannot_be_carried(named: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        carried_variables({}, [named])
    assert message in caught.value.message


LINES = """\ufeff# a comment, on which DeepSpeed's own reader fails

  # another
PLAIN=1
export  EXPORTED=/a/b:/c
export\tTAB=1
SPACED='two words'
JSON='{"k":1}'
BACKSLASH=a\\b
DOUBLE="say \\"hi\\" to \\\\"
EMPTY=
EQUALS=a=b
HASH=a#b
"""


def test_environment_file(tmp_path: Path) -> None:
    path = tmp_path / ".deepspeed_env"
    path.write_text(LINES + "CRLF=1\r\n", newline="")
    assert read_environment_file(path) == {
        "PLAIN": "1",
        "EXPORTED": "/a/b:/c",
        "TAB": "1",
        "SPACED": "two words",
        "JSON": '{"k":1}',
        "BACKSLASH": "ab",
        "DOUBLE": 'say "hi" to \\',
        "EMPTY": "",
        "EQUALS": "a=b",
        "HASH": "a#b",
        "CRLF": "1",
    }


def test_quotes_mean_what_a_shell_says(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("\n".join(LINES.splitlines()[1:]))
    shown = subprocess.run(
        ["env", "-i", "bash", "-c", "set -a; . ./env; env -0"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    shell = dict(entry.split("=", 1) for entry in shown.stdout.split("\0") if entry)
    read = read_environment_file(tmp_path / "env")
    assert read == {name: shell[name] for name in read}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\nnonsense\n", "line 2 is not one `NAME=VALUE`"),
        ("\n\n1A=1\n", "line 3: `1A` cannot name an environment variable"),
        ("A='open\n", "line 1 is not one"),
        ('A="x" y\n', "line 1 is not one"),
        ("A = b\n", "line 1 is not one"),
        ("A=b # c\n", "line 1 is not one"),
        ("A=/x:$PATH\n", "line 1 is not one"),
        ("A='$HOME'\n", "line 1 is not one `NAME=VALUE` without `$` and backticks"),
        ("A=`id`\n", "line 1 is not one"),
    ],
)
def test_bad_environment_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "env").write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_environment_file(tmp_path / "env")
    assert message in caught.value.message
    assert str(tmp_path / "env") in caught.value.message


def test_errors_of_files_do_not_show_values(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("HF TOKEN=hunter2\n")
    with pytest.raises(LaunchError) as caught:
        read_environment_file(tmp_path / "env")
    assert "hunter2" not in str(caught.value)


def test_places_of_environment_files(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    assert environment_files({}, home=home, directory=here) == ()
    for path in (home / ".deepspeed_env", here / ".deepspeed_env", here / "mine"):
        path.write_text("A=1\n")
    assert environment_files({}, home=home, directory=here) == (home / ".deepspeed_env", here / ".deepspeed_env")
    assert environment_files({}, home=here, directory=here) == (here / ".deepspeed_env",)
    assert environment_files({"DS_ENV_FILE": "mine"}, home=home, directory=here) == (here / "mine",)
    assert environment_files({"DS_ENV_FILE": str(here / "mine")}, home=home, directory=here) == (here / "mine",)
    with pytest.raises(LaunchError, match="DS_ENV_FILE names the file `none`, but there is no"):
        environment_files({"DS_ENV_FILE": "none"}, home=home, directory=here)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be read"):
        carried_variables({}, files=[tmp_path])
