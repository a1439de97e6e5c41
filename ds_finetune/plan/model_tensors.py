"""Names and shapes of a model's tensors, taken from its modules on the meta device (model/build/meta_model.py)."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

from ds_finetune.families.family import Family
from ds_finetune.families.table import family_of

EMBEDDING, HEAD, SCORE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
_LAYER = re.compile(r"(?P<stack>.+?)\.(?P<number>\d+)\.(?P<name>.+)")
_PARTS = (
    ("indexer", re.compile(r"\.self_attn\.(compressor\.)?indexer\.")),
    (
        "attention",
        re.compile(
            r"\.self_attn\.(compressor\.)?\w+_proj(_with_mqa)?\.|\.self_attn\.(sinks|compressor\.position_bias)$"
            r"|\.linear_attn\.\w*_proj\w*\."
        ),
    ),
    ("routed experts", re.compile(r"\.mlp\.experts\.")),
    ("shared experts", re.compile(r"\.mlp\.shared_experts?\.")),
    ("router", re.compile(r"\.mlp\.(gate|router)\.")),
    ("dense MLP", re.compile(r"\.mlp\.\w+_proj\.")),
    ("multi-token prediction", re.compile(r"\.(eh|e|h)_proj\.")),
    ("hyper-connections", re.compile(r"(attn|ffn)_hc\.|\.hc_head\.|\.mtp\.hc_head\.")),
    ("norms", re.compile(r"norm")),
    ("embedding", re.compile(r"embed_tokens")),
    ("head", re.compile(r"^(lm_head|score)\.")),
)


@lru_cache(maxsize=4096)
def part_of(name: str) -> str:
    """Part of the model that a tensor belongs to, by its name: attention, dense MLP, ...; empty if unknown."""
    return next((part for part, pattern in _PARTS if pattern.search(name)), "")


class FullTensor(NamedTuple):
    """A parameter's full shape, and how tensor and expert parallelism divide it (`model/parallel/sharding.py`)."""

    shape: tuple[int, ...]
    dim: int | None = None
    """Dimension that tensor parallel ranks divide; None where each rank has the full tensor."""
    is_routed: bool = False
    """Whether the tensor stacks all routed experts along dimension 0, which expert parallel ranks divide."""

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return prod(self.shape)

    def local(self, *, tp: int, ep: int) -> tuple[int, ...]:
        """Shape of a rank's shard."""
        local = list(self.shape)
        if self.is_routed:
            local[0] //= ep
        if self.dim is not None:
            local[self.dim] //= tp
        return tuple(local)


@dataclass(frozen=True)
class LayerKind:
    """A kind of layers of a model. Layers are of one kind if they have tensors of equal names and shapes."""

    stack: str
    """Name of the list of layers in the model, such as `model.layers`."""
    tensors: tuple[tuple[str, FullTensor], ...]
    """Tensors of a layer of this kind, by their names within the layer."""
    is_prediction: bool
    """Whether the layer is a multi-token prediction layer."""

    @cached_property
    def is_sparse(self) -> bool:
        """Whether the layer has routed experts."""
        return any(tensor.is_routed for _, tensor in self.tensors)

    @cached_property
    def has_indexer(self) -> bool:
        """Whether the layer has an indexer, which chooses the tokens that it attends to."""
        return any(".indexer." in name for name, _ in self.tensors)


@dataclass(frozen=True)
class ModelTensors:
    """All parameters of a model, including multi-token prediction layers if they are trained."""

    by_name: Mapping[str, FullTensor]
    """Parameters in the model's order, without a tied head."""
    is_tied: bool = False
    num_predictions: int = 0
    """Number of multi-token prediction layers, the last ones of the model."""
    linears: Collection[str] = ()
    """Names of the weights of linear modules except the head; empty for model types in the table of families."""

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(tensor.numel for tensor in self.by_name.values())

    @cached_property
    def layer_names(self) -> Mapping[str, list[str]]:
        """Full names of the tensors of each layer, by the layer's name such as `model.layers.0`."""
        names_of_layers: dict[str, list[str]] = {}
        for name in self.by_name:
            if layer := _LAYER.match(name):
                names_of_layers.setdefault(f"{layer['stack']}.{layer['number']}", []).append(name)
        return names_of_layers

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each layer of the model, in order."""
        first, kinds = len(self.layer_names) - self.num_predictions, []
        for number, (layer, names) in enumerate(self.layer_names.items()):
            own = tuple((name.removeprefix(f"{layer}."), self.by_name[name]) for name in names)
            kinds.append(LayerKind(layer.rpartition(".")[0], own, number >= first))
        distinct: dict[LayerKind, LayerKind] = {}
        return tuple(distinct.setdefault(kind, kind) for kind in kinds)

    @cached_property
    def ends(self) -> Mapping[str, FullTensor]:
        """Tensors outside of layers by full name: embedding, last norm, and head or score head."""
        return {name: tensor for name, tensor in self.by_name.items() if not _LAYER.match(name)}

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Full name and full shape of every parameter of the model."""
        return ((name, tensor.shape) for name, tensor in self.by_name.items())


class DescribedModel(dict[str, Any]):
    """config.json of a model, unmodified, with the names and shapes of the model's tensors."""

    def __init__(
        self, config: Mapping[str, Any], build: Callable[[], ModelTensors], *, teacher: "DescribedModel | None" = None
    ) -> None:
        super().__init__(config)
        self._build, self.teacher = build, teacher

    @property
    def family(self) -> Family:
        """The model's row in the table of families."""
        return family_of(str(self.get("model_type")))

    @cached_property
    def tensors(self) -> ModelTensors:
        """All parameters; first use builds the model on the meta device. ModelError where it cannot be built."""
        return self._build()

    def __hash__(self) -> int:  # type: ignore[override]
        """Hash of the object's identity, so that results for a model can be cached although its config.json is a
        dictionary.
        """
        return id(self)
