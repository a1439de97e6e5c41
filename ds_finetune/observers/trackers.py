"""Sends the metrics of a run to TensorBoard, MLflow, and other trackers of accelerate. MLflow is called from a thread,
so that no step waits for its server.
"""

import atexit
import errno
import json
import math
import os
import posixpath
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Self

from ds_finetune.config.dotted_keys import values_by_key
from ds_finetune.config.units import MIB
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import ConfigError
from ds_finetune.observers.record import StepRecord
from ds_finetune.observers.writers import MAX_WAITING, Outage, Record, one_line
from ds_finetune.system.whole_file import replace_file

PACKAGES = {
    "aim": "aim",
    "clearml": "clearml",
    "comet_ml": "comet-ml",
    "dvclive": "dvclive",
    "mlflow": "'ds_finetune[track]'",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "'ds_finetune[track]'",
}
"""The pip package of each tracker of accelerate 1.15 (tracking.py)."""
_ROOM_BYTES = MIB
"""Minimum free bytes on the disk to write TensorBoard's records."""
_PROJECT = "ds_finetune"
"""Project name in wandb where WANDB_PROJECT is not set."""
PAUSE_SECONDS = 2.0
"""Seconds between two calls of MLflow: a call costs its SQLite store 6 ms and 0.1 ms per value."""
_LONGEST_PAUSE = CLOSE_SECONDS = 60.0
_LONGEST_NAME, _LONGEST_VALUE = 250, 6000


class MlflowRun:
    """A run in MLflow. A resumed run continues it: only values that it does not have yet are sent.

    Uses MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID; without the first, the store is `mlflow.db` in
    the run folder. `mlflow.json` there holds the run's id.
    """

    # MLflow's own asynchronous logging is not used: it drops a batch that fails, and at exit waits for its last retry
    # (3.17, utils/async_logging/async_logging_queue.py:77), which takes minutes where the server is gone.

    def __init__(
        self, folder: Path, parameters: Mapping[str, str | float], earlier: Sequence[Record], say: Say
    ) -> None:
        self._folder, self._parameters, self._say = folder, parameters, say
        self._is_resumed, self._earlier = bool(earlier), [(_now(), *record) for record in earlier]
        self._waiting: deque[tuple[int, int, Mapping[str, float]]] = deque()
        self._client: Any = None
        self._sending, self._next, self._pause = Lock(), time.monotonic() + PAUSE_SECONDS, PAUSE_SECONDS
        self._lost, self._is_failing = 0, True

    def start(self) -> None:
        """Find or create the run, and store the parameters; MlflowException where that fails."""
        from mlflow import MlflowClient, is_tracking_uri_set
        from mlflow.entities import Param, RunTag

        client = MlflowClient(None if is_tracking_uri_set() else f"sqlite:///{self._folder.absolute()}/mlflow.db")
        run = _find(client, self._folder if self._is_resumed else None)
        if run is None:
            run = client.create_run(_experiment(client), run_name=self._folder.absolute().name)
            replace_file(self._folder / "mlflow.json", json.dumps({"run_id": run.info.run_id}) + "\n")
        self._run_id, stored = run.info.run_id, run.data.params
        client.update_run(self._run_id, status="RUNNING")
        self._sent_until = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        texts = {_legal(name): str(value)[:_LONGEST_VALUE] for name, value in self._parameters.items()}
        # MLflow never changes a parameter once it has a value.
        changed = [RunTag(f"resumed.{name}", text) for name, text in texts.items() if stored.get(name, text) != text]
        new = [Param(name, text) for name, text in texts.items() if name not in stored]
        client.log_batch(self._run_id, params=new, tags=changed)
        self._client, self._is_failing = client, False
        # Called where the process exits before the run has finished.
        atexit.register(self.close, "FAILED")

    def put(self, record: Record) -> None:
        """Queue the values of a step."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append((_now(), *record))
        else:
            self._lost += 1
        if time.monotonic() >= self._next and not self._sending.locked():
            Thread(target=self._try, name="mlflow", daemon=True).start()

    def close(self, status: str = "FINISHED") -> None:
        """Send queued records, for at most a minute, set the status of the run, and report what was not sent."""
        atexit.unregister(self.close)
        last = Thread(target=self._try, args=(status,), name="mlflow", daemon=True)
        last.start()
        last.join(CLOSE_SECONDS)
        if lost := self._lost + len(self._waiting):
            self._say(f"mlflow LACKS {lost} RECORDS, which could not be written")

    def _try(self, status: str = "") -> None:
        with self._sending:
            failed_before = self._is_failing
            try:
                self._send(status)
            except Exception as failed:  # noqa: BLE001 - a server, a disk or the package fails; records wait
                if not failed_before:
                    self._say(f"mlflow CANNOT BE WRITTEN: {one_line(failed)}; training continues, and its records wait")
                self._is_failing, self._pause = True, min(2 * self._pause, _LONGEST_PAUSE)
            else:
                if failed_before:
                    self._say("mlflow is written again")
                self._is_failing, self._pause = False, PAUSE_SECONDS
            self._next = time.monotonic() + self._pause

    def _send(self, status: str) -> None:
        from mlflow.entities import Metric

        if self._client is None:
            self.start()
        while records := [*self._earlier, *islice(self._waiting.copy(), 100)]:
            metrics = [
                Metric(_legal(name), float(value), at, step)
                for at, step, values in records
                for name, value in values.items()
                if step > self._sent_until.get(_legal(name), -1)
            ]
            self._client.log_batch(self._run_id, metrics)
            # Only the thread that holds the lock removes records, and only after MLflow has received them.
            for _ in records[len(self._earlier) :]:
                self._waiting.popleft()
            self._earlier = []
        if status:
            self._client.set_terminated(self._run_id, status)


def check_trackers(names: Sequence[str]) -> None:
    """ConfigError for a tracker unknown to accelerate (with the known ones), or whose package is missing."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = {str(name) for name in get_available_trackers()}
    known_names = sorted(str(name) for name in LOGGER_TYPE_TO_CLASS)
    for name in names:
        if name not in known_names:
            raise ConfigError(f"log.trackers names `{name}`", hint=f"accelerate knows {', '.join(known_names)}")
        if name not in available:
            raise ConfigError(
                f"log.trackers names `{name}`, whose package is not installed",
                hint=f"pip install {PACKAGES.get(name, name)}, or leave it out",
            )


