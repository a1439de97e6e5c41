"""Extends the context of a model by YaRN (arXiv 2309.00071): number of positions and rotary scaling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.errors import ConfigError
from ds_finetune.families.table import WITH_CONTEXT

_POSITIONS, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_LATENT_SCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
"""YaRN keys of DeepSeek-V3's config.json that make YaRN scale attention logits. Without these keys YaRN scales cosines
and sines, which in latent attention affect only a few columns.
"""


@dataclass(frozen=True)
class ContextPlan:
    """Positions and rotary scaling of a model, before and after applying `model.context`."""

    context: int
    """Context that the run file asks for by `model.context`, in tokens."""
    published: int
    """Maximum number of positions that the published config.json states."""
    rope_before: Mapping[str, Any]
    rope: Mapping[str, Any]
    """Rotary settings of the trained model, in the schema of transformers' `rope_parameters`."""
    head_dim: int | None = None
    """Value to write for `head_dim` if config.json has null there, as Mixtral's has. transformers 5.23 computes YaRN
    from this key (modeling_rope_utils.py:415).
    """

    @property
    def positions(self) -> int:
        """Positions of the trained model: the maximum of `context` and `published`."""
        return max(self.context, self.published)

    @property
    def is_extended(self) -> bool:
        """Whether `model.context` exceeds the published positions, so that the model's configuration changes."""
        return self.context > self.published

    def settings(self) -> dict[str, int]:
        """Keys of the model's configuration that `model.context` changes, with their new values. Rotary settings are
        not among them.
        """
        return {_POSITIONS: self.positions, **({"head_dim": self.head_dim} if self.head_dim is not None else {})}

    def lines(self) -> list[tuple[str, str]]:
        """Plan line about positions and rotary scaling of the model."""
        if not self.is_extended:
            text = f"{self.context} tokens; the model has {self.published} positions, and nothing of it is changed"
        else:
            text = f"{self.published} -> {self.context} positions, {_kind(self.rope_before)} -> {_kind(self.rope)}"
        return [("context", text)]

    def notes(self) -> tuple[str, ...]:
        """Note for the plan: YaRN changes results on short texts too. Empty if `model.context` keeps the scaling."""
        if not self.is_extended or self.rope == self.rope_before:
            return ()
        return (
            f"model.context {self.context}: YaRN applies at every length, so short texts change too: attention logits "
            f"are scaled, and low frequencies are divided by {_factor(self.rope):g} instead of "
            f"{_factor(self.rope_before):g}. Train on texts of both lengths: DeepSeek-V3's own extensions, to 32K and "
            "then to 128K, took 1,000 steps each",
        )


def plan_context(model: Mapping[str, Any], context: int) -> ContextPlan:
    """The extension of a model to `context` tokens; ConfigError where its positions cannot be extended.

    `model` is the configuration as transformers reads it, with all rotary settings in `rope_parameters`. A model
    without scaling gets YaRN with the factor context / positions. A model with YaRN keeps its other settings and gets
    the factor context / `original_max_position_embeddings`. If the model already has enough positions, nothing changes.
    """
    kind, published = str(model.get("model_type")), model.get(_POSITIONS)
    if kind not in WITH_CONTEXT or not published:
        raise ConfigError(
            f"model.context {context} is not tested with model_type {kind}",
            hint=f"leave model.context out, or use one of {', '.join(WITH_CONTEXT)}",
        )
    rope, is_latent = dict(model.get("rope_parameters") or {}), model.get("kv_lora_rank") is not None
    if rope and _rope_type(rope) == "yarn" and rope.get("factor") is None:
        rope["factor"] = published / rope[_ORIGINAL]
    if context <= published:
        return ContextPlan(context, published, rope, rope)
    original = _original_positions(rope, published, context)
    added = _LATENT_SCALES if is_latent and _rope_type(rope) == "default" else {}
    extended = {**rope, "rope_type": "yarn", "factor": _new_factor(rope, original, context), _ORIGINAL: original}
    extended |= {"type": "yarn"} if "type" in rope else {}
    is_width_known = model.get("head_dim", 0) is not None
    head_dim = None if is_width_known else model["hidden_size"] // model["num_attention_heads"]
    return ContextPlan(context, published, rope, {**extended, **added}, head_dim)


def _original_positions(rope: Mapping[str, Any], published: int, context: int) -> int:
    is_by_layer = any(isinstance(value, Mapping) for value in rope.values())
    if not rope or is_by_layer or _rope_type(rope) not in ("default", "yarn"):
        scaling = "another by type of layer" if is_by_layer else _rope_type(rope) if rope else "none"
        raise ConfigError(
            f"model.context {context} is more than the {published} positions of the model, whose rotary scaling "
            f"({scaling}) YaRN cannot extend, unlike `default` or `yarn`",
            hint=f"set model.context: {published}, leave it out, or train another model",
        )
    if _rope_type(rope) == "default":
        return published
    # Without the key for the original number of positions, transformers 5.23 takes max_position_embeddings
    # (modeling_rope_utils.py:843).
    return int(rope.get(_ORIGINAL) or published)


def _new_factor(rope: Mapping[str, Any], original: int, context: int) -> float:
    """RoPE scaling factor: context length / original length; ConfigError if the model's own factor is larger, or if
    servers would compute another factor from config.json.
    """
    factor, scaled = context / original, round(original * _factor(rope))
    if factor < _factor(rope):
        raise ConfigError(
            f"model.context {context} is less than the {scaled} positions of the model's YaRN: {original} x factor "
            f"{_factor(rope):g}",
            hint=f"set model.context: {scaled}",
        )
    if int(original * factor) != context:
        # vLLM computes the number of positions as original x factor, cut to an integer.
        below = context // original * original
        legal = [size for size in (below, below + original) if size >= scaled]
        raise ConfigError(
            f"model.context {context} is not the number of positions that vLLM computes, {original} x the factor "
            f"{factor!r} in floating point",
            hint=f"set model.context to {' or '.join(map(str, legal))}",
        )
    return factor


def extend_tree(tree: Mapping[str, Any], plan: ContextPlan) -> dict[str, Any]:
    """The published config.json (`tree`) with the positions and rotary settings of `plan`, in each schema that the file
    uses.

    Some readers of `rope_scaling` expect the kind of scaling under `type`, all others under `rope_type`.
    """
    extended, rope = {**tree, **plan.settings()}, plan.rope
    if tree.get("rope_parameters"):
        extended["rope_parameters"] = {**tree["rope_parameters"], **rope}
    if "rope_scaling" in tree or not tree.get("rope_parameters"):
        unscaled = ("rope_theta", "partial_rotary_factor")
        scaling = {key: value for key, value in rope.items() if key not in (*unscaled, "type")}
        extended["rope_scaling"] = {"type": rope["rope_type"], **scaling}
        extended |= {key: rope[key] for key in unscaled if key not in tree and key in rope}
    return extended


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _factor(rope: Mapping[str, Any]) -> float:
    return float(rope.get("factor") or 1.0) if _rope_type(rope) == "yarn" else 1.0


def _kind(rope: Mapping[str, Any]) -> str:
    return f"YaRN factor {_factor(rope):g}" if _rope_type(rope) == "yarn" else "no scaling"
