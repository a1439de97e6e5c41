"""Makes a tiny copy of a model configuration: fewer and narrower layers, but at least one of each kind."""

import copy
import re
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import nn
from transformers import PretrainedConfig

VOCABULARY = 256
"""Number of tokens of a tiny model's vocabulary."""
WINDOW = 8
"""Size in tokens of a tiny model's attention window, and of its chunks of attention or recurrence."""

_MAIN_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")
_DEPTH = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers|num_blocks"
    r"|num_layers_per_stack)$"
)
_HEADS = re.compile(
    r"^((num|n)_(attention_|key_value_|kv_|mamba_)?heads?|num_attention_heads_per_layer|(en|de)coder_attention_heads"
    r"|attention_heads|kv_n_heads|num_(en|de)coder_attention_heads|mamba_(n|num)_heads|linear_num_(key_|value_)?heads"
    r"|swa_num_(attention|key_value)_heads|num_query_groups)$"
)
_WIDTHS = re.compile(
    r"(^|_)(hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|embed_proj_dim|lru_width|d_ssm"
    r"|intermediate_size|intermediate_size_mlp"
    r"|ffn_dim|ffn_hidden_size|feed_forward_size|d_inner|n_inner|dff|dim_ff)$"
)
_WINDOWS = re.compile(
    r"^(sliding_window(_size)?|attention_window_size|window_size|local_attention(_window_len)?|attention_chunk_size"
    r"|keep_window_size|index_topk|floor_scale|log_scaling_n_floor)$"
)
_CHUNKS = re.compile(r"^((mamba_)?chunk_size|block_size)$")
_TOKEN_IDS = re.compile(r"(_token_(id|index)|_token)$")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_GROUPS = ("n_group", "num_expert_group")
_EXPERTS = re.compile(r"^(moe_)?(n|num)_(local_|routed_)?experts$|^zero_expert_num$")
_LAYER_NUMBERS = re.compile(r"(_idxs|_ids|_indices|only_layers|moe_layers)$")
_SPECIAL_TOKENS = 40
"""Number of ids for special tokens, at the end of a tiny model's vocabulary."""
_MULTIPLE = 8
_HEAD_WIDTH = 32

Kind = frozenset[tuple[str, str, str]]
"""Kind of a layer: name, class name and settings of each of its modules."""


@dataclass(frozen=True)
class Size:
    """Size of a tiny model: number of layers, and approximate number of attention heads.

    Attention windows of `row_tokens` or more tokens are not shrunk, because no row of the run exceeds them. Shorter
    windows shrink, so that the test's rows exceed them too.
    """

    heads: int
    layers: int
    row_tokens: int


def tiny_config(config: PretrainedConfig, size: Size) -> PretrainedConfig:
    """A copy of `config` with the given size, and with smaller widths, vocabulary and numbers of experts."""
    tiny = copy.deepcopy(config)
    _shrink(tiny, size, None)
    return tiny


def layers_of_each_kind(lm: nn.Module) -> int:
    """Smallest number of first layers of the model's longest stack that include every kind of layer in the stack."""
    kinds = [_kind(layer) for layer in max(_stacks(lm), key=len, default=[])]
    return max((kinds.index(kind) for kind in kinds), default=-1) + 1


def layer_kinds(lm: nn.Module) -> set[Kind]:
    """The kinds of layers in a model, which may be on the meta device."""
    return {_kind(layer) for stack in _stacks(lm) for layer in stack}


def _stacks(lm: nn.Module) -> list[nn.ModuleList]:
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in lm.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and len(module) and not is_inside:
            stacks[name] = module
    return list(stacks.values())


def _kind(layer: nn.Module) -> Kind:
    return frozenset(
        (re.sub(r"\d+", "N", name), type(module).__name__, _settings(module)) for name, module in layer.named_modules()
    )


def _settings(module: nn.Module) -> str:
    """Settings of a module that distinguish kinds of layers: flags, texts, and names of attributes that are None."""
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    switches = sorted((name, value) for name, value in attributes.items() if isinstance(value, bool | str))
    return repr((switches, sorted(name for name, value in attributes.items() if value is None)))


