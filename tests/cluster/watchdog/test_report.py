"""Report of an error, and of many ranks that hang."""

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ds_finetune.cluster.watchdog.endings import RankProcess, RunEnding, status_lines
from ds_finetune.cluster.watchdog.monitor import StackFile, ending_by, kill_process
from ds_finetune.cluster.watchdog.progress import RankProgress, RankStatus
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.engine.groups.collective_log import CollectiveCall
from ds_finetune.errors import ConfigError, RunError
from ds_finetune.foreign.torch_distributed import is_peer_lost
from ds_finetune.system.processes import began_at
from tests.cluster.watchdog.ranks import Ranks


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:54500"), True),
        (dist.DistBackendError("NCCL error in: remote process exited"), True),
        (dist.DistNetworkError("Connection reset by peer"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (OSError(28, "No space left on device"), False),
        (RunError("NCCL is named in a message of ours", hint=""), False),
    ],
)
def test_what_follows_from_another_rank_is_told_from_what_does_not(error: Exception, wanted: bool) -> None:
    assert is_peer_lost(error) is wanted


def test_a_failure_brings_its_line_its_code_and_its_last_lines() -> None:
    assert ending_by(ConfigError("tp 3 does not divide 8", hint="try 2")) == RunEnding(
        (), "ConfigError: tp 3 does not divide 8", "tp 3 does not divide 8\n  hint: try 2", 2
    )
    with pytest.raises(KeyError) as raised:
        {}["layer"]
    failure = ending_by(raised.value)
    assert failure.line == "KeyError: 'layer'"
    assert failure.code == 1
    assert "test_report.py" in failure.text


def test_a_failure_at_a_file_name_that_is_no_text_reaches_the_other_ranks(tmp_path: Path) -> None:
    ranks, name = Ranks(tmp_path), os.fsdecode(b"rows-\xff.jsonl")
    with pytest.raises(FileNotFoundError) as raised:
        Path(name).read_text()
    failure = ending_by(raised.value)
    ranks.fail(1, failure.line, is_secondary=False)
    assert "rows-\\udcff.jsonl" in ranks.ending(2).line


def test_ranks_that_do_the_same_are_one_line() -> None:
    members = [RankProcess(rank, f"host-{rank // 8}", 100 + rank, "1", "") for rank in range(64)]
    call = CollectiveCall("all_reduce", 2, "all", 9)
    statuses = {rank: RankStatus(call, call, {"all": 9}, phase="step", step=4, seconds=60.0) for rank in range(64)}
    statuses[5] = RankStatus(None, call, {"all": 8}, phase="step", step=4, seconds=60.0)
    lines = status_lines(members, statuses, (5,))
    assert lines[0].startswith("  rank 5 (host host-0, process 105): is in no collective; the last was all_reduce of 2")
    assert lines[1].startswith(
        "  ranks 0-4,6-63 (host host-0, host-1, host-2, host-3, host-4, host-5, host-6, host-7): waits in all_reduce of 2"
    )
    assert len(lines) == 2


@pytest.mark.skipif(not began_at(os.getpid()), reason="processes are told apart by /proc")
def test_another_process_of_the_same_id_is_left_alone(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = RankProcess(1, "host-a", child.pid, "1", "a", str(tmp_path / "error.json"))
    kill_process(process, "")
    assert not list(tmp_path.iterdir())
    assert child.poll() is None
    child.send_signal(signal.SIGSTOP)
    kill_process(replace(process, began=began_at(child.pid)), "rank 1 did not answer")
    code = child.wait(60)
    assert code in (-signal.SIGKILL, -signal.SIGQUIT)
    failure = ProcessFailure(1, child.pid, code, process.error_file)
    assert failure.message["message"] == "killed by the watchdog: rank 1 did not answer"


def test_the_stacks_of_a_rank_come_with_what_torchfrtrace_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is built without NCCL here; its recorder of other backends has the same format."""
    from torch.distributed.flight_recorder.components.loader import read_dump

    c10d = torch._C._distributed_c10d
    file = StackFile(tmp_path, RankProgress(3, WatchdogConfig()))
    if not hasattr(c10d, "_dump_nccl_trace"):
        file.write()
        assert [path.name for path in tmp_path.iterdir()] == ["rank-00003.txt"]
        monkeypatch.setattr(c10d, "_dump_nccl_trace", c10d._dump_fr_trace, raising=False)
    file.write()
    file.close()
    assert "in test_the_stacks_of_a_rank" in (tmp_path / "rank-00003.txt").read_text()
    prefix = "nccl_trace_rank_"
    assert "entries" in read_dump(prefix, str(tmp_path / f"{prefix}3"))


def test_stacks_are_written_while_the_training_thread_enters_collectives(tmp_path: Path) -> None:
    progress = RankProgress(0, WatchdogConfig())

    class Call(CollectiveCall):
        def __str__(self) -> str:
            progress.collectives.last_calls.append(self)
            return super().__str__()

    progress.collectives.last_calls.extend(Call("all_reduce", 8, "all", number) for number in (1, 2))
    with closing(StackFile(tmp_path, progress)) as file:
        file.write()
        assert file.path.read_text().count("all_reduce of 8 bytes") >= 2
