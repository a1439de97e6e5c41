"""The chart library of reports and of the page of `watch`: BokehJS, one script that the package bokeh installs."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ds_finetune.errors import DependencyError

TEMPLATES = Path(__file__).parent / "templates"
PLOTS = TEMPLATES / "plots.js"
"""Draws with BokehJS what `charts.py` describes."""
_MAJOR, _LEAST_MINOR = 3, 7
"""The versions of bokeh whose script it draws with."""


def bokehjs() -> Path:
    """The script, which defines the global `Bokeh`. It is found without an import of bokeh.

    Raises:
        DependencyError: bokeh is missing or too old or new, or was installed without its scripts.
    """
    hint = f"pip install 'bokeh>={_MAJOR}.{_LEAST_MINOR},<{_MAJOR + 1}'"
    try:
        bokeh = distribution("bokeh")
    except PackageNotFoundError as missing:
        raise DependencyError("charts need the package bokeh, which is not installed", hint=hint) from missing
    major, minor = (int(part) for part in bokeh.version.split(".")[:2])
    if major != _MAJOR or minor < _LEAST_MINOR:
        wanted = f"{_MAJOR}.{_LEAST_MINOR} or a later {_MAJOR}.x"
        raise DependencyError(f"charts need bokeh {wanted}, and {bokeh.version} is installed", hint=hint)
    script = Path(str(bokeh.locate_file("bokeh/server/static/js/bokeh.min.js")))
    if not script.is_file():
        reason = f"bokeh {bokeh.version} is installed without `{script}`"
        raise DependencyError(reason, hint=f"{hint} --force-reinstall")
    return script
