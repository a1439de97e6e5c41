"""DeepSpeed's import: a package that its autotuner imports with it."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TUNER = "deepspeed.autotuning.autotuner"
"""Imports mlflow at its start, where that is installed, and goes on without it where it is not (DeepSpeed 0.19.8,
autotuning/autotuner.py:30-34).
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
