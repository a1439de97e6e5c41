"""Sends the metrics of a run to trackers that accelerate supports, such as TensorBoard, MLflow and Weights & Biases."""

import atexit
import errno
import json
import math
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread, current_thread
from typing import Any, ClassVar

from ds_finetune.config.run_file import values_by_key
from ds_finetune.config.units import MIB
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import ConfigError
from ds_finetune.observers.record import StepRecord
from ds_finetune.observers.writers import MAX_WAITING, Outage, Record, one_line, read_records
from ds_finetune.system.whole_file import replace_file

_PACKAGES = {"comet_ml": "comet-ml", "mlflow": "'ds_finetune[track]'", "wandb": "'ds_finetune[track]'"}
"""What pip must install for a tracker. Other trackers of accelerate 1.15 (tracking.py) are named like their package."""
_ROOM_BYTES = MIB
"""Records for TensorBoard are written only if the disk has at least this number of free bytes."""
_PROJECT = "ds_finetune"
"""Default of the project in wandb (WANDB_PROJECT) and of the experiment in MLflow (MLFLOW_EXPERIMENT_NAME)."""
CLOSE_SECONDS = 60.0
_LONGEST_NAME, _LONGEST_VALUE = 250, 6000
"""Maximum number of characters that MLflow accepts in a name, and in the value of a parameter."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if accelerate has no tracker of a name, or if the tracker's package is not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = {str(name) for name in get_available_trackers()}
    known_names = sorted(str(name) for name in LOGGER_TYPE_TO_CLASS)
    for name in names:
        if name not in known_names:
            raise ConfigError(
                f"log.trackers names `{name}`, which is unknown", hint=f"name one of {', '.join(known_names)}"
            )
        if name not in available:
            raise ConfigError(
                f"log.trackers names `{name}`, whose package is not installed",
                hint=f"pip install {_PACKAGES.get(name, name)}, or leave it out",
            )


class Trackers:
    """Sends the record of each step to the experiment trackers of a run. A tracker that fails does not end the run.

    The trackers are those of `names`, which `check_trackers` has accepted. The values of the run file are their
    parameters. A resumed run sends TensorBoard the records of `metrics.jsonl` that TensorBoard lacks. ConfigError if a
    tracker cannot be opened; a resumed run prints a line instead and retries.
    """

    def __init__(
        self, names: Sequence[str], folder: Path, config: Mapping[str, Any], say: Say, *, is_resumed: bool = False
    ) -> None:
        parameters = flatten(config)
        earlier = read_records(folder / "metrics.jsonl") if is_resumed else []
        self._trackers: list[_Tracker] = []
        for name in names:
            kind = {"tensorboard": _TensorBoard, "mlflow": _Mlflow}.get(name, _Tracker)
            self._trackers.append(kind(name, folder, parameters, earlier, say))
            try:
                self._trackers[-1].start()
            except Exception as failed:
                # Trackers raise exceptions of their own packages (wandb.errors.Error, MlflowException), which may not
                # be installed, so every exception is caught.
                if not is_resumed:
                    raise ConfigError(
                        f"log.trackers names `{name}`, which cannot be opened: {one_line(failed)}",
                        hint="set the environment variables that its package needs, or leave it out",
                    ) from failed
                say(f"{name} CANNOT BE OPENED: {one_line(failed)}; training continues, and its records wait")

    def after_step(self, record: StepRecord) -> StepRecord:
        """Send the finite values of a step's record to each tracker."""
        values = {name: value for name, value in record.values.items() if math.isfinite(value)}
        for tracker in self._trackers:
            tracker.put((record.step, values))
        return record

    def close(self) -> None:
        """Finish each tracker."""
        for tracker in self._trackers:
            tracker.close()


def flatten(tree: Mapping[str, Any]) -> dict[str, str | float]:
    """Map dotted keys of a run file to their values. Lists and null become JSON texts."""
    return {
        key: value if isinstance(value, str | int | float) else json.dumps(value)
        for key, value in values_by_key(tree).items()
    }


class _Tracker:
    """An experiment tracker of accelerate. A record that it fails to write waits in memory."""

    def __init__(
        self, name: str, folder: Path, parameters: Mapping[str, str | float], earlier: Sequence[Record], say: Say
    ) -> None:
        self._name, self._folder, self._parameters, self._earlier = name, folder, parameters, earlier
        self._open: Any = None
        self._outage = Outage(name, self._send, say)

    def start(self) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        arguments: dict[str, str] = {}
        if self._name == "wandb":
            names = {"name": ("WANDB_NAME", self._folder.absolute().name), "dir": ("WANDB_DIR", str(self._folder))}
            arguments = {name: value for name, (variable, value) in names.items() if variable not in os.environ}
        elif self._name == "aim":
            arguments = {"logging_dir": str(self._folder)}
        project = os.environ.get("WANDB_PROJECT", _PROJECT) if self._name == "wandb" else self._folder.name
        opened: Any = LOGGER_TYPE_TO_CLASS[self._name](project, **arguments)
        # Trackers of accelerate 1.10 have no method `start`; they open in the constructor.
        if hasattr(opened, "start"):
            opened.start()
        opened.store_init_configuration(dict(self._parameters))
        self._open = opened

    def put(self, record: Record) -> None:
        self._outage.put(record)

    def close(self) -> None:
        """Send queued records a last time and finish the tracker, ignoring errors, since the run is complete."""
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
            # Any exception of a tracker's package counts as an outage: the record is queued, and training continues.
            raise OSError(one_line(failed)) from failed

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._open.log(dict(values), step=step)

    def _finish(self) -> None:
        self._open.finish()


