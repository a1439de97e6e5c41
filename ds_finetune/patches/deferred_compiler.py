"""torch.compile's marks on functions of other packages, set without importing torch's compiler.

transformers decorates a few functions of modules that every model imports with `torch.compiler.disable` and
`allow_in_graph`, and each of them imports `torch._dynamo` (torch 2.13, compiler/__init__.py:260): 0.5 s of CPU in every
start.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from ds_finetune.patches.foreign import is_tested, replaced
from ds_finetune.patches.import_contexts import import_inside

_DYNAMO = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result")
"""Functions of `torch._dynamo` that note a function for the compiler, and return it."""
_waiting: list[tuple[str, Callable[..., Any]]] = []
"""Names of marks and the functions that get them once the compiler is imported."""


@contextmanager
def marking_later() -> Iterator[None]:
    """While this is open, decorating a function for the compiler does not import it.

    The function is marked when the compiler is imported, so that it is before anything is compiled.
    """
    import torch

    if _DYNAMO in sys.modules:
        yield
        return
    import_inside(_DYNAMO, _marking_waiting)
    stand_in = _MarksLater(_DYNAMO)
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.compiler, "disable", _disable_later))
        for name in _MARKS:
            stack.enter_context(replaced(torch.compiler, name, getattr(stand_in, name)))
        vars(torch).setdefault("_dynamo", stand_in)
        try:
            yield
        finally:
            if vars(torch).get("_dynamo") is stand_in:
                del torch._dynamo


def _disable_later(
    function: Callable[..., Any] | None = None, recursive: bool = True, *, reason: str | None = None
) -> Callable[..., Any]:
    """`torch.compiler.disable`, applied at the first call; `reason` is a text for messages of the compiler."""
    import torch

    disabled: Callable[..., Any] = torch._disable_dynamo(function, recursive)  # type: ignore[call-overload]
    return disabled


class _MarksLater(ModuleType):
    """What `torch._dynamo` is while its marks wait; reading anything else of it imports the real module."""

    def __getattr__(self, name: str) -> object:
        if name in _MARKS:
            return lambda function: _mark(name, function)
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(_DYNAMO), name)


def _mark(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if _DYNAMO in sys.modules:
        marked: Callable[..., Any] = getattr(sys.modules[_DYNAMO], name)(function)
        return marked
    _waiting.append((name, function))
    return function


@contextmanager
def _marking_waiting() -> Iterator[None]:
    """Mark the functions that wait, after the compiler has been imported."""
    yield
    while _waiting:
        name, function = _waiting.pop()
        getattr(sys.modules[_DYNAMO], name)(function)


def keep_compiler_out() -> None:
    """From now on calls of functions that torch does not let be compiled, such as `Optimizer.add_param_group`, and
    steps of optimizers do not import the compiler.

    It changes nothing after torch was imported, and where torch has not the version whose source was read. While the
    compiler is not imported nothing is compiled, and its marks and breaks have no effect.
    """
    if "torch" not in sys.modules and is_tested("torch"):
        import_inside("torch._compile", _calling_plainly)
        import_inside("torch.optim.optimizer", _stepping_plainly)


@contextmanager
def _calling_plainly() -> Iterator[None]:
    yield
    module: Any = sys.modules["torch._compile"]
    module._disable_dynamo = _disabling_at_need(module._disable_dynamo)


def _disabling_at_need(disable: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(disable)
    def disable_at_need(fn: Callable[..., Any] | None = None, recursive: bool = True) -> Callable[..., Any]:
        if fn is None:
            return partial(disable_at_need, recursive=recursive)
        disabled: Callable[..., Any] = disable(fn, recursive)
        # What torch's wrapper calls (2.13, _compile.py:44); without it, it imports the compiler to make one.
        _set_called(fn, recursive=recursive)
        return disabled

    return disable_at_need


def _set_called(function: Any, *, recursive: bool) -> None:  # noqa: ANN401 - a function with attributes
    def call(*args: object, **kwargs: object) -> object:
        if _DYNAMO not in sys.modules:
            return function(*args, **kwargs)
        # Waits where another thread is importing it.
        function.__dynamo_disable = import_module(_DYNAMO).disable(function, recursive, wrapping=False)
        return function.__dynamo_disable(*args, **kwargs)

    function.__dynamo_disable = call


@contextmanager
def _stepping_plainly() -> Iterator[None]:
    yield
    module: Any = sys.modules["torch.optim.optimizer"]
    module._use_grad_for_differentiable = _without_breaks(module._use_grad_for_differentiable)


def _without_breaks(decorate: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of `Optimizer.step` (2.13, optim/optimizer.py:59-88), without its breaks of a compiled graph.

    It sets whether gradients are recorded.
    """

    @wraps(decorate)
    def decorate_step(step: Callable[..., Any]) -> Callable[..., Any]:
        with_breaks = decorate(step)

        @wraps(step)
        def run(optimizer: Any, *args: object, **kwargs: object) -> object:  # noqa: ANN401
            if _DYNAMO in sys.modules:
                return with_breaks(optimizer, *args, **kwargs)
            import torch

            with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
                return step(optimizer, *args, **kwargs)

        return run

    return decorate_step
