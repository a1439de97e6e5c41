"""Reads LoRA adapters in peft's format. `export/adapter.py` writes adapters and documents their tensors."""

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ds_finetune.errors import ExportError
from ds_finetune.families.text_part import text_name
from ds_finetune.model.adapters.lora import Factors
from ds_finetune.plan.lora_targets import Shape

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY_PREFIX = "base_model.model."
"""Prefix of the names of tensors in peft's adapter files."""
BASE_DIGEST = "base_weights"
"""Metadata key in an adapter's file with the digest of the base weights on which the adapter was trained."""
DOWN, GATE_UP = "down_proj", "gate_up_proj"
"""Names of the two weights of fused experts: down projection, and gate and up projections."""
_KEY = re.compile(rf"^{re.escape(KEY_PREFIX)}(?P<module>.+?)(?P<inner>\.base_layer)?\.lora_(?P<side>[AB])\.weight$")
_READ = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "target_parameters", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "runtime_config", "eva_config", "megatron_core", "qalora_group_size"),
}
"""Keys of peft's adapter_config.json that this program reads, or that do not change the base model's weights."""
_ONLY_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
"""Supported values of some keys of peft's adapter_config.json. With other values (PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ)
peft changes the base model's weights. All keys besides these and those in `_READ` must be empty.
"""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter in peft's format, in a folder. `open` checks the folder; tensors are read later."""

    folder: Path
    config: Mapping[str, Any]
    keys: Mapping[tuple[str, str], str]
    """Name in the safetensors file of each factor A and B, by (name of the adapted weight, `A` or `B`)."""
    base: str
    """Digest of the base weights on which the adapter was trained; empty if another program wrote the adapter."""
    fully_trained: Mapping[str, str]
    """Name in the safetensors file of each weight trained in full (`modules_to_save`), such as a classifier's head."""

    @classmethod
    def open(cls, folder: Path) -> "PeftAdapter":
        """Open and check an adapter's folder. ExportError if files are missing or damaged, or the settings are not
        supported.
        """
        if absent := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
            raise ExportError(
                f"{folder} cannot be read as an adapter: it has no {' and no '.join(absent)}",
                hint=f"save it again with peft's save_pretrained, which writes {WEIGHTS}"
                if absent == [WEIGHTS]
                else "name a folder that peft's save_pretrained wrote",
            )
        try:
            config = dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
            for pattern in {**(config.get("rank_pattern") or {}), **(config.get("alpha_pattern") or {})}:
                re.compile(pattern)
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                matches = {key: _KEY.match(key) for key in file.keys()}  # noqa: SIM118 - not a dict
                digest = (file.metadata() or {}).get(BASE_DIGEST, "")
        except (OSError, ValueError, TypeError, re.error, SafetensorError) as broken:
            raise ExportError(
                f"{folder} cannot be read as an adapter: {broken}", hint="save it again with peft's save_pretrained"
            ) from broken
        refused = [
            f"{key} {value!r}"
            for key, value in config.items()
            if key not in _READ and value and value not in _ONLY_SUPPORTED.get(key, ())
        ]
        refused += [f"peft_type {config.get('peft_type')!r}"] if config.get("peft_type") != "LORA" else []
        fully_trained = {
            key.removeprefix(KEY_PREFIX): key
            for key in matches
            if _is_fully_trained(key.removeprefix(KEY_PREFIX), config.get("modules_to_save") or ())
        }
        unknown = [key for key, match in matches.items() if match is None and key not in fully_trained.values()]
        refused += [f"tensor {key}" for key in unknown[:5]]
        if refused:
            raise ExportError(
                f"{folder} holds {', '.join(refused)}, which is not supported here",
                hint="merge the adapter into its model with peft's merge_and_unload, not possible for aLoRA and prompt "
                "adapters",
            )
        adapted = {str(name).rpartition(".")[2] for name in config.get("target_parameters") or ()}
        outer = GATE_UP if GATE_UP in adapted and DOWN not in adapted else DOWN
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
                hint="save the adapter again",
            )
        return cls(folder, config, keys, digest, fully_trained)

    @property
    def names(self) -> list[str]:
        """Names of the weights that have an adapter."""
        return [name for name, side in self.keys if side == "A"]

    def rank_and_scale(self, name: str) -> tuple[int, float]:
        """Rank of a weight's adapter, and the scale by which B A is multiplied."""
        # peft matches the patterns of `rank_pattern` and `alpha_pattern` with the weight's name if it adapts a
        # parameter, else with the module's name (tuners/tuners_utils.py).
        rank, alpha = self._value("rank_pattern", "r", name), self._value("alpha_pattern", "lora_alpha", name)
        if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise ExportError(
                f"{self.folder}/{CONFIG}: `{name}` has r {rank!r} and lora_alpha {alpha!r}, which should be numbers",
                hint="correct the file, or save the adapter again with peft's save_pretrained",
            )
        return rank, alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def shape(self, name: str) -> Shape:
        """Shape (rows, columns) of the matrix that an adapter adapts; for fused experts that of one expert."""
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            a, b = (file.get_slice(self.keys[name, side]).get_shape() for side in "AB")
        return (b[0], a[-1])

    def factors(self, name: str) -> Factors:
        """Read A and B of a weight's adapter. ExportError if they do not fit the rank, or are not finite."""
        a, b = (self._finite(self.keys[name, side]) for side in "AB")
        is_fused, (rank, scale) = not name.endswith(".weight"), self.rank_and_scale(name)
        fits = a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1]
        if not fits or (a.shape[0] % rank if is_fused else a.shape[0] != rank):
            raise ExportError(
                f"{self.folder}: `{name}` has A {tuple(a.shape)} and B {tuple(b.shape)}, which do not fit rank {rank}",
                hint="the adapter is damaged; save it again",
            )
        if is_fused:
            a, b = a.reshape(-1, rank, a.shape[1]), b.reshape(b.shape[0], rank, -1).permute(2, 0, 1)
        return Factors(a, b, scale)

    def check_saved(self, names: Collection[str]) -> None:
        """ExportError if a module that adapter_config.json lists in `modules_to_save` is in the base model, whose
        weights have these `names`, but not in the adapter's file. peft 0.21 would only warn and take the base's weight.
        """
        listed = self.config.get("modules_to_save") or ()
        present, saved = (
            [module for module in listed if any(_is_fully_trained(weight, [module]) for weight in weights)]
            for weights in (names, self.fully_trained)
        )
        if lost := [module for module in present if module not in saved]:
            raise ExportError(
                f"{self.folder}/{CONFIG} lists {', '.join(lost)} in modules_to_save, but {WEIGHTS} has no tensor of "
                f"{'it' if len(lost) == 1 else 'them'}",
                hint="save the adapter again with peft's save_pretrained, or remove the name if it was not trained",
            )

    def digest(self) -> str:
        """SHA-256 digest of the adapter's weights file."""
        with (self.folder / WEIGHTS).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def initial(self, name: str, shape: Shape) -> dict[str, torch.Tensor]:
        """Read A and B of a weight's adapter, as initial values of training."""
        factors = self.factors(name)
        assert factors.shape == shape, (name, factors.shape, shape)
        return {"A": factors.a, "B": factors.b}

    def full_tensor(self, name: str) -> torch.Tensor:
        """Read a weight that was trained in full (`modules_to_save`). ExportError if it is not finite."""
        return self._finite(self.fully_trained[name])

    def _finite(self, key: str) -> torch.Tensor:
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            tensor = file.get_tensor(key)
        if not tensor.float().isfinite().all():
            raise ExportError(
                f"tensor `{key}` of {self.folder} holds NaN or infinity",
                hint="the adapter is damaged, or its training had diverged: take an older one",
            )
        return tensor

    def _value(self, patterns: str, default: str, name: str) -> Any:  # noqa: ANN401 - a number of the file
        # Patterns of ranks and alphas must match peft's names, which have a prefix in a multimodal model's text part.
        match = _KEY.match(self.keys[name, "A"])
        assert match is not None
        name = f"{match['module']}{'' if name.endswith('.weight') else '.' + name.rpartition('.')[2]}"
        overrides = self.config.get(patterns) or {}
        return next(
            (value for pattern, value in overrides.items() if re.match(rf"(.*\.)?({pattern})$", name)),
            self.config.get(default),
        )


def _is_fully_trained(weight: str, modules: Sequence[str]) -> bool:
    module = weight.rpartition(".")[0]
    parts = [module[: match.start()] for match in re.finditer(r"\.|$", module)]
    return any(part == name or part.endswith(f".{name}") for part in parts for name in modules)


def _weight(module: str, inner: str | None, outer: str) -> str:
    """Name of the weight that an adapter adapts, without the prefix of a multimodal model's text part. In fused experts
    it is `gate_up_proj` if the name of the adapter's tensor has `base_layer` (`inner`), else `outer`.
    """
    leaf = GATE_UP if inner else outer if module.endswith(".experts") else "weight"
    return text_name(f"{module}.{leaf}") or f"{module}.{leaf}"
