"""Resolves a run file: all that follows from it and the model's config.json, without reading weights or rows."""

import copy
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ds_finetune.config.objectives import ObjectiveConfig, is_grpo
from ds_finetune.config.schema import ConfigSource, RunConfig, dump_config, read_config
from ds_finetune.config.sections import ModelConfig
from ds_finetune.data.classes import find_classes
from ds_finetune.data.prepare import TokenLimits
from ds_finetune.data.prompt_format import template_settings
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.engine.devices import bf16_support, choose_device
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.export.formats import formats_of_run
from ds_finetune.families.text_part import is_composite
from ds_finetune.features.table import features_of, plan_features
from ds_finetune.model.adapters.lora_plan import check_stages
from ds_finetune.model.build.encoder import check_encoder, encoder_of, max_positions
from ds_finetune.model.build.generic_check import check_generic_type
from ds_finetune.model.build.meta_model import layers_of_stages, unused_parameters
from ds_finetune.model.build.model_plan import ModelPlan, task_of
from ds_finetune.model.build.skeleton import TOKENIZER_PATTERNS, Task, read_hf_config, resolve_folder, soft_cap
from ds_finetune.model.loss.score_config import set_classes, set_padding_token, with_base_classes
from ds_finetune.model.weights.vocabulary import grow_vocabulary
from ds_finetune.objectives.objective import make_objective
from ds_finetune.plan.config_json import read_config_json
from ds_finetune.plan.context import ContextPlan, plan_context
from ds_finetune.plan.estimate.memory import MemoryEstimate, RunMemory
from ds_finetune.plan.estimate.traced import without_activations
from ds_finetune.plan.forward import mlp_tiles
from ds_finetune.plan.kernels import kernels_problem
from ds_finetune.plan.layer_stages import check_trained_stages
from ds_finetune.plan.model_checks import WITH_MESH, WITHOUT_MESH, check_model
from ds_finetune.plan.name_patterns import last_part, patterns_of
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.precision import Bf16Support, with_precision
from ds_finetune.plan.settings import ModelSettings, RunSettings, sections_of
from ds_finetune.system.versions import check_versions
from ds_finetune.system.world import AccelerateChoices, World, accelerate_choices
from ds_finetune.trainer.document_lengths import length_notes
from ds_finetune.trainer.tracing.cache import Traces

_CONFIG_FILES = {"files": ("*.json",)}
"""Patterns of the files that are downloaded from the hub if only a model's configuration is read."""


@dataclass(frozen=True)
class ResolvedRun:
    """A run file, and all decisions that follow from it and from config.json, which later code does not repeat."""

    given: RunConfig
    """The run file with its overrides, before any decision."""
    plan: Plan
    """Layout, batch and DeepSpeed configuration."""
    model: ModelPlan
    """Model that the engine builds."""

    @cached_property
    def config(self) -> RunConfig:
        """The run file with the plan's precision, batch and recomputation, and the classes of a classifier."""
        return self.given.model_copy(update=sections_of(self.plan))

    @property
    def output_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.config.output_dir)

    @property
    def tree(self) -> dict[str, Any]:
        """The run file with defaults filled in, as a tree for checkpoints and trackers."""
        return self.config.model_dump(mode="json", by_alias=True)

    @property
    def text(self) -> str:
        """The run file with defaults filled in, as text for `config.yaml` of the run folder."""
        return dump_config(self.config)

    @cached_property
    def traces(self) -> Traces:
        """Activation memory and FLOPs of the model in any layout, traced on fake tensors."""
        return Traces(self.plan, lambda: self.model)

    @cached_property
    def needs(self) -> RunMemory:
        """Memory that the run needs, with its traced activations."""
        return RunMemory(self.plan, self.model.described, self.traces)

    @cached_property
    def states(self) -> MemoryEstimate:
        """Memory that the run needs for all but activations, estimated from the shapes of its ranks' tensors."""
        return replace(self.needs, traces=without_activations(self.model.described)).estimate()


S = TypeVar("S", bound=RunSettings)


def resolve_here(source: ConfigSource, world: World) -> ResolvedRun:
    """Resolve a run on this process's device, as rank of `world`, with the choices of `accelerate launch`."""
    device, accelerate = choose_device(), accelerate_choices(os.environ)
    return resolve(source, world=world, device=device, bf16=bf16_support(device, world), accelerate=accelerate)


