"""Checks a model folder before its files are read: it may come from anywhere, and must not make this program hang or
run out of memory.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_finetune.errors import ModelError
from ds_finetune.model.safetensors_header import header_bytes
from ds_finetune.units import MIB

MAX_LAYERS = 1000
"""Maximum number of layers of a model: each is built as Python objects before its weights are read. The deepest
published models have 126.
"""
MAX_CONFIG_BYTES = 16 * MIB
"""Maximum size of a config.json; published ones have a few KiB."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "num_nextn_predict_layers")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
_SHOWN = 5


def check_folder(folder: Path) -> None:
    """ModelError where `folder` holds something that is neither file nor folder, a template outside it, or implausible
    sizes.

    Reading a FIFO would wait forever. A chat template that is a link out of the folder would render, and export, a
    private file of this machine. The sizes are the number of layers and the lengths of safetensors headers.
    """
    special = [
        entry.name
        for entry in sorted(folder.iterdir())
        if entry.exists() and not entry.is_file() and not entry.is_dir()
    ]
    if special:
        raise ModelError(
            f"`{folder}` holds {', '.join(special[:_SHOWN])}, which is no regular file but a pipe, socket or device",
            hint="it may be harmful; remove it, or take another copy",
        )
    for template in (template for pattern in _TEMPLATES for template in folder.glob(pattern)):
        if not _is_inside(template, folder):
            raise ModelError(
                f"{template} is a link to {template.resolve()}, outside its folder",
                hint="it may be harmful; put the template itself there",
            )
    for file in (file for file in sorted(folder.glob("*.safetensors")) if file.is_file()):
        try:
            header_bytes(file)
        except ValueError as too_long:
            raise ModelError(f"{file}: {too_long}", hint="it is damaged or harmful; download it again") from too_long
    if (folder / "config.json").is_file():
        _check_layers(folder / "config.json")


def _is_inside(file: Path, folder: Path) -> bool:
    """Whether a file lies in `folder`, or in the blobs of the same model in the hub's cache."""
    real, target = folder.resolve(), file.resolve()
    blobs = [real.parents[1] / "blobs"] if real.parent.name == "snapshots" else []
    return any(target.is_relative_to(place) for place in (real, *blobs))


def _check_layers(file: Path) -> None:
    size = file.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise ModelError(
            f"{file} has {size:,} bytes, more than {MAX_CONFIG_BYTES:,}",
            hint="take the config.json published with the model",
        )
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        # The next reader of the file reports the error with more context.
        return
    for key, value in _counts(tree):
        least = 0 if key.endswith("num_nextn_predict_layers") else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_LAYERS:
            raise ModelError(
                f"{file}: {key} is {value!r}, not a number from {least} to {MAX_LAYERS}",
                hint="take the config.json published with the model",
            )


def _counts(tree: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - whatever a config.json holds
    """Numbers of layers by key, also those of nested configurations such as `text_config`."""
    for name, part in tree.items() if isinstance(tree, Mapping) else ():
        if name in _LAYERS and part is not None:
            yield name, part
        elif isinstance(part, Mapping):
            yield from ((f"{name}.{key}", value) for key, value in part.items() if key in _LAYERS and value is not None)
