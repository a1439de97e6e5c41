"""Recognises the kinds of folders that `export` reads by their files, and opens them as a `TensorSource`."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import torch

from ds_finetune.checkpoint.commit import MANIFEST, Manifest, complete_steps, step_name
from ds_finetune.checkpoint.part_storage import PartReader, flat_range_chunks
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.tools import BASE, CHECKPOINTS, find_checkpoint, verify_checkpoint
from ds_finetune.config.sections import LoraConfig
from ds_finetune.engine.state.state import BUFFER, WEIGHT
from ds_finetune.errors import CheckpointError, ExportError, ModelError
from ds_finetune.export.base_folder import find_base, hub_source, read_readable_config
from ds_finetune.export.load import holds_classifier
from ds_finetune.export.output_folder import RECORD
from ds_finetune.export.readers.deepspeed_native import is_deepspeed_checkpoint, read_deepspeed_checkpoint
from ds_finetune.export.source import TensorSource, read_model_spec
from ds_finetune.export.verify.record import ExportRecord
from ds_finetune.families.family import Family
from ds_finetune.families.table import family_of
from ds_finetune.families.text_part import text_tree
from ds_finetune.model.adapters.lora import Factors
from ds_finetune.model.adapters.peft_adapter import CONFIG as ADAPTER_CONFIG
from ds_finetune.model.adapters.peft_adapter import PeftAdapter
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.hub_folder import HubFolder, bin_conversion, check_folder, has_weights
from ds_finetune.model.build.skeleton import resolve_folder
from ds_finetune.model.parallel.sharding import shape_in_model
from ds_finetune.model.quantised.quantisation import check_no_other_format
from ds_finetune.model.weights.load import weights_digest
from ds_finetune.model.weights.names import hub_pieces, is_adapter, weight_of


def read_checkpoint(folder: Path) -> tuple[TensorSource, frozenset[str]]:
    """Open the fp32 weights and buffers of a run's checkpoint. Also returns the names of the buffers. CheckpointError
    if a part file is missing; reading elements that are in no part file raises it later.
    """
    manifest = Manifest.read(folder)
    if manifest.absent_parts:
        raise CheckpointError(
            f"{folder} lacks {', '.join(manifest.absent_parts)}, which other nodes store",
            hint="gather the parts of the checkpoint with `ds-finetune checkpoint gather`",
        )
    reader = PartReader(folder / name for name in manifest.parts)
    kinds = {key: key.partition("/") for key in reader.held}
    items = {name: reader.held[key][0][1] for key, (kind, _, name) in kinds.items() if kind in (WEIGHT, BUFFER)}
    buffers = frozenset(name for name, item in items.items() if item.key.startswith(f"{BUFFER}/"))

    def read(name: str, start: int, numel: int) -> torch.Tensor:
        item = items[name]
        out = torch.empty(numel, dtype=item.dtype)
        position = copied = 0
        for box in flat_range_chunks(item.shape, start, numel):
            target = out[position : position + box.numel].view(box.sizes)
            position += box.numel
            copied += reader.copy(item.key, box, target)
        if copied != numel:
            raise CheckpointError(
                f"{numel - copied:,} of {numel:,} elements of `{name}` are missing in the checkpoint",
                hint="take another checkpoint",
            )
        return out

    shapes = {name: shape_in_model(item.shape) for name, item in items.items()}
    return TensorSource(shapes, {name for name in buffers if items[name].dtype == torch.float32}, read), buffers


@dataclass(frozen=True)
class OpenedSource:
    """A folder opened for an export: its tensors, and where its configuration, tokenizer and base model are."""

    source: TensorSource
    folders: tuple[Path, ...]
    """Folders that are searched for config.json and tokenizer files, in this order."""
    trained: Path | None = None
    """Folder with the tokenizer and generation_config.json that the run exports. It takes precedence over --base."""
    record: ExportRecord | None = None
    """Verification record of the run's own export of the same weights, if there is one."""
    hub: HubFolder | None = None
    """Opened Hugging Face folder of the model, or of the adapters' base model; None for other sources."""
    base: Path | None = None
    """Folder of the base model from which training started, if it is known and on this machine."""
    why_no_base: str = "no --base was given"
    has_own_config: bool = False
    """Whether config.json and tokenizer must be the source's own, not the base's, e.g. of a classifier."""

    @property
    def is_model(self) -> bool:
        """Whether the source is a complete model with its own config.json and tokenizer."""
        return self.hub is not None and self.hub.folder == self.folders[0]


def open_deepspeed(path: Path, _: Path | None) -> OpenedSource:
    """Open a checkpoint in DeepSpeed's own format. The Hugging Face Trainer adds a config.json."""
    folders = (path,) if (path / "latest").is_file() else (path, path.absolute().parent)
    return OpenedSource(read_deepspeed_checkpoint(path), folders)


