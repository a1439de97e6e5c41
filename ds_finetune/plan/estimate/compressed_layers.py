"""What layers of DeepSeek-V4 keep and compute beside those of other families: compressed attention and the residual
streams of hyper-connections (model/attention/compressed_attention.py, model/hyper_connections.py).
"""

from ds_finetune.families.layer_rules import ModelConfig, window_of
from ds_finetune.families.table import family_of
from ds_finetune.plan.estimate.widths import WIDE, Widths, norm_bytes

_INDEX = 8
_INPUTS = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj", "compressor.kv_proj", "compressor.gate_proj")


def streams_of(model: ModelConfig) -> int:
    """Hidden states of a token between layers."""
    return int(model.get("hc_mult", 4)) if family_of(str(model["model_type"])).compresses else 1


def mixing_bytes(model: ModelConfig, widths: Widths) -> int:
    """Kept by the hyper-connections of both sublayers: products and root of a token, what its sublayer gives, and the
    weights by which that is added; and the streams between both. The layer's input is not among them.
    """
    streams, hidden = streams_of(model), model["hidden_size"]
    if streams == 1:
        return 0
    weights = WIDE * (1 + (2 + streams) * streams) + widths.number * streams
    return 2 * (weights + widths.number * hidden) + widths.number * streams * hidden


def mixing_moments(model: ModelConfig, widths: Widths, mlp: int) -> tuple[int, ...]:
    """Bytes beside what attention keeps at the moments when streams of the second sublayer have gradients: their own,
    while the `mlp` and its router are kept; then those before the sublayer, and copies in fp32 of narrower ones, with
    what balances streams: every sum, and some matrices.
    """
    streams, wide = streams_of(model), streams_of(model) * model["hidden_size"]
    if streams == 1:
        return ()
    balance = (2 * int(model.get("hc_sinkhorn_iters", 20)) - 1 + 4 * streams) * streams
    copies = WIDE if widths.number == WIDE else 3 * WIDE
    return mlp + widths.number * wide, WIDE * balance + (widths.number + copies) * wide


def one_stream_bytes(model: ModelConfig, widths: Widths) -> int:
    """Kept where one hidden state is made of all streams after the last layer: these, products and a root."""
    streams = streams_of(model)
    return 0 if streams == 1 else widths.number * streams * model["hidden_size"] + WIDE * (1 + streams)


def last_streams_bytes(model: ModelConfig, widths: Widths) -> int:
    """Held while the streams after the last layer get gradients: those, and copies in fp32 of narrower ones and of the
    gradient that they are made of.
    """
    streams, hidden = streams_of(model), model["hidden_size"]
    copies = WIDE if widths.number == WIDE else WIDE + widths.number
    return 0 if streams == 1 else one_stream_bytes(model, widths) + ((streams + 1) * copies + streams * WIDE) * hidden


def compressed_attention_bytes(model: ModelConfig, widths: Widths) -> tuple[int, int]:
    """Bytes that attention keeps, and those of its gradients."""
    width, heads, columns = widths.number, model["num_attention_heads"] // widths.tp, model["head_dim"]
    rope = int(model.get("qk_rope_head_dim") or columns * model.get("partial_rotary_factor", 1))
    rank = model["q_lora_rank"]
    kept = norm_bytes(rank, widths, normalised=WIDE) + (width * rank if widths.keeps("self_attn.q_b_proj") else 0)
    kept += norm_bytes(columns, widths, normalised=WIDE)
    # Queries are normalised without a weight; then they, tokens, the output and the logarithms of sums are kept.
    kept += width * (3 * heads + 1) * columns + 2 * WIDE * heads
    kept += 3 * WIDE * rope
    kept += width * heads * columns if widths.keeps("self_attn.o_a_proj") else 0
    kept += width * model["o_groups"] * model["o_lora_rank"] if widths.keeps("self_attn.o_b_proj") else 0
    kept += widths.low_rank(*(f"self_attn.{name}" for name in _INPUTS)) + _entries(model, widths, rope)
    return kept, heads * columns * (2 * width + 2 * WIDE)


def _entries(model: ModelConfig, widths: Widths, rope: int) -> int:
    """Kept for each token by the compressor, in windows that overlap or do not, and by what it makes of them."""
    window = window_of(model, widths.kind)
    if window is None:
        return 0
    width, columns = widths.number, model["head_dim"]
    series = window.series
    weights = WIDE + width if width == WIDE else WIDE + 2 * width
    entry = norm_bytes(columns, widths, normalised=WIDE)
    entry += width * columns + WIDE * rope
    places = _INDEX * (2 * series - 1) + (series if series > 1 else 0)
    return series * columns * weights + places + entry // window.tokens
