"""Reads and checks the config.json of a model for planning, without building the model."""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_finetune.config.run_file import values_by_key
from ds_finetune.config.units import MIB
from ds_finetune.errors import ModelError
from ds_finetune.families.layer_rules import OLDER_RATES, RATES, RATIOS
from ds_finetune.families.table import family_of
from ds_finetune.families.text_part import text_tree

MAX_LAYERS = 1000
"""Maximum number of layers of a model: a config.json with a million layers would fill the memory with Python objects.
The deepest published models have 126.
"""
MAX_CONFIG_BYTES = 16 * MIB
"""Maximum size of a model's config.json. Published ones have a few KiB."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "num_nextn_predict_layers")
_SIZES_OF_V4 = (
    *("sliding_window", "index_topk", "index_n_heads", "index_head_dim", "hc_mult", "hc_sinkhorn_iters"),
    *("o_groups", "o_lora_rank", "q_lora_rank", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
_LISTS_OF_V4: Mapping[str, tuple[Any, ...]] = {
    "compress_ratios": tuple(RATIOS),
    "layer_types": tuple(RATIOS.values()),
    "mlp_layer_types": ("hash_moe", "moe"),
}
"""Lists of a DeepSeek-V4 config.json that have one item for each layer, with the valid items."""
_NEEDED_BY_V4 = (
    *((key,) for key in (*_SIZES_OF_V4, "hidden_size", "vocab_size", "num_attention_heads", "head_dim")),
    *(("num_hidden_layers",), ("swiglu_limit",), ("compress_ratios", "layer_types")),
    *(("num_hash_layers", "mlp_layer_types"), ("qk_rope_head_dim", "partial_rotary_factor")),
)
"""Groups of keys of a DeepSeek-V4 config.json. At least one key of each group is required; if all are missing,
transformers would take the values of DeepSeek-V4-Flash.
"""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
"""Keys of config.json whose values must be integers of at least 1; they may be missing or null."""
_ROTATED_WIDTHS = ("head_dim", "qk_rope_head_dim")
"""Keys of `_SIZES` that may be 0 in models without rotary embeddings, such as GLM-5-Next."""
_POSITIVE = (
    *("rms_norm_eps", "layer_norm_eps", "hc_eps", "rope_theta", "compress_rope_theta", "factor", "swiglu_limit"),
    *("routed_scaling_factor", "partial_rotary_factor", "original_max_position_embeddings"),
)
"""Keys of config.json, and of its rotary sections, whose values must be above 0."""
_ROPE_KINDS = ("rope_type", "type")
_UNSCALED = ("default", "mrope")
"""Kinds of rotary embeddings whose frequencies are not scaled."""
_REFUSED = {
    "deepseek_v41": (
        "transformers 5.23 has no classes for it. Missing are keys and values that layers share, Engram tables and "
        "DSpark layers",
        "train DeepSeek-V4 instead",
    ),
}
"""Model types that are refused, each with the reason and a hint."""

_DTYPES = (
    *("auto", "bfloat16", "float16", "float32", "float64", "half", "float", "double"),
    *("float8_e4m3fn", "float8_e5m2"),
)
_DTYPE_KEYS = ("dtype", "torch_dtype")
_PUBLISHED = "take the config.json published with the model"
_NAME = "config.json"


def read_config_json(path: str) -> dict[str, Any]:
    """Read the config.json of a model folder or hub id; of a hub id only that file is downloaded. ModelError where it
    is missing, unreadable or invalid.
    """
    file = _config_file(path)
    check_sizes(file)
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as broken:
        raise ModelError(f"{file} cannot be read: {broken}", hint=_PUBLISHED) from broken
    if not isinstance(tree, dict) or not isinstance(tree.get("model_type"), str):
        raise ModelError(f"{file} has no key `model_type` whose value is a text", hint=_PUBLISHED)
    return tree


def check_sizes(file: Path) -> None:
    """ModelError where a config.json is too large, or its dtype, layers, sizes or heads are invalid."""
    size = file.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise ModelError(f"{file} has {size:,} bytes, more than {MAX_CONFIG_BYTES:,}", hint=_PUBLISHED)
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        # Another function reads config.json later and reports the syntax error with its line.
        return
    for key, value in _counts(tree):
        least = 0 if key.endswith("num_nextn_predict_layers") else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_LAYERS:
            raise ModelError(f"{file}: {key} is {value!r}, not a number from {least} to {MAX_LAYERS}", hint=_PUBLISHED)
    for name, dtype in values_by_key(tree).items() if isinstance(tree, Mapping) else ():
        if {*_DTYPE_KEYS} & {*name.split(".")} and dtype not in (None, {}) and str(dtype) not in _DTYPES:
            # transformers 5.23 would accept any attribute of torch as a dtype, even `torch.save`.
            raise ModelError(f"{file}: {name} is {dtype!r}, not one of {', '.join(_DTYPES)}", hint=_PUBLISHED)
    if isinstance(tree, Mapping):
        _check_widths(file, text_tree(tree))
        kind = tree.get("model_type")
        if isinstance(kind, str) and kind in _REFUSED:
            reason, hint = _REFUSED[kind]
            raise ModelError(f"{file}: model_type {kind} is neither trained nor converted: {reason}", hint=hint)
        if family_of(str(kind)).compresses and (problem := next(_problems_of_v4(tree), None)):
            raise ModelError(f"{file}: {problem}", hint=_PUBLISHED)
        _check_values(file, text_tree(tree))


def _check_values(file: Path, tree: Mapping[str, Any]) -> None:
    """ModelError if a key of config.json has a value with which transformers does not compute."""
    kind = tree.get("model_type")
    for key, values in family_of(str(kind)).config_values.items():
        if key in tree and tree[key] not in values:
            computed = " or ".join(repr(value) for value in values if value is not None)
            raise ModelError(
                f"{file}: {key} is {tree[key]!r}, and transformers computes model_type {kind} only with {computed}",
                hint="train a model with a value that transformers computes",
            )


def _problems_of_v4(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield error messages about a DeepSeek-V4 config.json whose sizes are valid. Stop after the first message: later
    checks assume that earlier ones passed.
    """
    for keys in _NEEDED_BY_V4:
        if all(tree.get(key) is None for key in keys):
            yield f"it has no {' or '.join(keys)}"
    layers = tree["num_hidden_layers"]
    for key, kinds in _LISTS_OF_V4.items():
        values = tree.get(key)
        is_known = isinstance(values, list) and all(each in kinds and type(each) is type(kinds[0]) for each in values)
        if values is not None and not (is_known and len(values) >= layers):
            yield f"{key} is {values!r}, not one of {', '.join(map(str, kinds))} for each of {layers} layers"
    rates = tree.get("compress_rates") or RATES
    older = [tree[key] for key in OLDER_RATES.values() if tree.get(key) is not None]
    of_kinds = isinstance(rates, Mapping) and rates.keys() == RATES.keys()
    if not of_kinds or not all(type(rate) is int and rate > 1 for rate in (*rates.values(), *older)):
        yield f"layers compress {older or rates} tokens into an entry, not numbers above 1 for {' and '.join(RATES)}"
    yield from (
        f"{key} is {tree[key]!r}, and by {other} it is {value!r}"
        for key, other, value in _facts_stated_twice(tree)
        if tree.get(key) not in (None, value)
    )
    for key, other in (("qk_rope_head_dim", "head_dim"), ("num_experts_per_tok", "n_routed_experts")):
        if (tree.get(key) or 0) > tree[other]:
            yield f"{key} {tree[key]} is more than {other} {tree[other]}"
    if tree["num_attention_heads"] % tree["o_groups"]:
        yield f"num_attention_heads {tree['num_attention_heads']} is no multiple of o_groups {tree['o_groups']}"


