"""Fills this rank's fragments of a model with random values, or with safetensors that must fit the model's tensors."""

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.console.phase_line import count_parts
from ds_finetune.errors import ModelError
from ds_finetune.families.family import Family
from ds_finetune.families.table import FAMILIES
from ds_finetune.model.build.encoder import published_name
from ds_finetune.model.build.hub_folder import HubFolder
from ds_finetune.model.build.skeleton import Fragment, Where, full_fragment, has_score_head
from ds_finetune.model.mtp import published_copies
from ds_finetune.model.parallel.sharding import UNSHARDED, ModelShard
from ds_finetune.model.weights.names import Piece, hub_pieces, is_table
from ds_finetune.model.weights.vocabulary import GrownFolder, Growth

_STRIP_NUMEL = 2**20
"""Number of elements of a checkpoint's tensor that are read at a time, rounded to full rows."""
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_FUSED_EXPERTS = re.compile(r"\.experts\.\w+$")
_LANGUAGE_MODEL_HEAD = re.compile(r"^(lm_head|embed_out|output)\.(weight|bias)$")
_DIGESTED = 256
"""Maximum number of tensors whose first row enters a digest of weights."""


@dataclass(frozen=True)
class LoadReport:
    """Result of loading. `skipped` are names of checkpoint tensors that were not loaded, `missing` names of this rank's
    parameters that the checkpoint lacks.
    """

    num_tensors: int
    skipped: tuple[str, ...]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class _ModelTensor:
    """A tensor of the model: this rank's fragment of it, and the checkpoint's tensors that contain its values."""

    name: str
    fragment: Fragment
    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...] = ()
    """Index of this rank's first element in each of `pieces`, the checkpoint's tensors."""


def load_weights(  # noqa: PLR0913
    model: PreTrainedModel,
    folder: Path,
    *,
    family: Family,
    where: Where = full_fragment,
    model_shard: ModelShard = UNSHARDED,
    skeleton: PreTrainedModel | None = None,
    growth: Growth | None = None,
    may_be_missing: Collection[str] = (),
) -> LoadReport:
    """Load the safetensors of `folder` into the fragments `where` of `model`, in pieces of bounded size.

    Only this rank's `model_shard` of each tensor is read. For a pipeline stage `skeleton` is the complete model on the
    meta device, which the checkpoint must match. With `growth` the model has more tokens than the folder, and new rows
    are initialised. Parameters in `may_be_missing` stay unchanged if the folder has no tensor of their module.

    Names and shapes are compared before anything is written. ModelError lists tensors that are missing, unexpected or
    of wrong shape. FP8 weights are dequantised in fp32, only in the needed rows and columns. Values are cast to the
    dtype of their target; ModelError if one is NaN or infinite.
    """
    targets = list(_model_tensors(model, family, where, model_shard))
    complete = (model, where, model_shard) if skeleton is None else (skeleton, full_fragment, UNSHARDED)
    expected = _expected_tensors(family, *complete)
    rename = partial(published_name, expected=expected, prefix=model.base_model_prefix) if family.encoder else None
    hub = HubFolder(folder, rename=rename) if growth is None else GrownFolder(folder, growth, expected, rename=rename)
    # A parameter may be missing only if the folder has no other parameter of its module.
    present = {name.rpartition(".")[0] for name in may_be_missing if name in hub.shapes}
    missing = {name for name in may_be_missing if name.rpartition(".")[0] not in present}
    skipped = _check_tensors(hub, {key: expected[key] for key in expected if key not in missing}, model, family)
    stored = [target for target in targets if target.name not in missing]
    for target in count_parts("loading weights", stored, len(stored)):
        with target.fragment.opened() as flat:
            for piece in target.pieces:
                _copy_piece(hub, target, flat, piece)
            if is_table(target.name):
                _check_table(hub, target, flat, model)
    return LoadReport(
        num_tensors=sum(len(target.pieces) for target in stored),
        skipped=tuple(skipped),
        missing=tuple(target.name for target in targets if target.name in missing),
    )


def open_weights(model: PreTrainedModel, folder: Path, *, family: Family) -> HubFolder:
    """Open the safetensors of `folder`. ModelError if they do not fit `model`, which may be on the meta device."""
    hub = HubFolder(folder)
    _check_tensors(hub, _expected_tensors(family, model, full_fragment, UNSHARDED), model, family)
    return hub


