"""Adds routers and routed experts to an ONNX graph. A loop runs over the experts that tokens are routed to."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from onnx import helper
from transformers import PretrainedConfig

from ds_finetune.export.onnx.graph import Graph, value
from ds_finetune.export.onnx.layers import Layers, array_of, parts_of, silu
from ds_finetune.model.weights.names import hub_pieces

_FP32 = np.dtype(np.float32)


Routing = tuple[str, str]
"""Routing of tokens to experts: expert indices int64 [tokens, k], and routing weights fp32 [tokens, k]."""


def moe(layers: Layers, x: str, name: str, config: PretrainedConfig) -> str:
    """Add the mixture-of-experts layer `name` for x [batch, length, hidden]: routed and shared experts."""
    graph = layers.graph
    flat = graph.op("Reshape", x, graph.ints(-1, config.hidden_size))
    matrix = layers.weight(f"{name}.gate.weight", torch.t, dtype=_FP32)
    logits = graph.op("MatMul", graph.cast(flat, np.float32) if graph.is_half() else flat, matrix)
    routing = ROUTERS[parts_of(config).router or ""](layers, logits, f"{name}.gate", config)
    routed = graph.op("Reshape", _experts(layers, flat, routing, f"{name}.experts"), graph.op("Shape", x))
    shared = getattr(layers.module(name), "shared_experts", None)
    if shared is None or not shared.up_proj.out_features:
        return routed
    return graph.op("Add", routed, layers.mlp(x, f"{name}.shared_experts"))


def _route_sigmoid(layers: Layers, logits: str, name: str, config: PretrainedConfig) -> Routing:
    """Add a sigmoid router, as in transformers 5.23 (modeling_deepseek_v3.py:133-158). The correction bias affects only
    the choice of experts. Groups of experts rank by the sum of their two best experts' scores.
    """
    graph, experts = layers.graph, layers.module(name).num_experts
    scores = graph.op("Sigmoid", logits)
    choice = graph.op("Add", scores, layers.weight(f"{name}.e_score_correction_bias", dtype=_FP32))
    pairs, _ = _top(graph, _in_groups(graph, choice, config.n_group, experts), 2)
    is_candidate = _in_best_groups(graph, graph.op("ReduceSum", pairs, graph.ints(-1), keepdims=0), config, experts)
    candidates = graph.op("Where", is_candidate, choice, graph.scalar(-np.inf, _FP32))
    _, index = _top(graph, candidates, config.num_experts_per_tok)
    weights = graph.op("GatherElements", scores, index, axis=1)
    if config.norm_topk_prob:
        total = graph.op("Add", graph.op("ReduceSum", weights, graph.ints(-1), keepdims=1), graph.scalar(1e-20, _FP32))
        weights = graph.op("Div", weights, total)
    return index, graph.op("Mul", weights, graph.scalar(config.routed_scaling_factor, _FP32))


def _route_grouped_softmax(layers: Layers, logits: str, name: str, config: PretrainedConfig) -> Routing:
    """Add a softmax router with groups of experts, which rank by their best expert, as in transformers 5.23
    (modeling_deepseek_v2.py:97-116). Routing weights are not normalised.
    """
    graph, experts = layers.graph, layers.module(name).num_experts
    scores = graph.op("Softmax", logits, axis=-1)
    if config.topk_method == "group_limited_greedy":
        best = graph.op("ReduceMax", _in_groups(graph, scores, config.n_group, experts), graph.ints(-1), keepdims=0)
        scores = graph.op("Where", _in_best_groups(graph, best, config, experts), scores, graph.scalar(0, _FP32))
    weights, index = _top(graph, scores, config.num_experts_per_tok)
    return index, graph.op("Mul", weights, graph.scalar(config.routed_scaling_factor, _FP32))


def _route_softmax(layers: Layers, logits: str, name: str, config: PretrainedConfig) -> Routing:
    """Add a softmax router: the top k scores, divided by their sum if the router's `norm_topk_prob` is true or missing.
    It computes as transformers 5.23 does, modeling_qwen3_moe.py:257-266, modeling_olmoe.py:326-335 and
    modeling_mixtral.py:107-114.
    """
    graph = layers.graph
    weights, index = _top(graph, graph.op("Softmax", logits, axis=-1), config.num_experts_per_tok)
    if getattr(layers.module(name), "norm_topk_prob", True):
        weights = graph.op("Div", weights, graph.op("ReduceSum", weights, graph.ints(-1), keepdims=1))
    return index, weights


ROUTERS: Mapping[str, Callable[[Layers, str, str, PretrainedConfig], Routing]] = {
    "grouped_softmax": _route_grouped_softmax,
    "softmax": _route_softmax,
    "sigmoid": _route_sigmoid,
}
"""Builders of routers, by name in a family's `OnnxGraph`; each gets router logits, fp32 [tokens, experts]."""


def _top(graph: Graph, x: str, k: int) -> list[str]:
    return graph.ops("TopK", x, graph.ints(k), names=2, axis=-1)


