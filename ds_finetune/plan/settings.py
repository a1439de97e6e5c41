"""Settings of a run that checks read, before and after the model is known. Also the form of a refused setting."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Self, TypeVar

from ds_finetune.config.objectives import ObjectiveConfig
from ds_finetune.config.rewards import RewardConfig
from ds_finetune.config.schedule import LrSchedule
from ds_finetune.config.schema import ConfigSource, RunConfig, read_config
from ds_finetune.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ExportConfig,
    IndexerConfig,
    LoraConfig,
    ModelConfig,
    MtpConfig,
    OptimConfig,
    ParallelConfig,
    ProfileConfig,
    RolloutConfig,
    RouterConfig,
    TrainConfig,
    WatchdogConfig,
)
from ds_finetune.config.value_types import InexactNames
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.families.family import Family
from ds_finetune.families.table import family_of
from ds_finetune.plan.batch import rows_of_forward
from ds_finetune.plan.deepspeed_config import Tree, offload_device
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.plan.mesh import PARALLEL_AXES, Mesh
from ds_finetune.plan.precision import with_precision

_ONE_RANK = Mesh(0, 1)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings that are known before the model: the ranks, the DeepSpeed configuration, and sections of the run file.
    Planning and searching replace single sections.
    """

    model: ModelConfig
    data: DataConfig
    deepspeed: str | dict[str, Any] | None
    inexact: InexactNames
    objective: ObjectiveConfig
    rewards: tuple[RewardConfig, ...]
    train: TrainConfig
    optim: OptimConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    parallel: ParallelConfig
    lora: LoraConfig | None
    mtp: MtpConfig
    router: RouterConfig | None
    indexer: IndexerConfig
    features: Mapping[str, Mapping[str, Any]]
    rollout: RolloutConfig
    profile: ProfileConfig | None
    watchdog: WatchdogConfig
    export: ExportConfig
    mesh: Mesh = _ONE_RANK
    device: str = "cpu"
    deepspeed_config: Tree = field(default_factory=lambda: {"zero_optimization": {}}, repr=False)
    accumulation: int = 1
    """Gradient accumulation steps: forwards per optimizer step on a rank."""

    @classmethod
    def of(cls, source: ConfigSource, **fields: Any) -> Self:  # noqa: ANN401 - values of the fields below the sections
        """Settings from the sections of a run file and further `fields`. ConfigError if the run file is not valid."""
        return cls(**sections_of(read_config(source)), **fields)

    @property
    def zero(self) -> Tree:
        """The section `zero_optimization`."""
        section: Tree = self.deepspeed_config.get("zero_optimization") or {}
        return section

    @property
    def options(self) -> Tree:
        """Keys of the DeepSpeed configuration merged with those of its section `zero_optimization`."""
        return {**self.deepspeed_config, **self.zero}

    @property
    def zero_stage(self) -> int:
        """ZeRO stage."""
        return int(self.zero.get("stage", 0))

    @property
    def offload_optimizer(self) -> str:
        """Device to which optimizer states are offloaded: `none`, `cpu` or `nvme`."""
        return offload_device(self.zero, "offload_optimizer")

    @property
    def offload_param(self) -> str:
        """Device to which weights are offloaded: `none`, `cpu` or `nvme`."""
        return offload_device(self.zero, "offload_param")

    @property
    def accumulation_dtype(self) -> str | None:
        """Value of `data_types.grad_accum_dtype`; None where DeepSpeed decides."""
        given = (self.deepspeed_config.get("data_types") or {}).get("grad_accum_dtype")
        return None if given == "auto" else given

    @property
    def precision(self) -> str:
        """Value of `train.precision`. `auto` is resolved here, on the assumption that a GPU computes in bf16."""
        return with_precision(self.train, device=self.device)[0].precision

    @property
    def micro_batch_size(self) -> int:
        """Micro-batch size in rows; 1 as long as `train.micro_batch_size: auto` is not resolved."""
        return rows_of_forward(self.train)

    @property
    def optimizer(self) -> str:
        """Name of the optimizer in lower case."""
        return self.optim.name.lower()

    @property
    def axes(self) -> frozenset[str]:
        """Parallel axes with more than one rank, besides data parallelism."""
        return frozenset(axis for axis in PARALLEL_AXES if getattr(self.mesh, axis) > 1)


def sections_of(given: RunConfig | RunSettings) -> dict[str, Any]:
    """Sections of a run file, or of a run's settings, that planning needs, by their names."""
    names = RunSettings.__dataclass_fields__.keys() & RunConfig.model_fields
    return {name: value for name, value in vars(given).items() if name in names}


