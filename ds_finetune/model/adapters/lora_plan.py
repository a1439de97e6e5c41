"""Which modules of a model LoRA adapts and which weights it holds in four bits, worked out once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import nn
from transformers import PretrainedConfig

from ds_finetune.config.sections import ALL_LINEAR, LoraConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.family import layer_of
from ds_finetune.model.build.meta_model import read_tensors
from ds_finetune.model.build.skeleton import Task, head_of
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.plan.lora_targets import (
    FOUR_BIT,
    ROUTED,
    LoraTarget,
    Shape,
    adapted_targets,
    last_name,
    nf4_bytes,
    quantised_targets,
    targets_among,
)
from ds_finetune.plan.model_tensors import SCORE_HEAD


@dataclass(frozen=True)
class LoraPlan:
    """The `lora` section of the run file applied to a model; a `LoraTarget` is a module that can have adapters."""

    section: LoraConfig
    adaptable: tuple[LoraTarget, ...]
    """Every module that can be adapted, in the model's order."""
    targets: tuple[LoraTarget, ...]
    """The modules that are adapted."""
    quantised: tuple[LoraTarget, ...]
    """The modules whose frozen weights are held in four bits, adapted or not; none without `lora.quantize`."""
    model_params: int
    """Parameters of the model without adapters."""
    head_params: int = 0
    """Parameters of a score head, which is trained whole beside the adapters."""

    @property
    def num_params(self) -> int:
        """Parameters of all adapters, and of a score head."""
        return sum(target.num_params(self.section.rank) for target in self.targets) + self.head_params

    @property
    def quantised_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the weights in four bits."""
        return tuple(shape for target in self.quantised for shape in target.shapes.values())

    def lines(self) -> list[tuple[str, str]]:
        """Name and text of what is adapted, kind by kind, as the plan prints it."""
        lora = self.section
        modules = Counter(target.kind for target in self.adaptable)
        text = f"rank {lora.rank}, alpha {lora.alpha:g}, {self.num_params:,} parameters are trained"
        rows = [("lora", text)]
        for kind, number in modules.items():
            chosen = [target for target in self.targets if target.kind == kind]
            names = dict.fromkeys(last_name(target.name) for target in chosen)
            numel = sum(target.num_params(lora.rank) for target in chosen)
            text = f"{len(chosen)} of {number} modules, {numel:,} parameters: {', '.join(names)}"
            rows.append((f"  {kind}", text if names else f"none of {number} modules"))
        if self.head_params:
            rows.append(("  score head", f"trained whole, {self.head_params:,} parameters"))
        return rows if lora.quantize is None else [*rows, self._quantised_line()]

    def _quantised_line(self) -> tuple[str, str]:
        """What is held in four bits and in how many bytes, and what is not."""
        shapes = self.quantised_shapes
        numel, size = sum(map(prod, shapes)), sum(map(nf4_bytes, shapes))
        experts = [target for target in self.adaptable if target.kind == ROUTED]
        routed = sum(prod(shape) for target in experts for shape in target.shapes.values())
        unfit = sum(target.kind in FOUR_BIT for target in self.adaptable) - len(self.quantised)
        kinds = ", ".join(dict.fromkeys(target.kind for target in self.quantised))
        text = f"{len(shapes)} weights, {numel:,} parameters in {size:,} bytes: {kinds}"
        rest = f"the other {self.model_params - numel:,} are in train.precision"
        rest += f", {routed:,} of them routed experts'" if routed else ""
        rest += f", and {unfit} weights with rows of no multiple of 64" if unfit else ""
        return f"  frozen in {self.section.quantize}", f"{text}; {rest}"


def plan_lora(hf_config: PretrainedConfig, lora: LoraConfig, task: Task = "causal_lm") -> LoraPlan:
    """The modules that `lora` adapts (those that its patterns name, or all but routers) and quantises.

    ConfigError where a pattern names no module (with the legal names) or one that cannot be adapted, experts
    are given a rank that grouped products cannot take, or no weight fits four bits.
    """
    tensors = read_tensors(hf_config, task)
    every = targets_among(tensors.shapes())
    if set(ALL_LINEAR) & set(lora.target_modules or ()):
        _check_all_linear(hf_config, task, every)
    return LoraPlan(
        section=lora,
        adaptable=every,
        targets=adapted_targets(every, lora),
        quantised=quantised_targets(every, lora),
        model_params=tensors.numel,
        head_params=sum(tensor.numel for name, tensor in tensors.ends.items() if name == SCORE_HEAD),
    )


def _check_all_linear(hf_config: PretrainedConfig, task: Task, every: Sequence[LoraTarget]) -> None:
    """ConfigError where the model has linear layers, other than its head, that cannot be adapted."""
    lm = build_meta_model(hf_config, task)
    linear = {name for name, each in lm.named_modules() if isinstance(each, nn.Linear) and each is not head_of(lm)}
    if others := sorted({last_name(name) for name in linear - {target.name for target in every}}):
        raise ConfigError(
            f"lora.target_modules {ALL_LINEAR[0]} names modules of {hf_config.model_type} that cannot be adapted: "
            f"{', '.join(others)}",
            hint="leave it out, or name the modules to adapt",
        )


def check_stages(lora: LoraPlan, stages: Sequence[StageLayers | None], *, ep_size: int) -> None:
    """ConfigError where a pipeline stage has no adapters, or none of a kind that others have: of experts that `ep_size`
    ranks divide, or of the rest.

    DeepSpeed 0.19.8 needs a parameter on every rank, and adds up norms over stages group by group
    (zero/stage_1_and_2.py:2951).
    """
    parts = {True: "routed experts", False: "other modules" if ep_size > 1 else "modules"}
    kinds = [{target.kind == ROUTED and ep_size > 1 for target in _targets_of(lora, layers)} for layers in stages]
    if lora.head_params:
        kinds[-1].add(False)
    for number, (layers, found) in enumerate(zip(stages, kinds, strict=True)):
        missing = sorted(set.union(*kinds) - found)
        if missing and layers is not None:
            raise ConfigError(
                f"lora.target_modules {list(lora.section.target_modules or ())} adapts no {parts[missing[0]]} of stage "
                f"{number} of parallel.pp {len(stages)}, layers {layers}",
                hint=f"name {parts[missing[0]]} of every stage, or set parallel.pp to 1",
            )


def _targets_of(lora: LoraPlan, layers: StageLayers | None) -> list[LoraTarget]:
    """The targets in these layers; all for None."""
    return [target for target in lora.targets if layers is None or layer_of(f"{target.name}.") in layers]
