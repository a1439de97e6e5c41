"""Tensors of a model to be exported, wherever they are stored, and their match with the model's class."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.errors import ExportError
from ds_finetune.families.table import family_of
from ds_finetune.model.folder_check import check_folder
from ds_finetune.model.fp8 import check_readable
from ds_finetune.model.names import differences, hub_pieces

_COMPARED_NUMEL = 2**20
"""Elements of two tensors that are compared at a time."""


class TensorSource(Protocol):
    """Tensors of a model that can be read in parts, wherever they lie."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by the model's name for it."""
        ...

    @property
    def fp32_names(self) -> Collection[str]:
        """Names of tensors that are written in fp32 whatever dtype is asked for, e.g. a router's bias."""
        ...

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the row-major flattened tensor: 1-D, on the CPU, of any floating
        dtype.

        Called from several threads at once. The caller is done with the result before the same thread reads again,
        so one buffer for each thread is enough.
        """
        ...


@dataclass(frozen=True)
class ModelSpec:
    """What a model class holds: its name, shapes of parameters (once) and persistent buffers in order, and names that
    share another's tensor.
    """

    architecture: str
    model_type: str
    layers: int
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]

    def published_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors in a published checkpoint."""
        family = family_of(self.model_type)
        return {
            piece.key: piece.shape for name, shape in self.shapes.items() for piece in hub_pieces(name, shape, family)
        }

    def may_skip(self, key: str) -> bool:
        """Whether a checkpoint tensor may be there that the model does not build, e.g. of a multi-token prediction
        layer.
        """
        return family_of(self.model_type).may_skip(key, layers=self.layers)


def read_model_spec(folder: Path) -> ModelSpec:
    """The causal LM of `folder`/config.json, built on the meta device; ExportError where transformers has none. No code
    of the folder is run.
    """
    check_folder(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            check_readable(config.quantization_config, f"{folder}/config.json", ExportError)
            del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, OSError) as unknown:
        reason = str(unknown).splitlines()[0]
        raise ExportError(
            f"{folder}/config.json: {reason}", hint="name a folder with the config.json of a causal LM by --base"
        ) from unknown
    once = dict(model.named_parameters())
    owners = {id(param): name for name, param in once.items()}
    tied = {
        name: owners[id(param)] for name, param in model.named_parameters(remove_duplicate=False) if name not in once
    }
    state = model.state_dict().keys()
    shapes = {name: tuple(tensor.shape) for name, tensor in (*once.items(), *model.named_buffers()) if name in state}
    return ModelSpec(type(model).__name__, str(config.model_type), int(config.num_hidden_layers), shapes, tied)


@dataclass(frozen=True)
class SelectedTensors:
    """Some tensors of a source, in an order of their own; `copies` are read from the tensor that each repeats."""

    source: TensorSource
    shapes: Mapping[str, tuple[int, ...]]
    copies: Mapping[str, str] = field(default_factory=dict)

    @property
    def fp32_names(self) -> Collection[str]:
        """Those of the source."""
        return self.source.fp32_names

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of the flattened tensor, as the source gives them."""
        return self.source.read(self.copies.get(name, name), start, numel)

    def with_copies(self, copies: Mapping[str, str]) -> "SelectedTensors":
        """The same with further tensors, or others of these names: each repeats one of the source, whose name it is
        given with.
        """
        return replace(
            self,
            shapes={**self.shapes, **{key: self.shapes[original] for key, original in copies.items()}},
            copies=copies,
        )


def fit_source(source: TensorSource, spec: ModelSpec, *, label: str) -> SelectedTensors:
    """`source` with the tensors of `spec` in its order, then those that the model does not build and may be there.

    ExportError lists what is missing, unexpected or of another shape. Names may also be those of published
    checkpoints (transformers 4 names one expert at a time). A tied tensor may be absent; where it is there, it must
    equal the tensor it is tied to, and is left out.
    """
    left = {name: shape for name, shape in source.shapes.items() if name not in spec.tied and spec.may_skip(name)}
    found = {name: shape for name, shape in source.shapes.items() if name not in spec.tied and name not in left}
    published = spec.published_shapes()
    wanted = published if len(published.keys() ^ found.keys()) < len(spec.shapes.keys() ^ found.keys()) else spec.shapes
    wrong = differences(wanted, found)
    if wrong:
        raise ExportError(f"{label} does not fit {spec.architecture}: {wrong}", hint=_hint(wanted, found))
    for name, owner in spec.tied.items():
        if name in source.shapes and not _is_equal(source, name, owner):
            raise ExportError(
                f"{label}: `{name}` differs from `{owner}`, to which the config ties it",
                hint="untie them: tie_word_embeddings false in config.json",
            )
    return SelectedTensors(source, {**wanted, **left})


def _hint(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    embedding = next((name for name in wanted if name.endswith("embed_tokens.weight")), "")
    if embedding and wanted[embedding][1:] == found.get(embedding, ())[1:] and wanted[embedding] != found[embedding]:
        return (
            f"its vocabulary has {found[embedding][0]} rows: the config.json that is used must say `vocab_size` "
            f"{found[embedding][0]}"
        )
    return "name the folder of the model it was trained from by --base"


def _is_equal(source: TensorSource, name: str, other: str) -> bool:
    if source.shapes[name] != source.shapes[other]:
        return False
    numel = math.prod(source.shapes[name])
    parts = ((start, min(_COMPARED_NUMEL, numel - start)) for start in range(0, numel, _COMPARED_NUMEL))
    return all(torch.equal(source.read(name, *part).clone(), source.read(other, *part)) for part in parts)
