"""Checks a model folder before its files are read: it may come from anywhere, and must not make this program hang or
run out of memory.
"""

from pathlib import Path

from ds_finetune.errors import ModelError
from ds_finetune.model.safetensors_header import header_bytes
from ds_finetune.plan.config_json import check_sizes

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
        check_sizes(folder / "config.json")


def _is_inside(file: Path, folder: Path) -> bool:
    """Whether a file lies in `folder`, or in the blobs of the same model in the hub's cache."""
    real, target = folder.resolve(), file.resolve()
    blobs = [real.parents[1] / "blobs"] if real.parent.name == "snapshots" else []
    return any(target.is_relative_to(place) for place in (real, *blobs))
