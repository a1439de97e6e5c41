"""Fine-tune DeepSeek-style causal LMs with DeepSpeed.

The names of `__all__` are the Python API (docs/reference/python-api.md). Each is imported at its first use:
`import ds_finetune` alone loads none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_finetune.api import evaluate, export_model, plan_run, train
    from ds_finetune.config.schema import RunConfig, read_config

__version__ = "0.1.0"
__all__ = ["RunConfig", "evaluate", "export_model", "plan_run", "read_config", "train"]

_MODULES = {
    "RunConfig": "config.schema",
    "read_config": "config.schema",
    "plan_run": "api",
    "evaluate": "api",
    "export_model": "api",
    "train": "api",
}

if not TYPE_CHECKING:
    # Hidden from type checkers: they would take any name for an attribute of this module.

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
