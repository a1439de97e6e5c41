"""Fine-tune DeepSeek-style causal LMs with DeepSpeed: a run is a value that is planned, fed, stepped, saved and
exported.

The names of `__all__` are the Python API (docs/reference/python-api.md). Each is imported at its first use:
importing the package loads nothing else.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_finetune.api import evaluate, export, train
    from ds_finetune.config.schema import RunConfig, read_config
    from ds_finetune.trainer.dry_run import plan_run

__version__ = "0.1.0"
__all__ = ["RunConfig", "evaluate", "export", "plan_run", "read_config", "train"]

_MODULES = {
    "RunConfig": "config.schema",
    "read_config": "config.schema",
    "plan_run": "trainer.dry_run",
    "evaluate": "api",
    "export": "api",
    "train": "api",
}


class _Package(ModuleType):
    """This module's type: keeps a module from taking the place of a function that has its name.

    Importing `ds_finetune.export` or `ds_finetune.train` makes Python set the module as an attribute of this package
    (3.11, importlib/_bootstrap.py, `_find_and_load_unlocked`), and `from ds_finetune import export` would then give the
    module.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:
    # Hidden from type checkers, for which any name would exist.

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
