"""Adapters in peft's format, and their sum with the weights of a base folder, read a bounded piece at a time."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ds_finetune.errors import ExportError
from ds_finetune.export.adapter import BASE_DIGEST, CONFIG, DOWN, GATE_UP, KEY_PREFIX, WEIGHTS
from ds_finetune.export.source import TensorSource
from ds_finetune.families.family import Family
from ds_finetune.families.text_part import text_name
from ds_finetune.model.adapters.lora import Factors
from ds_finetune.model.weights.names import hub_pieces

_KEY = re.compile(rf"^{re.escape(KEY_PREFIX)}(?P<module>.+?)(?P<inner>\.base_layer)?\.lora_(?P<side>[AB])\.weight$")
_READ = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "target_parameters", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "runtime_config", "eva_config", "megatron_core", "qalora_group_size"),
}
"""Settings of peft's LoraConfig that are read here, or that do not change the weights an adapter is added to."""
_ONLY_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
"""Settings of which only these values leave the base as it is: PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ take their first
adapter, or an error of rounding, off the base's weights. A setting that is named neither here nor in `_READ` has to be
empty, as new ones of peft are by default.
"""


@dataclass(frozen=True)
class PeftAdapter:
    """A folder with an adapter in peft's format; it is checked when it is opened, and its tensors are read later."""

    folder: Path
    config: Mapping[str, Any]
    keys: Mapping[tuple[str, str], str]
    """Key in the file by weight and side."""
    base: str
    """Digest of the weights that it was trained on; empty where another program trained it."""
    whole: Mapping[str, str]
    """Key in the file by name of a weight that was trained whole (`modules_to_save`), such as a classifier's head."""

    @classmethod
    def open(cls, folder: Path) -> "PeftAdapter":
        """ExportError where the folder is damaged, is not LoRA, or has settings that are not supported."""
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                matches = {key: _KEY.match(key) for key in file.keys()}  # noqa: SIM118 - not a dict
                digest = (file.metadata() or {}).get(BASE_DIGEST, "")
        except (OSError, ValueError, SafetensorError) as broken:
            raise ExportError(
                f"{folder} cannot be read as an adapter: {broken}", hint="save it again with peft's save_pretrained"
            ) from broken
        refused = [
            f"{key} {value!r}"
            for key, value in config.items()
            if key not in _READ and value and value not in _ONLY_SUPPORTED.get(key, ())
        ]
        refused += [f"peft_type {config.get('peft_type')!r}"] if config.get("peft_type") != "LORA" else []
        whole = {
            key.removeprefix(KEY_PREFIX): key for key in matches if _is_whole(key, config.get("modules_to_save") or ())
        }
        refused += [f"tensor {key}" for key, m in matches.items() if m is None and key not in whole.values()][:5]
        if refused:
            raise ExportError(
                f"{folder} holds {', '.join(refused)}, which is not supported here",
                hint="merge it with peft's merge_and_unload (aLoRA adapters cannot be merged)",
            )
        alone = {str(name).rpartition(".")[2] for name in config.get("target_parameters") or ()} & {GATE_UP, DOWN}
        outer = alone.pop() if len(alone) == 1 else DOWN
        keys = {
            (_weight(match["module"], match["inner"], outer), match["side"]): key
            for key, match in matches.items()
            if match
        }
        unpaired = sorted(name for name, side in keys if (name, "B" if side == "A" else "A") not in keys)
        if unpaired or not keys:
            shown = ", ".join(unpaired[:5])
            raise ExportError(
                f"{folder}/{WEIGHTS}: {len(keys)} tensors, without A or B for {len(unpaired)} adapters: {shown}",
                hint="save it again",
            )
        return cls(folder, config, keys, digest, whole)

    @property
    def names(self) -> list[str]:
        """Names of the weights that are adapted."""
        return [name for name, side in self.keys if side == "A"]

    def factors(self, name: str) -> Factors:
        """The adapter of a weight, read as a whole."""
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            a, b = (file.get_tensor(self.keys[name, side]) for side in "AB")
        # peft looks patterns up by the weight's name for parameters, by the module's for modules
        # (tuners/tuners_utils.py).
        is_fused = not name.endswith(".weight")
        rank = int(self._value("rank_pattern", "r", name))
        scale = float(self._value("alpha_pattern", "lora_alpha", name)) / (
            math.sqrt(rank) if self.config.get("use_rslora") else rank
        )
        if (
            a.dim() != 2
            or b.dim() != 2
            or a.shape[0] != b.shape[1]
            or a.shape[0] % rank
            or (a.shape[0] != rank and not is_fused)
        ):
            raise ExportError(
                f"{self.folder}: `{name}` has A {tuple(a.shape)} and B {tuple(b.shape)} for rank {rank}",
                hint="the adapter is damaged; save it again",
            )
        if is_fused:
            a, b = a.reshape(-1, rank, a.shape[1]), b.reshape(b.shape[0], rank, -1).permute(2, 0, 1)
        return Factors(a, b, scale)

    def _value(self, patterns: str, default: str, name: str) -> Any:  # noqa: ANN401 - a number of the file
        # peft looks patterns up by its own name, which is longer for the text part of a composite model.
        match = _KEY.match(self.keys[name, "A"])
        assert match is not None
        name = f"{match['module']}{'' if name.endswith('.weight') else '.' + name.rpartition('.')[2]}"
        overrides = self.config.get(patterns) or {}
        return next(
            (value for pattern, value in overrides.items() if re.match(rf"(.*\.)?({pattern})$", name)),
            self.config.get(default),
        )