def open_checkpoint(path: Path, base: Path | None) -> OpenedSource:
    """Open a checkpoint of a run, or the newest complete checkpoint of a run, after verifying its files. Adapters are
    merged into `base`, or into the model that the run file names.
    """
    folder = find_checkpoint(path)
    check_folder(folder)
    verify_checkpoint(folder, workers=os.cpu_count() or 1)
    state, (source, buffers) = RunState.read(folder), read_checkpoint(folder)
    sides = {weight_of(name): name for name in source.shapes if is_adapter(name)}
    train = state.config["train"]
    if not sides and not (train.get("only") or train.get("freeze")):
        model = state.config["model"]
        is_random = model["weights"] == "random"
        missing = f"the weights of {model['path']} are not here (--base FOLDER names them)"
        changed = any(model.get(key) for key in ("resize_vocabulary", "context"))
        return OpenedSource(
            source,
            (folder / BASE,),
            trained=folder / BASE,
            record=_record_of_run(folder),
            base=None if is_random else find_base(model["path"]),
            why_no_base="its weights were initialised at random" if is_random else missing,
            has_own_config=changed or holds_classifier(folder / BASE),
        )
    lora, dtype = LoraConfig.model_validate(state.config["lora"] or {}), PRECISION_DTYPES[train["precision"]]

    def factors(weight: str) -> Factors:
        """LoRA factors of `weight`, rounded to the dtype in which training computed with them."""
        a, b = (
            source.read(name, 0, prod(source.shapes[name])).view(source.shapes[name]).to(dtype)
            for name in (sides[weight, s] for s in "AB")
        )
        return Factors(a, b, lora.scale)

    base_folder = _resolve_base(str(base or state.config["model"]["path"]), path)
    check_base(state.base, base_folder, label=str(path))
    trained = [weight for weight, side in sides if side == "A"]
    heads = {name: shape for name, shape in source.shapes.items() if not is_adapter(name) and name not in buffers}
    adapters = _Adapters(trained, factors, source.select(heads) if heads else None)
    return _open_merged(base_folder, adapters, config_folder=folder / BASE, label=str(path))


def open_model(path: Path, _: Path | None) -> OpenedSource:
    """Open a folder of published weights with its config.json. ModelError if a file is missing or damaged; ExportError
    if weights are in an unsupported quantised format.
    """
    config = read_readable_config(path)
    model_type = text_tree(config).get("model_type") or config.get("model_type")
    if model_type is None:
        raise ExportError(
            f"{path}/config.json has no model_type", hint="use the config.json that was published with the model"
        )
    check_no_other_format(path, ExportError)
    hub = HubFolder(path)
    return OpenedSource(hub_source(hub, family_of(str(model_type))), (path,), hub=hub)


def is_model(path: Path) -> bool:
    """Whether the folder `path` has published weights and a config.json."""
    return (path / "config.json").is_file() and has_weights(path)


def open_adapter(path: Path, base: Path | None) -> OpenedSource:
    """Open an adapter in peft's format, merged into `base`, or into the model that adapter_config.json names."""
    adapter = PeftAdapter.open(path)
    base_folder = _resolve_base(str(base or adapter.config.get("base_model_name_or_path") or ""), path)
    check_base(adapter.base, base_folder, label=str(path))
    if adapter.config.get("task_type") == "SEQ_CLS" and not holds_classifier(path):
        raise ExportError(
            f"{path} adapts a classifier (task_type SEQ_CLS) and holds no config.json, which names its classes",
            hint="put the config.json of the trained classifier into the folder (peft: model.config.save_pretrained)",
        )
    if adapter.config.get("modules_to_save"):
        adapter.check_saved(HubFolder(base_folder).shapes)
    trained = None
    if adapter.fully_trained:
        source = hub_source(HubFolder(path), family_of(read_model_spec(base_folder).model_type))
        shapes = {name: source.shapes[key] for name, key in adapter.fully_trained.items()}
        trained = source.select(shapes, adapter.fully_trained)
    adapters = _Adapters(adapter.names, adapter.factors, trained)
    return _open_merged(base_folder, adapters, config_folder=path, label=str(path))


def _resolve_base(name: str, path: Path) -> Path:
    if not name:
        raise ExportError(
            f"{path} does not say which base model its adapters belong to",
            hint="name the folder of the base model by --base",
        )
    try:
        return resolve_folder(name)
    except ModelError as absent:
        raise ExportError(
            f"the base model `{name}` of the adapters in {path} cannot be opened: {absent.message}",
            hint="name the folder of the base model by --base",
        ) from absent


def check_base(digest: str, folder: Path, *, label: str) -> None:
    """Raise ExportError if the weights of `folder` do not have this `digest`. An empty digest fits any weights."""
    if digest and (actual := weights_digest(folder)) != digest:
        raise ExportError(
            f"{label} was trained from weights with digest {digest}, but the weights of `{folder}` have {actual}",
            hint="set --base to the folder of the model that training started from",
        )


@dataclass(frozen=True)
class _Adapters:
    names: Collection[str]
    factors: Callable[[str], Factors]
    trained: TensorSource | None
    """Fully trained tensors, e.g. a classification head, which replace the base model's; None if there are none."""


