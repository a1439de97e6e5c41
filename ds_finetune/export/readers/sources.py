"""The kinds of folders that `export` reads, recognised by their files, and opened as a `TensorSource`."""

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
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
from ds_finetune.export.base_folder import HubSource, find_base
from ds_finetune.export.classifiers import holds_classifier
from ds_finetune.export.output_folder import RECORD
from ds_finetune.export.readers.adapter import MergedSource
from ds_finetune.export.readers.deepspeed_native import is_deepspeed_checkpoint, read_deepspeed_checkpoint
from ds_finetune.export.source import SelectedTensors, TensorSource, read_model_spec
from ds_finetune.export.verify.record import ExportRecord
from ds_finetune.families.table import family_of
from ds_finetune.families.text_part import text_tree
from ds_finetune.model.adapters.lora import Factors
from ds_finetune.model.adapters.peft_adapter import CONFIG as ADAPTER_CONFIG
from ds_finetune.model.adapters.peft_adapter import PeftAdapter
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.hub_folder import HubFolder, bin_conversion, check_folder, has_weights
from ds_finetune.model.build.skeleton import resolve_folder
from ds_finetune.model.parallel.sharding import shape_in_model
from ds_finetune.model.quantised.quantisation import check_config_readable, check_no_other_format
from ds_finetune.model.weights.load import weights_digest
from ds_finetune.model.weights.names import is_adapter, weight_of


class CheckpointSource:
    """The fp32 weights and the buffers of a checkpoint of a run, as a TensorSource."""

    def __init__(self, folder: Path) -> None:
        manifest = Manifest.read(folder)
        if manifest.absent_parts:
            raise CheckpointError(
                f"{folder} lacks {', '.join(manifest.absent_parts)}: other nodes keep them",
                hint="make it whole with `ds-finetune checkpoint gather`",
            )
        self._reader = reader = PartReader(folder / name for name in manifest.parts)
        kinds = {key: key.partition("/") for key in reader.held}
        self._chunks = {name: reader.held[key] for key, (kind, _, name) in kinds.items() if kind in (WEIGHT, BUFFER)}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter and persistent buffer, by its name in the model."""
        return {name: shape_in_model(chunks[0][1].shape) for name, chunks in self._chunks.items()}

    @property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter, by its name in the model."""
        return {
            name: shape for name, shape in self.shapes.items() if self._chunks[name][0][1].key.startswith(f"{WEIGHT}/")
        }

    @cached_property
    def fp32_names(self) -> Collection[str]:
        """Names of buffers that training kept in fp32."""
        return {
            name
            for name, chunks in self._chunks.items()
            if chunks[0][1].key.startswith(f"{BUFFER}/") and chunks[0][1].dtype == torch.float32
        }

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the flattened tensor, 1-D.

        CheckpointError where elements are in no part of the checkpoint.
        """
        item = self._chunks[name][0][1]
        out = torch.empty(numel, dtype=item.dtype)
        position = copied = 0
        for box in flat_range_chunks(item.shape, start, numel):
            target = out[position : position + box.numel].view(box.sizes)
            position += box.numel
            copied += self._reader.copy(item.key, box, target)
        if copied != numel:
            raise CheckpointError(
                f"{numel - copied:,} of {numel:,} elements of `{name}` are in no part", hint="take another checkpoint"
            )
        return out


@dataclass(frozen=True)
class OpenedSource:
    """A folder opened for an export."""

    source: TensorSource
    folders: tuple[Path, ...]
    """Folders that are searched in this order for config.json and tokenizer files."""
    trained: Path | None = None
    """Folder with the tokenizer and generation_config.json that the run exports; takes precedence over --base."""
    record: ExportRecord | None = None
    """The record of the run's own export of these weights, if there is one."""
    hub: HubFolder | None = None
    """The folder of the model itself, or of the base model of adapters; None for other sources."""
    base: Path | None = None
    """Folder of the model that the source was trained from, if known and on this machine."""
    why_no_base: str = "no --base was given"
    has_own_config: bool = False
    """Whether only the source's own config.json and tokenizer fit: its vocabulary may be larger than the base's, or it
    is a classifier.
    """

    @property
    def is_model(self) -> bool:
        """Whether the source is a complete model with its own config.json and tokenizer."""
        return self.hub is not None and self.hub.folder == self.folders[0]