def resolve(  # noqa: PLR0913 - what is decided, and what it is decided from
    source: ConfigSource,
    *,
    world: World,
    device: str,
    bf16: Bf16Support | None = None,
    accelerate: AccelerateChoices | None = None,
    is_config_only: bool = False,
) -> ResolvedRun:
    """Resolve a run file for the ranks of `world` with accelerator `device`; ConfigError, ModelError or DataError where
    it cannot be trained.

    `bf16` is the bf16 support of a GPU, for `train.precision: auto`. With `is_config_only`, only configuration and
    tokenizer files of a model on the hub are downloaded, and no rows are read: the number of classes is that of the
    base model, and parameters that no loss reaches are not determined.
    """
    config = read_config(source)
    if (config.lora is not None and config.lora.quantize is not None) or config.optim.name.lower() == "adamw8bit":
        check_versions("quantize")
    train, precision = with_precision(config.train, device=device, support=bf16)
    settings = replace(RunSettings.of(config), train=train)
    plan = make_plan(settings, world=world, device=device, accelerate=accelerate)
    if not is_config_only and plan.optimizer == "muon":
        _check_muon(device)
    plan = with_classes(plan, is_config_only=is_config_only)
    tree = read_config_json(plan.model.path)
    if is_composite(tree):
        _check_composite(settings)
    model = make_model_plan(plan, is_config_only=is_config_only)
    token_limits(plan, model.hf_config)
    for row in formats_of_run(config.export.formats)[1:]:
        row.check_not_composite(tree)
        row.check_model_type(model.hf_config.model_type)
        # Installed packages, model settings and tokenizer matter only on the machine that exports, so a plan from
        # config.json does not check them.
        if not is_config_only:
            is_classifier, tokenizer = model.task != "causal_lm", _tokenizer(plan.model)
            if plan.data.template != "auto":
                tokenizer.chat_template = template_settings(plan.data, tokenizer).chat_template
            row.load().check_model(model.hf_config, is_classifier=is_classifier, tokenizer=tokenizer)
    context = model.context.notes() if model.context is not None else ()
    lengths = length_notes(model, max_seq_len=plan.train.max_seq_len)
    part = f"text part trained as {model.hf_config.model_type}, without images or sound"
    parts = (f"model_type {tree['model_type']}: {part}",) if is_composite(tree) else ()
    notes = (*plan.notes, *precision, *parts, *context, *try_generic_type(plan, model), *lengths)
    plan = replace(plan, notes=notes)
    return ResolvedRun(config, plan if is_config_only else freeze_parameters(plan, model), model)


def _check_composite(run: RunSettings) -> None:
    composite = f"`{run.model.path}`, which combines text with images or sound"
    if run.model.weights == "random":
        raise ModelError(
            f"model.weights is random for {composite}: an export would lack the weights of the parts for other media",
            hint="initialise it with transformers, save it by save_pretrained, and set model.weights: load",
        )
    for key in ("start", "modules_to_save"):
        if getattr(run.lora, key, None):
            raise ConfigError(
                f"lora.{key} is not tested with {composite}: peft names its weights differently",
                hint=f"leave lora.{key} out; a merged adapter may be trained further",
            )


def _check_muon(device: str) -> None:
    """Raise ConfigError if torch.compile does not work here, because DeepSpeed's Muon uses it (0.19.8,
    runtime/zero/muon/original_muon.py:50).
    """
    if os.environ.get("TORCH_COMPILE_DISABLE") != "1" and (problem := kernels_problem("compile", device, stage=0)):
        cause, remedy = problem
        raise ConfigError(f"optim.name is Muon: {cause}", hint=f"{remedy}, or set TORCH_COMPILE_DISABLE=1")


def make_model_plan(run: RunSettings, *, is_config_only: bool = False) -> ModelPlan:
    """Plan of the run's model, checked against the layout. ConfigError or ModelError if the model cannot be built.

    With `is_config_only`, only configuration and tokenizer files of a model on the hub are downloaded.
    """
    hf_config, context = _config_and_context(run.model, task_of(run.objective), is_config_only=is_config_only)
    padding = _set_up_scores(run.objective, run.model, hf_config)
    check_model(ModelSettings(run, hf_config.to_dict()), *WITH_MESH)
    planned = plan_model(hf_config, run)
    if planned.teacher is not None:
        check_model(ModelSettings(run, planned.teacher.hf_config.to_dict()), "teacher")
    return replace(planned, padding=padding, context=context)


