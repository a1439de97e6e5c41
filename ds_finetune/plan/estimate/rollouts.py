"""Memory for sampling answers between steps: KV cache and logits.

Prompts with answers are assumed to fill rows of `train.max_seq_len`, with no answer ending early.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ds_finetune.config.objectives import GrpoObjective
from ds_finetune.families.layer_rules import ModelConfig
from ds_finetune.plan.estimate.rank_weights import RankWeights
from ds_finetune.plan.estimate.rows import MemoryRow, Place
from ds_finetune.plan.estimate.zero_rows import FetchingRules, gathered_weights, num_persistent
from ds_finetune.plan.forward import PROMPT_TOKENS, WEIGHTS_SHARE, head_widths, rows_drawn_at_once, rows_of_batch
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.tested_layouts import WEIGHT_BYTES

_WIDE = 4
_DRAWING_BYTES = 30
"""Bytes per logit of the rows whose random numbers are computed at once (engine/sampling/noise.py)."""
_OPTION = "rollout.batch_rows"


def samples_itself(plan: Plan) -> bool:
    """Whether the ranks of a run sample answers themselves."""
    return plan.objective.row.head == "answers" and plan.rollout.engine == "own"


@dataclass(frozen=True)
class Sampling:
    """How a rank samples the answers of a rollout."""

    rows: int
    """Number of answers per batch."""
    token_bytes: int
    """Bytes of keys and values per token, over all layers of the rank."""
    is_gathered: bool
    """Whether weights partitioned by ZeRO-3 are gathered once for all answers, instead of for each token."""


def group_size(plan: Plan) -> int:
    """Number of answers to a prompt."""
    assert isinstance(plan.objective, GrpoObjective)
    return plan.objective.group_size


def sampling_of(plan: Plan, model: ModelConfig, weights: RankWeights, *, free: float) -> Sampling:
    """How a rank with `free` bytes between steps samples."""
    size = group_size(plan)
    prompts = -(-plan.rollout.prompts_per_step * plan.rollout.steps_per_rollout // plan.zero_ranks)
    whole = WEIGHT_BYTES[plan.precision] * weights.numel
    is_cut = plan.zero_stage == 3 and plan.zero_ranks > 1
    is_gathered = is_cut and plan.offload_param == "none" and whole <= WEIGHTS_SHARE * free
    each = WEIGHT_BYTES[plan.precision] * _cached_numbers(model, weights, tp=plan.mesh.tp)
    rows = plan.rollout.batch_rows
    if rows == "auto":
        left, vocabulary = free - (whole if is_gathered else 0), int(model["vocab_size"])
        rows = rows_of_batch(left, tokens=plan.batch.max_seq_len, token_bytes=each, vocabulary=vocabulary)
    if rows >= size:
        # Groups stay together, and batches have equal sizes (engine/sampling/sampler.py).
        rows = size * -(-prompts // -(-prompts // (rows // size)))
    return Sampling(rows, each, is_gathered)


def _cached_numbers(model: ModelConfig, weights: RankWeights, *, tp: int) -> int:
    """Numbers per token in the KV cache, over all layers of a rank."""
    if (rank := model.get("kv_lora_rank")) is not None:
        each = rank + model["qk_rope_head_dim"]
    else:
        each = sum(head_widths(model)) * -(-int(model.get("num_key_value_heads") or model["num_attention_heads"]) // tp)
    chosen = sum(kind.has_indexer for kind in weights.layer_kinds)
    return int(each * len(weights.layers) + chosen * (model.get("index_head_dim") or 0))


def sampling_rows(
    plan: Plan, model: ModelConfig, weights: RankWeights, *, forward: int, free: float
) -> Iterator[MemoryRow]:
    """Rows for the moment in which answers are sampled, on a rank with `free` bytes between steps.

    `forward` are bytes per token in the forward of one layer.
    """
    home: Place = "host" if plan.device == "cpu" else "gpu"
    found, width = sampling_of(plan, model, weights, free=free), WEIGHT_BYTES[plan.precision]
    yield from _weight_rows(plan, weights, found, home)
    cache = found.rows * plan.batch.max_seq_len * found.token_bytes
    yield MemoryRow("keys and values of answers", home, cache, _OPTION, ("rollout",))
    logits = found.rows * int(model["vocab_size"])
    at_once = min(found.rows, rows_drawn_at_once(plan.device, vocabulary=int(model["vocab_size"])))
    drawing = _DRAWING_BYTES * at_once * int(model["vocab_size"])
    # The previous token's logits are held until the next ones are computed.
    work = _WIDE * logits + max(drawing, (_WIDE if width == _WIDE else width + _WIDE) * logits)
    longest = max(1, plan.batch.max_seq_len - plan.rollout.max_new_tokens)
    tokens = min(max(PROMPT_TOKENS // longest, 1), -(-found.rows // group_size(plan))) * longest
    prompts = tokens * (found.token_bytes + forward) + _WIDE * logits
    # When columns are added or rows dropped, the cache is copied layer by layer (engine/sampling/row_cache.py).
    copied = cache // len(weights.layers)
    yield MemoryRow("forwards of answers", home, max(work, prompts, copied), _OPTION, ("rollout",))


def _weight_rows(plan: Plan, weights: RankWeights, found: Sampling, home: Place) -> Iterator[MemoryRow]:
    if plan.zero_stage != 3 or plan.zero_ranks == 1:
        return
    width, rules = WEIGHT_BYTES[plan.precision], FetchingRules.of(plan.zero)
    if found.is_gathered:
        beside = sum(kind.numel - kind.sharded for kind in weights.kinds) - num_persistent(weights.kinds, rules)
        yield MemoryRow("whole weights, rollout", home, width * max(beside, 0), "", ("rollout",))
        return
    fetched = [kind for kind in weights.kinds if kind.sharers > 1 or plan.offload_param != "none"]
    forward, *_ = gathered_weights(fetched, rules, passes=1, home=home)
    yield MemoryRow("gathered weights, rollout", home, width * (forward.numel + forward.arriving), "", ("rollout",))