def weights_digest(folder: Path) -> str:
    """Sixteen hexadecimal digits that identify a folder's weights, hashed from the first rows of many tensors.

    A bf16 model and its fp32 copy have equal digests, and so have an FP8 model and its bf16 copy.
    """
    digest, hub = hashlib.sha256(), HubFolder(folder)
    keys = sorted(hub.shapes)
    for key in keys[:: -(-len(keys) // _DIGESTED)]:
        row = hub.read(key, 0, math.prod(hub.shapes[key][1:]))
        digest.update(key.encode() + row.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def initialise_weights(
    model: PreTrainedModel,
    *,
    seed: int,
    where: Where = full_fragment,
    model_shard: ModelShard = UNSHARDED,
    names: Collection[str] | None = None,
) -> None:
    """Randomly initialise all weights (or those in `names`) by the model's own rule, `_init_weights`. Values do not
    depend on world size, ZeRO stage or shard.

    Modules are initialised one by one in fp32 on the CPU, seeded by (`seed`, module name), and copied to fragments.
    """
    tied = {name for name in (model.all_tied_weights_keys or {}) if model.config.tie_word_embeddings}
    for name, module in model.named_modules():
        full = {leaf: f"{name}.{leaf}".lstrip(".") for leaf in module._parameters}
        own_parameters = [
            (leaf, param)
            for leaf, param in module.named_parameters(recurse=False)
            if full[leaf] not in tied and (names is None or full[leaf] in names)
        ]
        if not own_parameters:
            continue
        shards = {
            leaf: model_shard.tensor_shard(f"{name}.{leaf}", where(param).shape) for leaf, param in own_parameters
        }
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed_of(seed, name))
            for leaf, shard in shards.items():
                module._parameters[leaf] = nn.Parameter(torch.zeros(shard.full_shape, dtype=torch.float32))
            module._buffers.update({leaf: b.clone() for leaf, b in buffers.items() if b is not None})
            model._init_weights(module)
            values = {leaf: value.data for leaf, value in module._parameters.items() if value is not None}
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        for leaf, param in own_parameters:
            where(param).write(shards[leaf].slice(values.pop(leaf)))


def seed_of(seed: int, name: str) -> int:
    """Seed for the random values of the tensor `name`, in a run with the seed `seed`."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def _expected_tensors(
    family: Family, model: PreTrainedModel, where: Where, model_shard: ModelShard
) -> dict[str, tuple[int, ...]]:
    expected: dict[str, tuple[int, ...]] = {}
    for target in _model_tensors(model, family, where, model_shard):
        full_shape = model_shard.tensor_shard(target.name, target.fragment.shape).full_shape
        expected |= {piece.key: piece.shape for piece in hub_pieces(target.name, full_shape, family)}
    return expected


def _model_tensors(
    model: PreTrainedModel, family: Family, where: Where, model_shard: ModelShard
) -> Iterator[_ModelTensor]:
    for name, param in model.named_parameters():
        fragment = where(param)
        shard = model_shard.tensor_shard(name, fragment.shape)
        first = shard.offsets[0] if shard.is_expert_parallel else 0
        pieces = hub_pieces(name, fragment.shape, family, first_expert=first)
        # A model's tensor may have a first dimension of experts, which the checkpoint's tensors lack.
        offsets = shard.offsets[len(shard.offsets) - len(pieces[0].shape) :]
        yield _ModelTensor(name, fragment, pieces, offsets)
    for module_name, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                name = f"{module_name}.{leaf}".lstrip(".")
                shape = tuple(buffer.shape)
                yield _ModelTensor(name, full_fragment(buffer), hub_pieces(name, shape, family), (0,) * len(shape))


def _check_tensors(
    hub: HubFolder, expected: Mapping[str, tuple[int, ...]], model: PreTrainedModel, family: Family
) -> list[str]:
    """Compare a checkpoint's tensors with the `expected` ones. Returns those that are not loaded: a tied head, a
    classifier's language model head, layers after the last one, and others that the family allows.
    """
    _check_layout_of_experts(hub, expected, model, family)
    tied = dict(model.all_tied_weights_keys or {}) if model.config.tie_word_embeddings else {}
    heads = {key for key in hub.shapes if _LANGUAGE_MODEL_HEAD.match(key)} if has_score_head(model) else set()
    unused = tied.keys() | heads
    layers = model.config.num_hidden_layers
    remaining = hub.left_over(
        expected, model=type(model).__name__, may_be=lambda key: key in unused or family.may_skip(key, layers=layers)
    )
    if isinstance(hub, GrownFolder):
        hub.check_left(set(remaining) - unused)
    for key in tied.keys() & set(remaining):
        if not hub.is_same(key, tied[key]):
            raise ModelError(
                f"{hub.folder}: `{key}` differs from `{tied[key]}`, but config.json ties both",
                hint="set tie_word_embeddings to false in config.json",
            )
    for key, original in published_copies(model.config).items():
        if key in hub.shapes and not hub.is_same(key, original):
            raise ModelError(
                f"mtp.train true: the prediction layer would use `{original}` instead of `{key}`, but the two differ "
                f"in {hub.folder}",
                hint="leave the section mtp out; exports then get the tensor from the model's folder",
            )
    return remaining


def _check_layout_of_experts(
    hub: HubFolder, expected: Mapping[str, tuple[int, ...]], model: PreTrainedModel, family: Family
) -> None:
    one_by_one = sorted(key for key in hub.shapes if key not in expected and _ONE_EXPERT.search(key))
    fused = sorted(key for key in expected if key not in hub.shapes and _FUSED_EXPERTS.search(key))
    if not family.fused_experts and one_by_one and fused:
        legal = ", ".join(kind for kind, row in FAMILIES.items() if row.fused_experts)
        raise ModelError(
            f"{hub.folder} has a tensor for each expert (`{one_by_one[0]}`), but {type(model).__name__} has one tensor "
            f"for all experts (`{fused[0]}`). Joining tensors is not supported for model_type "
            f"`{family.model_type}`, only for {legal}",
            hint="load the weights with transformers, save them by "
            "save_pretrained(folder, save_original_format=False) and name that folder",
        )


def _copy_piece(hub: HubFolder, target: _ModelTensor, flat: torch.Tensor, piece: Piece) -> None:
    """Copy this rank's elements of `piece` to `flat`. Only the needed rows are read, a few at a time."""
    fragment = target.fragment
    begin, width = piece.first_element(fragment.shape), max(1, math.prod(piece.shape[1:]))
    first = max(0, (fragment.start - begin) // width)
    last = min(piece.shape[0] if piece.shape else 1, -(-(fragment.start + fragment.numel - begin) // width))
    step = max(1, _STRIP_NUMEL // width)
    columns = tuple(slice(at, at + size) for at, size in zip(target.offsets, piece.shape, strict=True))[1:]
    within = columns if hub.shapes[piece.key][1:] != piece.shape[1:] else ()
    for low in range(first, last, step):
        if piece.shape:
            top = target.offsets[0]
            values = hub.rows(piece.key, top + low, top + min(low + step, last), within)
        else:
            values = hub.read(piece.key, 0, 1)
        # Minimum and maximum of data with NaN are NaN. Computing them is faster than isfinite of all elements.
        if not all(map(math.isfinite, map(float, torch.aminmax(values)))):
            raise ModelError(
                f"tensor `{piece.key}` of {hub.folder} holds NaN or infinity",
                hint="the checkpoint is damaged; download it again",
            )
        flat_values = values.reshape(-1)
        offset = begin + low * width - fragment.start
        source_from, target_from = max(0, -offset), max(0, offset)
        count = min(flat_values.numel() - source_from, fragment.numel - target_from)
        flat[target_from : target_from + count].copy_(flat_values[source_from : source_from + count])


def _check_table(hub: HubFolder, target: _ModelTensor, table: torch.Tensor, model: PreTrainedModel) -> None:
    """ModelError if a table from token ids to experts names an expert that does not exist."""
    low, high, experts = int(table.min()), int(table.max()), int(model.config.n_routed_experts)
    if low < 0 or high >= experts:
        raise ModelError(
            f"tensor `{target.pieces[0].key}` of {hub.folder} names experts {low} to {high}, but a layer has {experts}",
            hint="the checkpoint is damaged; download it again",
        )
