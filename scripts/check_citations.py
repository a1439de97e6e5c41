"""Checks every `file:line` of foreign source that comments, patches and docs name against what is installed.

    python scripts/check_citations.py [--write]

Prints a line for each place that differs from the table, and exits with 1 if there is any. --write writes the table
again, after every line of that list has been read.

The table, `scripts/citations.tsv`, has for each cited place its package, file and lines, the definition around the
first line, and a digest of the text. After an upgrade the list says which places have moved and where to, which
have changed, and which are gone.
"""

import argparse
import ast
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "scripts" / "citations.tsv"
_READ = ("ds_finetune", "bench", "docs", "tests", "scripts", "examples")
_ENDINGS = (".py", ".md", ".sh", ".yaml")
_LEFT_OUT = "test_citations.py"
"""Its citations are of no package."""
_PACKAGES = {
    "accelerate": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "huggingface_hub": "huggingface_hub",
    "jinja2": "jinja2",
    "liger-kernel": "liger_kernel",
    "optuna": "optuna",
    "peft": "peft",
    "tensorboard": "tensorboard",
    "torch": "torch",
    "transformers": "transformers",
    "trl": "trl",
    "uvicorn": "uvicorn",
}
"""How texts call a package, and the name of its folder."""
_NAME = re.compile(rf"\b({'|'.join(_PACKAGES)})\b", re.IGNORECASE)
_LINES = r"\d+(?:-\d+)?"
_CITATION = re.compile(
    rf"(?<![\w/.-])((?:[\w-]+/)*\w+\.(?:py|cpp|cu|cuh|h)):((?>{_LINES}(?:,\s?{_LINES})*))(?!:\d|\.\d)"
)
_HEADER = "package\tfile\tlines\tdefinition\tdigest\n"
ELSEWHERE = "-"
"""The package of a place whose file no package installs, as sources in C++."""


@dataclass(frozen=True, order=True)
class Place:
    """Lines of a file of a foreign package, as `12` or `12-20`."""

    package: str
    file: str
    lines: str

    def __str__(self) -> str:
        return f"{self.package} {self.file}:{self.lines}"


@dataclass(frozen=True)
class Entry:
    """What stands at a place: the definition around its first line, and a digest of the text of its lines."""

    definition: str
    digest: str


def citations(text: str) -> Iterator[tuple[str, str, str, int]]:
    """The citations of a text: the package named before, the file, the lines, and the number of the line they stand on.

    A file without its folder is in that of the citation before, where that is on the same line or the one above.
    """
    for match in _CITATION.finditer(text):
        named = [name.group(1).lower() for name in _NAME.finditer(text, 0, match.start())]
        line = text.count("\n", 0, match.start()) + 1
        for lines in re.findall(_LINES, match.group(2)):
            yield _PACKAGES[named[-1]] if named else "", match.group(1), lines, line


def cited_places(root: Path = ROOT) -> tuple[dict[Place, list[str]], list[str]]:
    """Every cited place with where it is cited, and what is wrong with citations themselves."""
    places: dict[Place, list[str]] = {}
    wrong: list[str] = []
    for path in _read_files(root):
        beside, above = "", 0
        for package, file, lines, number in citations(path.read_text(encoding="utf-8")):
            where = f"{path.relative_to(root)}:{number}"
            if (path.parent / file).exists() or (root / file).exists() or (root / "ds_finetune" / file).exists():
                continue
            found = _resolve(package, file, beside if number <= above + 1 else "")
            if len(found) > 1:
                wrong.append(f"{where}: `{file}:{lines}` may be {', '.join(sorted(found)[:3])}: write more of the path")
                continue
            owner, _, inside = found[0].partition("/") if found else (ELSEWHERE, "", file)
            beside, above = found[0].rpartition("/")[0] if found else "", number
            places.setdefault(Place(owner, inside, lines), []).append(where)
    return places, wrong


def _read_files(root: Path) -> Iterator[Path]:
    for folder in _READ:
        yield from (
            path for path in sorted((root / folder).rglob("*")) if path.suffix in _ENDINGS and path.name != _LEFT_OUT
        )


def _resolve(package: str, file: str, beside: str) -> Sequence[str]:
    """The installed files, as `package/path`, that a citation may mean; those of the named package come first."""
    every = _installed().get(file.rpartition("/")[2], ())
    found = [path for path in every if path == file or path.endswith(f"/{file}")]
    of_package = [path for path in found if path.startswith(f"{package}/")] or found
    for whole in (f"{beside}/{file}", f"{package}/{file}"):
        if whole in of_package:
            return [whole]
    return of_package