@dataclass(frozen=True)
class SourceKind:
    """A kind of folder: its name in messages, how it is recognised, and how it is opened."""

    name: str
    matches: Callable[[Path], bool]
    open: Callable[[Path, Path | None], OpenedSource]


def open_deepspeed(path: Path, _: Path | None) -> OpenedSource:
    """Open a checkpoint in DeepSpeed's own format; the Hugging Face Trainer writes config.json beside it."""
    return OpenedSource(
        read_deepspeed_checkpoint(path), (path,) if (path / "latest").is_file() else (path, path.absolute().parent)
    )


def open_checkpoint(path: Path, base: Path | None) -> OpenedSource:
    """Open a checkpoint of a run, or a run's newest complete one, and verify its files first.

    Adapters are merged into `base`, or into the model that the run file names.
    """
    folder = find_checkpoint(path)
    check_folder(folder)
    verify_checkpoint(folder, workers=os.cpu_count() or 1)
    state, source = RunState.read(folder), CheckpointSource(folder)
    sides = {weight_of(name): name for name in source.shapes if is_adapter(name)}
    train = state.config["train"]
    if not sides and not (train.get("only") or train.get("freeze")):
        trained_from, why = _base_of_run(state)
        changed = any(state.config["model"].get(key) for key in ("resize_vocabulary", "context"))
        is_own = changed or holds_classifier(folder / BASE)
        record = _record_of_run(folder)
        return OpenedSource(
            source,
            (folder / BASE,),
            trained=folder / BASE,
            record=record,
            base=trained_from,
            why_no_base=why,
            has_own_config=is_own,
        )
    lora, dtype = LoraConfig.model_validate(state.config["lora"] or {}), PRECISION_DTYPES[train["precision"]]

    def factors(weight: str) -> Factors:
        """The adapter of `weight`, rounded to the training dtype, in which the model computed."""
        a, b = (
            source.read(name, 0, prod(source.shapes[name])).view(source.shapes[name]).to(dtype)
            for name in (sides[weight, s] for s in "AB")
        )
        return Factors(a, b, lora.scale)

    base_folder = _resolve_base(str(base or state.config["model"]["path"]), path)
    check_base(state.base, base_folder, label=str(path))
    trained = [weight for weight, side in sides if side == "A"]
    heads = {name: shape for name, shape in source.weights.items() if not is_adapter(name)}
    adapters = _Adapters(trained, factors, SelectedTensors(source, heads) if heads else None)
    return _open_merged(base_folder, adapters, beside=folder / BASE, label=str(path))


def _base_of_run(state: RunState) -> tuple[Path | None, str]:
    """The folder of published weights from which a run started; or None and the reason."""
    model = state.config["model"]
    if model["weights"] == "random":
        return None, "its weights were initialised at random"
    return find_base(model["path"]), f"the weights of {model['path']} are not here (--base FOLDER names them)"


def open_model(path: Path, _: Path | None) -> OpenedSource:
    """Open a folder of published weights with its config.json.

    ModelError where a file is missing or damaged; ExportError for an unsupported quantised format.
    """
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        model_type = str(text_tree(config).get("model_type") or config["model_type"])
    except (ValueError, KeyError, TypeError) as broken:
        raise ExportError(
            f"{path}/config.json is not that of a model: {broken!r}", hint="take the config.json published with it"
        ) from broken
    check_config_readable(config, f"{path}/config.json", ExportError)
    check_no_other_format(path, ExportError)
    hub = HubFolder(path)
    return OpenedSource(HubSource(hub, family_of(model_type)), (path,), hub=hub)


def is_model(path: Path) -> bool:
    """Whether `path` has published weights and a config.json."""
    return (path / "config.json").is_file() and has_weights(path)


def open_adapter(path: Path, base: Path | None) -> OpenedSource:
    """Open an adapter in peft's format, merged into `base`, or into the model that its configuration names."""
    adapter = PeftAdapter.open(path)
    base_folder = _resolve_base(str(base or adapter.config.get("base_model_name_or_path") or ""), path)
    check_base(adapter.base, base_folder, label=str(path))
    is_classifier_known = holds_classifier(path)
    if adapter.config.get("task_type") == "SEQ_CLS" and not is_classifier_known:
        raise ExportError(
            f"{path} adapts a classifier (task_type SEQ_CLS) and holds no config.json, which names its classes",
            hint="put the config.json of the trained classifier there (peft: model.config.save_pretrained)",
        )
    adapters = _Adapters(adapter.names, adapter.factors, _saved_modules(adapter, base_folder))
    return _open_merged(base_folder, adapters, beside=path, label=str(path))