class Trackers:
    """The trackers of a run. A failing tracker does not end the run."""

    def __init__(self, trackers: "Sequence[_Tracker | MlflowRun]") -> None:
        self._trackers = trackers

    @classmethod
    def open(
        cls, names: Sequence[str], folder: Path, config: Mapping[str, Any], say: Say, *, is_resumed: bool = False
    ) -> Self:
        """Start each tracker of `names`, which `check_trackers` has accepted, with the configuration as parameters.

        A resumed run sends TensorBoard and MLflow the records of `metrics.jsonl` that they lack. ConfigError where a
        tracker cannot be opened; a resumed run prints a line instead and retries.
        """
        parameters = flatten(config)
        earlier = read_records(folder / "metrics.jsonl") if is_resumed else []
        trackers: list[_Tracker | MlflowRun] = []
        for name in names:
            if name == "mlflow":
                trackers.append(MlflowRun(folder, parameters, earlier, say))
            else:
                kind = _TensorBoard if name == "tensorboard" else _Tracker
                trackers.append(kind(name, folder, parameters, earlier, say))
            with _opening(name, say, is_resumed=is_resumed):
                trackers[-1].start()
        return cls(trackers)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Send the finite values of the record."""
        values = {name: value for name, value in record.values.items() if math.isfinite(value)}
        for tracker in self._trackers:
            tracker.put((record.step, values))
        return record

    def close(self) -> None:
        """Finish each tracker."""
        for tracker in self._trackers:
            tracker.close()


def flatten(tree: Mapping[str, Any]) -> dict[str, str | float]:
    """The values of a configuration by dotted key; lists and null as JSON."""
    return {
        key: value if isinstance(value, str | int | float) else json.dumps(value)
        for key, value in values_by_key(tree).items()
    }


def read_records(path: Path) -> list[Record]:
    """The finite values of each step of a complete `metrics.jsonl`; empty without the file."""
    if not path.exists():
        return []
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [
        (
            line["step"],
            {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)},
        )
        for line in lines
    ]


@contextmanager
def _opening(name: str, say: Say, *, is_resumed: bool) -> Iterator[None]:
    try:
        yield
    except Exception as failed:
        # The packages raise exception classes of their own (wandb.errors.Error, MlflowException), and need not be
        # installed.
        if not is_resumed:
            raise ConfigError(
                f"log.trackers names `{name}`, which cannot be opened: {one_line(failed)}",
                hint="set the variables of its package, or leave it out",
            ) from failed
        say(f"{name} CANNOT BE OPENED: {one_line(failed)}; training continues, and its records wait")


class _Tracker:
    """A tracker of accelerate, which gets each record at once; a record that it fails to write is queued (`Outage`)."""

    def __init__(
        self, name: str, folder: Path, parameters: Mapping[str, str | float], earlier: Sequence[Record], say: Say
    ) -> None:
        self._name, self._folder, self._parameters, self._earlier = name, folder, parameters, earlier
        self._open: Any = None
        self._outage = Outage(name, self._send, say)
        self.put = self._outage.put

    def start(self) -> None:
        """Open the tracker and store the settings of the run."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        arguments: dict[str, str] = {}
        if self._name == "wandb":
            names = {"name": ("WANDB_NAME", self._folder.absolute().name), "dir": ("WANDB_DIR", str(self._folder))}
            arguments = {name: value for name, (variable, value) in names.items() if variable not in os.environ}
        elif self._name == "aim":
            arguments = {"logging_dir": str(self._folder)}
        project = os.environ.get("WANDB_PROJECT", _PROJECT) if self._name == "wandb" else self._folder.name
        opened: Any = LOGGER_TYPE_TO_CLASS[self._name](project, **arguments)
        # accelerate 1.10 has no `start`, and opens in the constructor.
        if hasattr(opened, "start"):
            opened.start()
        opened.store_init_configuration(dict(self._parameters))
        self._open = opened

    def close(self) -> None:
        """Send queued records a last time and finish; errors of finishing are ignored, because the run is complete."""
        self._outage.close()
        with suppress(Exception):
            self._finish()

    def _send(self, record: Record) -> None:
        try:
            if self._open is None:
                self.start()
            self._log(*record)
        except OSError:
            raise
        except Exception as failed:
            # Any exception of a package counts as an outage: the record is queued, and training continues.
            raise OSError(one_line(failed)) from failed

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._open.log(dict(values), step=step)

    def _finish(self) -> None:
        self._open.finish()


