"""The files and hub data sets behind what a run file names, each with the split that is read."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_finetune.data.files import FileKind, Record, known_endings, read_file
from ds_finetune.data.hub import read_hub
from ds_finetune.data.splits import DEFAULT_SPLITS, split_of_file
from ds_finetune.errors import DataError

__all__ = ["Record", "Source", "find_sources", "read_records"]


@dataclass(frozen=True)
class Source:
    """One file of a known kind, or a hub data set with its subset and split; `purpose` is `train` or `eval`.

    `note` says which split of a folder it was taken for, and what is left out; the same for all files of the folder.
    """

    path: str
    kind: str
    subset: str = ""
    split: str = ""
    purpose: str = "train"
    note: str = ""

    @property
    def fingerprint(self) -> tuple[str, int, int]:
        """What changes when the content does, known without reading it: path, bytes and modification time of a file."""
        if self.kind == "hub":
            return f"{self.path}:{self.subset}:{self.split or DEFAULT_SPLITS[self.purpose]}", 0, 0
        stat = Path(self.path).stat()
        return str(Path(self.path).resolve()), stat.st_size, stat.st_mtime_ns


def find_sources(paths: Sequence[str], *, purpose: str = "train") -> list[Source]:
    """The files behind paths (folders are searched), in a stable order; DataError for what is missing, empty or of no
    known kind.

    A path may end in `:split`, a hub id also in `:subset:split`. Where none is named, `purpose` chooses: the training
    split, or the held-out one.
    """
    found = [source for path in paths for source in _expand(path, purpose)]
    for source in found:
        if source.kind != "hub" and Path(source.path).stat().st_size == 0:
            raise DataError(f"data file `{source.path}` is empty", hint="write at least one row, or leave it out")
    return found


def read_records(source: Source) -> Iterator[tuple[str, Record]]:
    """Records of a source with the place of each (`file line 7`), for messages."""
    if source.kind == "hub":
        yield from read_hub(source.path, source.subset, source.split, purpose=source.purpose)
    else:
        yield from read_file(source.path, source.kind)


def _expand(path: str, purpose: str) -> Iterator[Source]:
    base, *names = [path] if Path(path).exists() else path.split(":")
    place = Path(base)
    if place.is_dir():
        yield from _files_of(base, _only(names, path), purpose)
    elif place.is_file():
        kind = FileKind.of(place)
        if names:
            raise DataError(f"data file `{base}` has no split `{':'.join(names)}`", hint="name the file alone")
        if kind is None:
            raise DataError(
                f"data file `{path}` ends in `{''.join(place.suffixes[-2:])}`", hint=f"known endings: {known_endings()}"
            )
        yield Source(path, kind.kind, purpose=purpose)
    elif FileKind.of(place) or base.startswith((".", "/", "~")) or base.count("/") != 1:
        raise DataError(
            f"data file `{base}` does not exist",
            hint="check data.train and data.eval; paths are relative to where you start",
        )
    else:
        yield _hub_source(base, names, purpose)


def _only(names: Sequence[str], path: str) -> str:
    if len(names) > 1:
        raise DataError(
            f"data folder `{path}` has no subsets", hint="name the folder of the subset, and its split after a colon"
        )
    return names[0] if names else ""


def _hub_source(path: str, names: Sequence[str], purpose: str) -> Source:
    if len(names) > 2 or not all(names):
        raise DataError(
            f"data `{':'.join((path, *names))}` is not a data set", hint="write `id`, `id:split` or `id:subset:split`"
        )
    subset, split = ("", *names)[-2:] if names else ("", "")
    return Source(path, "hub", subset, split, purpose)


def _files_of(path: str, split: str, purpose: str) -> Iterator[Source]:
    """The files of a folder, of one split where their names say which is theirs."""
    place = Path(path)
    kinds = {
        file: found for file in sorted(place.rglob("*")) if (found := FileKind.of(file)) is not None and file.is_file()
    }
    if not kinds:
        raise DataError(
            f"data folder `{path}` holds no file that ends in {known_endings()}", hint="name a folder with data files"
        )
    splits = {file: split_of_file(file.relative_to(place)) for file in kinds}
    wanted = split or _split_for(purpose, list(splits.values()), path)
    files = [file for file in kinds if not wanted or splits[file] == wanted]
    if not files:
        raise DataError(
            f"data folder `{path}` has no split `{wanted}`", hint=f"its splits are {_listed(splits.values())}"
        )
    named = {kinds[file].kind for file in files}
    if len(named) > 1:
        raise DataError(
            f"data folder `{path}` mixes {' and '.join(sorted(named))} files", hint="name the files themselves"
        )
    is_part = len(files) < len(kinds)
    note = f"data.{purpose} `{path}`: split {wanted} is read, {len(files)} of {len(kinds)} files" if is_part else ""
    yield from (Source(str(file), kinds[file].kind, split=wanted, purpose=purpose, note=note) for file in files)


def _split_for(purpose: str, splits: Sequence[str], path: str) -> str:
    """The split to read for `purpose`; empty for all files, where no name, or none but fitting ones, tells of a
    split.
    """
    named, fitting = {split for split in splits if split}, DEFAULT_SPLITS[purpose]
    if not named or named == {fitting[0]} or ("" in splits and len(named) == 1 and named <= set(fitting)):
        return ""
    if "" in splits:
        raise DataError(
            f"data folder `{path}` holds files of {_listed(named)}, and {splits.count('')} files of no split",
            hint="name the files themselves, or one split after a colon",
        )
    found = next((split for split in fitting if split in named), "")
    if not found:
        kind = "training" if purpose == "train" else "held-out"
        raise DataError(
            f"data.{purpose} `{path}` has no {kind} split: its files are of {_listed(named)}",
            hint=f"name another folder, or the split, e.g. `{path}:{min(named)}`",
        )
    return found


def _listed(splits: Iterable[str]) -> str:
    return ", ".join(sorted({split for split in splits if split})) or "not named"
