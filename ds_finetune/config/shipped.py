"""Finds files that come with the package: DeepSpeed configurations, run files and hostfiles."""

from collections.abc import Iterator
from pathlib import Path

DS_CONFIGS, HOSTFILES = "ds_configs", "hostfiles"
"""Folders in the package: in a checkout links to the folders of the repository, in a wheel copies of them."""
_PACKAGE = Path(__file__).parent


def shipped_file(given: str) -> Path | None:
    """The file of a path such as `ds_configs/zero3.json`, or None where none comes with the package."""
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
