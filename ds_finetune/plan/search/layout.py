"""A layout: everything of a run file that the search may change, and a run file with it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ds_finetune.config.run_file import SHORT_FORMS
from ds_finetune.config.schema import ParallelConfig, RunConfig, dump_config, validate_tree
from ds_finetune.config.shipped import DS_CONFIGS, shipped_file, shipped_names
from ds_finetune.errors import ConfigError, OutputError
from ds_finetune.plan.deepspeed_config import given_choices
from ds_finetune.plan.plan import Recomputation
from ds_finetune.plan.tested_layouts import AXES

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


_LEAST_FIRST: tuple[Recomputation, ...] = ("none", "selective", "full")
"""By what is computed again."""
_TEXTS: Mapping[Recomputation, str] = {"none": "kept", "selective": "recomputed selectively", "full": "recomputed"}


@dataclass(frozen=True, order=True)
class Activations:
    """How the memory of activations is kept small: `train.activation_checkpointing` and what builds on it."""

    recomputation: Recomputation = "full"
    is_tiled: bool = False
    """`train.tiled_mlp`."""
    is_offloaded: bool = False
    """`train.activation_offload`."""

    def is_slower_than(self, other: "Activations") -> bool:
        """Whether it takes more time than another way, whatever the model is: a layer that is recomputed is computed
        again as a whole, and tiles compute its MLP again.
        """
        more = _LEAST_FIRST.index(self.recomputation) - _LEAST_FIRST.index(other.recomputation)
        if more < 0 or self.is_offloaded < other.is_offloaded:
            return False
        return self != other and (more > 0 or self.is_tiled >= other.is_tiled)

    def keys(self) -> dict[str, object]:
        """The keys of `train`."""
        return {
            "activation_checkpointing": self.recomputation,
            "activation_offload": self.is_offloaded,
            "tiled_mlp": self.is_tiled,
        }

    def __str__(self) -> str:
        """`recomputed, tiled MLP, offloaded inputs`."""
        parts = [_TEXTS[self.recomputation]]
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


def layout_keys(layout: Layout, config: RunConfig, given: RunConfig) -> dict[str, object]:
    """The keys of the run file that a layout sets, with their values.

    `config` is the run with the layout and `given` the run as its file has it; keys that keep their value are left out.
    """
    values: dict[str, object] = {}
    sizes = {axis: n for axis in ("tp", "pp", "sp", "ep") if (n := getattr(layout.sizes, axis)) > 1}
    if config.parallel != given.parallel:
        layers = {"pp_layers": list(config.parallel.pp_layers)} if config.parallel.pp_layers else {}
        chunks = {"vpp": config.parallel.vpp} if config.parallel.vpp > 1 else {}
        values["parallel"] = {**sizes, **layers, **chunks}
    assert isinstance(config.deepspeed, dict), config.deepspeed
    if config.deepspeed != decided(given_choices(given.deepspeed)[0]):
        values["deepspeed"] = shipped_name(config.deepspeed) or config.deepspeed
    keys = {"micro_batch_size": layout.micro_batch_size, **layout.activations.keys()}
    values |= {f"train.{key}": value for key, value in keys.items() if value != getattr(given.train, key)}
    return values


def shipped_name(choices: Mapping[str, Any]) -> str | None:
    """The name of the DeepSpeed file of this program that makes these choices, such as `zero3`; None where none does.

    A key that is "auto" counts as absent.
    """
    for name in shipped_names(DS_CONFIGS):
        file = shipped_file(f"{DS_CONFIGS}/{name}") if name.endswith(".json") and "/" not in name else None
        if file is not None and decided(yaml.safe_load(file.read_text(encoding="utf-8"))) == decided(choices):
            return name.removesuffix(".json")
    return None


def with_values(text: str, values: Mapping[str, object]) -> str:
    """The text of a run file with other values of some dotted keys; a section that is missing is added at the end."""
    for key, value in values.items():
        text = _with_value(text, tuple(key.split(".")), value)
    return text


def written_run_file(source: Path, values: Mapping[str, object], wanted: RunConfig, *, header: Sequence[str]) -> str:
    """The text of the run file `source` with `values` put in, after the lines of `header` as comments.

    Reading that text gives the run `wanted`. Where it cannot be edited so, as with YAML's anchors, the result is a new
    text with every key of `wanted`.
    """
    path = source if source.exists() else shipped_file(str(source)) or source
    comment = "".join(f"# {line}\n" for line in header)
    try:
        text = with_values(path.read_text(encoding="utf-8"), values)
        if _resolved(text) == _resolved(dump_config(wanted)):
            return comment + text
    except (ConfigError, yaml.YAMLError):
        pass
    return comment + dump_config(wanted)


def write_run_file(path: Path, text: str) -> None:
    """Write a new run file; OutputError where it exists already or its folder cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise OutputError(f"`{path}` exists already", hint="give --write another name, or remove the file") from None
    except OSError as failed:
        raise OutputError(
            f"`{path}` cannot be written: {failed.strerror}", hint="give --write another name"
        ) from failed


def _resolved(text: str) -> RunConfig:
    """The run that a text describes, with its DeepSpeed choices written out."""
    config = validate_tree(yaml.safe_load(text), {}, "the run file")
    return config.model_copy(update={"deepspeed": decided(given_choices(config.deepspeed)[0])})


def _with_value(text: str, keys: tuple[str, ...], value: object) -> str:
    node, depth = yaml.compose(text, Loader=yaml.SafeLoader), 0
    assert isinstance(node, yaml.MappingNode)
    while depth < len(keys):
        found = next((item for key, item in node.value if key.value == keys[depth]), None)
        if found is None:
            return _insert(text, node, keys[depth:], value)
        depth += 1
        if depth < len(keys) and not isinstance(found, yaml.MappingNode):
            # A short form, such as `model: PATH`.
            short = {SHORT_FORMS[keys[0]]: yaml.safe_load(_slice(text, found)), keys[depth]: value}
            return _replace(text, found, short)
        node = found
    return _replace(text, node, value)


def _slice(text: str, node: yaml.Node) -> str:
    return text[node.start_mark.index : node.end_mark.index]


def _replace(text: str, node: yaml.Node, value: object) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    rest = text[end:]
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        # A block begins on a line of its own and reaches up to the next key.
        start = text.rindex(":", 0, start) + 1
        return f"{text[:start]} {_flow(value)}\n{rest}"
    return f"{text[:start]}{_flow(value)}{rest}"


def _insert(text: str, node: yaml.MappingNode, keys: tuple[str, ...], value: object) -> str:
    for key in reversed(keys[1:]):
        value = {key: value}
    item = f"{keys[0]}: {_flow(value)}"
    end = node.end_mark.index
    if node.flow_style:
        end = text.rindex("}", 0, end)
        return f"{text[:end].rstrip()}{', ' if node.value else ''}{item}{text[end:]}"
    # The end of a block is where the next key begins: comments between the two stay where they are.
    last = len(text[: node.value[-1][1].end_mark.index].rstrip())
    line = text.find("\n", last)
    line = len(text) if line < 0 else line
    return f"{text[:line]}\n{' ' * node.start_mark.column}{item}{text[line:]}"


def _flow(value: object) -> str:
    """A value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return text.removesuffix("\n...").strip()


def override_values(overrides: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Key and value of overrides `a.b=value`."""
    for override in overrides:
        name, _, text = override.partition("=")
        yield name, yaml.safe_load(text)
