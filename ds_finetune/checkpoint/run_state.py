"""The state of a run without tensors: data position, configuration and layout. Each checkpoint stores it as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ds_finetune.checkpoint.commit import STATE
from ds_finetune.plan.plan import Plan
from ds_finetune.system.versions import installed_version

_PACKAGES = ("ds_finetune", "torch", "deepspeed", "transformers")


@dataclass(frozen=True)
class RunState:
    """The state of a run in plain values.

    `position` is (epoch, next row) in the data. `engine` has the counters of optimizer and loss scale, `observers` the
    state of each observer by name, and `values` the metrics of the step. `data` is a fingerprint of the training rows.
    """

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
    """Digest of the base model's weights if adapters are trained; empty if all weights are trained."""
    teacher: str = ""
    """Digest of the teacher's weights; empty unless the run is a distillation."""
    held_out: str = ""
    """Fingerprint of the evaluation rows; empty if there are none."""
    deepspeed: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Write the run's state as JSON text, which `read` parses."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the run's state from a checkpoint folder, whose files must be undamaged."""
        tree = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return cls(**{**tree, "position": tuple(tree["position"])})


def layout_of(plan: Plan) -> dict[str, Any]:
    """The parallel layout of a run, for display. A rank's random state is restored only if `mesh` is equal."""
    return {
        "world_size": plan.world.world_size,
        "mesh": str(plan.mesh),
        "zero_stage": plan.zero_stage,
        "offload_optimizer": plan.offload_optimizer,
        "offload_param": plan.offload_param,
        "device": plan.device,
    }


def versions() -> dict[str, str]:
    """Versions of the packages that affect the results of training."""
    return {name: installed_version(name) or "not installed" for name in _PACKAGES}
