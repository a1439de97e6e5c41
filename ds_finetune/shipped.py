"""Files that come with the package, by name from any folder: DeepSpeed choices, run files and hostfiles."""

from collections.abc import Iterator
from pathlib import Path

DS_CONFIGS, HOSTFILES = "ds_configs", "hostfiles"
"""Links in the package to the folders at the top of a checkout; a wheel holds copies in their place."""
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
    """Files of a folder, by their paths below it."""
    root = _PACKAGE / folder
    return (str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file())
