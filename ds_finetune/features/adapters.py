"""The features that freeze parameters: LoRA adapters (modules in model/adapters/), `train.only` and `train.freeze`."""

from collections.abc import Collection
from math import isclose
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ConfigError, ExportError
from ds_finetune.families.family import Family
from ds_finetune.families.table import family_of
from ds_finetune.features.feature import Feature
from ds_finetune.features.mtp import check_adapted
from ds_finetune.model.adapters.lora import AdapterPlacement, install_lora
from ds_finetune.model.adapters.lora_plan import LoraPlan, plan_lora
from ds_finetune.model.adapters.peft_adapter import PeftAdapter
from ds_finetune.model.build.meta_model import read_tensors
from ds_finetune.model.build.model_plan import task_of
from ds_finetune.model.loss.score_head import head_parameters
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.plan.lora_targets import is_transposed
from ds_finetune.plan.settings import RunSettings
from ds_finetune.plan.trained_parts import FreezePlan, plan_freezing

_SHOWN = 3


class AdapterFeature(Feature):
    """Freezes the model and trains LoRA adapters. A head for classification or scores is trained in full."""

    name = "adapters"
    saves_frozen = False

    settings: LoraPlan

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> LoraPlan | None:
        """Plan LoRA adapters if the run file has a section `lora`, else None."""
        if run.lora is None:
            return None
        lora = plan_lora(hf_config, run.lora, task_of(run.objective))
        if run.lora.start is not None:
            names = read_tensors(hf_config, task_of(run.objective)).by_name
            _check_start(Path(run.lora.start), lora, names, family_of(hf_config.model_type))
        if run.mtp.train:
            check_adapted(hf_config, run.mtp, lora)
        return lora

    def install(self, lm: PreTrainedModel, placement: AdapterPlacement) -> None:
        """Add LoRA adapters. Weights must be loaded already, because the model's files have no adapter parameters."""
        lora = self.settings
        start = None if lora.section.start is None else PeftAdapter.open(Path(lora.section.start))
        install_lora(
            lm,
            lora.targets,
            lora.section,
            seed=self.plan.train.seed,
            placement=placement,
            start=None if start is None else start.initial,
        )
        for name, param in lm.named_parameters():
            if name in lora.fully_trained:
                param.requires_grad_(True)
                if start is not None:
                    fragment = placement.where(param)
                    shard = placement.model_shard.tensor_shard(name, fragment.shape)
                    fragment.write(shard.slice(start.full_tensor(name)))


def _check_start(folder: Path, lora: LoraPlan, names: Collection[str], family: Family) -> None:
    """ConfigError if the adapter from which training starts (`lora.start`) does not fit the section `lora`, or lacks
    tensors that its settings list. `names` are those of the model's weights.
    """
    try:
        adapter = PeftAdapter.open(folder)
        adapter.check_saved(names)
    except ExportError as refused:
        raise ConfigError(f"lora.start cannot be used: {refused.message}", hint=refused.hint) from refused
    shapes = {f"{target.name}.{leaf}": shape for target in lora.targets for leaf, shape in target.shapes.items()}
    section, common_names = lora.section, sorted(shapes.keys() & set(adapter.names))
    differ = _differences("adapters", set(adapter.names), shapes.keys())
    differ += _differences("weights trained whole", adapter.fully_trained.keys(), lora.fully_trained.keys())
    for name in common_names:
        rank, scale = adapter.rank_and_scale(name)
        differ += [f"rank {rank} of {name}, lora.rank {section.rank}"] if rank != section.rank else []
        differ += [f"scale {scale:g} of {name}, lora {section.scale:g}"] if not isclose(scale, section.scale) else []
        stored, expected = adapter.shape(name), shapes[name][-2:]
        expected = expected[::-1] if is_transposed(name, family) else expected
        differ += [f"{name} {stored}, the model's {expected}"] if stored != expected else []
    if differ:
        more = f", and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        raise ConfigError(
            f"the adapter in lora.start {folder} does not fit the section lora: {'; '.join(differ[:_SHOWN])}{more}",
            hint="set the section lora to the values in the adapter's adapter_config.json, or take another adapter",
        )


def _differences(what: str, theirs: Collection[str], ours: Collection[str]) -> list[str]:
    only = {"in lora.start": sorted(set(theirs) - set(ours)), "in lora": sorted(set(ours) - set(theirs))}
    return [f"{what} only {where}: {', '.join(names[:_SHOWN])}" for where, names in only.items() if names]


class FreezeFeature(Feature):
    """Freezes parameters. Optimizer and checkpoints leave them out; exports read them from the model's folder."""

    name = "freezing"
    saves_frozen = False

    settings: FreezePlan

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> FreezePlan | None:
        """Plan which parameters `train.only` or `train.freeze` freezes; None if neither is set. ConfigError if no
        parameter would be trained, or if a new, randomly initialised score head would be frozen.
        """
        task, family = task_of(run.objective), family_of(hf_config.model_type)
        freezing = plan_freezing(read_tensors(hf_config, task).by_name, only=run.train.only, freeze=run.train.freeze)
        if freezing is None:
            return None
        key = "train.freeze" if run.train.freeze else "train.only"
        if not any(not family.is_of_indexer(name) for name in freezing.trained):
            raise ConfigError(
                f"{key} leaves no parameter that the objective trains",
                hint=f"freeze fewer parameters, or leave {key} out",
            )
        is_scored = run.objective.row.head == "scores"
        heads = freezing.frozen.keys() & {*head_parameters(build_meta_model(hf_config, task))} if is_scored else ()
        if heads:
            raise ConfigError(
                f"{key} freezes {', '.join(sorted(heads))}, the head of objective {run.objective.name}, which is "
                "randomly initialised because the model's folder has none",
                hint=f"change {key} so that the head is trained",
            )
        return freezing

    def install(self, lm: PreTrainedModel, placement: AdapterPlacement) -> None:
        """Freeze the planned parameters by `requires_grad = False`."""
        for name, param in lm.named_parameters():
            if name in self.settings.frozen:
                param.requires_grad_(False)
