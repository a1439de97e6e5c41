"""Tasks of lm-evaluation-harness, where it is installed, over a model and the one it was trained from."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ds_finetune.errors import ConfigError
from ds_finetune.evaluation.compare import Metric
from ds_finetune.model.build import resolve_folder

METHOD = "normal approximation from the harness's standard errors, the two taken as independent"
_Z = 1.96


def run_tasks(
    model: str, baseline: str | None, tasks: Sequence[str | dict[str, Any]], *, limit: int | None
) -> dict[str, Metric]:
    """Metrics as `task/metric,filter` for every metric that has a standard error; ConfigError where the harness is not
    installed.

    A task is a name that the harness knows, or its configuration.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(
            f"--tasks {','.join(map(str, tasks))} needs lm-evaluation-harness, which is not installed",
            hint="pip install 'lm_eval[hf]>=0.4.13'",
        )
    here = _results(model, tasks, limit)
    there = None if baseline is None else _results(baseline, tasks, limit)
    return {
        name: _metric(value, error, None if there is None else there[name])
        for name, (value, error) in here.items()
        if there is None or name in there
    }


def _results(model: str, tasks: Sequence[str | dict[str, Any]], limit: int | None) -> dict[str, tuple[float, float]]:
    """Value and standard error by name."""
    import torch
    from lm_eval import simple_evaluate

    # Left out, lm_eval 0.4.13 takes `cuda` whether there is one or not.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {"pretrained": str(resolve_folder(model)), "dtype": "auto"}
    found = simple_evaluate(
        model="hf", model_args=given, tasks=list(tasks), device=device, limit=limit, bootstrap_iters=1000
    )
    return {f"{task}/{name}": pair for task, values in found["results"].items() for name, pair in _with_errors(values)}


def _with_errors(values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[float, float]]]:
    """The harness writes `acc,none` beside `acc_stderr,none`, and N/A where it has no error."""
    for key, value in values.items():
        name, _, kind = key.partition(",")
        error = values.get(f"{name}_stderr,{kind}")
        if isinstance(value, float | int) and isinstance(error, float | int):
            yield key, (float(value), float(error))


def _metric(value: float, error: float, baseline: tuple[float, float] | None) -> Metric:
    middle, wide = (value, error) if baseline is None else (value - baseline[0], (error**2 + baseline[1] ** 2) ** 0.5)
    interval = (middle - _Z * wide, middle + _Z * wide)
    return Metric(value, None if baseline is None else baseline[0], None if baseline is None else middle, interval)