def _merged_source(
    base: TensorSource, adapters: _Adapters, family: Family, *, label: str, without: Collection[str] = ()
) -> TensorSource:
    """The tensors of `base` without the names in `without`, with `adapters` merged in fp32. Adapters of the last few
    weights are cached. ExportError if an adapter does not fit the base.
    """
    factors = lru_cache(maxsize=8)(lambda name: adapters.factors(name).as_stored(name, family))

    def pieces_of(name: str, shape: tuple[int, ...]) -> list[tuple[str, int, tuple[int, ...]]]:
        """Published tensors that make up the tensor `name` of the base, as (key, index of first element, shape)."""
        if name in base.shapes:
            return [(name, 0, shape)]
        return [(piece.key, piece.first_element(shape), piece.shape) for piece in hub_pieces(name, shape, family)]

    replaced = {
        key: (name, begin, piece_shape)
        for name, shape in (adapters.trained.shapes if adapters.trained else {}).items()
        for key, begin, piece_shape in pieces_of(name, shape)
    }
    adapted: dict[str, tuple[str, int]] = {}
    for name in adapters.names:
        shape = factors(name).shape
        pieces = pieces_of(name, shape)
        wrong = [
            f"`{key}` is {piece_shape}, and in the base {base.shapes.get(key, 'absent')}"
            for key, _, piece_shape in pieces
            if base.shapes.get(key) != piece_shape
        ]
        if wrong:
            raise ExportError(
                f"{label} does not fit the base model's shapes: {'; '.join(wrong[:3])}",
                hint="set --base to the folder of the model that training started from",
            )
        adapted |= {key: (name, begin) for key, begin, _ in pieces}

    def read(name: str, start: int, numel: int) -> torch.Tensor:
        if adapters.trained is not None and name in replaced:
            trained_name, begin, _ = replaced[name]
            return adapters.trained.read(trained_name, begin + start, numel)
        flat = base.read(name, start, numel)
        if name not in adapted:
            return flat
        weight, begin = adapted[name]
        return flat.float() + factors(weight).delta(begin + start, numel)

    shapes = {name: shape for name, shape in base.shapes.items() if name not in without}
    shapes |= {key: piece_shape for key, (_, _, piece_shape) in replaced.items()}
    return TensorSource(shapes, base.fp32_names, read)


def _open_merged(base: Path, adapters: _Adapters, *, config_folder: Path, label: str) -> OpenedSource:
    family, hub = family_of(read_model_spec(base).model_type), HubFolder(base)
    is_own = holds_classifier(config_folder)
    unused: set[str] = set()
    if is_own:
        spec = read_model_spec(config_folder)
        # A classifier has no use for the base model's language-model head and multi-token prediction layers.
        unused = hub.shapes.keys() - spec.shapes.keys() - spec.published_shapes().keys()
    source = _merged_source(hub_source(hub, family), adapters, family, label=label, without=unused)
    return OpenedSource(source, (config_folder, base), trained=config_folder, hub=hub, base=base, has_own_config=is_own)


def is_peft_adapter(path: Path) -> bool:
    """Whether the folder `path` has an adapter in peft's format."""
    return (path / ADAPTER_CONFIG).is_file()


def _record_of_run(checkpoint: Path) -> ExportRecord | None:
    run = checkpoint.absolute().parent.parent
    folders = (folder for folder in (run / "export", run / "export-best") if (folder / RECORD).is_file())
    for record in map(ExportRecord.read, folders):
        if record.step is not None and step_name(record.step) == checkpoint.name:
            return record
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint of a run, or a folder with complete checkpoints."""
    return (path / MANIFEST).is_file() or any(complete_steps(folder) for folder in (path, path / CHECKPOINTS))


KINDS: Mapping[str, tuple[Callable[[Path], bool], Callable[[Path, Path | None], OpenedSource]]] = {
    "a run or a checkpoint of one (manifest.json)": (is_checkpoint, open_checkpoint),
    "a DeepSpeed checkpoint (`latest`, or *_states.pt files)": (is_deepspeed_checkpoint, open_deepspeed),
    "an adapter (adapter_config.json)": (is_peft_adapter, open_adapter),
    "a model (config.json and *.safetensors)": (is_model, open_model),
}
"""Kinds of folders that `export` reads, by name in messages: a function that recognises one, and one that opens it."""


def open_source(path: Path, base: Path | None = None) -> OpenedSource:
    """Open the checkpoint, adapter or model in `path`. `base` is the folder of the base model, if given. ExportError if
    the folder is none of `KINDS`.
    """
    if not path.is_dir():
        raise ExportError(f"`{path}` is not a folder", hint="name the folder of a run, a checkpoint or a model")
    check_folder(path)
    for matches, open_kind in KINDS.values():
        if matches(path):
            return open_kind(path, base)
    content = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
    raise ExportError(
        f"`{path}` is no folder that can be exported; it holds {content}",
        hint=bin_conversion(path) or f"name a folder that holds {' or '.join(KINDS)}",
    )
