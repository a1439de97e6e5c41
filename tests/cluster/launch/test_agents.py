"""torch's agent on this machine: how a run ends and starts again, and what is said about it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from ds_finetune.cluster.hosts import Reply
from ds_finetune.cluster.launch.commands import Job
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.cluster.launch.run import LaunchRequest, _LaunchedRun, launch
from ds_finetune.config.hostfile import Host
from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError, LaunchError
from ds_finetune.plan.settings import RunSettings
from tests.conftest import ROOT
from tests.running import tiny_task

SECONDS = 120
HERE = Host("localhost", 1, 1)


def _remote(folder: Path, script: str = f'exec {sys.executable} "$@"') -> Remote:
    """A Python that is started by `script`, in which "$@" are its arguments."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return Remote(python=str(python), directory=str(ROOT))


def run(
    folder: Path, code: str, *, ranks: int = 1, remote: Remote | None = None, **settings: float
) -> tuple[int, list[str]]:
    """Exit code and lines of a launch whose ranks are Python programs, with their folder as argument."""
    said: list[str] = []
    environ = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    hosts = (Host("localhost", ranks, 1),)
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": str(folder / "run"), "train": {"global_batch_size": 2}}
    config = RunConfig.model_validate(tree | {"launch": {"greeting_seconds": SECONDS, "silent_seconds": 60} | settings})
    job = Job(str(folder), (), hosts, "r-1", variables=environ, entry=("-c", code))
    request = LaunchRequest(job, RunSettings.of(config), config.launch, config.output_dir, remote or _remote(folder))
    return launch(request, said.append), said


def test_two_hosts_that_are_lost_at_once_of_which_the_batch_needs_one(tmp_path: Path) -> None:
    """A batch of 16 rows needs four hosts or two, so the loss of host 2 leaves out host 4, which is lost as well."""
    hosts = tuple(Host(f"127.0.0.{number}", 4, number) for number in range(1, 5))
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "launch": {"restarts": 1, "min_hosts": 1}}
    config = RunConfig.model_validate(tree | {"train": {"global_batch_size": 16, "micro_batch_size": 1}})
    remote, said = _remote(tmp_path, "exit 1"), list[str]()
    request = LaunchRequest(Job("r", (), hosts, "r-1"), RunSettings.of(config), config.launch, "o", remote)
    done: Reply = ({"run_ranks": True}, 0.0, 0.0)
    with contextlib.closing(_LaunchedRun(request, said.append)) as run:
        for host, reply in zip(hosts, (done, "is cut off", done, "is cut off"), strict=True):
            run._agents[host] = Future()
            run._agents[host].set_result(reply)
        assert run.finish() == 1
    assert said[0] == "left out: 127.0.0.4: layout and batch allow 2 of 3 hosts"
    assert "host 127.0.0.2 failed first" in said[1]


def test_a_run_that_never_resumes_is_not_restarted(tmp_path: Path) -> None:
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "launch": {"restarts": 1}}
    config = RunConfig.model_validate(tree | {"checkpoint": {"resume": "never"}})
    request = LaunchRequest(Job("r", (), (HERE,), "r-1"), RunSettings.of(config), config.launch, "o", _remote(tmp_path))
    with pytest.raises(ConfigError, match=r"checkpoint\.resume is never: a restart would not resume"):
        launch(request, print)


LIKE_MESSAGES = ['["reply", [0, {}]]', '["event", {"failed": 1}]', '{"reply": 5}', "5", "null", "r-1.x ["]


def test_lines_of_a_shell_that_look_like_messages_are_none(tmp_path: Path) -> None:
    """Before the first reply, which the shell leaves in the middle of a line, and while ranks run."""
    printed = "; ".join(f"echo '{line}'" for line in LIKE_MESSAGES)
    script = f'(for i in 1 2 3 4; do {printed}; sleep 1; done) & printf welcome; exec {sys.executable} "$@"'
    code, said = run(tmp_path, "print('rank 0 is here')", remote=_remote(tmp_path, script))
    assert code == 0, said
    assert "rank 0 is here" in said
    assert said[-1].startswith("attempt 1 done in ")