class _TensorBoard(_Tracker):
    """The tracker TensorBoard. After a failed write, its records go to a new event file."""

    _is_reopened = False

    def start(self) -> None:
        """Open a new event file. From the first step of this file on, TensorBoard hides the records of earlier files.

        A resumed run repeats the last record from before it resumed, because TensorBoard may lack that record. If there
        are no earlier files, it repeats all such records.
        """
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = self._folder / "tensorboard"
        has_files = any(folder.glob("events.*"))
        earlier = self._earlier[-1:] if has_files else self._earlier
        # A run without earlier records starts anew, so event files of an earlier start are hidden from step 0 on.
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
        # On a nearly full disk a record would be written incompletely, so it is not written.
        disk = os.statvfs(self._folder)
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < _ROOM_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._send(record)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        # A single event has all values of a step; SummaryWriter.add_scalar would write an event for each value.
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        try:
            self._open.file_writer.add_summary(summary, step)
            self._open.flush()
        except OSError:
            # The writer's thread ends with its first error (tensorboard 2.21, summary/writer/event_file_writer.py:246)
            # and leaves an incomplete record, at which readers stop. Later records need a new file.
            self._open = None
            raise

    def _finish(self) -> None:
        self._open.close()


class _Mlflow(_Tracker):
    """The tracker MLflow. It is called from a thread of its own, so that no step waits for its server.

    The tracker uses MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID. Without MLFLOW_TRACKING_URI, the
    store is `mlflow.db` in the run folder. A resumed run continues the MLflow run whose id is in `mlflow.json`.
    """

    _unfinished: "ClassVar[_Mlflow | None]" = None

    def __init__(
        self, name: str, folder: Path, parameters: Mapping[str, str | float], earlier: Sequence[Record], say: Say
    ) -> None:
        super().__init__(name, folder, parameters, earlier, say)
        self._say, self._is_resumed, self._has_own_store, self._lost = say, bool(earlier), False, 0
        self._end_status = "FINISHED"
        self._records: Queue[Record | None] = Queue(MAX_WAITING)
        self._started = Future[None]()
        self._thread = Thread(target=self._work, name="mlflow", daemon=True)

    def start(self) -> None:
        """Open MLflow in the tracker's thread, since MLflow's current run belongs to a thread."""
        if current_thread() is not self._thread:
            if _Mlflow._unfinished is not None:
                # A failed earlier run of this process left its tracker open. This run would use the store of that run.
                _Mlflow._unfinished.close("FAILED")
            _Mlflow._unfinished = self
            self._thread.start()
            try:
                return self._started.result()
            finally:
                # If the process exits before the run has finished, MLflow records the run as failed.
                atexit.register(self.close, "FAILED")
        import mlflow
        from accelerate.tracking import MLflowTracker

        self._has_own_store = self._has_own_store or not mlflow.is_tracking_uri_set()
        if self._has_own_store:
            mlflow.set_tracking_uri(f"sqlite:///{self._folder.absolute()}/mlflow.db")
        file = self._folder / "mlflow.json"
        run_id = json.loads(file.read_text())["run_id"] if self._is_resumed and file.exists() else None
        tracker = MLflowTracker(_PROJECT, run_id=run_id, run_name=self._folder.absolute().name)
        tracker.start()
        parameters = {_legal(name): str(value)[:_LONGEST_VALUE] for name, value in self._parameters.items()}
        # MLflow never changes the value of a parameter, so values that differ after a resume become tags.
        stored = tracker.tracker.data.params
        changed = {name: text for name, text in parameters.items() if stored.get(name, text) != text}
        mlflow.set_tags({f"resumed.{name}": text for name, text in changed.items()})
        if run_id is None:
            tracker.store_init_configuration(parameters)
            replace_file(file, json.dumps({"run_id": tracker.tracker.info.run_id}) + "\n")
        self._open = tracker

    def put(self, record: Record) -> None:
        """Queue the values of a step for the tracker's thread; if the queue is full, count them as lost."""
        try:
            self._records.put_nowait(record)
        except Full:
            self._lost += 1

    def close(self, status: str = "FINISHED") -> None:
        """Let the tracker's thread send queued records and set the status of MLflow's run. Wait at most two minutes for
        this, then report how many records were not sent.
        """
        atexit.unregister(self.close)
        _Mlflow._unfinished = None
        self._end_status = status
        with suppress(Full):
            self._records.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if lost := self._lost + self._records.qsize():
            self._say(f"mlflow LACKS {lost} RECORDS, which could not be written")

    def _work(self) -> None:
        try:
            self.start()
        except Exception as failed:  # noqa: BLE001 - `start` raises it again in the thread of its caller
            self._started.set_exception(failed)
        else:
            self._started.set_result(None)
        while record := self._records.get():
            self._outage.put(record)
        super().close()

    def _finish(self) -> None:
        import mlflow

        mlflow.end_run(self._end_status)
        if self._has_own_store:
            # The store's address is unset, because the next run of this process has a store of its own.
            mlflow.set_tracking_uri(None)  # type: ignore[arg-type] # unsets it (mlflow 3.17)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        super()._log(step, {_legal(name): value for name, value in values.items()})


def _legal(name: str) -> str:
    """Replace characters that MLflow does not allow in a name. Cut the name so that a prefix `resumed.` fits."""
    return posixpath.normpath(re.sub(r"[^\w\-. /]", "_", name)[: _LONGEST_NAME - len("resumed.")])