@cache
def _installed() -> dict[str, list[str]]:
    """Files of the installed packages, as `package/path`, by their names."""
    files: dict[str, list[str]] = {}
    for package in sorted(set(_PACKAGES.values())):
        folder = _folder(package)
        for path in sorted(folder.rglob("*")) if folder else ():
            if path.suffix in (".py", ".h", ".cu", ".cpp", ".cuh"):
                files.setdefault(path.name, []).append(f"{package}/{path.relative_to(folder)}")
    return files


@cache
def _folder(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def _source(package: str, file: str) -> tuple[str, ...] | None:
    """The lines of a file without the space around them; None where there is none."""
    folder = _folder(package)
    path = folder / file if folder else None
    if path is None or not path.is_file():
        return None
    return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines())


def read_place(place: Place) -> Entry | None:
    """What stands at a place in the installed package; None where it has no such file or lines."""
    source = _source(place.package, place.file)
    first, last = bounds(place.lines)
    if source is None or last > len(source):
        return None
    return Entry(_definition(place.package, place.file, first), _digest(source[first - 1 : last]))


def bounds(lines: str) -> tuple[int, int]:
    """The first and the last line of `12` or `12-20`."""
    first, _, last = lines.partition("-")
    return int(first), int(last or first)


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


@cache
def _definitions(package: str, file: str) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and dotted name of each class and function of a Python file, outer ones first."""
    folder = _folder(package)
    if folder is None or not file.endswith(".py"):
        return ()
    found: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                begin = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                found.append((begin, child.end_lineno or child.lineno, name))
            visit(child, name)

    visit(ast.parse((folder / file).read_text(encoding="utf-8")), "")
    return tuple(found)


def _definition(package: str, file: str, line: int) -> str:
    """The innermost definition around a line; empty at the top of the module."""
    around = [name for begin, end, name in _definitions(package, file) if begin <= line <= end]
    return around[-1] if around else ""


def moved_to(place: Place, entry: Entry) -> list[str]:
    """Where the recorded text stands now, first in the definition in which it was."""
    source = _source(place.package, place.file) or ()
    first, last = bounds(place.lines)
    size = last - first + 1
    found = [at + 1 for at in range(len(source) - size + 1) if _digest(source[at : at + size]) == entry.digest]
    same = [line for line in found if _definition(place.package, place.file, line) == entry.definition]
    return [str(line) if size == 1 else f"{line}-{line + size - 1}" for line in same or found]


def read_table(path: Path = TABLE) -> dict[Place, Entry]:
    """The recorded places."""
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:])
    return {Place(*row[:3]): Entry(*row[3:]) for row in rows}


def differences(places: dict[Place, list[str]], table: dict[Place, Entry]) -> Iterator[str]:
    """What differs between citations, the table and what is installed; places of absent packages are passed over."""
    for place, where in sorted(places.items()):
        recorded, cited = table.get(place), ", ".join(where)
        if recorded is None:
            yield f"{cited}: {place} is not in the table; read the place and run --write"
        elif place.package != ELSEWHERE and _folder(place.package) is not None:
            entry = read_place(place)
            if entry != recorded:
                yield f"{cited}: {place}{_what_happened(place, recorded)}"
    for place in sorted(table.keys() - places.keys()):
        gone = place.package == ELSEWHERE or _source(place.package, place.file) is not None
        yield f"{place} is in the table and {'nothing cites it; run --write' if gone else 'its file is not installed'}"


def _what_happened(place: Place, recorded: Entry) -> str:
    within = f" in `{recorded.definition}`" if recorded.definition else ""
    if _source(place.package, place.file) is None:
        return f"{within}: the file is gone"
    lines = moved_to(place, recorded)
    if not lines:
        return f"{within}: the text has changed"
    return f"{within} is now at {' or '.join(lines)}"


def write_table(places: dict[Place, list[str]], path: Path = TABLE) -> None:
    """Record every cited place as it is installed; places of packages that are absent here keep their row."""
    before = read_table(path) if path.exists() else {}
    rows = []
    for place in sorted(places):
        entry = read_place(place) or before.get(place) or Entry("", "")
        rows.append("\t".join((place.package, place.file, place.lines, entry.definition, entry.digest)))
    path.write_text(_HEADER + "\n".join(rows) + "\n", encoding="utf-8")


def main() -> int:
    """Print the list, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table as the citations are now")
    asked = parser.parse_args()
    places, wrong = cited_places()
    if asked.write:
        write_table(places)
    lines = [*wrong, *differences(places, read_table())]
    absent = sum(place.package == ELSEWHERE or _folder(place.package) is None for place in places)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.write(f"{len(places)} places, {len(lines)} to look at, {absent} of packages that are not installed\n")
    return bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
