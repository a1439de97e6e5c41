"""Send the metrics of a run to MLflow from a thread, many steps in one call."""

import atexit
import json
import os
import posixpath
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ds_finetune.console.phase_line import Say
from ds_finetune.system.whole_file import replace_file

Record = tuple[int, Mapping[str, float]]
"""A step and its finite values by name."""
MAX_WAITING = 10_000
"""Maximum number of records that wait while MLflow cannot be reached; newer ones are sent by a resume alone."""
PAUSE_SECONDS = 2.0
"""Between two calls: a call costs MLflow's SQLite store 6 ms and 0.1 ms a value."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for what is not yet sent."""
_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""Maximum number of a call (mlflow 3.17, utils/validation.py)."""
_LONGEST_NAME, _LONGEST_VALUE = 250, 6000
_EXPERIMENT = "ds_finetune"
_RUN_FILE = "mlflow.json"


def one_line(failed: Exception) -> str:
    """The reason of an exception: the first line of its text."""
    text = (getattr(failed, "strerror", None) or str(failed)).strip()
    return text.splitlines()[0][:300] if text else type(failed).__name__


class MlflowRun:
    """A run in MLflow, which a resumed run continues: it sends no value of a step again, and those that are missing.

    Uses MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID; without the first, the store is `mlflow.db` in
    the run folder. `mlflow.json` there holds the run's id.
    """

    def __init__(
        self, name: str, folder: Path, parameters: Mapping[str, str | float], earlier: Sequence[Record]
    ) -> None:
        self.name, self._folder, self._parameters = name, folder, parameters
        now = int(time.time() * 1000)
        self._earlier = [(now, step, values) for step, values in earlier]
        self._is_resumed = bool(earlier)
        self._client: Any = None
        self._run_id = ""
        self._sent_until: dict[str, int] = {}
        self._names: dict[str, str] = {}

    @property
    def is_open(self) -> bool:
        """Whether `start` has succeeded."""
        return self._client is not None

    def start(self) -> None:
        """Find or create the run, store the parameters, and send what it lacks of earlier steps; MlflowException."""
        client = self._connect()
        run = self._find(client)
        if run is None:
            run = client.create_run(self._experiment(client), run_name=self._folder.absolute().name)
            replace_file(self._folder / _RUN_FILE, json.dumps({"run_id": run.info.run_id}) + "\n")
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        self._run_id = run.info.run_id
        self._sent_until = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self._store_parameters(client, run.data.params)
        self._client = client

    def log(self, records: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Send steps with their time in milliseconds and values; MlflowException where they were not received."""
        from mlflow.entities import Metric

        metrics = [
            Metric(self._name_of(name), float(value), at, step)
            for at, step, values in (*self._earlier, *records)
            for name, value in values.items()
            if step > self._sent_until.get(self._name_of(name), -1)
        ]
        for some in _chunks(metrics, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=some)
        self._earlier = []

    def finish(self, status: str) -> None:
        """Set the status of the run."""
        if self._client is not None:
            self._client.set_terminated(self._run_id, status)

    def _connect(self) -> Any:  # noqa: ANN401 - mlflow's client
        import mlflow

        has_own_store = not mlflow.is_tracking_uri_set()
        return mlflow.MlflowClient(f"sqlite:///{self._folder.absolute() / 'mlflow.db'}" if has_own_store else None)

    def _experiment(self, client: Any) -> str:  # noqa: ANN401 - mlflow's client
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        if (found := client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            # Another run may have created it meanwhile.
            if (found := client.get_experiment_by_name(name)) is None:
                raise
            return str(found.experiment_id)

    def _find(self, client: Any) -> Any:  # noqa: ANN401 - a run of mlflow, or None
        """The run named by MLFLOW_RUN_ID; else that of the start before, None where there is none in this store."""
        from mlflow.exceptions import MlflowException

        if run_id := os.environ.get("MLFLOW_RUN_ID"):
            return client.get_run(run_id)
        file = self._folder / _RUN_FILE
        if not self._is_resumed or not file.exists():
            return None
        try:
            return client.get_run(json.loads(file.read_text(encoding="utf-8"))["run_id"])
        except MlflowException as failed:
            if failed.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _store_parameters(self, client: Any, stored: Mapping[str, str]) -> None:  # noqa: ANN401 - mlflow's client
        """Store them; MLflow keeps the first value of one for good, so a value that changed becomes a tag."""
        from mlflow.entities import Param, RunTag

        texts = {self._name_of(name): str(value)[:_LONGEST_VALUE] for name, value in self._parameters.items()}
        new = [Param(name, text) for name, text in texts.items() if name not in stored]
        for params in _chunks(new, _MOST_PARAMS):
            client.log_batch(self._run_id, params=params)
        changed = [
            RunTag(f"resumed.{name}"[:_LONGEST_NAME], text)
            for name, text in texts.items()
            if name in stored and stored[name] != text
        ]
        for tags in _chunks(changed, _MOST_PARAMS):
            client.log_batch(self._run_id, tags=tags)

    def _name_of(self, name: str) -> str:
        """The name in MLflow, which takes few characters and no path that leads elsewhere; unique."""
        if name not in self._names:
            allowed = re.sub(r"[^\w\-. /]", "_", name)
            clean = posixpath.normpath(re.sub(r"(^|/)\.\.?(?=/|$)", r"\1_", allowed).strip("/") or "_")
            clean, number = clean[: _LONGEST_NAME - 4], 2
            unique = clean
            while unique in self._names.values():
                unique, number = f"{clean}_{number}", number + 1
            self._names[name] = unique
        return self._names[name]


class MlflowSender:
    """A thread that sends what waits every two seconds. While MLflow fails, records wait and the run goes on."""

    def __init__(self, run: MlflowRun, say: Say) -> None:
        self._run, self._say = run, say
        self._waiting: deque[tuple[int, int, Mapping[str, float]]] = deque()
        self._lost = 0
        self._is_failing = not run.is_open
        self._status = "FINISHED"
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._send_until_end, name="mlflow", daemon=True)
        self._thread.start()
        atexit.register(self._fail)

    def put(self, record: Record) -> None:
        """Queue the values of a step."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append((int(time.time() * 1000), *record))
        else:
            self._lost += 1

    def close(self) -> None:
        """Send what waits, for a minute at most, and report what was not sent."""
        atexit.unregister(self._fail)
        self._ends.set()
        self._thread.join(CLOSE_SECONDS)
        if lost := self._lost + len(self._waiting):
            self._say(f"{self._run.name} LACKS {lost} RECORDS, which could not be written")

    def _fail(self) -> None:
        """At the end of a process whose run did not come to its end."""
        self._status = "FAILED"
        self.close()

    def _send_until_end(self) -> None:
        pause = PAUSE_SECONDS
        while not self._ends.wait(pause):
            pause = PAUSE_SECONDS if self._try(self._send) else min(2 * pause, 60)
        self._try(self._send)
        self._try(partial(self._run.finish, self._status))

    def _send(self) -> None:
        if not self._run.is_open:
            self._run.start()
        while True:
            # Only this thread removes records, and only after they were received.
            records = list(islice(self._waiting.copy(), 100))
            self._run.log(records)
            for _ in records:
                self._waiting.popleft()
            if not records:
                return

    def _try(self, send: Callable[[], None]) -> bool:
        """Whether it succeeded; prints a line when it first fails, and when it works again."""
        try:
            send()
        except Exception as failed:  # noqa: BLE001 - a server, a disk or the package
            if not self._is_failing:
                reason = one_line(failed)
                self._say(f"{self._run.name} CANNOT BE WRITTEN: {reason}; training continues, and its records wait")
            self._is_failing = True
            return False
        if self._is_failing:
            self._say(f"{self._run.name} is written again")
            self._is_failing = False
        return True


def _chunks(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), most):
        yield items[begin : begin + most]
