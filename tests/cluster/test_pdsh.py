"""Plain `deepspeed --hostfile`, as README names it, on two hosts by pdsh over ssh: the same losses as one host."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.cluster.bed import INTERFACE, Bed
from tests.cluster.training import ZERO3, losses_of_two_ranks, started, traveling
from tests.running import metrics, tiny_task

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("pdsh"), reason="pdsh is not installed")]


def test_deepspeed_hostfile(bed: Bed, tmp_path: Path) -> None:
    wanted = losses_of_two_ranks(tmp_path)
    # Of these DeepSpeed's pdsh carries no variable by itself; a comment in its file would end it.
    (bed.shared / "variables").write_text(f"DS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME={INTERFACE}\nOMP_NUM_THREADS=1\n")
    environ = (
        os.environ
        | traveling()
        | {"DS_ENV_FILE": str(bed.shared / "variables"), "PDSH_SSH_ARGS_APPEND": f"-F {bed.ssh_config}"}
    )
    hostfile, folder = str(bed.hostfile(1, 1)), bed.shared / "run"
    # DeepSpeed asks the first host by plain ssh, without those arguments, whether it answers and what its address is.
    options = ["--hostfile", hostfile, "--no_ssh_check", "--master_addr", bed.hosts[0].address]
    script = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    argv = [str(script), *options, "ds_finetune/train.py", str(tiny_task(folder, deepspeed=ZERO3))]
    run = started(bed, argv, environ, folder)
    printed = run.process.communicate(timeout=250)[0]
    assert run.process.returncode == 0, printed
    assert "10.77.0.2: " in printed
    assert "started by deepspeed" in printed
    assert [record["train/loss"] for record in metrics(folder)] == pytest.approx(wanted, abs=2e-6)