def _set_up_scores(objective: ObjectiveConfig, section: ModelConfig, hf_config: PretrainedConfig) -> str:
    """Set classes and padding token in the configuration of a classifier or reward model. Returns a text about the
    padding token; empty for a causal LM.
    """
    if objective.row.head != "scores":
        return ""
    set_classes(hf_config, objective, outputs=objective.num_outputs)
    if encoder_of(hf_config) is not None:
        return f"{hf_config.pad_token_id}, as published"
    return set_padding_token(hf_config, _tokenizer(section))


def with_classes(run: S, *, is_config_only: bool = False) -> S:
    """The run with number and names of classes filled in. A base model that is a classifier gives them, else the
    training rows. With `is_config_only` no rows are read.
    """
    objective = run.objective
    if objective.row.kind != "labelled":
        return run
    objective = with_base_classes(
        objective,
        read_hf_config(run.model.path, **(_CONFIG_FILES if is_config_only else {}), task="sequence_classification"),
    )
    if not is_config_only:
        kind = find_classes(run.data, RowKind.of(objective))
        objective = objective.model_copy(update={"labels": kind.labels, "num_labels": kind.num_labels})
    return replace(run, objective=objective)


def try_generic_type(run: RunSettings, model: ModelPlan) -> tuple[str, ...]:
    """Try a tiny copy of a model (or teacher) whose type `families/table.py` lacks, and return notes. Raises ModelError
    if the model would be trained wrongly, or if the teacher would attend across documents.
    """
    lora = model.lora
    adapted = () if lora is None else {last_part(target.name) for target in (*lora.targets, *lora.quantised)}
    tried = [(model.hf_config, adapted), *([(model.teacher.hf_config, ())] if model.teacher is not None else [])]
    notes = [
        check_generic_type(
            hf_config,
            objective=model.objective,
            attention=run.model.attention,
            packing=run.data.packing,
            row_tokens=run.train.max_seq_len,
            precision=run.precision,
            adapted=names,
        )
        for hf_config, names in tried
    ]
    return tuple(dict.fromkeys(line for lines in notes for line in lines))


def token_limits(run: RunSettings, hf_config: PretrainedConfig) -> TokenLimits:
    """Limits of the model on rows; ConfigError where `max_seq_len` is more than the model allows."""
    allowed = max_positions(hf_config)
    check_model(ModelSettings(run, hf_config.to_dict(), positions=allowed), "positions")
    return limits_of(run, hf_config)


def limits_of(run: RunSettings, hf_config: PretrainedConfig) -> TokenLimits:
    """Limits on rows and prompts. The limit on prompts leaves room for the longest sampled answer."""
    answer = run.rollout.max_new_tokens if is_grpo(run.objective) else 0
    return TokenLimits(run.train.max_seq_len, hf_config.vocab_size, answer, run.train.seed)


def model_config(run: RunSettings, *, is_config_only: bool = False) -> PretrainedConfig:
    """Configuration of the model as trained, with `model.resize_vocabulary` and `model.context` applied.

    With `is_config_only`, only configuration and tokenizer files of a model on the hub are downloaded.
    """
    return _config_and_context(run.model, task_of(run.objective), is_config_only=is_config_only)[0]


def _config_and_context(
    section: ModelConfig, task: Task, *, is_config_only: bool
) -> tuple[PretrainedConfig, ContextPlan | None]:
    """Configuration of the model as trained, and the plan of its extended context; None without `model.context`."""
    hf_config = read_hf_config(section.path, **(_CONFIG_FILES if is_config_only else {}), task=task)
    context = plan_context(hf_config.to_dict(), section.context) if section.context is not None else None
    if context is not None and context.is_extended:
        for key, value in {**context.settings(), "rope_parameters": dict(context.rope)}.items():
            setattr(hf_config, key, value)
    if section.resize_vocabulary:
        grow_vocabulary(hf_config, max(_tokenizer(section).get_vocab().values()) + 1)
    return hf_config, context


def _tokenizer(section: ModelConfig) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(resolve_folder(section.tokenizer or section.path, files=TOKENIZER_PATTERNS)))


def freeze_parameters(plan: Plan, model: ModelPlan) -> Plan:
    """Freeze parameters that get no gradient, and parameters that a feature of the run freezes, e.g. routers."""
    plan = with_chunked_loss(plan, model)
    names, notes = _unreached_parameters(plan, model)
    if plan.mesh.tp > 1 and model.family.compresses:
        shared = "all heads share one key and value head, which each tensor parallel rank has whole"
        notes = [f"{shared}, with compressed entries", *notes]
    if names:
        line = f"{len(names)} parameters that the loss does not reach, kept as they are: {patterns_of(names)}"
        plan, notes = replace(plan, frozen=names), [*notes, f"frozen: {line}"]
    return complete_features(replace(plan, notes=(*plan.notes, *notes)), model)


