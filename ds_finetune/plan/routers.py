"""Which policies of routers a model can be trained with, and the lines of the plan about them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.config.routers import RouterConfig
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import LoraConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.family import RouterKind
from ds_finetune.families.table import FAMILIES, family_of


@dataclass(frozen=True)
class RouterPlan:
    """The routers of a model, and how a run changes them."""

    kind: RouterKind
    layers: tuple[int, ...]
    """Numbers of the layers that have one, of the whole model."""
    experts: int
    """Experts of a layer."""
    per_token: int
    """Experts that a token is sent to."""
    section: RouterConfig

    def parameters(self, beyond: range = range(0)) -> tuple[str, ...]:
        """Names of the routers' parameters, also of the layers `beyond` the last one."""
        layers = (*self.layers, *beyond)
        return tuple(
            f"model.layers.{layer}.{self.kind.module}.{leaf}" for layer in layers for leaf in self.kind.parameters
        )

    def lines(self) -> list[tuple[str, str]]:
        """Name and text of what is decided about routers, for people; nothing where they are trained as all else."""
        return [("routers", ", ".join(self._texts()))] if self.section != RouterConfig() else []

    def _texts(self) -> Iterator[str]:
        section = self.section
        state = "trained" if section.train else "frozen"
        yield f"{state} in {len(self.layers)} layers, which send a token to {self.per_token} of {self.experts} experts"
        if section.balance:
            yield f"plus {section.balance:g} x their balance loss, a mean over the documents of the global batch"
        if section.bias_update:
            yield f"biases moved by {section.bias_update:g} after each step"


def plan_routers(config: RunConfig, model: Mapping[str, Any]) -> RouterPlan | None:
    """The routers of a model as the run file trains them; None where its family has none, or none that is known.

    `model` is the model's config.json. ConfigError where `router` of the run file does not fit it.
    """
    family = family_of(str(model.get("model_type")))
    kind, rules, keys = family.router, family.parameters, family.expert_keys
    layers: tuple[int, ...] = ()
    if kind is not None and rules is not None:
        layers = tuple(number for number in range(int(model["num_hidden_layers"])) if rules.is_sparse(model, number))
    if kind is None or keys is None or not layers:
        _refuse_router(config.router, model)
        return None
    if config.router is not None:
        _check_router(config.lora, config.router, kind, str(model["model_type"]))
    section = RouterConfig() if config.router is None else config.router
    return RouterPlan(kind, layers, keys.number(model), keys.per_token(model), section)


def _refuse_router(section: RouterConfig | None, model: Mapping[str, Any]) -> None:
    if section is None:
        return
    name = str(model.get("model_type"))
    known = [other for other, family in FAMILIES.items() if family.router is not None]
    what = "has no routed experts" if name in FAMILIES else "is not in the table of model families"
    raise ConfigError(
        f"{_given(section)} with model_type {name}, which {what}",
        hint=f"leave `router` out; it is for {', '.join(known)}",
    )


def _check_router(lora: LoraConfig | None, section: RouterConfig, kind: RouterKind, model_type: str) -> None:
    if lora is not None:
        raise ConfigError(
            f"{_given(section)} with lora.rank {lora.rank}: adapters leave routers as they are",
            hint="leave `router` out, or train all weights; lora.target_modules adapts routers where it names `gate`",
        )
    if section.bias_update and kind.bias is None:
        biased = [name for name, family in FAMILIES.items() if family.router is not None and family.router.bias]
        raise ConfigError(
            f"router.bias_update {section.bias_update:g} with model_type {model_type}, whose routers have no bias",
            hint=f"set router.balance instead; routers of {', '.join(biased)} have a bias",
        )
    if section.balance and not section.train:
        raise ConfigError(
            f"router.balance {section.balance:g} with router.train false: the loss could not change the routers",
            hint="set router.train to true, or router.balance to 0",
        )


def _given(section: RouterConfig) -> str:
    """The keys of the section that are given, with their values."""
    given = ", ".join(f"{name} {getattr(section, name)}" for name in section.model_fields_set)
    return f"`router` ({given or 'empty'})"