@dataclass(frozen=True)
class ModelSettings:
    """Settings of a run, with the config.json of its model."""

    run: RunSettings
    config: Mapping[str, Any]
    """config.json of the run's model or of its teacher."""
    positions: int | None = None
    """Maximum number of positions of the model; None for no limit."""
    stages: tuple[StageLayers | None, ...] = ()

    @property
    def model_type(self) -> str:
        """Model type of config.json."""
        return str(self.config.get("model_type"))

    @property
    def family(self) -> Family:
        """The model's family: its row in the table of families."""
        return family_of(self.model_type)


@dataclass(frozen=True)
class LengthSettings:
    """Settings of a run, with its learning-rate schedule and the size of an epoch."""

    run: RunSettings
    schedule: LrSchedule
    rows: int | None
    """Rows of an epoch; None for a stream."""
    steps_per_epoch: float
    """Optimizer steps of an epoch, not rounded; infinite for a stream."""


S = TypeVar("S", contravariant=True)
MessageFields = dict[str, object] | None
"""Result of a condition: values for the placeholders of the refusal's message; None where the run is not refused."""
Condition = Callable[[S], object]
"""Function that tests whether a run is refused; a true result means yes. If the result is a mapping, its items fill the
placeholders of the message.
"""


@dataclass(frozen=True)
class Refusal(Generic[S]):
    """A row of the table of refused settings: a condition, the message of the error, and a hint.

    `message` and `hint` are templates of `str.format`. Their fields are settings such as `{optim.name}` and `{mesh}`,
    or keys of the mapping that `applies` returns.
    """

    applies: Condition[S]
    message: str
    hint: str
    error: type[ConfigError | ModelError] = ConfigError

    def raise_for(self, settings: S) -> None:
        """Raise the refusal's error if its condition applies to the settings."""
        if result := self.applies(settings):
            fields = _Fields(result if isinstance(result, Mapping) else {})
            fields.settings = settings
            raise self.error(self.message.format_map(fields), hint=self.hint.format_map(fields))


class _Fields(dict[str, object]):
    settings: object

    def __missing__(self, name: str) -> object:
        return getattr(self.settings, name)


class Conflict(NamedTuple):
    """A setting that is refused in combination with another: its text, a hint, and the condition that it is set."""

    text: str
    hint: str
    applies: Condition[RunSettings]


def setting(text: str, hint: str) -> Conflict:
    """The conflict with a setting that is written as `section.key value`, such as `mtp.train true`. Without a value,
    such as `lora` or `model.context`, it is the conflict with any value but None.
    """
    key, _, value = text.strip("`").partition(" ")
    section, _, name = key.partition(".")

    def is_set(run: RunSettings) -> bool:
        given = getattr(run, section)
        given = getattr(given, name, None) if name else given
        return str(given).lower() == value.lower() if value else given is not None

    return Conflict(text if value or not name else f"{key} {{{key}}}", hint, is_set)


def refuse_pairs(
    first: str,
    applies: Condition[RunSettings],
    others: Iterable[Conflict],
    *,
    link: str = " with ",
    why: str = " is not tested",
) -> Iterator[Refusal[RunSettings]]:
    """Yield a refusal of each pair of `first` and a setting of `others`. `applies` says whether a run has `first`. The
    message is the text of `first`, `link`, the text of the other setting, and `why`.
    """
    for other in others:
        yield Refusal(_both(applies, other.applies), f"{first}{link}{other.text}{why}", other.hint)


def _both(first: Condition[RunSettings], second: Condition[RunSettings]) -> Condition[RunSettings]:
    def hold(run: RunSettings) -> object:
        one = first(run)
        two = one and second(run)
        return {**one, **(two if isinstance(two, Mapping) else {})} if two and isinstance(one, Mapping) else two

    return hold


UNTESTED_STATES: tuple[Conflict, ...] = (
    Conflict("offload to nvme", "offload to cpu", lambda run: "nvme" in (run.offload_optimizer, run.offload_param)),
    # Steps of Muon and Lamb depend on whole matrices.
    Conflict("optim.name {optim.name}", "use AdamW", lambda run: run.optimizer not in ("adam", "adamw")),
)
"""Optimizers and offloads that tests of layouts, adapters, indexers and multi-token prediction do not cover."""
UNTESTED_TRAINING: tuple[Conflict, ...] = (
    setting("train.precision fp16", "set train.precision to bf16, or to fp32 on a GPU that has no bf16"),
    *UNTESTED_STATES,
)
"""Settings that tests of layouts, indexers and multi-token prediction do not cover."""
