"""Checks a model folder before its files are read: it may come from anywhere, and must not make this program hang or
run out of memory.
"""

import shutil
from pathlib import Path

from ds_finetune.errors import ModelError
from ds_finetune.model.weights.safetensors_file import header_bytes
from ds_finetune.plan.config_json import check_sizes

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.codes", "additional_chat_templates/*.jinja")
"""Files that are copied to checkpoints and exports, or whose content tokenizers and configurations repeat there."""
_INDEX = ".index.json"
"""Ending of the lists of weight files."""
_SHOWN = 5


def check_folder(folder: Path) -> None:
    """ModelError where `folder` holds something that is neither file nor folder, a link out of it in place of a file
    that is copied, or implausible sizes.

    Reading a FIFO would wait forever. A chat template, vocabulary or configuration that is a link out of the folder
    would render, and export, a private file of this machine. Weights and their index may be links. The sizes are the
    number of layers and the lengths of safetensors headers.
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
    for file in (file for pattern in _COPIED for file in sorted(folder.glob(pattern))):
        if not file.name.endswith(_INDEX):
            check_inside(file, folder)
    for file in (file for file in sorted(folder.glob("*.safetensors")) if file.is_file()):
        try:
            header_bytes(file)
        except ValueError as too_long:
            raise ModelError(f"{file}: {too_long}", hint="it is damaged or harmful; download it again") from too_long
    if (folder / "config.json").is_file():
        check_sizes(folder / "config.json")


def check_inside(file: Path, folder: Path | None = None) -> Path:
    """The path of `file` without links; ModelError where it is neither in `folder` (default: its own) nor in the blobs
    of the same model in the hub's cache.
    """
    real, target = (folder or file.parent).resolve(), file.resolve()
    blobs = [above.parent / "blobs" for above in real.parents if above.name == "snapshots"]
    if not any(target.is_relative_to(place) for place in (real, *blobs)):
        raise ModelError(
            f"{file} is a link to {target}, outside its folder",
            hint="it may be harmful; where it is not, put the file itself there, e.g. with `cp -L`",
        )
    return target


def copy_model_file(file: Path, out: Path) -> None:
    """Copy a file of a model folder or checkpoint to the path `out`.

    ModelError where it is a link out of its folder, whose target may be a private file of this machine.
    """
    shutil.copyfile(check_inside(file), out, follow_symlinks=False)
