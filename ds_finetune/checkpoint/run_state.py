"""The state of a run beside its tensors: its position, configuration and layout."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from ds_finetune.checkpoint.files import STATE
from ds_finetune.plan.plan import Plan

_PACKAGES = ("ds_finetune", "torch", "deepspeed", "transformers")


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
    held_out: str = ""
    """A fingerprint of the evaluation rows; empty where there are none."""
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """The finished DeepSpeed configuration."""

    def text(self) -> str:
        """JSON that `read` turns into the same value."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The state in a checkpoint folder whose files are known to be whole."""
        tree = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return cls(**{**tree, "position": tuple(tree["position"])})


def layout_of(plan: Plan) -> dict[str, Any]:
    """The layout of the run that saved, for people. Only a rank's own state depends on it: it needs the same `mesh`."""
    return {
        "world_size": plan.world.world_size,
        "mesh": str(plan.mesh),
        "zero_stage": plan.zero_stage,
        "offload_optimizer": plan.offload_optimizer,
        "offload_param": plan.offload_param,
        "device": plan.device,
    }


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
