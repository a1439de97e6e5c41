"""Plans LoRA: which modules of a model get adapters, and which weights are quantised to four bits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import nn
from transformers import PretrainedConfig

from ds_finetune.config.sections import ALL_LINEAR, LoraConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.table import family_of
from ds_finetune.model.build.meta_model import read_tensors
from ds_finetune.model.build.skeleton import Task, head_of
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.plan.layer_stages import StageLayers, check_trained_stages
from ds_finetune.plan.lora_targets import (
    FOUR_BIT,
    ROUTED,
    LoraTarget,
    adapted_targets,
    fully_trained_parameters,
    is_peft_parameter,
    nf4_bytes,
    quantised_targets,
    targets_of,
)
from ds_finetune.plan.model_tensors import EMBEDDING, FullTensor
from ds_finetune.plan.name_patterns import last_part


@dataclass(frozen=True)
class LoraPlan:
    """The modules that get adapters and the weights that are quantised, as the section `lora` asks."""

    section: LoraConfig
    adaptable: tuple[LoraTarget, ...]
    """All modules that can be adapted, in the model's order."""
    targets: tuple[LoraTarget, ...]
    quantised: tuple[LoraTarget, ...]
    """Modules whose frozen weights are quantised to four bits, with or without adapter (`lora.quantize`)."""
    model_params: int
    """Number of parameters of the model without adapters."""
    fully_trained: Mapping[str, FullTensor] = field(default_factory=dict)
    """Tensors that are trained in full beside adapters (`lora.modules_to_save`), by name."""

    @property
    def num_params(self) -> int:
        """Number of trained parameters: those of adapters and those of `lora.modules_to_save`."""
        return sum(target.num_params(self.section.rank) for target in self.targets) + self._whole_params

    @property
    def _whole_params(self) -> int:
        return sum(tensor.numel for tensor in self.fully_trained.values())

    def lines(self) -> list[tuple[str, str]]:
        """Lines of the printed plan about adapters, as (name, text) pairs, with one line for each kind of module."""
        lora = self.section
        modules = Counter(target.kind for target in self.adaptable)
        text = f"rank {lora.rank}, alpha {lora.alpha:g}{', rslora' if lora.rslora else ''}"
        text += f", dropout {lora.dropout:g}" if lora.dropout else ""
        rows = [("lora", f"{text}, {self.num_params:,} parameters are trained")]
        rows += [("  start", lora.start)] if lora.start is not None else []
        for kind, number in modules.items():
            chosen = [target for target in self.targets if target.kind == kind]
            names = dict.fromkeys(last_part(target.name) for target in chosen)
            numel = sum(target.num_params(lora.rank) for target in chosen)
            text = f"{len(chosen)} of {number} modules, {numel:,} parameters: {', '.join(names)}"
            rows.append((f"  {kind}", text if names else f"none of {number} modules"))
        if self.fully_trained:
            rows.append(("  trained whole", f"{self._whole_params:,} parameters: {', '.join(self.fully_trained)}"))
        return rows if lora.quantize is None else [*rows, self._quantised_line()]

    def _quantised_line(self) -> tuple[str, str]:
        shapes = [shape for target in self.quantised for shape in target.shapes.values()]
        numel, size = sum(map(prod, shapes)), sum(map(nf4_bytes, shapes))
        experts = [target for target in self.adaptable if target.kind == ROUTED]
        routed = sum(prod(shape) for target in experts for shape in target.shapes.values())
        unfit = sum(target.kind in FOUR_BIT for target in self.adaptable) - len(self.quantised)
        kinds = ", ".join(dict.fromkeys(target.kind for target in self.quantised))
        text = f"{len(shapes)} weights, {numel:,} parameters in {size:,} bytes: {kinds}"
        unquantised = f"the other {self.model_params - numel:,} are in train.precision"
        unquantised += f", {routed:,} of them routed experts'" if routed else ""
        unquantised += f", and {unfit} weights with rows of no multiple of 64" if unfit else ""
        return f"  frozen in {self.section.quantize}", f"{text}; {unquantised}"