def _shrink(config: PretrainedConfig, size: Size, outer: Fraction | None) -> None:
    """Shrink `config` and nested ones in place. `outer` is the ratio by which the enclosing one's widths shrink."""
    depth, ratio = getattr(config, "num_hidden_layers", None), _ratio(config, size.heads, outer)
    values = vars(config)
    for name, value in list(values.items()):
        if isinstance(value, PretrainedConfig) and not name.startswith("_"):
            _shrink(value, size, ratio if ratio < 1 else None)
        elif not name.startswith("_"):
            is_by_layer = isinstance(value, Sized) and len(value) == depth
            values[name] = _small_value(name, value, ratio, size, is_by_layer=is_by_layer)
    _keep_experts_few(config)


def _small_value(name: str, value: Any, ratio: Fraction, size: Size, *, is_by_layer: bool) -> Any:  # noqa: ANN401
    if isinstance(value, list | tuple) or name.endswith("_pattern"):
        value = value[: size.layers] if is_by_layer else value
        is_list = isinstance(value, list | tuple)
        if not is_list or any(isinstance(one, bool) or not isinstance(one, int) for one in value):
            return value
        if _LAYER_NUMBERS.search(name):
            return type(value)(one for one in value if one < size.layers)
        return type(value)(_small_number(name, one, ratio, size) for one in value)
    if name == "compress_rates":
        return {kind: min(rate, WINDOW) for kind, rate in value.items()}
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return _small_number(name, value, ratio, size)
    return value


def _ratio(config: PretrainedConfig, heads: int, outer: Fraction | None) -> Fraction:
    """Ratio by which the model's widths and its number of heads shrink, which leaves the width of a head as it is.
    `outer` is the ratio of the configuration that holds this one, for a configuration without heads.
    """
    for name in _MAIN_HEADS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count > 0:
            return min(Fraction(1), Fraction(heads, count))
    width = getattr(config, "hidden_size", None)
    if outer is not None or not isinstance(width, int) or width <= 0:
        return outer or Fraction(1)
    return min(Fraction(1), Fraction(_HEAD_WIDTH * heads, width))


def _small_number(name: str, value: int, ratio: Fraction, size: Size) -> int:
    if _DEPTH.match(name):
        return min(value, size.layers)
    if _WINDOWS.match(name) and value >= size.row_tokens:
        return value
    return next((rule(value, ratio) for pattern, rule in _RULES if pattern.search(name)), value)


def _width(value: int, ratio: Fraction) -> int:
    exact = value * ratio
    return int(exact) if exact.denominator == 1 else max(_MULTIPLE, round(exact / _MULTIPLE) * _MULTIPLE)


def _at_most(limit: int) -> Callable[[int, Fraction], int]:
    return lambda value, _: min(value, limit)


_RULES: Sequence[tuple[re.Pattern[str], Callable[[int, Fraction], int]]] = (
    (_HEADS, lambda value, ratio: max(1, int(value * ratio))),
    (re.compile(r"^hidden_size_per_layer_input$"), _at_most(32)),
    (_WIDTHS, _width),
    (re.compile(r"(^|_)(lora_rank|lowrank)$"), _at_most(32)),
    (re.compile(r"^index_n_heads$"), _at_most(16)),
    (re.compile(r"^index_(block_size|topk_blocks)$"), _at_most(4)),
    # Unpadded vocabularies shrink more than padded ones, so that their sizes still differ.
    (re.compile(r"^unpadded_vocab_size$"), _at_most(VOCABULARY - 16)),
    (re.compile(r"(^|_)(vocab_size|vocab_size_per_layer_input|vocab_size_base|group_vocab)$"), _at_most(VOCABULARY)),
    (_WINDOWS, _at_most(WINDOW)),
    (_CHUNKS, _at_most(WINDOW)),
    (_TOKEN_IDS, lambda value, _: min(value, VOCABULARY - 1 - value % _SPECIAL_TOKENS)),
)
"""How settings of a configuration shrink: patterns of their names, with a function (value, ratio) -> smaller value."""


def _keep_experts_few(config: PretrainedConfig) -> None:
    """Reduce the number of experts, so that the router still has a choice and groups of experts stay equal."""
    values = vars(config)
    groups = max([1, *(values.get(name) or 1 for name in _GROUPS)])
    chosen = [values[name] for name in _TOP_K if isinstance(values.get(name), int)]
    enough = groups * max(2, -(-2 * max([2, *chosen]) // groups))
    for name, value in values.items():
        if _EXPERTS.search(name) and isinstance(value, int):
            values[name] = min(value, enough)
