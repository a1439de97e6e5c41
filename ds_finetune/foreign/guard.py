"""Helpers for patches of other packages: checks that the patched code is as expected, and temporary replacements."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ds_finetune.errors import DependencyError
from ds_finetune.system.versions import installed_version

TESTED = {
    "bitsandbytes": "0.50.2",
    "datasets": "5.2.0",
    "deepspeed": "0.19.8",
    "liger-kernel": "0.8.5",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}
"""The version of each package with which the patches were tested."""


@dataclass(frozen=True)
class Foreign:
    """Code of another `package` that a patch changes. `location` names file and lines in the tested version."""

    package: str
    location: str

    def attribute(self, owner: object, name: str) -> Any:  # noqa: ANN401 - whatever it is
        """Return the attribute `name` of `owner`. DependencyError if it does not exist."""
        if not hasattr(owner, name):
            self._raise_changed(f"`{getattr(owner, '__name__', type(owner).__name__)}` has no `{name}`")
        return getattr(owner, name)

    def parameters(self, function: Callable[..., Any], *names: str) -> None:
        """Raise DependencyError if one of `names` is not a parameter of `function`."""
        parameters = inspect.signature(function).parameters
        for name in names:
            if name not in parameters:
                self._raise_changed(f"`{function.__qualname__}` takes no `{name}`")

    def source(self, function: Callable[..., Any], text: str) -> None:
        """Raise DependencyError if the source of `function` does not contain `text`."""
        if text not in inspect.getsource(function):
            self._raise_changed(f"`{function.__qualname__}` no longer contains `{text}`")

    def _raise_changed(self, problem: str) -> None:
        tested, installed = TESTED[self.package], installed_version(self.package).partition("+")[0] or "unknown"
        raise DependencyError(
            f"{self.package} {installed} cannot be patched: {problem}; ds-finetune's patch is written for "
            f"{self.package} {tested} ({self.location})",
            hint=f"pip install {self.package}=={tested} (constraints.txt lists all tested versions)",
        )


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Context in which the attribute `name` of `owner` (a module, class or object) has the value `value`."""
    is_own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