def plan_lora(hf_config: PretrainedConfig, lora: LoraConfig, task: Task = "causal_lm") -> LoraPlan:
    """Plan which modules the section `lora` adapts, and which weights it quantises. The modules that
    `lora.target_modules` matches are adapted; by default all but routers.

    ConfigError if a pattern matches nothing or a module that cannot be adapted, if torch's grouped matrix product does
    not support the experts' rank, or if there is no weight to quantise.
    """
    tensors = read_tensors(hf_config, task)
    all_targets = targets_of(tensors)
    if set(ALL_LINEAR) & set(lora.target_modules or ()):
        _check_all_linear(hf_config, task, all_targets)
    targets = adapted_targets(all_targets, lora)
    family = family_of(hf_config.model_type)
    # peft adapts some weights as parameters, without seeing their inputs.
    without_inputs = {
        last_part(target.name)
        for target in targets
        if lora.dropout and any(is_peft_parameter(f"{target.name}.{leaf}", family) for leaf in target.shapes)
    }
    if without_inputs:
        raise ConfigError(
            f"lora.dropout is set, but peft 0.21 has no dropout for adapters of {', '.join(sorted(without_inputs))}: "
            "it adds these adapters to the weights (tuners/lora/layer.py, ParamWrapper)",
            hint="name other modules in lora.target_modules, such as o_proj, or leave lora.dropout out",
        )
    fully_trained = fully_trained_parameters(tensors.by_name, lora, targets)
    if tensors.is_tied and EMBEDDING in fully_trained:
        raise ConfigError(
            f"lora.modules_to_save {list(lora.modules_to_save)} has the embedding, which is also this model's head: "
            "peft would train two copies of it",
            hint="remove the embedding from lora.modules_to_save",
        )
    return LoraPlan(
        section=lora,
        adaptable=all_targets,
        targets=targets,
        quantised=quantised_targets(all_targets, lora),
        model_params=tensors.numel,
        fully_trained=fully_trained,
    )


def _check_all_linear(hf_config: PretrainedConfig, task: Task, all_targets: Sequence[LoraTarget]) -> None:
    """ConfigError if `all-linear` would adapt other modules than in peft, which adapts all linear modules, but not
    gpt_oss' experts (peft 0.21, utils/transformers_weight_conversion.py has no rule for them).
    """
    if family_of(hf_config.model_type).transposed_experts:
        raise ConfigError(
            f"lora.target_modules {ALL_LINEAR[0]} leaves out the routed experts of {hf_config.model_type} in peft, but "
            "ds-finetune would adapt them",
            hint="write [q_proj, k_proj, v_proj, o_proj] to adapt attention only, or leave target_modules out to adapt "
            "the experts too",
        )
    lm = build_meta_model(hf_config, task)
    linear = {name for name, each in lm.named_modules() if isinstance(each, nn.Linear) and each is not head_of(lm)}
    if others := sorted({last_part(name) for name in linear - {target.name for target in all_targets}}):
        raise ConfigError(
            f"lora.target_modules {ALL_LINEAR[0]} names modules of {hf_config.model_type} that cannot be adapted: "
            f"{', '.join(others)}",
            hint="leave lora.target_modules out, or name the modules to adapt",
        )


def check_stages(lora: LoraPlan, stages: Sequence[StageLayers | None], *, ep_size: int) -> None:
    """ConfigError if a stage trains no tensors of a kind that another stage trains (see `check_trained_stages`)."""
    sides = {f"{each.name}.weight": FullTensor((1, 1), is_routed=each.kind == ROUTED) for each in lora.targets}
    setting = f"lora.target_modules {list(lora.section.target_modules or ())}"
    setting += f" and modules_to_save {list(lora.section.modules_to_save)}" if lora.section.modules_to_save else ""
    check_trained_stages({**sides, **lora.fully_trained}, stages, ep_size=ep_size, given=setting)
