"""Writes folders of the data cache with checksums, syncs them to disk, and verifies them before use."""

import errno
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from filelock import FileLock
from numpy.typing import DTypeLike, NDArray

from ds_finetune.errors import OutputError
from ds_finetune.system.whole_file import synchronise

_SUMS = "sums.json"
_CHECKED = "checked"


@dataclass(frozen=True)
class ArrayParts:
    """A one-dimensional array of `length` elements in several pieces, which need not fit into memory at once."""

    dtype: DTypeLike
    length: int
    parts: Iterable[NDArray[np.generic]]

    @classmethod
    def of(cls, array: NDArray[np.generic]) -> "ArrayParts":
        """Wrap an array that is already in memory."""
        return cls(array.dtype, len(array), [array])

    def chunks(self) -> Iterator[memoryview | bytes]:
        """Yield the bytes of the array's .npy file, which are the same on every machine."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        header, form = io.BytesIO(), np.lib.format
        facts = {"descr": form.dtype_to_descr(dtype), "fortran_order": False, "shape": (self.length,)}
        form.write_array_header_1_0(header, facts)
        yield header.getvalue()
        yield from (np.ascontiguousarray(part, dtype=dtype).data.cast("B") for part in self.parts if len(part))


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create `folder` and lock it against other processes of the host; OutputError where it cannot be written."""
    lock = FileLock(folder / "lock")
    with _write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except OSError as refused:
            if refused.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            raise OutputError(
                f"data cache {folder} cannot be locked: {refused.strerror}",
                hint="set data.cache_dir to a folder on a file system with flock, such as a local disk",
            ) from refused
    try:
        yield
    finally:
        lock.release()


def write_folder(folder: Path, arrays: Mapping[str, ArrayParts], texts: Mapping[str, str]) -> None:
    """Write arrays, as `NAME.npy`, and texts to the new folder `folder`.

    The files go to a temporary folder that is renamed at the end, so that `folder` is complete and synced as soon as it
    exists. OutputError where writing fails, e.g. on a full disk; the unfinished folder is then removed.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with _write_errors(folder.parent):
            partial.mkdir(parents=True)
            files = {f"{name}.npy": array for name, array in arrays.items()}
            sums = {name: _write_file(partial / name, array.chunks()) for name, array in files.items()}
            sums |= {name: _write_file(partial / name, [text.encode()]) for name, text in texts.items()}
            _write_file(partial / _SUMS, [json.dumps(sums, indent=1, sort_keys=True).encode()])
            synchronise(partial)
            partial.rename(folder)
            synchronise(folder.parent)
    except OutputError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def content_hash(folder: Path, names: Iterable[str]) -> str:
    """Hash of the arrays `names` in a cache folder, made from the checksums recorded with them."""
    sums = json.loads((folder / _SUMS).read_bytes())
    arrays = {f"{name}.npy": sums[f"{name}.npy"] for name in names}
    return xxhash.xxh3_64_hexdigest(json.dumps(arrays, sort_keys=True).encode())


def find_damage(folder: Path) -> str:
    """Description of the first file of a cache folder that differs from its checksum; empty if none does."""
    try:
        sums = json.loads((folder / _SUMS).read_bytes())
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in sums.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{folder / _SUMS} cannot be read"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if (actual_size := path.stat().st_size) != size:
            return f"{path} has {actual_size} bytes, not the {size} that were written"
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()  # type: ignore[arg-type]
        if actual != digest:
            return f"{path} has the checksum {actual}, not the {digest} that was written"
    return ""


def remove_damaged(folders: Sequence[Path], *, since: float) -> list[str]:
    """Remove damaged cache folders. Returns a message for each; the caller holds the lock of the parent folder."""
    checked = folders[0].with_name(_CHECKED)
    if checked.is_file() and checked.stat().st_mtime >= since:
        return checked.read_text(encoding="utf-8").splitlines()
    lines = []
    for folder in folders:
        damage = find_damage(folder) if folder.is_dir() else ""
        if damage:
            lines.append(f"data cache is damaged: {damage}; it is built again")
            shutil.rmtree(folder)
    # On a read-only disk no file can mark the cache as verified; every process then verifies it.
    with suppress(OSError):
        checked.write_text("\n".join(lines), encoding="utf-8")
    return lines


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failed:
        raise OutputError(
            f"data cache {folder} cannot be written: {failed.strerror or failed}",
            hint="free space there, or set data.cache_dir to a folder on another disk",
        ) from failed


def _write_file(path: Path, chunks: Iterable[memoryview | bytes]) -> tuple[int, str]:
    digest = xxhash.xxh3_64()
    with path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()
