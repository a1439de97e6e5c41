"""The routers of experts that a model has, how a run changes them, and the lines of the plan about them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.config.sections import RouterConfig
from ds_finetune.families.family import RouterKind
from ds_finetune.families.table import family_of


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
        layers = "1 layer, which sends" if len(self.layers) == 1 else f"{len(self.layers)} layers, which send"
        yield f"{state} in {layers} a token to {self.per_token} of {self.experts} experts"
        if section.balance:
            yield f"plus {section.balance:g} x their balance loss, a mean over the documents of the global batch"
        if section.bias_update:
            yield f"biases moved by {section.bias_update:g} after each step"


def plan_routers(section: RouterConfig | None, model: Mapping[str, Any]) -> RouterPlan | None:
    """The routers of the model with this config.json as the run file trains them; None where its family has none, or
    none that is known.
    """
    family = family_of(str(model.get("model_type")))
    kind, keys = family.router, family.expert_keys
    layers = _routed_layers(model)
    if kind is None or keys is None or not layers:
        return None
    return RouterPlan(kind, layers, keys.number(model), keys.per_token(model), section or RouterConfig())


def has_routers(model: Mapping[str, Any]) -> bool:
    """Whether a model has routers that can be trained in a way of their own."""
    return plan_routers(None, model) is not None


def _routed_layers(model: Mapping[str, Any]) -> tuple[int, ...]:
    rules = family_of(str(model.get("model_type"))).parameters
    if rules is None:
        return ()
    return tuple(number for number in range(int(model["num_hidden_layers"])) if rules.is_sparse(model, number))
