"""Traced FLOPs against counts by hand from dimensions, and against torch's own counter on real models."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.plan.model_shape import RowCost
from ds_finetune.plan.plan import Plan
from ds_finetune.trainer.forecast import trace_utilisation
from ds_finetune.trainer.tracing import activations
from ds_finetune.trainer.tracing.activations import count_flops
from ds_finetune.trainer.tracing.cache import Traces
from tests.trainer.tracing.test_activations import AXES, LAYERS, planned, tree_of

TOKENS, VOCAB = 96, 2048


def one_row(folder: Path, tree: dict[str, Any], **settings: Any) -> tuple[Plan, ModelPlan]:
    """A plan with one row of TOKENS tokens and without recomputation, and its model."""
    train = {"max_seq_len": TOKENS, "micro_batch_size": 1, "activation_checkpointing": "none"}
    return planned(folder, tree, train=train | settings.pop("train", {}), **settings)


def by_hand(tree: dict[str, Any], *, attended: float = TOKENS / 2) -> float:
    """FLOPs of a token from dimensions: six for each weight of a product, and attention's two products per position."""
    hidden, layers, heads = tree["hidden_size"], tree["num_hidden_layers"], tree["num_attention_heads"]
    if "kv_lora_rank" in tree:
        query = key = tree["qk_nope_head_dim"] + tree["qk_rope_head_dim"]
        value, latent = tree["v_head_dim"], tree["kv_lora_rank"]
        attention = hidden * heads * query + hidden * (latent + tree["qk_rope_head_dim"])
        attention += latent * heads * (tree["qk_nope_head_dim"] + value) + heads * value * hidden
    else:
        query = key = value = tree.get("head_dim", hidden // heads)
        attention = 2 * hidden * heads * query + 2 * hidden * tree["num_key_value_heads"] * key
    dense = 3 * hidden * tree["intermediate_size"]
    experts = tree.get("num_experts", tree.get("n_routed_experts", 0))
    sparse = hidden * experts + 3 * hidden * tree.get("moe_intermediate_size", 0) * (
        tree.get("num_experts_per_tok", 0) + tree.get("n_shared_experts", 0)
    )
    first = tree.get("first_k_dense_replace", 0) if experts else layers
    weights = layers * attention + first * dense + (layers - first) * sparse + hidden * tree["vocab_size"]
    return 6 * weights + 6 * layers * heads * (query + value) * attended


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "qwen3_moe"])
def test_flops_equal_a_count_from_dimensions(tmp_path: Path, family: str) -> None:
    tree = tree_of(family)
    plan, model = one_row(tmp_path, tree)
    assert count_flops(plan, model) == pytest.approx(TOKENS * by_hand(tree))
    # Rows are balanced over ranks by the same products.
    cost = RowCost.of(model.described, "none")
    assert 2 * cost.of_row(np.array([TOKENS]), TOKENS, row_len=None) == pytest.approx(TOKENS * by_hand(tree))


