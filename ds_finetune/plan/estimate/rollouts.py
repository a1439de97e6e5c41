"""Memory for sampling answers between steps: KV cache and logits.

Prompts with answers are assumed to fill rows of `train.max_seq_len`, with no answer ending early.
"""

from collections.abc import Iterator

from ds_finetune.config.objectives import GrpoObjective
from ds_finetune.families.layer_rules import ModelConfig
from ds_finetune.plan.estimate.rank_weights import RankWeights
from ds_finetune.plan.estimate.rows import MemoryRow
from ds_finetune.plan.estimate.zero_rows import FetchingRules, gathered_weights, num_persistent
from ds_finetune.plan.forward import PROMPT_TOKENS, WEIGHTS_SHARE, head_widths, rows_of_batch, rows_sampled_at_once
from ds_finetune.plan.plan import Plan

_WIDE = 4
_DRAWING_BYTES = 30
"""Bytes per logit while the random numbers of sampling are computed (engine/sampling/noise.py)."""
_OPTION = "rollout.batch_rows"


def samples_itself(plan: Plan) -> bool:
    """Whether the ranks of a run sample answers themselves."""
    return plan.objective.row.head == "answers" and plan.rollout.engine == "own"


def _cached_numbers(model: ModelConfig, weights: RankWeights, *, tp: int) -> int:
    """Elements of the KV cache per token, over all layers of a rank."""
    if (rank := model.get("kv_lora_rank")) is not None:
        each = rank + model["qk_rope_head_dim"]
    else:
        each = sum(head_widths(model)) * -(-int(model.get("num_key_value_heads") or model["num_attention_heads"]) // tp)
    chosen = sum(kind.has_indexer for kind in weights.layer_kinds)
    return int(each * len(weights.layers) + chosen * (model.get("index_head_dim") or 0))


def sampling_rows(
    plan: Plan, model: ModelConfig, weights: RankWeights, *, forward: int, free: float
) -> Iterator[MemoryRow]:
    """Memory rows for sampling answers, on a rank whose device has `free` bytes free between steps.

    `forward` is the peak of bytes per token in the forward of one layer.
    """
    assert isinstance(plan.objective, GrpoObjective)
    group_size, home, width, vocabulary = plan.objective.group_size, plan.home, plan.weight_bytes, model["vocab_size"]
    if plan.zero_stage == 3 and plan.zero_ranks > 1:
        rules = FetchingRules.of(plan.zero)
        # ZeRO-3 weights that fit into free memory are gathered once for all answers. Otherwise they are gathered again
        # for each token.
        if plan.offload_param == "none" and width * weights.numel <= WEIGHTS_SHARE * free:
            free -= width * weights.numel
            gathered = max(weights.numel - weights.sharded - num_persistent(weights.kinds, rules), 0)
            yield MemoryRow("whole weights, rollout", home, width * gathered, "", ("rollout",))
        else:
            fetched = [kind for kind in weights.kinds if kind.sharers > 1 or plan.offload_param != "none"]
            most, *_ = gathered_weights(fetched, rules, passes=1, home=home)
            size = width * (most.numel + most.arriving)
            yield MemoryRow("gathered weights, rollout", home, size, "", ("rollout",))
    token_bytes, rows = width * _cached_numbers(model, weights, tp=plan.mesh.tp), plan.rollout.batch_rows
    if rows == "auto":
        rows = rows_of_batch(free, tokens=plan.train.max_seq_len, token_bytes=token_bytes, vocabulary=vocabulary)
    if rows >= group_size:
        # The answers to a prompt are in one batch, and all batches have equal sizes (engine/sampling/sampler.py).
        prompts = -(-plan.rollout.prompts_per_step * plan.rollout.steps_per_rollout // plan.zero_ranks)
        rows = group_size * -(-prompts // -(-prompts // (rows // group_size)))
    cache, logits = rows * plan.train.max_seq_len * token_bytes, rows * vocabulary
    yield MemoryRow("keys and values of answers", home, cache, _OPTION, ("rollout",))
    at_once = min(rows, rows_sampled_at_once(plan.device, vocabulary=vocabulary))
    drawing = _DRAWING_BYTES * at_once * vocabulary
    # The previous token's logits are held until the next ones are computed.
    work = _WIDE * logits + max(drawing, (_WIDE if width == _WIDE else width + _WIDE) * logits)
    longest = max(1, plan.train.max_seq_len - plan.rollout.max_new_tokens)
    tokens = min(max(PROMPT_TOKENS // longest, 1), -(-rows // group_size)) * longest
    prompt_bytes = tokens * (token_bytes + forward) + _WIDE * logits
    # When columns are added or rows dropped, the cache is copied layer by layer (engine/sampling/row_cache.py).
    copied = cache // len(weights.layers)
    yield MemoryRow("forwards of answers", home, max(work, prompt_bytes, copied), _OPTION, ("rollout",))
