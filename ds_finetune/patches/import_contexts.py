"""Modules of other packages that are executed inside a context manager when they are imported."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

Context = Callable[[], AbstractContextManager[object]]


class _ContextFinder(MetaPathFinder):
    """Finds modules that have a context; all others are left to the finders behind it."""

    def __init__(self) -> None:
        self.contexts: dict[str, Context] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.contexts:
            return None
        spec = PathFinder.find_spec(name, path, target)
        # A module that is no source file is imported as it is.
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _ContextLoader(spec.loader.name, spec.loader.path, self.contexts[name])
        return spec


class _ContextLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, context: Context) -> None:
        super().__init__(name, path)
        self._context = context

    def exec_module(self, module: ModuleType) -> None:
        with self._context():
            super().exec_module(module)


_FINDER = _ContextFinder()


def import_inside(name: str, context: Context) -> None:
    """From now on the body of module `name` is executed inside `context()`; a module that is imported already stays."""
    _FINDER.contexts[name] = context
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


@contextmanager
def entered_at_import(name: str, context: Context) -> Iterator[None]:
    """While this is open `context()` is entered, now or as soon as module `name` is imported; it is left at the end."""
    with ExitStack() as stack:
        if name in sys.modules:
            stack.enter_context(context())
        else:
            before = _FINDER.contexts.get(name, nullcontext)
            import_inside(name, partial(_entering_after, stack, context, before))
            stack.callback(import_inside, name, before)
        yield


@contextmanager
def _entering_after(stack: ExitStack, context: Context, before: Context) -> Iterator[None]:
    with before():
        yield
    stack.enter_context(context())