def _facts_stated_twice(tree: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the facts that a DeepSeek-V4 config.json may state under two keys, as (published key, key that transformers
    prefers, value of the published key that agrees with the preferred key).
    """
    if kinds := tree.get("mlp_layer_types"):
        yield "num_hash_layers", "mlp_layer_types", kinds.count("hash_moe")
    if kinds := tree.get("layer_types"):
        numbers = {kind: ratio for ratio, kind in RATIOS.items()}
        # `compress_ratios` has further items, for multi-token prediction layers, after the items for the layers.
        others = (tree.get("compress_ratios") or [])[len(kinds) :]
        yield "compress_ratios", "layer_types", [*(numbers[kind] for kind in kinds), *others]
    if factor := tree.get("partial_rotary_factor"):
        yield "qk_rope_head_dim", "partial_rotary_factor", int((tree.get("head_dim") or 0) * factor)


def _check_widths(file: Path, tree: Mapping[str, Any]) -> None:
    """ModelError where a size in config.json is no integer of at least 1, key and value heads do not divide the
    attention heads equally, or the number of rotated columns is not even.
    """
    if not isinstance(quantised := tree.get("quantization_config") or {}, Mapping):
        raise ModelError(f"{file}: quantization_config is {quantised!r:.60}, not an object", hint=_PUBLISHED)
    family = family_of(str(tree.get("model_type")))
    of_v4 = _SIZES_OF_V4 if family.compresses else ()
    for key in (*_SIZES, *of_v4):
        value = tree.get(key)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        # In config.json of some models a size is a list, with one number for each layer.
        least = 0 if family.is_generic and key in _ROTATED_WIDTHS else 1
        if value is not None and not (isinstance(value, list) and not of_v4) and not (is_number and value >= least):
            raise ModelError(f"{file}: {key} is {value!r}, not a whole number of at least {least}", hint=_PUBLISHED)
    for key, value in _numbers(tree):
        if isinstance(value, str | bool) or (isinstance(value, int | float) and not value > 0):
            raise ModelError(f"{file}: {key} is {value!r}, not a number above 0", hint=_PUBLISHED)
    for key, value, other, other_value in _rope_contradictions(tree):
        raise ModelError(
            f"{file}: {key} is {value!r}, and {other} is {other_value!r}: transformers 5 and other programs would "
            "compute different rotary embeddings",
            hint="make both equal, or remove the wrong one",
        )
    heads, groups = tree.get("num_attention_heads"), tree.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ModelError(
            f"{file}: num_attention_heads {heads} is no multiple of num_key_value_heads {groups}, so "
            "attention heads cannot be divided equally among key and value heads",
            hint=_PUBLISHED,
        )
    if any(isinstance(tree.get(key), list) for key in _SIZES):
        return
    name, width = _rotary_width(tree)
    if width % 2:
        raise ModelError(
            f"{file}: {name} {width} is an odd number, but rotary embeddings rotate pairs", hint=_PUBLISHED
        )


def _rope_contradictions(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield pairs of contradicting rotary settings as (older key, its value, new key, its value). New keys are those in
    `rope_parameters`, which transformers 5 writes.
    """
    new, old = tree.get("rope_parameters"), tree.get("rope_scaling")
    if not isinstance(new, Mapping) or any(isinstance(value, Mapping) for value in new.values()):
        return
    stated = {key: (key, tree[key]) for key in ("rope_theta", "partial_rotary_factor") if tree.get(key) is not None}
    if "rope_scaling" in tree and (old is None or isinstance(old, Mapping)):
        stated |= {key: (f"rope_scaling.{key}", value) for key, value in (old or {}).items() if key not in _ROPE_KINDS}
        kinds = [next((part[key] for key in _ROPE_KINDS if part.get(key)), "default") for part in (old or {}, new)]
        if (kinds[0] in _UNSCALED) != (kinds[1] in _UNSCALED):
            yield "rope_scaling", old, "rope_parameters.rope_type", kinds[1]
    for key, (name, value) in stated.items():
        if key in new and new[key] != value:
            yield name, value, f"rope_parameters.{key}", new[key]


def _numbers(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((key, tree[key]) for key in _POSITIVE if key in tree)
    for section in ("rope_parameters", "rope_scaling", "main", "compress"):
        if isinstance(part := tree.get(section), Mapping):
            yield from ((f"{section}.{key}", value) for key, value in _numbers(part))


def _rotary_width(tree: Mapping[str, Any]) -> tuple[str, int]:
    """The config.json key that sets how many columns of an attention head are rotated, and that number; 0 if it is not
    known.
    """
    family, rope = family_of(str(tree.get("model_type"))), tree.get("rope_parameters")
    # If the number of rotated columns is a fraction, transformers 5.23 rounds it up (modeling_rope_utils.py:902).
    is_partial = any("partial_rotary_factor" in part for part in (tree, rope) if isinstance(part, Mapping))
    if family.is_generic or family.encoder is not None or is_partial:
        return "", 0
    if key := next((key for key in ("qk_rope_head_dim", "head_dim") if tree.get(key)), ""):
        return key, tree[key]
    heads = tree.get("num_attention_heads")
    return "hidden_size / num_attention_heads", tree.get("hidden_size", 0) // heads if heads else 0


def _counts(tree: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - whatever a config.json holds
    for name, part in tree.items() if isinstance(tree, Mapping) else ():
        if name in _LAYERS and part is not None:
            yield name, part
        elif isinstance(part, Mapping):
            yield from ((f"{name}.{key}", value) for key, value in part.items() if key in _LAYERS and value is not None)


def max_positions(model: Mapping[str, Any]) -> int | None:
    """Maximum number of tokens of a document that the model's config.json allows; None if it sets no limit."""
    positions, encoder = model.get("max_position_embeddings"), family_of(str(model.get("model_type"))).encoder
    if not positions:
        return None
    # RoBERTa's positions start after the padding position (transformers 5.23, roberta/modeling_roberta.py:142-156).
    first = int(model.get("pad_token_id") or 0) + 1 if encoder is not None and encoder.positions_follow_padding else 0
    return int(positions) - first


def _config_file(path: str) -> Path:
    folder = Path(path)
    check_model_path(path)
    if (folder / _NAME).is_file():
        return folder / _NAME
    if folder.is_dir():
        raise ModelError(
            f"model folder `{folder}` has no config.json", hint="name the folder that holds the model's config.json"
        )
    return _hub_file(path)


def check_model_path(path: str) -> None:
    """Raise a ModelError if the path is an adapter, or neither a folder nor a hub id.

    A folder with both an adapter and a model counts as an adapter, because transformers would read the base model that
    the adapter names.
    """
    folder = Path(path)
    if (folder / "adapter_config.json").is_file():
        base = "BASE"
        with suppress(OSError, ValueError, LookupError, TypeError):
            base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
        raise ModelError(
            f"model `{path}` is an adapter, not a model",
            hint=f"merge it first: ds-finetune export {shlex.quote(path)} OUT --base {shlex.quote(str(base))}",
        )
    if folder.is_dir():
        return
    if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(
            f"model `{path}` is not a folder", hint="name a folder that holds config.json, or a hub id such as org/name"
        )


def _hub_file(path: str) -> Path:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    from ds_finetune.foreign.hub_access import hub_problem, without_password

    problem = hub_problem()
    try:
        return Path(hf_hub_download(path, _NAME, local_files_only=bool(problem)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as missing:
        where = f"on the hub: {without_password(missing)}"
        if problem:
            where = f"in the hub's cache {constants.HF_HUB_CACHE}, and {problem}"
        raise ModelError(
            f"config.json of model `{path}` is neither in a folder of this name nor {where}",
            hint="check the name, give a local folder with config.json, or start where the hub can be reached",
        ) from missing