RANKS = """
import os, signal, sys, time
from ds_finetune.system.rank_files import record_error
if os.environ["RANK"] == "0":
    time.sleep(100)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
ENDS = {
    "an error": ("record_error('no rows'); sys.exit(1)", 1, "rank 1 on localhost failed first: exited with code 1"),
    "a kill": (KILL, 137, "rank 1 on localhost failed first: was killed by SIGKILL"),
    "a kill by the watchdog": (
        f"record_error('killed by the watchdog: rank 1 hangs', file=os.environ['TORCHELASTIC_ERROR_FILE']); {KILL}",
        137,
        "rank 1 on localhost failed first: was killed by SIGKILL",
    ),
    "an end because of another": ("record_error('rank 0 hangs', cause='rank 0 hangs'); os._exit(1)", 1, "rank 0 hangs"),
}


@pytest.mark.parametrize("kind", ENDS)
def test_the_rank_that_fails_is_named(tmp_path: Path, kind: str) -> None:
    """The other rank would sleep, and is killed."""
    end, wanted, text = ENDS[kind]
    code, said = run(tmp_path, f"{RANKS}print('before')\n{end}", ranks=2)
    assert code == wanted, said
    (line,) = [line for line in said if line.startswith("attempt 1 failed after ")]
    # The kernel may kill a process of somebody else at the same time, which is then said too.
    assert f" s: {text}" in line
    errors = {"an error": "no rows", "a kill by the watchdog": "killed by the watchdog: rank 1 hangs"}
    assert f"  | {errors.get(kind, 'before')}" in said
    log = tmp_path / "run" / "logs" / "r-1" / "attempt-1" / "rank-00001.log"
    assert log.read_text() == "before\n"


TIMES = """
import os, sys
from pathlib import Path
folder = Path(sys.argv[1])
attempt = len(list(folder.glob("try-*")))
(folder / f"try-{attempt}").touch()
sys.exit(CODES[attempt])
"""


@pytest.mark.parametrize(
    ("codes", "wanted", "tries"),
    [([1, 2, 0], 0, 3), ([1, 1, 4], 4, 3), ([2], 2, 1)],
    ids=["a mistake is final in the first attempt only", "restarts are counted", "a mistake"],
)
def test_what_is_started_again(tmp_path: Path, codes: list[int], wanted: int, tries: int) -> None:
    code, said = run(tmp_path, TIMES.replace("CODES", repr(codes)), restarts=2)
    assert (code, len(list(tmp_path.glob("try-*")))) == (wanted, tries), said
    assert sum(line.startswith("starting again, restart ") for line in said) == tries - 1


STORES = """
import os, sys, time
import torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
values = [None, None]
dist.all_gather_object(values, number)
assert values == [number, number]
# Without the interpreter's shutdown, in which gloo may abort.
os._exit(number == 0 and os.environ["RANK"] == "1")
"""


def test_a_restart_finds_no_keys_of_the_attempt_before(tmp_path: Path) -> None:
    code, said = run(tmp_path, STORES, ranks=2, restarts=1)
    assert code == 0, said


PAUSED_LAUNCH = """
import sys
from pathlib import Path
from tests.cluster.launch.test_agents import run
rank = "import sys, time; from pathlib import Path; folder = Path(sys.argv[1]); (folder / 'started').touch()"
rank += "\\nwhile not (folder / 'go').exists(): time.sleep(0.05)"
code, said = run(Path(sys.argv[1]), rank, silent_seconds=3.0, restarts=1)
print(said)
sys.exit(code)
"""


def _has_ended(pid: int) -> bool:
    """Whether a process has ended, though its parent may not know."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("is_paused", [True, False], ids=["both are paused", "the launching program is gone silent"])
def test_a_launch_that_was_paused_continues(tmp_path: Path, is_paused: bool) -> None:
    """Both ends are stopped for longer than they may be silent, and the host's is the first to run again. Where only the
    launching program is stopped, as on a laptop that was closed, the host ends its ranks.
    """
    with subprocess.Popen(
        [sys.executable, "-c", PAUSED_LAUNCH, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        until = time.monotonic() + SECONDS
        while not (tmp_path / "started").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        began = time.monotonic()
        (host,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        stopped = [host, process.pid] if is_paused else [process.pid]
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGSTOP)
        while (is_paused and time.monotonic() < began + 7) or (not is_paused and not _has_ended(host)):
            if time.monotonic() > until:
                process.kill()
            time.sleep(0.05)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
        (tmp_path / "go").touch()
        printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == (0 if is_paused else 1), printed


def test_ranks_that_a_signal_has_ended_are_not_started_again(tmp_path: Path) -> None:
    """Before they can save, SIGTERM ends them."""
    command = [sys.executable, "-c", PAUSED_LAUNCH, str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + SECONDS
        while not (tmp_path / "started").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM, printed
    assert "starting again" not in printed


@pytest.mark.parametrize(("greeting", "wanted"), [(30, 28), (2.5, 1), (120, 118)])
def test_times_of_ssh(greeting: float, wanted: int) -> None:
    remote = Remote(greeting_seconds=greeting, silent_seconds=10)
    command = remote.command(Host("elsewhere.invalid", 1, 1), ["true"])
    assert {f"ConnectTimeout={wanted}", "ServerAliveInterval=3", "ServerAliveCountMax=3"} <= set(command)


@pytest.mark.parametrize(
    ("script", "seconds", "wanted"),
    [
        ("echo no such thing >&2; exit 7", SECONDS, "Python ended with exit code 7: no such thing"),
        ("cat > /dev/null", 0.5, "no answer in time; last output: nothing"),
        ("exec cat > /dev/null 2>&1", 1, "no answer in time; last output: nothing"),
    ],
)
def test_a_program_that_does_not_start_is_told_from_a_silent_host(
    tmp_path: Path, script: str, seconds: float, wanted: str
) -> None:
    with pytest.raises(LaunchError, match="1 of 1 hosts are not ready, nothing was started") as refused:
        run(tmp_path, "", remote=_remote(tmp_path, script), greeting_seconds=seconds)
    assert f"localhost (line 1): {wanted}\n" in refused.value.message


def test_a_reader_that_leaves_does_not_end_a_launch(tmp_path: Path) -> None:
    """`launch ... | head`: what follows is not shown, and the run is done."""
    task = tiny_task(tmp_path)
    command = f"{sys.executable} -m ds_finetune launch {task} --nproc 1; echo $? > {tmp_path}/code"
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-c", f"({command}) | head -1"], env=environ, capture_output=True, timeout=120, check=True)
    assert (tmp_path / "code").read_text() == "0\n"
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
