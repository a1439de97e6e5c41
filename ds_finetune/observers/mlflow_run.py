"""Send the metrics of a run to MLflow from a thread, so that no step waits for its server."""

import atexit
import json
import os
import posixpath
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from ds_finetune.console.phase_line import Say
from ds_finetune.observers.outage import MAX_WAITING, Record, one_line
from ds_finetune.system.whole_file import replace_file

PAUSE_SECONDS = 2.0
"""Between two calls: a call costs MLflow's SQLite store 6 ms and 0.1 ms a value."""
_LONGEST_PAUSE = CLOSE_SECONDS = 60.0
_LONGEST_NAME, _LONGEST_VALUE = 250, 6000


class MlflowRun:
    """A run in MLflow. A resumed run continues it: values that it has are not sent again, and those it lacks are.

    Uses MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID; without the first, the store is `mlflow.db` in
    the run folder. `mlflow.json` there holds the run's id.
    """

    # MLflow's own asynchronous logging drops a batch that fails, and waits at exit until its last retry has ended
    # (3.17, utils/async_logging/async_logging_queue.py:77): minutes where the server is gone.

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
        """Find or create the run and store the parameters; MlflowException where that fails."""
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
        # MLflow keeps the first value of a parameter for good.
        changed = [RunTag(f"resumed.{name}", text) for name, text in texts.items() if stored.get(name, text) != text]
        new = [Param(name, text) for name, text in texts.items() if name not in stored]
        client.log_batch(self._run_id, params=new, tags=changed)
        self._client, self._is_failing = client, False
        # At the end of a process whose run did not come to its end.
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
        """Send what waits, for a minute at most, set the status of the run, and report what was not sent."""
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
            except Exception as failed:  # noqa: BLE001 - a server, a disk or the package
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
            # Only the thread that holds the lock removes records, and only after they were received.
            for _ in records[len(self._earlier) :]:
                self._waiting.popleft()
            self._earlier = []
        if status:
            self._client.set_terminated(self._run_id, status)


def _now() -> int:
    return int(time.time() * 1000)


def _legal(name: str) -> str:
    """The name as MLflow takes it: few characters, and a path that leads nowhere else."""
    return posixpath.normpath(re.sub(r"[^\w\-. /]", "_", name))[: _LONGEST_NAME - len("resumed.")]


def _find(client: Any, folder: Path | None) -> Any:  # noqa: ANN401 - mlflow's client, and a run of it or None
    """The run named by MLFLOW_RUN_ID; else that of the start before in `folder`, None where this store has none."""
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
    if client.get_experiment_by_name(name) is None:
        try:
            client.create_experiment(name)
        except MlflowException:
            # Another run may have created it meanwhile.
            if client.get_experiment_by_name(name) is None:
                raise
    return str(client.get_experiment_by_name(name).experiment_id)
