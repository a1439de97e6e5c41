"""Differences between the run files of several runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ds_finetune.config.dotted_keys import values_by_key
from ds_finetune.runs.report.number_texts import NONE

_LONGEST = 160


def flat_config(config: Mapping[str, Any]) -> dict[str, str]:
    """The values of a run file by their keys joined by dots, as YAML on one line."""
    return {key: _text(value) for key, value in values_by_key(config).items()}


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each key whose value is not the same in all run files: the key and the value of each run.

    A key that a run file does not have, as in another version, is shown as a dash. `output_dir` always differs and is
    left out.
    """
    flats = [flat_config(config) for config in configs]
    names = {name: None for flat in flats for name in flat}
    return [
        (name, *(flat.get(name, NONE) for flat in flats))
        for name in names
        if name != "output_dir" and len({flat.get(name) for flat in flats}) > 1
    ]


def _text(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    text = text.removesuffix("\n...").strip()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2]} …"
