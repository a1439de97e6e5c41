"""Files of JSON objects that tests read and change."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file."""
    return dict(json.loads(path.read_text()))


def change_json(path: Path, values: Mapping[str, object]) -> None:
    """Give the object in a file these values."""
    path.write_text(json.dumps(read_json(path) | dict(values)))
