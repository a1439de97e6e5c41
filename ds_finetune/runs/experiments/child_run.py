"""A run of the ordinary command in a process of its own, whose metrics are read while it is running."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from ds_finetune.cluster.launch.process_tags import die_with_parent
from ds_finetune.errors import INTERRUPTED_EXIT_CODE
from ds_finetune.runs.experiments.places import Place
from ds_finetune.runs.metrics import MetricsReader
from ds_finetune.runs.status import read_object
from ds_finetune.system.processes import began_at, has_ended, own_pid_namespace
from ds_finetune.system.whole_file import replace_file

LOG, RUN_FILE, PROCESS, RUN = "output.log", "run.yaml", "process.json", "run"
_LAST_LINES = 3


class ChildRun:
    """A run that was started in `folder`, which gets `run.yaml`, `output.log`, `process.json` and the run folder `run`.

    Where this process ends for any reason, also by kill -9, the kernel sends the run SIGTERM, so that it saves and
    ends. A run in the same folder is resumed where it has checkpoints, and starts anew where it has none.
    """

    def __init__(self, folder: Path, run_file: str, place: Place) -> None:
        self.folder, self.place = folder, place
        self.metrics = MetricsReader(folder / RUN / "metrics.jsonl")
        self.is_stopped = False
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / RUN_FILE, run_file)
        self._began = time.monotonic()
        with (folder / LOG).open("ab") as log:
            self.process = subprocess.Popen(
                place.command(folder / RUN_FILE),
                env=place.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
        pid = self.process.pid
        tree = {"namespace": own_pid_namespace(), "pid": pid, "began": began_at(pid)}
        replace_file(folder / PROCESS, json.dumps(tree) + "\n")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it is running. Reads what was added to the metrics."""
        code = self.process.poll()
        self.metrics.update_all()
        return code

    def stop(self) -> None:
        """Let the run save and end; a second call has no effect."""
        if not self.is_stopped and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.is_stopped = True

    def kill(self) -> None:
        """End the run and its processes at once; `launch` ends the ranks that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def why_failed(self, code: int) -> str:
        """The exit code in words, with the last lines of the output."""
        if code == INTERRUPTED_EXIT_CODE:
            return "it was ended by a signal"
        lines = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        text = " / ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}: {text}"


def is_still_running(folder: Path) -> bool:
    """Whether the run that an earlier experiment started in `folder` still runs, for example because it saves.

    Known for processes of this host and container alone; elsewhere the lock of the checkpoint folder keeps runs apart.
    """
    earlier = read_object(folder / PROCESS)
    if earlier.get("namespace") != own_pid_namespace() or not isinstance(earlier.get("pid"), int):
        return False
    return not has_ended(earlier["pid"], str(earlier.get("began", "")))


def is_stopped_code(code: int) -> bool:
    """Whether a run that was told to end has ended with `code`: after it had saved, or by the signal itself.

    A run that saves nothing, or has trained its last step, does not handle the signal; `launch` adds 128.
    """
    return code in (INTERRUPTED_EXIT_CODE, -signal.SIGTERM, 128 + signal.SIGTERM)
