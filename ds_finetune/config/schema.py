"""The run file as a whole: its schema, made of the sections of `sections.py`, and `read_config`."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import yaml
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from ds_finetune.config.ineffective_keys import check_keys_have_effect
from ds_finetune.config.invalid_keys import explain
from ds_finetune.config.objectives import SEQUENCE_CLIPS, GrpoObjective, ObjectiveConfig, ObjectiveField, SftObjective
from ds_finetune.config.rewards import RewardList
from ds_finetune.config.run_file import SHORT_FORMS, Lines, apply_override, read_yaml
from ds_finetune.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ExportConfig,
    IndexerConfig,
    LaunchConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    MtpConfig,
    OptimConfig,
    ParallelConfig,
    ProfileConfig,
    RolloutConfig,
    RouterConfig,
    Section,
    TrainConfig,
    WatchdogConfig,
    short_form,
    short_lora,
)
from ds_finetune.config.value_types import FolderText, Free, InexactNames, PathText, Refused, named_files, stage_as_file
from ds_finetune.errors import ConfigError


class RunConfig(Section):
    """The configuration of a run: the YAML file with overrides applied and defaults filled in."""

    model: Annotated[ModelConfig, BeforeValidator(short_form(SHORT_FORMS["model"]))]
    """The model, as a path or a section."""
    data: DataConfig
    """Training data and held-out data."""
    deepspeed: Annotated[Free[PathText | dict[str, Any] | None], BeforeValidator(stage_as_file)] = None
    """DeepSpeed's settings: a JSON file, a file of ds_configs/ such as `zero3`, a ZeRO stage 0 to 3, or a section."""
    inexact: InexactNames = ()
    """Options of DeepSpeed that are allowed although they change results (docs/how-to/inexact-options.md)."""
    rollout: RolloutConfig = RolloutConfig()
    """How answers are sampled during training with `objective: grpo`."""
    objective: ObjectiveField = SftObjective()
    """Objective of training: a name such as `dpo`, or a section `{name: dpo, beta: 0.1}`."""
    rewards: RewardList = ()
    """Scores of the answers that the model samples: names such as `number`, or sections `{reward: NAME}`."""
    train: TrainConfig = Field(default=TrainConfig(), validate_default=True)
    """Length, batch size and precision of training."""
    optim: OptimConfig = OptimConfig()
    """The optimizer, its settings, and the learning rate over the run."""
    eval: EvalConfig = EvalConfig()
    """Evaluation of held-out data."""
    checkpoint: Free[CheckpointConfig] = CheckpointConfig()
    """When checkpoints are saved, and from which one a run resumes."""
    parallel: ParallelConfig = ParallelConfig()
    """Tensor, pipeline, expert and sequence parallel sizes."""
    lora: Annotated[Refused[LoraConfig | None], BeforeValidator(short_lora)] = None
    """Low-rank adapters; left out, all weights are trained. `true` takes the defaults, and a number is the rank."""
    mtp: MtpConfig = MtpConfig()
    """Training of multi-token prediction layers."""
    router: RouterConfig | None = None
    """How the routers of mixtures of experts are trained."""
    indexer: IndexerConfig = IndexerConfig()
    """How indexers of sparse attention are trained."""
    features: Refused[dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """Settings of features that other packages add, as in `features: {name: {weight: 0.1}}`."""
    log: Free[LogConfig] = LogConfig()
    """Progress lines and trackers."""
    profile: Free[ProfileConfig | None] = None
    """Steps that are profiled; left out, no step is profiled."""
    launch: Free[LaunchConfig] = LaunchConfig()
    """How `ds-finetune launch` restarts a run."""
    watchdog: Free[WatchdogConfig] = WatchdogConfig()
    """When a run that hangs is ended."""
    export: Free[ExportConfig] = ExportConfig()
    """Exports of the trained model."""
    output_dir: Free[FolderText]
    """Folder to which the run writes its files (docs/reference/run-directory.md)."""

    @field_validator("objective")
    @classmethod
    def _fill_in_numbers(cls, objective: ObjectiveConfig, before: ValidationInfo) -> ObjectiveConfig:
        """Fill in defaults of GRPO that depend on other keys: `fixed_length`, and with `ratio: sequence` the clips."""
        rollout, values = before.data.get("rollout"), dict[str, object]()
        if not isinstance(objective, GrpoObjective):
            return objective
        if objective.aggregation == "fixed" and rollout is not None:
            values = {"fixed_length": rollout.max_new_tokens}
        if objective.ratio == "sequence":
            values |= SEQUENCE_CLIPS
        return _filled(objective, **{key: values[key] for key in values.keys() - objective.model_fields_set})

    @field_validator("train")
    @classmethod
    def _fill_in_answers(cls, train: TrainConfig, before: ValidationInfo) -> TrainConfig:
        """Fill in the global batch size of GRPO, prompts per step x group size, where it is left out."""
        objective, rollout = before.data.get("objective"), before.data.get("rollout")
        if rollout is None or not isinstance(objective, GrpoObjective) or "global_batch_size" in train.model_fields_set:
            return train
        return _filled(train, global_batch_size=rollout.prompts_per_step * objective.group_size)

    def inputs(self) -> Iterator[tuple[str, Path]]:
        """Run-file keys that name files or folders to read, each with its path. The path may also be a hub id."""
        data = self.data
        for purpose in ("train", "eval"):
            for path in data.paths(purpose):
                # A path may end in `:split`, which is not part of the name of a file.
                files = (file if Path(file).exists() else file.partition(":")[0] for file in named_files(path))
                yield from ((f"data.{purpose}", Path(file)) for file in files)
        named = {"model.path": self.model.path, "model.tokenizer": self.model.tokenizer, "data.template": data.template}
        named |= {f"objective.{key}": getattr(self.objective, key, None) for key in ("teacher", "scores")}
        named["deepspeed"] = self.deepspeed if isinstance(self.deepspeed, str) else None
        yield from ((key, Path(path)) for key, path in named.items() if path)
        yield from (("rewards", Path(reward.file)) for reward in self.rewards if reward.file)


_Filled = TypeVar("_Filled", bound=Section)


def _filled(section: _Filled, **values: object) -> _Filled:
    """A copy of the section with values derived from other sections. The values count as defaults, so that a later
    override of the other sections may change them.
    """
    filled = section.model_copy(update=values)
    filled.model_fields_set.difference_update(values)
    return filled


ConfigSource: TypeAlias = "RunConfig | Mapping[str, Any] | str | Path"
"""A RunConfig, the nested dictionary of a run file, or the path of a run file."""


def read_config(source: ConfigSource, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply `a.b=value` overrides; a ConfigError names a wrong key, its line and the nearest name.

    A key that has no effect because of the values of other keys is an error too.
    """
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not is_list or not all(isinstance(override, str) for override in overrides):
        raise ConfigError(f"`overrides` is {overrides!r}", hint="give a list of texts, such as ['optim.lr=1e-5']")
    if isinstance(source, RunConfig) and not overrides:
        return source
    lines: Lines = {}
    if isinstance(source, str | Path):
        tree, lines = read_yaml(Path(source))
    elif isinstance(source, RunConfig):
        tree = source.model_dump(mode="json", by_alias=True, exclude_unset=True)
    elif isinstance(source, Mapping):
        tree = _plain(source)
    else:
        raise ConfigError(
            f"the run's configuration is {source!r}", hint="give the path of a run file, a dictionary, or a RunConfig"
        )
    for override in overrides:
        apply_override(tree, lines, override)
    return validate_tree(tree, lines, str(source) if isinstance(source, str | Path) else "the configuration")


def _plain(value: Any) -> Any:  # noqa: ANN401 - any value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else deepcopy(value)


def validate_tree(tree: dict[str, Any], lines: Lines, source: str) -> RunConfig:
    """Make the RunConfig of a run file's nested dictionary; a ConfigError names each key that is not valid.

    `source` names the run file in errors, and `lines` has the line numbers of its keys.
    """
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as invalid:
        raise explain(invalid, RunConfig, source, lines) from None
    check_keys_have_effect(dict(_keys(config, changed=True)), dict(_keys(config)), source, lines)
    return config


def _keys(section: Section, prefix: str = "", *, changed: bool = False) -> Iterator[tuple[str, object]]:
    """Dotted keys and values below `section`; with `changed` only values that are given and are not the default."""
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{field.alias or name}", getattr(section, name)
        if isinstance(value, Section):
            yield from _keys(value, f"{key}.", changed=changed)
        elif not changed or (
            name in section.model_fields_set and value != field.get_default(call_default_factory=True)
        ):
            yield key, value


def dump_config(config: RunConfig) -> str:
    """YAML text from which `read_config` reads the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False)
