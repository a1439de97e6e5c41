"""A layout: all settings of a run file that the search may change."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import yaml

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.config.shipped import DS_CONFIGS, shipped_file, shipped_names
from ds_finetune.plan.deepspeed_config import given_choices
from ds_finetune.plan.plan import Recomputation
from ds_finetune.plan.settings import RunSettings

Offload = Literal["none", "optimizer", "all"]
OFFLOADS: Mapping[Offload, tuple[tuple[str, ...], str]] = {
    "none": ((), ""),
    "optimizer": (("offload_optimizer",), ", optimizer on the host"),
    "all": (("offload_optimizer", "offload_param"), ", optimizer and weights on the host"),
}
"""States in host memory: none, optimizer states and fp32 weights, or all weights too. Each has its keys of
`zero_optimization`, and a suffix of the ZeRO stage in texts."""
_RECOMPUTATION: Mapping[Recomputation, str] = {
    "none": "kept",
    "selective": "recomputed selectively",
    "full": "recomputed",
}


class Activations(NamedTuple):
    """How the memory of activations is reduced: three keys of the section `train`."""

    activation_checkpointing: Recomputation = "full"
    activation_offload: bool = False
    tiled_mlp: bool = False

    def __str__(self) -> str:
        """Text such as `recomputed, tiled MLP, inputs of layers on the host`."""
        tiled, offloaded = ", tiled MLP" * self.tiled_mlp, ", inputs of layers on the host" * self.activation_offload
        return f"{_RECOMPUTATION[self.activation_checkpointing]}{tiled}{offloaded}"


class Layout(NamedTuple):
    """Settings of a run that the search chooses."""

    parallel: ParallelConfig
    zero_stage: int
    offload: Offload
    micro_batch_size: int
    activations: Activations

    @property
    def train_keys(self) -> dict[str, Any]:
        """Keys of the section `train` with their values."""
        return {"micro_batch_size": self.micro_batch_size, **self.activations._asdict()}

    def apply(self, run: RunSettings) -> RunSettings:
        """The run with this layout."""
        return replace(run, **self.sections(run))

    def sections(self, run: RunSettings) -> dict[str, Any]:
        """Sections of the run file that this layout changes. DeepSpeed keys other than stage and offload stay."""
        tree = decided(given_choices(run.deepspeed)[0])
        zero = dict(tree.get("zero_optimization") or {})
        given = {key: zero.pop(key, None) or {} for key in ("offload_optimizer", "offload_param")}
        zero["stage"] = self.zero_stage
        for key in OFFLOADS[self.offload][0]:
            zero[key] = given[key] if given[key].get("device") == "cpu" else {"device": "cpu", "pin_memory": True}
        return {
            "train": run.train.model_copy(update=self.train_keys),
            "parallel": self.parallel,
            "deepspeed": {**tree, "zero_optimization": zero},
        }


def decided(tree: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed choices without values "auto", which count as absent, and without sections that have no others."""
    values = {key: decided(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return {key: value for key, value in values.items() if value != "auto" and value != {}}


def layout_keys(layout: Layout, given: RunSettings) -> dict[str, Any]:
    """Run-file keys that a layout changes, with their new values."""
    values: dict[str, Any] = {}
    wanted = layout.sections(given)
    if layout.parallel != given.parallel:
        values["parallel"] = layout.parallel.model_dump(mode="json", exclude_defaults=True)
    if wanted["deepspeed"] != decided(given_choices(given.deepspeed)[0]):
        values["deepspeed"] = shipped_name(wanted["deepspeed"]) or wanted["deepspeed"]
    changed = {key: value for key, value in layout.train_keys.items() if value != getattr(given.train, key)}
    return values | {f"train.{key}": value for key, value in changed.items()}


def shipped_name(choices: Mapping[str, Any]) -> str | None:
    """Name of the shipped DeepSpeed file with these choices, such as `zero3`; None where there is none.

    A value of "auto" counts as absent.
    """
    for name in shipped_names(DS_CONFIGS):
        file = shipped_file(f"{DS_CONFIGS}/{name}") if name.endswith(".json") and "/" not in name else None
        if file is not None and decided(yaml.safe_load(file.read_text(encoding="utf-8"))) == decided(choices):
            return name.removesuffix(".json")
    return None
