"""What a checkpoint remembers of the run beside tensors: how far it is, what it was told, and on what it ran."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from ds_finetune.checkpoint.files import STATE
from ds_finetune.config import RunConfig
from ds_finetune.errors import CheckpointError
from ds_finetune.plan.layout import Plan

_PACKAGES = ("ds_finetune", "torch", "deepspeed", "transformers")
_MUST_STAY = ("train.global_batch_size", "train.seed", "data.shuffle", "data.streaming", "optim.name")
_OF_ADAPTERS = ("lora", "lora.rank", "lora.alpha", "lora.target_modules", "lora.quantize")
"""Keys on which the order of the data, the kind of optimizer state, and what is trained depend."""


@dataclass(frozen=True)
class RunState:
    """Plain values alone. `position` is (epoch, next row) of the data, `engine` counters of optimizer and loss scale,
    `observers` what each remembers by name, `values` the step's own record, `data` a fingerprint of the rows."""

    step: int
    skipped_steps: int
    tokens_seen: int
    position: tuple[int, ...]
    engine: Mapping[str, Any]
    observers: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, float]
    data: str
    config: Mapping[str, Any]
    layout: Mapping[str, Any]
    versions: Mapping[str, str]
    base: str = ""
    """Digest of the weights that adapters belong to; empty where all weights are trained."""

    def text(self) -> str:
        """JSON that `read` turns into the same value."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The state in a checkpoint folder whose files are known to be whole."""
        tree = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return cls(**{**tree, "position": tuple(tree["position"])})


def layout_of(plan: Plan) -> dict[str, Any]:
    """What the state was cut by, for people; a rank's own state is its own again on the same `mesh`, and nothing else depends on it."""
    return {
        "world_size": plan.world.world_size,
        "mesh": str(plan.mesh),
        "zero_stage": plan.zero_stage,
        "offload_optimizer": plan.offload_optimizer,
        "offload_param": plan.offload_param,
        "device": plan.device,
    }


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def changes(state: RunState, config: RunConfig, *, data: str, base: str) -> list[str]:
    """Keys of the run file that differ from the checkpoint's, one line each; CheckpointError where the run would not be the same one."""
    then, now = dict(_leaves(state.config)), dict(_leaves(config.model_dump(mode="json", by_alias=True)))
    for tree in (then, now):
        name = str(tree["optim.name"]).lower()
        tree["optim.name"] = "adamw" if name == "adam" else name
    differ = {key: f"{key} {then.get(key)!r} -> {now.get(key)!r}" for key in sorted(then.keys() | now.keys()) if then.get(key) != now.get(key)}
    broken = [differ[key] for key in (*_MUST_STAY, *_OF_ADAPTERS) if key in differ]
    broken += [f"training rows {state.data} -> {data}"] if state.data != data else []
    broken += [f"weights that adapters belong to {state.base or 'none'} -> {base or 'none'}"] if state.base != base else []
    if broken:
        raise CheckpointError(
            f"the checkpoint of step {state.step} was written with other values: {'; '.join(broken)}",
            hint="set them back, or begin a new run with checkpoint.resume never and another output_dir, from an export",
        )
    return [f"changed since the checkpoint: {text}" for key, text in differ.items() if not key.startswith(("checkpoint.", "output_dir", "log."))]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
