"""A layout: all settings of a run file that the search may change."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.config.shipped import DS_CONFIGS, shipped_file, shipped_names
from ds_finetune.plan.deepspeed_config import given_choices
from ds_finetune.plan.plan import Plan, Recomputation
from ds_finetune.plan.settings import RunSettings
from ds_finetune.plan.tested_layouts import AXES

Offload = Literal["none", "optimizer", "all"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "all")
"""What is kept in host memory: nothing, optimizer states and fp32 weights, or also the weights themselves."""
_OFFLOADED: Mapping[Offload, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("offload_optimizer",),
    "all": ("offload_optimizer", "offload_param"),
}
OFFLOAD_TEXTS: Mapping[Offload, str] = {
    "none": "",
    "optimizer": ", optimizer on the host",
    "all": ", optimizer and weights on the host",
}
"""Suffixes of the ZeRO stage in texts."""
_HOST_MEMORY = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True, order=True)
class Sizes:
    """Parallel sizes besides data parallelism, which takes the remaining ranks."""

    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1

    @property
    def axes(self) -> frozenset[str]:
        """Names of the sizes above 1."""
        return frozenset(axis for axis in AXES if getattr(self, axis) > 1)

    def section(self, given: ParallelConfig) -> ParallelConfig:
        """The section `parallel` with these sizes and one chunk of layers per pipeline rank; layers of stages are kept
        if the number of stages is.
        """
        layers = given.pp_layers if (given.pp, given.vpp) == (self.pp, 1) else ()
        return ParallelConfig(tp=self.tp, pp=self.pp, sp=self.sp, ep=self.ep, pp_layers=layers)


_TEXTS: Mapping[Recomputation, str] = {"none": "kept", "selective": "recomputed selectively", "full": "recomputed"}


@dataclass(frozen=True, order=True)
class Activations:
    """How the memory of activations is reduced: `train.activation_checkpointing` and options that build on it."""

    recomputation: Recomputation = "full"
    is_tiled: bool = False
    """`train.tiled_mlp`."""
    is_offloaded: bool = False
    """`train.activation_offload`."""

    def of_plan(self, plan: Plan) -> Plan:
        """The plan with these settings of activations."""
        train = plan.train.model_copy(update=self.keys())
        return replace(plan, train=train, activation_checkpointing=self.recomputation)

    def keys(self) -> dict[str, object]:
        """Keys and values of the section `train`."""
        return {
            "activation_checkpointing": self.recomputation,
            "activation_offload": self.is_offloaded,
            "tiled_mlp": self.is_tiled,
        }

    def __str__(self) -> str:
        """Text such as `recomputed, tiled MLP, offloaded inputs`."""
        parts = [_TEXTS[self.recomputation]]
        parts += ["tiled MLP"] if self.is_tiled else []
        return ", ".join([*parts, *(["inputs of layers on the host"] if self.is_offloaded else [])])


@dataclass(frozen=True, order=True)
class Layout:
    """Settings of a run that the search chooses."""

    sizes: Sizes
    zero_stage: int
    offload: Offload
    micro_batch_size: int
    activations: Activations

    def apply(self, run: RunSettings) -> RunSettings:
        """The run with this layout."""
        return replace(run, **self.sections(run))

    def sections(self, run: RunSettings) -> dict[str, Any]:
        """Sections of the run file that this layout changes."""
        keys = {"micro_batch_size": self.micro_batch_size, **self.activations.keys()}
        # Keys other than ZeRO stage and offload are kept.
        tree = decided(given_choices(run.deepspeed)[0])
        zero = dict(tree.get("zero_optimization") or {})
        given = {key: zero.pop(key, None) for key in ("offload_optimizer", "offload_param")}
        zero["stage"] = self.zero_stage
        for key in _OFFLOADED[self.offload]:
            section = given[key] or {}
            zero[key] = section if section.get("device") == "cpu" else dict(_HOST_MEMORY)
        return {
            "train": run.train.model_copy(update=keys),
            "parallel": self.sizes.section(run.parallel),
            "deepspeed": {**tree, "zero_optimization": zero},
        }


def decided(tree: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed choices without values "auto", which count as absent, and without sections that have no others."""
    found = {key: decided(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return {key: value for key, value in found.items() if value != "auto" and value != {}}


def layout_keys(layout: Layout, given: RunSettings) -> dict[str, Any]:
    """Run-file keys that a layout changes, with their new values."""
    values: dict[str, Any] = {}
    wanted = layout.apply(given)
    if wanted.parallel != given.parallel:
        sizes = {axis: n for axis in ("tp", "pp", "sp", "ep") if (n := getattr(layout.sizes, axis)) > 1}
        layers = {"pp_layers": list(wanted.parallel.pp_layers)} if wanted.parallel.pp_layers else {}
        values["parallel"] = {**sizes, **layers}
    assert isinstance(wanted.deepspeed, dict), wanted.deepspeed
    if wanted.deepspeed != decided(given_choices(given.deepspeed)[0]):
        values["deepspeed"] = shipped_name(wanted.deepspeed) or wanted.deepspeed
    keys = {"micro_batch_size": layout.micro_batch_size, **layout.activations.keys()}
    return values | {f"train.{key}": value for key, value in keys.items() if value != getattr(given.train, key)}


def shipped_name(choices: Mapping[str, Any]) -> str | None:
    """Name of the shipped DeepSpeed file with these choices, such as `zero3`; None where there is none.

    A value of "auto" counts as absent.
    """
    for name in shipped_names(DS_CONFIGS):
        file = shipped_file(f"{DS_CONFIGS}/{name}") if name.endswith(".json") and "/" not in name else None
        if file is not None and decided(yaml.safe_load(file.read_text(encoding="utf-8"))) == decided(choices):
            return name.removesuffix(".json")
    return None
