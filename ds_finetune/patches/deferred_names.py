"""Names that a module of another package imports at its start and rarely uses: the import waits for the first use.

`from scipy.optimize import linear_sum_assignment` takes 0.2 s of CPU in every start, and a function that is called in
training of object detectors uses it. Inside `deferring`, such a statement binds a stand-in. Calling it, reading its
attributes or deriving a class from it imports the module and uses the real thing. `isinstance` and `issubclass` are
false while the module is not imported, since nothing can be an instance of its classes then.

A stand-in is not the object that it stands for: `type(x) is Name`, a base in `__mro__` or a key of a registry would
differ. So importers are listed one by one, and `tests/patches/test_deferred_names.py` reads their source.
"""

import builtins
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, resolve_name
from types import ModuleType, new_class
from typing import Any

from ds_finetune.patches.foreign import replaced


class DeferredName(type):
    """The type of stand-ins for classes and functions; each is a class, so that annotations with `|` work."""

    _origin: tuple[str, str]

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **keywords: object) -> Any:  # noqa: ANN401
        """A class that derives from a stand-in derives from the real class."""
        real = tuple(_real(base) if isinstance(base, DeferredName) else base for base in bases)
        if real == bases:
            return super().__new__(cls, name, bases, body)
        return new_class(name, real, keywords, lambda namespace: namespace.update(body))

    def __call__(cls, *args: object, **kwargs: object) -> object:
        """Call the real object."""
        return _real(cls)(*args, **kwargs)

    def __getattr__(cls, name: str) -> object:
        """The attribute of the real object."""
        return getattr(_real(cls), name)

    def __instancecheck__(cls, instance: object) -> bool:
        """False where the module is not imported, else what the real class says."""
        return cls._origin[0] in sys.modules and isinstance(instance, _real(cls))

    def __subclasscheck__(cls, subclass: type) -> bool:
        """False where the module is not imported, else what the real class says."""
        return cls._origin[0] in sys.modules and issubclass(subclass, _real(cls))


def _real(stand_in: DeferredName) -> Any:  # noqa: ANN401 - whatever it stands for
    module, name = stand_in._origin
    return getattr(import_module(module), name)


class _NamesLater(ModuleType):
    """What `from MODULE import NAME` reads its names from."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return DeferredName(name, (), {"_origin": (self.__name__, name), "__module__": self.__name__})


class _ModuleLater(ModuleType):
    """What `import MODULE` binds."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)


@contextmanager
def deferring(importer: str, modules: Collection[str]) -> Iterator[None]:
    """While this is open, import statements of module `importer` do not import `modules`.

    Modules that are imported already, or whose package is not installed, are imported as usual, as are all modules by
    any other importer. `import a.b` is not deferred, only `import a` and `from a.b import name`.
    """
    genuine = builtins.__import__

    def import_later(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if globals is not None and globals.get("__name__") == importer and (fromlist or "." not in name):
            module = resolve_name("." * level + name, globals["__package__"]) if level else name
            if module in modules and module not in sys.modules and find_spec(module.partition(".")[0]) is not None:
                return _NamesLater(module) if fromlist else _ModuleLater(module)
        return genuine(name, globals, locals, fromlist, level)

    with replaced(builtins, "__import__", import_later):
        yield
