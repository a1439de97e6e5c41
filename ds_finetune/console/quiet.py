"""Hides messages of other packages that are known to be irrelevant; errors and other warnings stay.

DS_LOG_LEVEL=debug, info or warning shows the messages, and sets the level of DeepSpeed's log. The programs `deepspeed`
and `torchrun` still print their own lines before they start ranks ("Unable to find hostfile").
"""

import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ds_finetune.console.phase_line import count_parts
from ds_finetune.errors import ConfigError

SWITCH = "DS_LOG_LEVEL"
LEVELS = ("debug", "info", "warning")
_FORWARDED = "all_gather_into_tensor|reduce_scatter_tensor|_all_gather_base|_reduce_scatter_base"
_WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    # torch 2.13 warns about some functions of torch.distributed, which DeepSpeed 0.19.8 calls in every micro-batch
    # under ZeRO-3 (comm/torch.py).
    (FutureWarning, rf"`torch\.distributed\.({_FORWARDED})` is (deprecated|a private function)"),
    # The model classes of transformers 5.20 to 5.24 all use the deprecated `gradient_checkpointing_enable`
    # (modeling_utils.py:3191).
    (FutureWarning, r"`gradient_checkpointing_enable` is deprecated"),
)
_RECORDS = {
    # DeepSpeed's launcher prints this warning if it finds no hostfile and so uses the GPUs of this machine
    # (launcher/runner.py:214).
    "DeepSpeed": re.compile(r"Unable to find hostfile, will proceed with training"),
    # transformers prints a table of checkpoint tensors that the model ignores, such as those of a multi-token
    # prediction layer. A table that also names missing tensors stays (5.23, utils/loading_report.py).
    "transformers.modeling_utils": re.compile(r"(?s).*LOAD REPORT(?!.*(MISSING|MISMATCH|CONVERSION)).*UNEXPECTED"),
    # MLflow logs that it creates database tables at the first use of an SQLite store (mlflow 3.17, store/db/utils.py).
    "mlflow.store.db.utils": re.compile(r"(Creating initial MLflow|Updating) database tables"),
}
"""Patterns of log messages that are hidden, up to level WARNING, by the name of the logger."""
_LOADING_BAR = "Loading weights"
"""Description of transformers' progress bar of loading weights (5.23, core_model_loading.py:1831)."""
_WRITING_BAR = "Writing model shards"
"""transformers' progress bar of `save_pretrained`, which selftest calls (5.23, modeling_utils.py:3580)."""


def quiet_packages(environ: Mapping[str, str] = os.environ) -> None:
    """Hide known warnings and log messages until the process ends; ConfigError if DS_LOG_LEVEL is invalid."""
    if deepspeed_level(environ) != "quiet":
        return
    for category, message in _WARNINGS:
        # The filter is not removed at the end, because that would reset Python's record of warnings already shown.
        warnings.filterwarnings("ignore", message=message, category=category)
    for name, is_shown in _FILTERS.items():
        logging.getLogger(name).addFilter(is_shown)


def deepspeed_level(environ: Mapping[str, str] = os.environ) -> str:
    """Value of the environment variable DS_LOG_LEVEL, `quiet` by default; ConfigError for a value not in LEVELS."""
    level = environ.get(SWITCH) or "quiet"
    if level not in ("quiet", *LEVELS):
        raise ConfigError(f"{SWITCH} is `{level}`", hint=f"set it to {', '.join(LEVELS)}, or unset it")
    return level


def show_loading_as_phase() -> None:
    """Show transformers' loading of weights as a progress line, and hide transformers' bar of writing weights."""
    from transformers.utils import logging as transformers_logging

    if deepspeed_level() == "quiet":
        transformers_logging.set_tqdm_hook(_bar_or_phase)


def _bar_or_phase(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    # transformers only iterates over these two progress bars, so an iterator can replace them.
    if kwargs.get("desc") not in (_LOADING_BAR, _WRITING_BAR) or len(args) != 1:
        return factory(*args, **kwargs)
    if kwargs["desc"] == _WRITING_BAR:
        return args[0]
    return count_parts("loading weights", args[0], len(args[0]))


def _is_shown(pattern: re.Pattern[str], record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING or not pattern.search(record.getMessage())


_FILTERS = {name: partial(_is_shown, pattern) for name, pattern in _RECORDS.items()}