def test_frozen_weights_get_no_gradients(tmp_path: Path) -> None:
    """Adapters on the queries of the last layer of two: below it there is only a forward."""
    tree, rank = tree_of("llama", num_hidden_layers=2), 8
    lora = {"rank": rank, "target_modules": [r"model\.layers\.1\.self_attn\.q_proj"]}
    hidden, head_dim = tree["hidden_size"], tree["hidden_size"] // tree["num_attention_heads"]
    queries, keys = hidden * hidden, hidden * tree["num_key_value_heads"] * head_dim
    mlp, head = 3 * hidden * tree["intermediate_size"], hidden * tree["vocab_size"]
    forward = 2 * (2 * queries + 2 * keys + mlp) + head
    # Gradients of hidden states: through the head, the MLP and the output projection of the last layer.
    backward = head + mlp + queries
    # Of the adapter: both products forward, the gradients of both matrices, and of what is between them.
    adapter = 2 * (rank * hidden) + 2 * (rank * hidden) + rank * hidden
    attention = (1 + 3) * 2 * 2 * hidden * TOKENS / 2
    expected = 2 * (forward + backward + adapter) + attention
    assert count_flops(*one_row(tmp_path, tree, lora=lora)) == pytest.approx(TOKENS * expected)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_adapters_of_all_layers(tmp_path: Path, quantize: str | None) -> None:
    """Four FLOPs for each frozen weight and six for each of an adapter. The hidden states of the frozen embedding need
    no gradients.
    """
    tree, rank = tree_of("llama", hidden_size=64, intermediate_size=128), 8
    hidden, inner, layers = tree["hidden_size"], tree["intermediate_size"], tree["num_hidden_layers"]
    keys = tree["num_key_value_heads"] * hidden // tree["num_attention_heads"]
    inputs_of_attention = [(hidden, hidden), (hidden, keys), (hidden, keys)]
    products = [*inputs_of_attention, (hidden, hidden), (hidden, inner), (hidden, inner), (inner, hidden)]
    expected = 4 * (layers * sum(rows * columns for rows, columns in products) + hidden * tree["vocab_size"])
    expected += 6 * layers * sum(rank * (rows + columns) for rows, columns in products)
    expected -= 2 * sum(rows * columns + rank * rows for rows, columns in inputs_of_attention)
    expected += 6 * layers * 2 * hidden * TOKENS / 2
    assert count_flops(*one_row(tmp_path, tree, lora={"rank": rank, "quantize": quantize})) == pytest.approx(
        TOKENS * expected
    )


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_torch_counts_the_same_products_of_a_real_model(tmp_path: Path, family: str) -> None:
    tree = tree_of(family, num_hidden_layers=2)
    # torch's counter has no formula of grouped products, so each expert is computed by itself.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tree), **eager)
    ids = torch.randint(0, VOCAB, (1, TOKENS))
    with FlopCounterMode(display=False) as counter:
        lm(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    # Eager attention also computes products with later tokens, which causal attention masks.
    squares = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    expected = counter.get_total_flops() - squares / 2
    assert count_flops(*one_row(tmp_path, tree)) == pytest.approx(expected)


@pytest.mark.parametrize("way", ["recomputed", "tp", "ep", "pp"])
def test_recomputation_and_layout_do_not_change_model_flops(tmp_path: Path, way: str) -> None:
    tree = tree_of("qwen3_moe")
    recomputed = {"train": {"activation_checkpointing": "full", "tiled_mlp": True}}
    plan, model = planned(tmp_path, tree, **(recomputed if way == "recomputed" else AXES[way]))
    plan = replace(plan, data=plan.data.model_copy(update={"cache_dir": str(tmp_path / "cache")}))
    traces = Traces(plan, lambda: model)
    assert traces.flops_per_token(plan, TOKENS) == pytest.approx(by_hand(tree))
    again = Traces(plan, lambda: pytest.fail("traced again"))
    assert again.flops_per_token(plan, TOKENS) == pytest.approx(by_hand(tree))


@pytest.mark.parametrize("family", ["qwen3", "exaone4", "gpt_oss"])
def test_windows_limit_what_is_attended(tmp_path: Path, family: str) -> None:
    """Full-attention layers of EXAONE 4 pass no window, while their modules have one. Biases of gpt_oss's experts are
    added, which is no product.
    """
    window = 16
    kinds = {"use_sliding_window": True, "max_window_layers": 0} if family == "qwen3" else {}
    tree = tree_of(
        family, **kinds, sliding_window=window, layer_types=["full_attention", "sliding_attention"] * (LAYERS // 2)
    )
    near = (window * window / 2 + (TOKENS - window) * window) / TOKENS
    experts = (
        {"num_experts": tree["num_local_experts"], "moe_intermediate_size": tree["intermediate_size"]}
        if (family == "gpt_oss")
        else {}
    )
    expected = by_hand(tree | experts, attended=(TOKENS / 2 + near) / 2)
    assert count_flops(*one_row(tmp_path, tree)) == pytest.approx(TOKENS * expected)


def test_attention_counts_the_length_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two documents of a pair are half as long as the row. MFU uses the mean length, weighted by tokens."""
    tree = tree_of("llama")
    reward = {"objective": {"name": "simpo", "beta": 2.0}, "data": {"train": "none.jsonl"}}
    pairs = count_flops(*one_row(tmp_path, tree, **reward))
    assert pairs == pytest.approx(TOKENS * by_hand(tree, attended=TOKENS / 4))

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    plan, model = planned(tmp_path, tree)
    plan = replace(plan, data=plan.data.model_copy(update={"cache_dir": str(tmp_path / "cache")}))
    rows = object.__new__(PreparedRows)
    monkeypatch.setattr(PreparedRows, "mean_attended", TOKENS / 2)
    run: Any = SimpleNamespace(
        plan=plan, model=model, inputs=SimpleNamespace(train=rows), traces=Traces(plan, lambda: model)
    )
    messages: list[str] = []
    utilisation = trace_utilisation(run, messages.append)
    assert utilisation is not None
    assert utilisation.flops_per_token == pytest.approx(by_hand(tree))
    assert utilisation.peak_flops == 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU that is not in the table")
    assert trace_utilisation(run, messages.append) is None
    assert messages == []


def test_a_run_says_why_it_has_no_utilisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise KeyError("values")

    monkeypatch.setattr(activations, "count_flops", fail)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    plan, model = planned(tmp_path, tree_of("llama"))
    plan = replace(plan, data=plan.data.model_copy(update={"cache_dir": str(tmp_path / "cache")}))
    traced: list[str] = []
    messages: list[str] = []
    run: Any = SimpleNamespace(
        plan=plan,
        model=model,
        inputs=SimpleNamespace(train=None),
        traces=Traces(plan, lambda: model, traced.append),
    )
    assert trace_utilisation(run, messages.append) is None
    (message,) = messages
    assert message.startswith(f"perf/mfu is not measured: the FLOPs of {tmp_path} cannot be traced: KeyError at")
    assert traced == ["computing a forward and backward on tensors without memory, to trace the model's FLOPs"]