def _saved_modules(adapter: PeftAdapter, base: Path) -> SelectedTensors | None:
    if not adapter.whole:
        return None
    source = HubSource(HubFolder(adapter.folder), family_of(read_model_spec(base).model_type))
    return SelectedTensors(source, {name: source.shapes[key] for name, key in adapter.whole.items()}, adapter.whole)


def _resolve_base(name: str, path: Path) -> Path:
    if not name:
        raise ExportError(
            f"{path} does not say which model its adapters belong to", hint="name the folder of that model by --base"
        )
    try:
        return resolve_folder(name)
    except ModelError as absent:
        raise ExportError(
            f"{path} holds adapters for `{name}`: {absent.message}", hint="name the folder of that model by --base"
        ) from absent


def check_base(digest: str, folder: Path, *, label: str) -> None:
    """ExportError where the weights of `folder` have another `digest`; an empty digest fits any weights."""
    if digest and (actual := weights_digest(folder)) != digest:
        raise ExportError(
            f"{label} was trained on weights with digest {digest}, and those of `{folder}` have {actual}",
            hint="name that model's folder by --base",
        )


@dataclass(frozen=True)
class _Adapters:
    """Names of adapted weights, their adapters, and the fully trained weights, if any."""

    names: Collection[str]
    factors: Callable[[str], Factors]
    whole: TensorSource | None


def _open_merged(base: Path, adapters: _Adapters, *, beside: Path, label: str) -> OpenedSource:
    family, hub = family_of(read_model_spec(base).model_type), HubFolder(base)
    is_own = holds_classifier(beside)
    without: set[str] = set()
    if is_own:
        # The language-model head, and multi-token prediction layers.
        spec = read_model_spec(beside)
        without = hub.shapes.keys() - spec.shapes.keys() - spec.published_shapes().keys()
    source = MergedSource(
        HubSource(hub, family),
        adapters.names,
        adapters.factors,
        family,
        label=label,
        whole=adapters.whole,
        without=without,
    )
    return OpenedSource(source, (beside, base), trained=beside, hub=hub, base=base, has_own_config=is_own)


def is_peft_adapter(path: Path) -> bool:
    """Whether `path` has an adapter written by peft or by a run."""
    return (path / ADAPTER_CONFIG).is_file()


def _record_of_run(checkpoint: Path) -> ExportRecord | None:
    """The record of an export that the same run wrote at the step of `checkpoint`; None without one."""
    run = checkpoint.absolute().parent.parent
    records = (
        ExportRecord.read(folder) for folder in (run / "export", run / "export-best") if (folder / RECORD).is_file()
    )
    return next(
        (record for record in records if record.step is not None and step_name(record.step) == checkpoint.name), None
    )


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint of a run, or a folder with some."""
    return (path / MANIFEST).is_file() or any(complete_steps(folder) for folder in (path, path / CHECKPOINTS))


KINDS = (
    SourceKind("a run or a checkpoint of one (manifest.json)", is_checkpoint, open_checkpoint),
    SourceKind("a DeepSpeed checkpoint (`latest`, or *_states.pt files)", is_deepspeed_checkpoint, open_deepspeed),
    SourceKind("an adapter (adapter_config.json)", is_peft_adapter, open_adapter),
    SourceKind("a model (config.json and *.safetensors)", is_model, open_model),
)


def open_source(path: Path, base: Path | None = None) -> OpenedSource:
    """Open the checkpoint, adapter or model in `path`; `base` is the model that was trained, if known.

    ExportError where the folder is none of `KINDS`.
    """
    if not path.is_dir():
        raise ExportError(f"`{path}` is not a folder", hint="name the folder of a run, a checkpoint or a model")
    check_folder(path)
    for kind in KINDS:
        if kind.matches(path):
            return kind.open(path, base)
    content = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
    raise ExportError(
        f"`{path}` holds no checkpoint: {content}",
        hint=bin_conversion(path) or f"name a folder that holds {' or '.join(kind.name for kind in KINDS)}",
    )