def with_chunked_loss(plan: Plan, model: ModelPlan) -> Plan:
    """The plan with the chunked loss if the model's logits have a soft cap, because Liger's loss kernel is not tested
    with it. ConfigError if the run file asks for Liger's loss.
    """
    cap = soft_cap(model.hf_config)
    if plan.loss_kernel == "chunked" or cap is None:
        return plan
    if plan.model.loss == "liger":
        raise ConfigError(
            f"model.loss liger with the soft cap {cap:g} of model_type {model.hf_config.model_type} is not tested",
            hint="set model.loss: auto",
        )
    return replace(plan, loss_kernel="chunked")


def _unreached_parameters(plan: Plan, model: ModelPlan) -> tuple[tuple[str, ...], list[str]]:
    """Names of the parameters that get no gradient, so that only weight decay would change them. Also returns a note
    if these parameters cannot be determined.

    Indexers get no gradient unless they are trained. If only indexers are trained, all other parameters get none.
    """
    hf_config, decay = model.hf_config, plan.optim.weight_decay
    family = model.family
    if model.lora is not None or not (family.indexer is not None or family.is_generic):
        return (), []
    if family.indexer is not None:
        return tuple(filter(model.is_untrained, model.described.tensors.by_name)), []
    try:
        return unused_parameters(hf_config, tokens=plan.train.max_seq_len, task=model.task), []
    except NotImplementedError as unknown:
        note = (
            f"not examined: whether the loss reaches every parameter of model_type {hf_config.model_type} ({unknown}); "
            f"optim.weight_decay {decay} would shrink one that it does not reach"
        )
        return (), [note] * bool(decay)


def complete_features(plan: Plan, model: ModelPlan) -> Plan:
    """The plan with the frozen parameters and notes that features (`features/table.py`) of the run add."""
    for feature in features_of(model, plan):
        plan = feature.complete(plan)
    return plan


def plan_model(hf_config: PretrainedConfig, run: RunSettings) -> ModelPlan:
    """Plan of a run's model from its configuration and run file; ConfigError or ModelError if they do not fit."""
    model, objective = run.model, run.objective
    hf_config, noise = _without_noise(hf_config) if "reference" in objective.row.needs else (hf_config, ())
    check_model(ModelSettings(run, hf_config.to_dict()), *WITHOUT_MESH)
    check_encoder(hf_config, attention=model.attention, objective=objective.name)
    resized = model.resize_vocabulary
    runtime = make_objective(objective)
    task = task_of(runtime)
    published = read_hf_config(model.path, files=("*.json",), task=task) if resized else hf_config
    features = plan_features(run, hf_config)
    stages = layers_of_stages(hf_config, run.parallel, task)
    if "adapters" in features:
        check_stages(features["adapters"], stages, ep_size=run.parallel.ep)
    if "freezing" in features:
        condition = f"train.only {list(run.train.only)}, train.freeze {list(run.train.freeze)}"
        check_trained_stages(features["freezing"].trained, stages, ep_size=run.parallel.ep, given=condition)
    check_model(ModelSettings(run, hf_config.to_dict(), stages=stages), "stages")
    return ModelPlan(
        path=model.path,
        hf_config=hf_config,
        attention=model.attention,
        has_random_weights=model.weights == "random",
        resizes_vocabulary=resized,
        published_vocab_size=int(published.vocab_size),
        stages=stages,
        objective=runtime,
        features=features,
        mlp_tiles=mlp_tiles(hf_config.to_dict()) if run.train.tiled_mlp else 1,
        without_noise=noise,
    )


def _without_noise(hf_config: PretrainedConfig) -> tuple[PretrainedConfig, tuple[str, ...]]:
    """The model's configuration without dropout and router noise, and the names of the settings that were on.

    With dropout or noise, the trained model would differ from its reference model before the first step.
    """
    hf_config, settings = copy.deepcopy(hf_config), list[str]()
    parts = [hf_config, *(part for part in vars(hf_config).values() if isinstance(part, PretrainedConfig))]
    for part in parts:
        for key, value in part.to_dict().items():
            if ("drop" in key or "jitter" in key) and isinstance(value, float) and value:
                settings.append(f"{key} {value:g}")
                setattr(part, key, 0.0)
    return hf_config, tuple(settings)