class _TensorBoard(_Tracker):
    """TensorBoard, whose event file is opened again after a failed write."""

    _is_reopened = False

    def start(self) -> None:
        """Write to a new event file, which replaces the records of earlier files from its first step on.

        On resume the first step is the last one before it, whose record may be missing; without earlier files all steps
        are written.
        """
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = self._folder / "tensorboard"
        has_files = any(folder.glob("events.*"))
        earlier = self._earlier[-1:] if has_files else self._earlier
        # Also replace records of a run that ended before its first checkpoint.
        first = (earlier[0][0] if earlier else 0) if has_files and not self._is_reopened else None
        self._open = SummaryWriter(str(folder), purge_step=first)  # type: ignore[no-untyped-call] # of torch
        if self._is_reopened:
            return
        self._is_reopened = True
        # SummaryWriter.add_hparams would create a separate TensorBoard run for the parameters.
        for summary in hparams(dict(self._parameters), {}):  # type: ignore[no-untyped-call] # of torch
            self._open.file_writer.add_summary(summary)
        for record in earlier:
            self._log(*record)

    def _send(self, record: Record) -> None:
        # On a nearly full disk a record would be written incompletely.
        disk = os.statvfs(self._folder)
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < _ROOM_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._send(record)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        # A single event for all values; SummaryWriter.add_scalar writes one for each.
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        try:
            self._open.file_writer.add_summary(summary, step)
            self._open.flush()
        except OSError:
            # tensorboard 2.21: the writer's thread ends with its first error and leaves an incomplete record
            # (summary/writer/event_file_writer.py:246), at which readers stop. Later records need a new file.
            self._open = None
            raise

    def _finish(self) -> None:
        self._open.close()


def _now() -> int:
    return int(time.time() * 1000)


def _legal(name: str) -> str:
    """The name with the characters that MLflow allows, as a normalised path."""
    return posixpath.normpath(re.sub(r"[^\w\-. /]", "_", name))[: _LONGEST_NAME - len("resumed.")]


def _find(client: Any, folder: Path | None) -> Any:  # noqa: ANN401 - mlflow's client, and a run of it or None
    """The run of MLFLOW_RUN_ID; else the run of the previous start in `folder`, None where this store lacks it."""
    from mlflow.exceptions import MlflowException

    if run_id := os.environ.get("MLFLOW_RUN_ID"):
        return client.get_run(run_id)
    file = None if folder is None else folder / "mlflow.json"
    try:
        return client.get_run(json.loads(file.read_text())["run_id"]) if file is not None and file.exists() else None
    except MlflowException as failed:
        if failed.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _experiment(client: Any) -> str:  # noqa: ANN401 - mlflow's client
    from mlflow.exceptions import MlflowException

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ds_finetune")
    if (experiment := client.get_experiment_by_name(name)) is None:
        # Another run may create it at the same time.
        with suppress(MlflowException):
            client.create_experiment(name)
        experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id)
