"""The pause of Python's search for cycles: what it keeps, and what it does not."""

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from ds_finetune import api
from ds_finetune.garbage import collection_paused


class Cycle:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_cycles_from_before_are_freed_and_those_from_inside_are_kept() -> None:
    before = weakref.ref(Cycle())
    with collection_paused():
        assert before() is None
        assert not gc.isenabled()
        inside = weakref.ref(Cycle())
    assert gc.isenabled()
    gc.collect()
    assert inside() is not None


def test_collection_is_enabled_again_after_an_error_and_stays_disabled_where_it_was() -> None:
    with pytest.raises(ImportError), collection_paused():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_program_that_calls_train_gets_its_own_cycles_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a model in a notebook that is dropped after the run."""

    def train(*_: object, **__: object) -> None:
        raise InterruptedError

    mine = Cycle()
    seen, config = weakref.ref(mine), Any
    monkeypatch.setitem(sys.modules, "ds_finetune.trainer.train", SimpleNamespace(train=train))
    with pytest.raises(InterruptedError):
        api.train(config)  # type: ignore[arg-type]
    del mine
    gc.collect()
    assert seen() is None
