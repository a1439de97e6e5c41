"""torch.utils.cpp_extension: the lock on the folder in which an operator is compiled, and its source files."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from torch.utils.file_baton import FileBaton

from ds_finetune.patches.foreign import TESTED, Foreign, installed_version, replaced
from ds_finetune.patches.import_contexts import entered_at_import
from ds_finetune.whole_file import replace_file

_LOCK = Foreign("torch", "utils/cpp_extension.py:2345, utils/file_baton.py")
_LOAD = Foreign("torch", "utils/cpp_extension.py:1818")
_JOINED = ("async_io", "cpu_adam", "pin_memory")
"""Operators of DeepSpeed 0.19.8 (ops/op_builder) whose files can be compiled as one."""
_APART = "common"
"""The folder of async_io's files that define the same names as others; they include nothing of torch."""
_UNGUARDED = (
    "common/deepspeed_aio_types.h",
    "common/deepspeed_aio_utils.h",
    "common/deepspeed_aio_common.h",
    "py_lib/deepspeed_py_aio.h",
    "py_lib/deepspeed_aio_op_desc.h",
    "py_lib/deepspeed_cpu_op.h",
    "py_lib/deepspeed_aio_thread.h",
    "py_lib/deepspeed_py_io_handle.h",
    "py_lib/deepspeed_py_aio_handle.h",
    "py_lib/deepspeed_py_copy.h",
)
"""Headers of async_io that lack an include guard, each after those that it includes."""


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


@contextmanager
def joined_sources() -> Iterator[None]:
    """While this is open, DeepSpeed's operators for CPUs are compiled from one file each, without debug information.

    Nearly all of a file's time goes into torch's headers, which async_io has in eight of twelve files. The library lies
    in a folder of its own, since the other one would be compiled again for other files. Versions of DeepSpeed that are
    not tested keep their own files. A run that compiles nothing does not import torch's extensions, and setuptools with
    them.
    """
    with entered_at_import("torch.utils.cpp_extension", _loads_joined):
        yield


@contextmanager
def _loads_joined() -> Iterator[None]:
    from torch.utils import cpp_extension

    load = _LOAD.attribute(cpp_extension, "load")
    _LOAD.parameters(load, "sources", "extra_cflags", "build_directory", "with_cuda")

    @wraps(load)
    def load_joined(name: str, sources: Sequence[str], extra_cflags: Sequence[str] = (), **given: Any) -> Any:  # noqa: ANN401 - what torch's takes and returns
        if not is_joined(name) or given.get("with_cuda") or given.get("build_directory"):
            return load(name, sources, extra_cflags, **given)
        folder = joined_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        flags = [flag for flag in extra_cflags if flag != "-g"]
        return load(name, _join(sources, folder / "joined.cpp"), flags, build_directory=str(folder), **given)

    with replaced(cpp_extension, "load", load_joined):
        yield


def is_joined(name: str) -> bool:
    """Whether the operator `name` is compiled from one file where it is not compiled for CUDA."""
    return name in _JOINED and installed_version("deepspeed") == TESTED["deepspeed"]


def joined_folder(name: str) -> Path:
    """Where an operator that is compiled from one file is kept."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, False)) / "joined"


def _join(sources: Sequence[str], joined: Path) -> list[str]:
    """Write the file that includes those of `sources` which may be joined; returns what there is to compile."""
    apart = [source for source in sources if Path(source).parent.name == _APART]
    root = Path(sources[0]).parents[1]
    # What GCC and clang have imported they do not include again.
    lines = [f'#import "{root / header}"' for header in _UNGUARDED] if apart else []
    text = "\n".join([*lines, *(f'#include "{source}"' for source in sources if source not in apart), ""])
    if not joined.exists() or joined.read_text() != text:
        replace_file(joined, text)
    return [str(joined), *apart]
