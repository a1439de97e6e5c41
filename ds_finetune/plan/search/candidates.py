"""Layouts and candidates of a search. A layout holds the settings of a run file that the search may change; a candidate
is a layout that `train` accepts on a number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ds_finetune.config.run_file import one_line_yaml
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.plan.batch import divisors, legal_micro_batches
from ds_finetune.plan.checks import check
from ds_finetune.plan.config_json import max_positions
from ds_finetune.plan.deepspeed_config import given_choices
from ds_finetune.plan.layer_stages import stages_of
from ds_finetune.plan.mesh import TESTED_LAYOUTS, Mesh
from ds_finetune.plan.model_checks import WITH_MESH, WITHOUT_MESH, check_model
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.plan import Plan, Recomputation, make_plan
from ds_finetune.plan.settings import ModelSettings, RunSettings
from ds_finetune.system.world import World

Offload = Literal["none", "optimizer", "all"]
OFFLOADS: Mapping[Offload, tuple[tuple[str, ...], str]] = {
    "none": ((), ""),
    "optimizer": (("offload_optimizer",), ", optimizer on the host"),
    "all": (("offload_optimizer", "offload_param"), ", optimizer and weights on the host"),
}
"""Which states a run offloads to host memory: none, optimizer states and fp32 weights, or all weights too. Each entry
has the keys of `zero_optimization` to set, and the text that follows the ZeRO stage in a layout's name.
"""
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
        """Keys of the section `train` that this layout sets, with their values."""
        return {"micro_batch_size": self.micro_batch_size, **self.activations._asdict()}

    def apply(self, run: RunSettings) -> RunSettings:
        """The settings of `run`, changed to this layout."""
        return replace(run, **self.sections(run))

    def sections(self, run: RunSettings) -> dict[str, Any]:
        """Sections of the run file with the changes that this layout makes. Keys of the DeepSpeed configuration other
        than ZeRO stage and offload keep their values.
        """
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
    """A DeepSpeed configuration without values of "auto", which count as absent, and without sections that become
    empty.
    """
    values = {key: decided(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return {key: value for key, value in values.items() if value != "auto" and value != {}}


def layout_overrides(layout: Layout, given: RunSettings) -> list[str]:
    """Overrides `key=value` that change the run file `given` to the layout."""
    values: dict[str, Any] = {}
    wanted = layout.sections(given)
    if layout.parallel != given.parallel:
        values["parallel"] = layout.parallel.model_dump(mode="json", exclude_defaults=True)
    if wanted["deepspeed"] != decided(given_choices(given.deepspeed)[0]):
        values["deepspeed"] = wanted["deepspeed"]
    changed = {key: value for key, value in layout.train_keys.items() if value != getattr(given.train, key)}
    values |= {f"train.{key}": value for key, value in changed.items()}
    return [f"{key}={one_line_yaml(value)}" for key, value in values.items()]


STAGES = (0, 1, 2, 3)
ACTIVATIONS = (
    Activations("none"),
    Activations("selective"),
    Activations(),
    Activations(tiled_mlp=True),
    Activations(activation_offload=True),
    Activations(tiled_mlp=True, activation_offload=True),
)
"""Combinations of recomputation, tiled MLPs and offloaded inputs that a search tries, least recomputation first."""


@dataclass(frozen=True)
class Ranks:
    """Number and kind of the ranks for which a search looks for layouts."""

    number: int
    per_node: int
    device: str
    """`cuda` or `cpu`."""

    @cached_property
    def world(self) -> World:
        """Rank and sizes of the run as rank 0 would get them from a launcher."""
        return World(0, self.number, 0, min(self.number, self.per_node), "a dry run")


class Candidate(NamedTuple):
    """A layout that the checks of `train` accept, with the plan of the run in that layout."""

    layout: Layout
    plan: Plan


@dataclass(frozen=True)
class Candidates:
    """The legal layouts of a run on some ranks, given its model's config.json."""

    run: RunSettings
    model: DescribedModel
    ranks: Ranks

    @cached_property
    def sizes(self) -> tuple[ParallelConfig, ...]:
        """Parallel sizes of tested layouts that divide ranks, batch and model. Tensor parallel groups stay within a
        node, because they exchange activations several times in each layer.
        """
        axes = self.model.family.parallel_axes
        tested = {frozenset[str](), *(row.axes for row in TESTED_LAYOUTS if row.axes <= axes)}
        return tuple(each for each in self._divided() if each.axes in tested and self.refusal(each) is None)

    def _divided(self) -> Iterator[ParallelConfig]:
        """Parallel sizes that divide the ranks, the heads and the experts, with no more stages than layers.
        `parallel.pp_layers` of the run file is used only with the number of stages that the run file sets.
        """
        keys, ranks = self.model.family.expert_keys, self.ranks.number
        heads, layers = (int(self.model.get(key) or 1) for key in ("num_attention_heads", "num_hidden_layers"))
        experts, given = divisors(keys.number(self.model) if keys is not None else 1), self.run.parallel
        for tp in divisors(heads, most=min(ranks, self.ranks.per_node)):
            legal_sp = (sp for sp in divisors(heads // tp) if ranks % (tp * sp) == 0)
            pairs = ((sp, pp) for sp in legal_sp for pp in divisors(ranks // (tp * sp), most=layers))
            for sp, pp in pairs:
                pp_layers = given.pp_layers if (given.pp, given.vpp) == (pp, 1) else ()
                legal_ep = (ep for ep in experts if ranks // (tp * pp) % ep == 0)
                yield from (ParallelConfig(tp=tp, pp=pp, sp=sp, ep=ep, pp_layers=pp_layers) for ep in legal_ep)

    def refusal(self, sizes: ParallelConfig) -> ConfigError | ModelError | None:
        """Error with which `train` refuses these parallel sizes at all ZeRO stages; None if it accepts them at some."""
        batch, dp = self.run.train.global_batch_size, self._dp(sizes)
        if batch % dp:
            return ConfigError(
                f"train.global_batch_size {batch} is not a multiple of dp {dp}", hint=f"set a multiple of {dp}"
            )
        return _refusal(self._check_search, replace(self.run, parallel=sizes))

    def micro_batch_sizes(self, sizes: ParallelConfig) -> tuple[int, ...]:
        """Micro-batch sizes that divide the rows of a data parallel rank, ascending."""
        return legal_micro_batches(global_batch_size=self.run.train.global_batch_size, dp=self._dp(sizes))

    def _dp(self, sizes: ParallelConfig) -> int:
        return self.ranks.number // (sizes.tp * sizes.pp * sizes.sp)

    @cached_property
    def activations(self) -> tuple[Activations, ...]:
        """Legal combinations of recomputation, tiled MLPs and offloaded inputs, least recomputation first."""

        def check_activations(run: RunSettings) -> None:
            check(run, "activations")
            check_model(ModelSettings(run, self.model), "activations of the model")

        run = replace(self.run, device=self.ranks.device)
        runs = {each: replace(run, train=run.train.model_copy(update=each._asdict())) for each in ACTIVATIONS}
        return tuple(each for each, run in runs.items() if _refusal(check_activations, run) is None)

    def find(self, layout: Layout) -> Candidate | None:
        """The candidate with this layout; None where `make_plan` refuses the layout."""
        run = layout.apply(self._decided)
        try:
            return Candidate(layout, make_plan(run, world=self.ranks.world, device=self.ranks.device))
        except ConfigError:
            return None

    def check(self, run: RunSettings) -> ModelSettings:
        """Divide the model of `run` over `ranks`. Returns the settings with the pipeline stages; ConfigError or
        ModelError where the section `parallel` cannot divide the model.
        """
        mesh = Mesh.of(run.parallel, world_size=self.ranks.number, rank=0)
        # The search chooses the number of forwards of a step later. Until then it is the number of pipeline stages,
        # which every pipeline schedule accepts.
        run = replace(run, mesh=mesh, accumulation=mesh.pp)
        check_model(ModelSettings(run, self.model), *WITH_MESH)
        if self.model.teacher is not None:
            check_model(ModelSettings(run, self.model.teacher), "teacher", "attention of the model")
        stages = stages_of(self.model.tensors, run.parallel) if mesh.pp > 1 else (None,)
        settings = ModelSettings(run, self.model, stages=stages)
        check_model(settings, "stages")
        return settings

    def _check_search(self, run: RunSettings) -> None:
        """Check the run as `check` does; also ConfigError where only the data or the built model could show whether the
        layout is legal.
        """
        settings = self.check(run)
        stages, lora = settings.stages, run.lora
        check_model(settings, "length of documents")
        patterns = (
            lora.target_modules or lora.modules_to_save if lora is not None else run.train.only or run.train.freeze
        )
        if len(stages) > 1 and patterns:
            raise ConfigError(
                f"--search with parallel.pp {len(stages)} and patterns {list(patterns)} of `lora` or `train`: which "
                "stages have matching parameters is known only once the model is built",
                hint="set parallel.pp in the run file, and leave --search out",
            )

    @cached_property
    def _decided(self) -> RunSettings:
        """The run with its DeepSpeed configuration as a mapping, so that the file is read only once."""
        return replace(self.run, deepspeed=decided(given_choices(self.run.deepspeed)[0]))


def check_run(run: RunSettings, model: Mapping[str, Any]) -> None:
    """Raise the ConfigError or ModelError with which `train` would refuse the run in every layout."""
    # With model.context the model gets more positions, so the number in its config.json is no limit.
    allowed = None if run.model.context is not None else max_positions(model)
    check_model(ModelSettings(run, model, positions=allowed), *WITHOUT_MESH, "positions")


def _refusal(check: Callable[[RunSettings], object], run: RunSettings) -> ConfigError | ModelError | None:
    try:
        check(run)
    except (ConfigError, ModelError) as refused:
        return refused
    return None
