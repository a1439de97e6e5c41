"""A layout: everything of a run file that the search may change, and a run file with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ds_finetune.config.schema import ParallelConfig, RunConfig
from ds_finetune.plan.batch import rows_of_forward
from ds_finetune.plan.combinations import AXES
from ds_finetune.plan.deepspeed_config import given_choices

Offload = Literal["none", "optimizer", "all"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "all")
"""What is held in host memory: nothing, optimizer states and fp32 weights, or these and the weights themselves."""
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
"""For people, behind the ZeRO stage."""
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

    def section(self, given: ParallelConfig, *, vpp: int = 1) -> ParallelConfig:
        """The section `parallel` of the run file with `vpp` chunks on each pipeline rank; its layers of chunks stay
        where there are as many.
        """
        layers = given.pp_layers if (given.pp, given.vpp) == (self.pp, vpp) else ()
        return ParallelConfig(tp=self.tp, pp=self.pp, sp=self.sp, ep=self.ep, pp_layers=layers, vpp=vpp)


@dataclass(frozen=True, order=True)
class Activations:
    """How the memory of activations is kept small: `train.activation_checkpointing` and what builds on it."""

    recomputes: bool = True
    is_tiled: bool = False
    """`train.tiled_mlp`."""
    is_offloaded: bool = False
    """`train.activation_offload`."""

    def is_slower_than(self, other: "Activations") -> bool:
        """Whether it takes more time than another way, whatever the model is: a layer that is recomputed is computed
        again as a whole, and tiles compute its MLP again.
        """
        if self.recomputes < other.recomputes or self.is_offloaded < other.is_offloaded:
            return False
        return self != other and (self.recomputes > other.recomputes or self.is_tiled >= other.is_tiled)

    def keys(self) -> dict[str, bool]:
        """The keys of `train`."""
        return {
            "activation_checkpointing": self.recomputes,
            "activation_offload": self.is_offloaded,
            "tiled_mlp": self.is_tiled,
        }

    def __str__(self) -> str:
        """`recomputed, tiled MLP, offloaded inputs`."""
        parts = ["recomputed"] if self.recomputes else ["kept"]
        parts += ["tiled MLP"] if self.is_tiled else []
        return ", ".join([*parts, *(["inputs of layers on the host"] if self.is_offloaded else [])])


@dataclass(frozen=True, order=True)
class Layout:
    """What the search chooses of a run."""

    sizes: Sizes
    zero_stage: int
    offload: Offload
    micro_batch_size: int
    activations: Activations
    vpp: int = 1
    """Chunks of layers on each pipeline rank."""

    def apply(self, config: RunConfig) -> RunConfig:
        """The run of `config` with this layout."""
        train = config.train.model_copy(update={"micro_batch_size": self.micro_batch_size, **self.activations.keys()})
        return config.model_copy(
            update={
                "train": train,
                "parallel": self.sizes.section(config.parallel, vpp=self.vpp),
                "deepspeed": deepspeed_choices(config, self.zero_stage, self.offload),
            }
        )


def layout_of(config: RunConfig) -> Layout:
    """The layout of a run file as it is written."""
    parallel, train = config.parallel, config.train
    zero = given_choices(config.deepspeed)[0].get("zero_optimization") or {}
    devices = [(zero.get(key) or {}).get("device") or "none" for key in ("offload_param", "offload_optimizer")]
    offload: Offload = "all" if devices[0] != "none" else "optimizer" if devices[1] != "none" else "none"
    activations = Activations(train.activation_checkpointing, train.tiled_mlp, train.activation_offload)
    sizes = Sizes(parallel.tp, parallel.pp, parallel.sp, parallel.ep)
    return Layout(sizes, int(zero.get("stage", 0)), offload, rows_of_forward(train), activations, parallel.vpp)


def deepspeed_choices(config: RunConfig, zero_stage: int, offload: Offload) -> dict[str, Any]:
    """The DeepSpeed choices of the run file with another ZeRO stage and other offload; its other keys stay."""
    tree = decided(given_choices(config.deepspeed)[0])
    zero = dict(tree.get("zero_optimization") or {})
    given = {key: zero.pop(key, None) for key in ("offload_optimizer", "offload_param")}
    zero["stage"] = zero_stage
    for key in _OFFLOADED[offload]:
        section = given[key] or {}
        zero[key] = section if section.get("device") == "cpu" else dict(_HOST_MEMORY)
    return {**tree, "zero_optimization": zero}


def decided(tree: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed choices without "auto", which counts as absent, and without sections of nothing else."""
    found = {key: decided(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return {key: value for key, value in found.items() if value != "auto" and value != {}}
