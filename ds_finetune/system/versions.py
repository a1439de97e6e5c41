"""Tested version ranges of packages, from pyproject.toml, and installed versions."""

import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from ds_finetune.console.tables import show_error
from ds_finetune.errors import DependencyError

UNTESTED = "DS_FINETUNE_UNTESTED_VERSIONS"
"""Environment variable: with the value 1, versions outside the tested ranges cause a warning instead of an error."""
EXTRAS = ("compressed", "eval", "gguf", "gpu", "math", "onnx", "pages", "quantize", "serve", "sweep", "track")
"""Extras whose packages are used at run time."""
_PROJECT = "ds_finetune"
_FILE = Path(__file__).resolve().parents[2] / "pyproject.toml"


@cache
def requirements_of(extra: str = "") -> tuple[Requirement, ...]:
    """Requirements of `extra`, including the extras it refers to, or of the program itself. They are read from the
    pyproject.toml of a checkout, whose installed metadata may be outdated, else from the installed package's metadata;
    empty without either.
    """
    lines: list[str] | None = None
    if _FILE.is_file():
        project = tomllib.loads(_FILE.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == _PROJECT:
            lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    if lines is None:
        try:
            requirements = [Requirement(line) for line in requires(_PROJECT) or ()]
        except PackageNotFoundError:
            return ()
        assert not extra or extra in metadata(_PROJECT).get_all("Provides-Extra", ())
        is_of_extra = {line: "extra" in str(line.marker) for line in requirements}
        lines = [str(line) for line in requirements if is_of_extra[line] == bool(extra)]
    parsed = [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate({"extra": extra})]
    named = [name for line in parsed if line.name.replace("-", "_") == _PROJECT for name in sorted(line.extras)]
    others = [line for line in parsed if line.name.replace("-", "_") != _PROJECT]
    return (*others, *(line for name in named for line in requirements_of(name)))


def installed_version(name: str) -> str:
    """The version of an installed package; "" where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def installed_versions(extras: Sequence[str] = ("", *EXTRAS)) -> dict[str, str]:
    """The installed version of each package that `extras` require ("": the program itself); "" where not installed."""
    return {line.name: installed_version(line.name) for extra in extras for line in requirements_of(extra)}


def outside_ranges(installed: Mapping[str, str], extra: str = "") -> dict[str, Requirement]:
    """Requirements of `extra`, or of the program itself, that the installed versions do not meet, by a text with the
    reason.

    A package of an extra that is not installed is left out, because the code that needs it reports that.
    """
    versions = {line: installed.get(line.name, "") for line in requirements_of(extra)}
    return {
        f"{line.name} {has or 'is not installed'} (tested: {range_text(line)})": line
        for line, has in versions.items()
        if not (line.specifier.contains(has, prereleases=True) if has else extra)
    }


def pip_install(*lines: Requirement) -> str:
    """The pip command that installs tested versions."""
    return shlex.join(["pip", "install", *(f"{line.name}{range_text(line)}" for line in lines)])


def range_text(line: Requirement) -> str:
    """The tested range of a package, lower bound first."""
    return ",".join(sorted(map(str, line.specifier), reverse=True))


@cache
def check_versions(extra: str = "") -> None:
    """DependencyError where installed packages are outside the tested ranges; a warning where `UNTESTED` is 1."""
    if not requirements_of():
        _warn("ds_finetune is not installed, and no pyproject.toml is beside it: versions of packages are not checked")
    elif wrong := outside_ranges(installed_versions([extra]), extra):
        text = f"packages outside the tested ranges: {', '.join(wrong)}"
        if os.environ.get(UNTESTED) != "1":
            hint = f"{pip_install(*wrong.values())}; or set {UNTESTED}=1 to compute with versions that no test has seen"
            raise DependencyError(text, hint=hint)
        _warn(f"{text}; no test has seen these versions ({UNTESTED}=1)")


def require_extra(extra: str, what: str) -> None:
    """DependencyError where a package of an extra, without which `what` does not work, is not installed or outside its
    tested range.
    """
    missing = [line.name for line in requirements_of(extra) if find_spec(line.name) is None]
    if missing:
        raise DependencyError(
            f"{what} needs {', '.join(missing)}: the extra `{extra}` is not installed",
            hint=f"pip install 'ds_finetune[{extra}]'",
        )
    check_versions(extra)


def _warn(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        show_error(f"warning: {text}")