def _is_whole(key: str, modules: Sequence[str]) -> bool:
    """Whether `key` belongs to one of `modules`, named by the end of the module's name as peft does."""
    module = key.removeprefix(KEY_PREFIX).rpartition(".")[0]
    parts = [module[: match.start()] for match in re.finditer(r"\.|$", module)]
    return any(part == name or part.endswith(f".{name}") for part in parts for name in modules)


def _weight(module: str, inner: str | None, outer: str) -> str:
    """Name of the weight that a key adapts, in the text part of a composite model.

    It is the module's `weight`, except for the two weights of fused experts: a key with `base_layer` (`inner`) adapts
    the first, any other key the one named `outer`.
    """
    leaf = GATE_UP if inner else outer if module.endswith(".experts") else "weight"
    return text_name(f"{module}.{leaf}") or f"{module}.{leaf}"


class MergedSource:
    """A base's tensors with adapters added in fp32, as a TensorSource.

    `factors` gives the adapter of a weight; those of the last few weights are kept in memory. Tensors of `whole` take
    the place of the base's; those of the base that are in `without` are left out.
    """

    def __init__(  # noqa: PLR0913
        self,
        base: TensorSource,
        names: Collection[str],
        factors: Callable[[str], Factors],
        family: Family,
        *,
        label: str,
        whole: TensorSource | None = None,
        without: Collection[str] = (),
    ) -> None:
        self._base, self._whole, self._without = base, whole, without
        self._factors = lru_cache(maxsize=8)(factors)
        self._adapted: dict[str, tuple[str, int]] = {}
        for name in names:
            shape = self._factors(name).shape
            parts = [(piece.key, piece.first_element(shape), piece.shape) for piece in hub_pieces(name, shape, family)]
            pieces = [(name, 0, shape)] if name in base.shapes else parts
            wrong = [
                f"{key} {piece_shape}, in the base {base.shapes.get(key, 'absent')}"
                for key, _, piece_shape in pieces
                if base.shapes.get(key) != piece_shape
            ]
            if wrong:
                raise ExportError(
                    f"{label} does not fit the base: `{name}` is {shape}, {'; '.join(wrong[:3])}",
                    hint="name the model it was trained on by --base",
                )
            self._adapted |= {key: (name, begin) for key, begin, _ in pieces}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the base's tensors without those left out, and of those that were trained whole."""
        kept = {name: shape for name, shape in self._base.shapes.items() if name not in self._without}
        return kept if self._whole is None else {**kept, **self._whole.shapes}

    @property
    def fp32_names(self) -> Collection[str]:
        """Names of tensors that the base keeps in fp32."""
        return self._base.fp32_names

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements of the base; where the tensor is adapted, in fp32 with the adapter added."""
        if self._whole is not None and name in self._whole.shapes:
            return self._whole.read(name, start, numel)
        flat = self._base.read(name, start, numel)
        if name not in self._adapted:
            return flat
        weight, begin = self._adapted[name]
        return flat.float() + self._factors(weight).delta(begin + start, numel)
