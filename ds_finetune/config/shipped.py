"""Finds and reads files that come with the package: DeepSpeed configurations, run files and hostfiles."""

from collections.abc import Iterator
from pathlib import Path

from ds_finetune.errors import ConfigError, LaunchError

DS_CONFIGS, HOSTFILES = "ds_configs", "hostfiles"
"""Folders of the package with shipped files. In a checkout they are links to folders of the repository."""
_PACKAGE = Path(__file__).parent
_MOST_BYTES = 2**20


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


def read_text(given: str | Path, kind: str, hint: str, error: type[ConfigError | LaunchError] = ConfigError) -> str:
    """Text of the file `given`, or of the file of that name that comes with the package. Raise `error`, which names
    `kind` such as "hostfile", if the file cannot be read or is larger than 1 MiB.
    """
    path = Path(given)
    try:
        with (path if path.exists() else shipped_file(str(given)) or path).open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise error(f"{kind} `{given}` has more than {_MOST_BYTES} bytes", hint=hint)
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise error(f"{kind} `{given}` does not exist", hint=hint) from None
    except OSError as unreadable:
        raise error(f"{kind} `{given}` cannot be read: {unreadable.strerror}", hint=hint) from None
    except UnicodeDecodeError as binary:
        raise error(f"{kind} `{given}` is not UTF-8 text: {binary}", hint="save it as UTF-8") from None
