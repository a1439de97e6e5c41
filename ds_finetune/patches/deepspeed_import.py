"""DeepSpeed's import: packages that it imports with it and that most runs do not use."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ds_finetune.patches.foreign import replaced
from ds_finetune.patches.import_contexts import import_inside

_TUNER = "deepspeed.autotuning.autotuner"
"""Imports mlflow at its start, where that is installed, and goes on without it where it is not (DeepSpeed 0.19.8,
autotuning/autotuner.py:30-34).
"""
_MUON = "deepspeed.runtime.zero.muon.original_muon"
"""Decorates three functions with torch.compile, which imports torch's compiler (DeepSpeed 0.19.8, lines 50, 81, 189).
"""


class _WithoutMlflow(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "mlflow" and _is_being_imported(_TUNER):
            raise ModuleNotFoundError(f"{_TUNER} does without mlflow", name=name)
        return None


def import_without_mlflow() -> None:
    """From now on an import of DeepSpeed does not import mlflow, which takes as long as all the rest of it (1.3 s).

    Whoever else imports mlflow gets it. Only DeepSpeed's autotuner misses it, which nothing here uses.
    """
    if not any(isinstance(finder, _WithoutMlflow) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WithoutMlflow())


def _is_being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def import_without_compiler() -> None:
    """From now on an import of DeepSpeed does not import torch's compiler, an eighth of the CPU time of a start.

    Muon's functions are compiled at their first call instead.
    """
    import_inside(_MUON, _compiling_later)


@contextmanager
def _compiling_later() -> Iterator[None]:
    import torch

    with replaced(torch, "compile", compiled_at_first_call):
        yield


def compiled_at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile(function)`, made when it is called."""

    @cache
    def compiled() -> Callable[..., Any]:
        import torch

        return torch.compile(function)

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        return compiled()(*args, **kwargs)

    return call
