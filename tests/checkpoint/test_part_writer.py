"""The process that writes parts while training continues, under the signals that reach every process of a job."""

import signal
import time

import pytest
import torch

from ds_finetune.checkpoint.commit import RemoveJob, WriteJob
from ds_finetune.checkpoint.part_writers import WriterProcess

SECONDS = 60.0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_whole_job_does_not_end_a_save(number: signal.Signals, tmp_path) -> None:  # noqa: ANN001
    """SIGHUP is that of a terminal that closes. The signal comes while the process starts, and again once it answers."""
    writer = WriterProcess()
    writer.start()
    assert writer._process is not None
    writer._process.send_signal(number)
    writer.copy(40, [torch.arange(10, dtype=torch.float32)])
    writer.send(RemoveJob([]))
    assert _answered(writer) == []
    writer._process.send_signal(number)
    part = tmp_path / "part"
    writer.send(WriteJob(part, 40, None))
    assert _answered(writer) == []
    assert torch.frombuffer(bytearray(part.read_bytes()), dtype=torch.float32).tolist() == list(range(10))
    writer.close()


def _answered(writer: WriterProcess) -> list[str]:
    until, errors = time.monotonic() + SECONDS, []
    while writer.is_busy:
        assert time.monotonic() < until
        errors += writer.errors()
        time.sleep(0.01)
    return errors
