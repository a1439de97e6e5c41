"""The tensors of a GGUF file, each made from one or more published tensors in chunks of bounded size."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from transformers import PretrainedConfig

from ds_finetune.errors import ExportError
from ds_finetune.export.gguf.settings import head_dim, rope_factors
from ds_finetune.export.shards import PIECE_NUMEL
from ds_finetune.export.source import check_finite
from ds_finetune.families.family import Family
from ds_finetune.model.build.hub_folder import HubFolder

KINDS = {"bf16": Kind.BF16, "f16": Kind.F16, "f32": Kind.F32, "q8_0": Kind.Q8_0}
"""ggml's tensor types by the value of `--dtype`."""
_EXPERT = re.compile(r"^(model\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight$")
_FP32_WEIGHTS = ("_norm.weight", ".ffn_gate_inp.weight")
_ROTATED = tuple(f"{name}_proj.{part}" for name in "qk" for part in ("weight", "bias"))

Change = Callable[[torch.Tensor], torch.Tensor]
"""Function that computes GGUF values from a chunk of a published tensor, [groups, rows of a group, columns]."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file, made by concatenating the published tensors `keys`."""

    name: str
    shape: tuple[int, ...]
    """Shape in torch's order of dimensions; the GGUF file lists dimensions in reverse."""
    kind: Kind
    keys: tuple[str, ...]
    group: int = 1
    """Number of consecutive rows that the function `change` gets at once, e.g. the rows of an attention head."""
    change: Change | None = None
    values: torch.Tensor | None = None
    """Values of a GGUF tensor that is computed from the configuration; None if it is made from published tensors."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the GGUF file in bytes, without padding."""
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * size

    def pieces(self, hub: HubFolder) -> Iterator[bytes]:
        """Yield the bytes of the GGUF tensor in order; ExportError for NaN or infinity, before or after a cast."""
        for part in self._parts(hub):
            values = part.float().reshape(-1, self.shape[-1])
            with np.errstate(over="ignore"):
                data = quantize(values.numpy(), self.kind)
            cast = torch.from_numpy(data) if self.kind == Kind.F16 else values
            check_finite(next(iter(self.keys), self.name), values, cast, others="bf16 or f32")
            yield data.tobytes()

    def _parts(self, hub: HubFolder) -> Iterator[torch.Tensor]:
        if self.values is not None:
            yield self.values
        for key in self.keys:
            shape = hub.shapes[key]
            columns = shape[-1] if len(shape) > 1 else 1
            numel = self.group * columns
            step = max(PIECE_NUMEL // numel, 1) * numel
            for start in range(0, math.prod(shape), step):
                flat = hub.read(key, start, min(step, math.prod(shape) - start))
                yield self.change(flat.view(-1, self.group, columns)) if self.change else flat


def gguf_tensors(hub: HubFolder, config: PretrainedConfig, family: Family, kind: Kind) -> list[GgufTensor]:
    """Plan the tensors of the GGUF file for the model `hub`. Weights whose rows do not divide into blocks of `kind`
    become f16. A tied head and multi-token prediction layers are left out. ExportError if llama.cpp has no name for a
    tensor.
    """
    assert family.gguf is not None
    tied = "lm_head.weight" if config.tie_word_embeddings else ""
    keys = [key for key in hub.shapes if key != tied and not family.may_skip(key, layers=config.num_hidden_layers)]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.gguf.name)
    name_map = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: list[GgufTensor] = []
    for key, parts in _stacked_experts(keys, family).items():
        shape = hub.shapes[parts[0]] if parts == [key] else (len(parts), *hub.shapes[parts[0]])
        for published, view, group, change in _views(key, shape, config, family):
            name = name_map.get_name(published, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise ExportError(
                    f"tensor `{parts[0]}` has no name in llama.cpp's architecture {family.gguf.name}",
                    hint="export with --format safetensors",
                )
            # llama.cpp reads vectors, biases, norms and routers in fp32 (conversion/base.py).
            is_fp32 = len(view) == 1 or name.endswith(_FP32_WEIGHTS) or not name.endswith(".weight")
            stored = Kind.F32 if is_fp32 else kind if view[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else Kind.F16
            tensors.append(GgufTensor(name, view, stored, tuple(parts), group, change))
    factors = rope_factors(config)
    if factors is not None:
        tensors.append(GgufTensor("rope_freqs.weight", tuple(factors.shape), Kind.F32, (), values=factors))
    return tensors


def _stacked_experts(keys: Sequence[str], family: Family) -> dict[str, list[str]]:
    """Group published tensors by the name of their GGUF tensor; all experts of a projection share one GGUF tensor."""
    names = family.published_mlp
    projections = {names.gate: "gate_proj", names.up: "up_proj", names.down: "down_proj"}
    stacks: dict[str, list[tuple[int, str]]] = {}
    for key in keys:
        expert = _EXPERT.match(key)
        name = f"{expert[1]}.mlp.experts.{projections[expert[3]]}.weight" if expert else key
        stacks.setdefault(name, []).append((int(expert[2]) if expert else 0, key))
    return {name: [key for _, key in sorted(parts)] for name, parts in stacks.items()}


_View = tuple[str, tuple[int, ...], int, Change | None]
"""Tensor name as the library gguf maps it, and the fields `shape`, `group` and `change` of a GgufTensor."""


def _views(key: str, shape: tuple[int, ...], config: PretrainedConfig, family: Family) -> list[_View]:
    assert family.gguf is not None
    module, _, leaf = key.rpartition(".self_attn.")
    if leaf == "kv_b_proj.weight":
        # The keys and values of kv_b_proj are split. llama.cpp multiplies queries by the keys, which are transposed.
        nope, rank, start = config.qk_nope_head_dim, shape[1], f"{module}.self_attn."
        head_rows = nope + config.v_head_dim
        heads = shape[0] // head_rows
        return [
            (start + "k_b_proj.weight", (heads, rank, nope), head_rows, lambda rows: rows[:, :nope].mT),
            (start + "v_b_proj.weight", (heads, head_rows - nope, rank), head_rows, lambda rows: rows[:, nope:]),
        ]
    if family.gguf.rotates_pairs and leaf in _ROTATED:
        return [(key, shape, head_dim(config), _pairs)]
    if family.transposed_experts and ".experts." in key:
        return _outputs_first(key, shape)
    end = ".weight" if leaf == "sinks" else ""
    return [(key.replace("e_score_correction_bias", "e_score_correction.bias") + end, shape, 1, None)]


def _outputs_first(key: str, shape: tuple[int, ...]) -> list[_View]:
    """Transpose experts published as [experts, inputs, outputs], and separate interleaved gate and up columns."""
    start, bias, _ = key.partition("_bias")
    turns = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    views: list[_View] = []
    for name, part in turns.items() if start.endswith("gate_up_proj") else [("down_proj", slice(None))]:
        one, outputs = start.replace("gate_up_proj", name), len(range(shape[-1])[part])
        kind = ("bias", (shape[0], outputs), 1) if bias else ("weight", (shape[0], outputs, shape[1]), shape[1])
        # The lambda transposes [groups, inputs, outputs] to [groups, outputs, inputs].
        views.append((f"{one}.{kind[0]}", kind[1], kind[2], lambda rows, part=part: rows[..., part].mT))  # type: ignore[misc]
    return views


def _pairs(heads: torch.Tensor) -> torch.Tensor:
    """Reorder rows of heads: rows that rotate together are half a head apart in transformers, adjacent in llama.cpp."""
    groups, rows, columns = heads.shape
    return heads.view(groups, 2, rows // 2, columns).transpose(1, 2)
