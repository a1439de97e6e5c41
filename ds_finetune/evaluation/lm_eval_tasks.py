"""Runs tasks of lm-evaluation-harness, an optional package, on a model and its baseline."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from ds_finetune.errors import ConfigError
from ds_finetune.evaluation.compare import Metric
from ds_finetune.model.build.skeleton import resolve_folder
from ds_finetune.system.versions import check_versions

METHOD = "normal approximation from the harness's standard errors, the two taken as independent"
_Z = 1.96


def run_tasks(
    model: str, baseline: str | None, tasks: Sequence[str | dict[str, Any]], *, limit: int | None
) -> dict[str, Metric]:
    """Run tasks of lm_eval, given by name or as a task configuration. Returns the metrics that have a standard error,
    by `task/metric,filter`; ConfigError without lm_eval.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(
            f"--tasks {','.join(map(str, tasks))} needs lm-evaluation-harness, and lm_eval is not installed",
            hint="pip install 'ds_finetune[eval]'",
        )
    check_versions("eval")
    of_model = _results(model, tasks, limit)
    of_baseline = None if baseline is None else _results(baseline, tasks, limit)
    return {
        name: _metric(value, error, None if of_baseline is None else of_baseline[name])
        for name, (value, error) in of_model.items()
        if of_baseline is None or name in of_baseline
    }


def _results(model: str, tasks: Sequence[str | dict[str, Any]], limit: int | None) -> dict[str, tuple[float, float]]:
    import torch
    from lm_eval import simple_evaluate

    # Without a named device, lm_eval 0.4.13 takes `cuda`, even on a host without GPUs.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = {"pretrained": str(resolve_folder(model)), "dtype": "auto"}
    results = simple_evaluate(
        model="hf", model_args=arguments, tasks=list(tasks), device=device, limit=limit, bootstrap_iters=1000
    )
    metrics = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            # lm_eval writes the standard error of `acc,none` as `acc_stderr,none`, which may be the text N/A.
            name, _, kind = key.partition(",")
            error = values.get(f"{name}_stderr,{kind}")
            if isinstance(value, float | int) and isinstance(error, float | int):
                metrics[f"{task}/{key}"] = float(value), float(error)
    return metrics


def _metric(value: float, error: float, baseline: tuple[float, float] | None) -> Metric:
    center, spread = (value, error) if baseline is None else (value - baseline[0], (error**2 + baseline[1] ** 2) ** 0.5)
    interval = (center - _Z * spread, center + _Z * spread)
    return Metric(value, None if baseline is None else baseline[0], None if baseline is None else center, interval)
