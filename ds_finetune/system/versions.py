"""Version ranges of packages that were tested, from pyproject.toml, and versions that are installed."""

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
"""Environment variable that, if it is 1, turns the error for versions outside the tested ranges into a warning."""
EXTRAS = ("compressed", "eval", "gguf", "gpu", "math", "onnx", "pages", "quantize", "serve", "sweep", "track")
"""Extras (optional dependencies) whose packages are used at run time."""
_PROJECT = "ds_finetune"
_FILE = Path(__file__).resolve().parents[2] / "pyproject.toml"


@cache
def requirements_of(extra: str = "") -> tuple[Requirement, ...]:
    """Requirements of the extra `extra` and of the extras that it refers to. With "", those of the program itself.

    In a checkout they are read from pyproject.toml, because installed metadata may be outdated; otherwise from the
    metadata of the installed package. Empty if there is neither.
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


@cache
def installed_version(name: str) -> str:
    """Version of an installed package; "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def installed_versions(extras: Sequence[str] = ("", *EXTRAS)) -> dict[str, str]:
    """Installed version of each package that `extras` require ("" for the program itself); "" for a missing package."""
    return {line.name: installed_version(line.name) for extra in extras for line in requirements_of(extra)}


def outside_ranges(installed: Mapping[str, str], extra: str = "") -> dict[str, Requirement]:
    """Requirements of the extra `extra` (or of the program itself) that the installed versions do not meet. The keys
    describe installed versions, such as `torch 2.9.0 (tested: >=2.11,<2.14)`.

    Missing packages of an extra are left out, because the code that needs them reports them.
    """
    versions = {line: installed.get(line.name, "") for line in requirements_of(extra)}
    return {
        f"{line.name} {has or 'is not installed'} (tested: {range_text(line)})": line
        for line, has in versions.items()
        if not (line.specifier.contains(has, prereleases=True) if has else extra)
    }


def pip_install(*lines: Requirement) -> str:
    """Make the pip command that installs tested versions of packages."""
    return shlex.join(["pip", "install", *(f"{line.name}{range_text(line)}" for line in lines)])


def range_text(line: Requirement) -> str:
    """Tested version range of a package as text, lower bound first."""
    return ",".join(sorted(map(str, line.specifier), reverse=True))


@cache
def check_versions(extra: str = "") -> None:
    """Raise DependencyError if installed versions are outside the tested ranges; with `UNTESTED`=1 only warn."""
    if not requirements_of():
        _warn("ds_finetune is not installed, and no pyproject.toml is beside it: versions of packages are not checked")
    elif wrong := outside_ranges(installed_versions([extra]), extra):
        names = ", ".join(wrong)
        if os.environ.get(UNTESTED) != "1":
            raise DependencyError(
                f"packages outside the tested ranges: {names}",
                hint=f"{pip_install(*wrong.values())}; or set {UNTESTED}=1 to compute with untested versions",
            )
        _warn(f"packages outside the tested ranges: {names}; these versions are not tested ({UNTESTED}=1)")


def require_extra(extra: str, what: str) -> None:
    """Raise DependencyError if the extra that `what` needs is not installed, or in untested versions."""
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
