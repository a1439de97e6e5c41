"""Finds files that come with the package: DeepSpeed configurations, run files and hostfiles."""

from collections.abc import Iterator
from pathlib import Path

DS_CONFIGS, HOSTFILES = "ds_configs", "hostfiles"
"""Folders of files in the package: links to the repository's folders in a checkout, copies in a wheel."""
_PACKAGE = Path(__file__).parent


def shipped_file(given: str) -> Path | None:
    """Path of a file that comes with the package, such as `ds_configs/zero3.json`; None where there is none."""
    parts = Path(given).parts
    path = _PACKAGE / given
    return (
        path
        if len(parts) > 1 and parts[0] in (DS_CONFIGS, HOSTFILES) and ".." not in parts and path.is_file()
        else None
    )


def shipped_names(folder: str) -> Iterator[str]:
    """Paths of the files in a folder of the package, relative to that folder."""
    root = _PACKAGE / folder
    return (str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file())