def _in_groups(graph: Graph, scores: str, groups: int, experts: int) -> str:
    return graph.op("Reshape", scores, graph.ints(-1, groups, experts // groups))


def _in_best_groups(graph: Graph, group_scores: str, config: PretrainedConfig, experts: int) -> str:
    """Mask [tokens, experts] of the experts in each token's best groups, by `group_scores` [tokens, groups]."""
    groups = config.n_group
    _, index = _top(graph, group_scores, config.topk_group)
    none = graph.op("ConstantOfShape", graph.op("Shape", group_scores))
    one = graph.op("Expand", graph.scalar(1, _FP32), graph.op("Shape", index))
    mask = graph.op("ScatterElements", none, index, one, axis=1)
    spread = graph.op("Expand", graph.op("Unsqueeze", mask, graph.ints(-1)), graph.ints(1, groups, experts // groups))
    return graph.op("Greater", graph.op("Reshape", spread, graph.ints(-1, experts)), graph.scalar(0, _FP32))


def _experts(layers: Layers, x: str, routing: Routing, name: str) -> str:
    """Add the weighted sum of each token's experts, [tokens, hidden], summed in fp32 and returned in the graph's dtype.

    An ONNX Loop runs once for each expert to which a token is routed. It takes the expert's weights from the stacked
    tensor, applies them to the expert's tokens, and adds the results to these tokens' rows. So each token costs only
    its own experts, plus a copy of the weights of each expert in use.
    """
    graph, module = layers.graph, layers.module(name)
    stacks = _stacks(layers, name)
    by_expert = graph.op("Concat", graph.op("Shape", x, start=0, end=1), graph.ints(module.num_experts), axis=0)
    zeros = graph.op("ConstantOfShape", by_expert)
    weights = graph.op("ScatterElements", zeros, *routing, axis=1)
    is_used = graph.op("Greater", graph.op("ReduceMax", weights, graph.ints(0), keepdims=0), graph.scalar(0, _FP32))
    used = graph.op("Squeeze", graph.op("NonZero", is_used), graph.ints(0))
    count = graph.op("Squeeze", graph.op("Shape", used), graph.ints(0))
    nothing = graph.op("ConstantOfShape", graph.op("Shape", x))
    # The nodes of the loop's body may use values of `graph` by name, so both share constants, weights and numbers.
    inner = replace(graph, nodes=[])
    step, condition, summed = (graph.new_name(kind) for kind in ("step", "condition", "summed"))
    expert = inner.op("Gather", used, step, axis=0)
    gate_up, down = (inner.op("Gather", stack, expert, axis=0) for stack in stacks)
    column = inner.op("Gather", weights, expert, axis=1)
    rows = inner.op("Squeeze", inner.op("NonZero", column), inner.ints(0))
    gate_and_up = inner.op("MatMul", inner.op("Gather", x, rows, axis=0), gate_up)
    gate, up = inner.ops("Split", gate_and_up, names=2, axis=-1, num_outputs=2)
    y = inner.op("MatMul", inner.op("Mul", silu(inner, gate), up), down)
    y = inner.cast(y, np.float32) if inner.is_half() else y
    scale = inner.op("Unsqueeze", inner.op("Gather", column, rows, axis=0), inner.ints(1))
    added = inner.op("Add", inner.op("Gather", summed, rows, axis=0), inner.op("Mul", y, scale))
    result = inner.op("ScatterND", summed, inner.op("Unsqueeze", rows, inner.ints(1)), added)
    still = inner.op("Identity", condition)
    hidden = module.hidden_dim
    loop = helper.make_graph(
        inner.nodes,
        "body",
        [value(step, np.int64, ()), value(condition, np.bool_, ()), value(summed, np.float32, ("tokens", hidden))],
        [value(still, np.bool_, ()), value(result, np.float32, ("tokens", hidden))],
    )
    total = graph.op("Loop", count, "", nothing, body=loop)
    return graph.cast(total, graph.dtype) if graph.is_half() else total


def _stacks(layers: Layers, name: str) -> tuple[str, str]:
    """Add the stacked weights of experts: gate and up [experts, hidden, 2 x inner], down [experts, inner, hidden]."""
    graph, module = layers.graph, layers.module(name)
    experts, hidden, inner = module.num_experts, module.hidden_dim, module.intermediate_dim

    def matrices(leaf: str) -> Iterator[np.ndarray]:
        pieces = hub_pieces(f"{name}.{leaf}", tuple(getattr(module, leaf).shape), layers.family)
        for expert, parts in groupby(pieces, lambda piece: piece.index[0]):
            matrix = torch.cat([layers.read(piece.key) for piece in parts])
            yield array_of(matrix.t(), graph.dtype, f"{name}.{expert}")

    gate_up = graph.weight(f"{name}.gate_up_proj", (experts, hidden, 2 * inner), lambda: matrices("gate_up_proj"))
    return gate_up, graph.weight(f"{name}.down_proj", (experts, inner, hidden), lambda: matrices("down_proj"))
