"""torch.utils.cpp_extension: the lock on the folder in which an operator is compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.utils.file_baton import FileBaton

from ds_finetune.foreign.guard import Foreign, replaced

_LOCK = Foreign("torch", "utils/cpp_extension.py:2345, utils/file_baton.py")


@contextmanager
def replaced_build_lock(lock: Callable[[str], FileBaton]) -> Iterator[None]:
    """While this is open operators are compiled under `lock(path)` instead of torch's own lock.

    Torch's lock is an empty file, for which others wait without end and without a message once its holder was killed.
    """
    from torch.utils import cpp_extension

    _LOCK.attribute(cpp_extension, "FileBaton")
    _LOCK.parameters(FileBaton.__init__, "lock_file_path")
    for method in ("try_acquire", "wait", "release"):
        _LOCK.attribute(FileBaton, method)
    with replaced(cpp_extension, "FileBaton", lock):
        yield
