"""Sources of a model's tensors for an export, and the check that the tensors fit the model class."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError

from ds_finetune.errors import ExportError
from ds_finetune.export.load import auto_class
from ds_finetune.export.shards import PIECE_NUMEL
from ds_finetune.families.table import family_of
from ds_finetune.foreign.auto_configs import AutoConfig, without_types
from ds_finetune.model.build.hub_folder import check_folder
from ds_finetune.model.build.text_config import check_text_part, text_config
from ds_finetune.model.loss.score_config import is_classifier
from ds_finetune.model.quantised.quantisation import check_readable
from ds_finetune.model.weights.names import differences, hub_pieces


@dataclass(frozen=True)
class TensorSource:
    """The tensors of a model, which can be read in parts, wherever they are stored."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all tensors of the source, by their names in the model."""
    fp32_names: Collection[str]
    """Names of tensors that stay in fp32, whatever the dtype of the export, e.g. the bias of a router."""
    read: Callable[[str, int, int], torch.Tensor]
    """Function `read(name, start, numel)` that returns the elements `start` to `start + numel` of a flattened tensor.
    The result is 1-D, on the CPU, and of any floating dtype. Several threads call this function. A result is valid
    until the same thread's next call, so that a source may use one buffer per thread.
    """

    def select(
        self, shapes: Mapping[str, tuple[int, ...]], originals: Mapping[str, str] | None = None
    ) -> "TensorSource":
        """Make a source that has only the tensors `shapes`. `originals` maps new names to names in this source."""
        names = originals or {}
        return replace(self, shapes=shapes, read=lambda name, *part: self.read(names.get(name, name), *part))

    def with_copies(self, copies: Mapping[str, str]) -> "TensorSource":
        """Make a source with more tensors. `copies` maps the name of each to the name of the tensor that it copies."""
        return self.select({**self.shapes, **{key: self.shapes[name] for key, name in copies.items()}}, copies)


@dataclass(frozen=True)
class ModelSpec:
    """The tensors that a model class of transformers has."""

    architecture: str
    model_type: str
    layers: int
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the model's parameters, without tied ones, and of persistent buffers, in order."""
    tied: Mapping[str, str]
    """Names of tied parameters, each with the name of the parameter whose tensor it shares."""
    is_classifier: bool = False

    def published_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes that the model class's tensors have in a published checkpoint."""
        family = family_of(self.model_type)
        pieces = (piece for name, shape in self.shapes.items() for piece in hub_pieces(name, shape, family))
        return {piece.key: piece.shape for piece in pieces}

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset({*self.shapes, *self.published_shapes()})

    def may_skip(self, key: str) -> bool:
        """Whether the tensor `key`, e.g. of a prediction layer, may be ignored, because the model class lacks it."""
        return key not in self._names and family_of(self.model_type).may_skip(key, layers=self.layers)


def read_model_spec(folder: Path) -> ModelSpec:
    """Read the tensors of the model class named in config.json of `folder`, by default the causal LM of the model type.
    The class is built on the meta device; code in the folder is not run. ExportError if transformers has no such class.
    """
    check_folder(folder)
    try:
        full_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        check_text_part(full_config, tree, "causal_lm", f"{folder}/config.json")
        config = text_config(full_config)
        if getattr(config, "quantization_config", None) is not None:
            check_readable(config.quantization_config, f"{folder}/config.json", ExportError)
            del config.quantization_config
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=False)
        layers = int(config.num_hidden_layers)
    except (
        *(AttributeError, ValueError, OSError, KeyError, TypeError, AssertionError, RecursionError),
        StrictDataclassError,
    ) as unknown:
        reason = without_types(unknown) or repr(unknown)
        raise ExportError(
            f"transformers cannot build a model from {folder}/config.json: {reason}",
            hint="name a folder with the config.json of a language model or a classifier by --base",
        ) from unknown
    once = dict(model.named_parameters())
    owners = {id(param): name for name, param in once.items()}
    parameters = model.named_parameters(remove_duplicate=False)
    tied = {name: owners[id(param)] for name, param in parameters if name not in once}
    state = model.state_dict().keys()
    shapes = {name: tuple(tensor.shape) for name, tensor in (*once.items(), *model.named_buffers()) if name in state}
    return ModelSpec(
        type(model).__name__,
        str(config.model_type),
        layers,
        shapes,
        tied,
        is_classifier=is_classifier(config),
    )


def fit_source(source: TensorSource, spec: ModelSpec, *, label: str) -> TensorSource:
    """Select the tensors of the model class `spec` from `source`, followed by tensors that the class ignores.

    The source may have published names instead of transformers' names, e.g. one tensor per expert. A tied tensor may be
    absent. If present, it is not selected, and must equal the parameter to which it is tied. ExportError lists tensors
    that are missing, unexpected or of another shape.
    """
    unbuilt = {name: shape for name, shape in source.shapes.items() if name not in spec.tied and spec.may_skip(name)}
    present = {name: shape for name, shape in source.shapes.items() if name not in spec.tied and name not in unbuilt}
    published = spec.published_shapes()
    is_published = len(published.keys() ^ present.keys()) < len(spec.shapes.keys() ^ present.keys())
    expected = published if is_published else spec.shapes
    wrong = differences(expected, present)
    if wrong:
        raise ExportError(f"{label} does not fit {spec.architecture}: {wrong}", hint=_hint(expected, present))
    for name, owner in spec.tied.items():
        if name in source.shapes and not _is_equal(source, name, owner):
            raise ExportError(
                f"{label}: `{name}` differs from `{owner}`, but config.json ties both",
                hint="set tie_word_embeddings to false in config.json",
            )
    return source.select({**expected, **unbuilt})


def _hint(expected: Mapping[str, tuple[int, ...]], present: Mapping[str, tuple[int, ...]]) -> str:
    embedding = next((name for name in expected if name.endswith(("embed_tokens.weight", "embed.weight"))), "")
    ours, theirs = expected.get(embedding, ()), present.get(embedding, ())
    if theirs[1:] and ours[1:] == theirs[1:] and ours != theirs:
        return f"its vocabulary has {theirs[0]} rows: the config.json that is used must say `vocab_size` {theirs[0]}"
    return "use the config.json that was published with the weights; for a run's weights name its folder by --base"


def _is_equal(source: TensorSource, name: str, other: str) -> bool:
    if source.shapes[name] != source.shapes[other]:
        return False
    numel = math.prod(source.shapes[name])
    parts = ((start, min(PIECE_NUMEL, numel - start)) for start in range(0, numel, PIECE_NUMEL))
    return all(torch.equal(source.read(name, *part).clone(), source.read(other, *part)) for part in parts)


def check_finite(key: str, stored: torch.Tensor, cast: torch.Tensor, *, others: str) -> None:
    """Raise ExportError if `cast`, a chunk of the tensor `key` cast from `stored`, has NaN or infinity. The hint
    proposes the dtypes `others`, unless `stored` already has NaN or infinity.
    """
    low, high = torch.aminmax(cast)
    if torch.isfinite(low) and torch.isfinite(high):
        return
    if torch.isfinite(stored).all():
        dtype = str(cast.dtype).removeprefix("torch.")
        raise ExportError(f"tensor `{key}` holds NaN or infinity as {dtype}", hint=f"export with --dtype {others}")
    raise ExportError(
        f"tensor `{key}` holds NaN or infinity in the source",
        hint="training had diverged when the source was saved: export an older checkpoint",
    )
