"""FLOPs by arithmetic against those that torch counts while a tiny model is trained, in every family."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from ds_finetune.auto_configs import AutoConfig
from ds_finetune.config.schema import RunConfig
from ds_finetune.estimate import operations as operations_module
from ds_finetune.estimate.operations import Work, operations
from ds_finetune.estimate.rank_weights import weights_of_run
from ds_finetune.estimate.row_shape import RowShape
from ds_finetune.families.table import FAMILIES
from ds_finetune.model import products
from ds_finetune.model.build import build_skeleton
from ds_finetune.model.cross_entropy import chunked_cross_entropy
from ds_finetune.model.head_chunks import NeededGradients
from ds_finetune.model.log_probs import HeadInputs, TwoPassHead
from ds_finetune.model.loss import TrainedModel
from ds_finetune.plan.plan import make_plan
from ds_finetune.world import World
from tests.estimate.test_activation_memory import config
from tests.model.tiny import CONFIGS

TOKENS = 1024
ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def _products_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter does not know oneDNN's operator, for which rows of experts are padded too."""
    monkeypatch.setattr(products, "is_for_onednn", lambda _: False)


def planned(tree: dict[str, Any], *, supervised: float = 0, **sections: Any) -> dict[str, float]:
    train = {"global_batch_size": 1, "max_seq_len": TOKENS, "precision": "fp32", "activation_checkpointing": False}
    train |= sections.pop("train", {})
    run = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o", "train": train, **sections}
    run |= {"deepspeed": {"zero_optimization": {"stage": 1}}}
    found = RunConfig.model_validate(run)
    plan = make_plan(found, world=World(0, 1, 0, 1, "a test"), device="cpu")
    work = Work(found, plan, tree, RowShape.full(TOKENS, supervised_share=supervised))
    (weights,) = weights_of_run(found, plan, tree)
    flops = dict.fromkeys(("attention", "products", "adapters"), 0.0)
    for operation in operations(work, weights, is_last=True):
        flops[operation.name if operation.name in flops else "products"] += operation.flops
    return flops


def counted(tree: dict[str, Any], *, recomputes: bool = False, is_frozen: bool = False) -> dict[str, float]:
    """What torch counts in the layers of a model: products, and attention as if it were not causal."""
    lm = build_skeleton(AutoConfig.for_model(**tree), attention="sdpa", dtype=torch.float32, device="cpu")
    for param in lm.parameters():
        param.data.normal_(0, 0.05)
    lm.base_model.layers.requires_grad_(not is_frozen)
    model = TrainedModel(lm)
    if recomputes:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
        lm.train()
    attention: list[float] = []

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        attention.append(sdpa_flop(query, key, value))
        return 0

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        attention.append(sdpa_backward_flop(grad, query, key, value))
        return 0

    def grouped(rows: Any, weight: Any, *_: Any, **kwargs: Any) -> int:
        """Of rows sorted by expert with all experts' weights, or of both sorted for the gradients of weights."""
        return 2 * rows[0] * rows[1] * weight[-1]

    mapping = {
        ATEN._grouped_mm: grouped,
        ATEN._scaled_dot_product_flash_attention_for_cpu: forward,
        ATEN._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    ids, positions = (torch.arange(TOKENS) % 90)[None], torch.arange(TOKENS)[None]
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with counter:
        hidden = model.hidden(ids, positions, ((TOKENS,),))
        (hidden[0] if isinstance(hidden, tuple) else hidden).sum().backward()
    return {"attention": sum(attention), "products": counter.get_total_flops()}


@pytest.mark.parametrize("family", CONFIGS)
def test_flops_are_those_that_torch_counts(family: str) -> None:
    tree = config(family) | {"model_type": family}
    found, expected = planned(tree), counted(tree)
    assert found["products"] == expected["products"]
    # A sink is one more key, and a query of its own.
    longer = (TOKENS + 1) ** 2 / TOKENS**2 if FAMILIES[family].has_sinks else 1.0
    assert 2 * found["attention"] * longer == pytest.approx(expected["attention"], rel=1e-9)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_recomputation_computes_layers_once_more(family: str) -> None:
    tree = config(family) | {"model_type": family}
    found, expected = planned(tree, train={"activation_checkpointing": True}), counted(tree, recomputes=True)
    # torch may end the recomputation of a layer before its last product, whose output no backward needs.
    last = 2 * TOKENS * tree["hidden_size"] * tree["intermediate_size"] * tree["num_hidden_layers"]
    assert found["products"] - last <= expected["products"] <= found["products"]
    assert found["products"] - last > planned(tree, train={"activation_checkpointing": False})["products"]
    assert 2 * found["attention"] == expected["attention"]


def test_frozen_weights_have_no_gradient() -> None:
    tree = config("qwen3") | {"model_type": "qwen3"}
    found = planned(tree, lora={"rank": 4, "target_modules": ["q_proj"]})
    assert found["products"] == counted(tree, is_frozen=True)["products"]
    columns = tree["hidden_size"] + tree["num_attention_heads"] * tree["head_dim"]
    assert found["adapters"] == 3 * 2 * TOKENS * 4 * columns * tree["num_hidden_layers"]


def test_chosen_tokens_are_attended_to_with_a_mask() -> None:
    tree = config("deepseek_v32") | {"model_type": "deepseek_v32", "index_topk": 64}
    assert planned(tree)["attention"] == 2 * planned(tree | {"index_topk": TOKENS})["attention"]
    assert planned(tree)["products"] > planned(tree | {"index_topk": TOKENS})["products"]


def test_heads_are_computed_for_supervised_tokens() -> None:
    hidden, weight = torch.randn(300, 16), torch.randn(96, 16)
    with FlopCounterMode(display=False) as counter:
        chunked_cross_entropy(hidden, weight, None, torch.zeros(300, dtype=torch.int64), NeededGradients(*[True] * 3))
    tree = config("llama") | {"model_type": "llama", "vocab_size": 96, "hidden_size": 16, "head_dim": 8}
    without, with_head = (planned(tree, supervised=share)["products"] for share in (0, 300 / TOKENS))
    assert with_head - without == counter.get_total_flops()


def test_losses_of_documents_compute_logits_again_but_those_of_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations_module, "head_chunk", lambda *_, **__: 128)
    inputs = HeadInputs(torch.randn(300, 16), torch.randn(96, 16), None, torch.zeros(300, dtype=torch.int64))
    with FlopCounterMode(display=False) as counter:
        head = TwoPassHead(inputs, chunk=128)
        head.gradients(head.log_probs(), NeededGradients(*[True] * 3))
    tree = config("llama") | {"model_type": "llama", "vocab_size": 96, "hidden_size": 16, "head_dim": 8}
    shares = (0, 300 / TOKENS)
    without, with_head = (planned(tree, supervised=share, objective={"name": "dpo"})["products"] for share in shares)
    assert with_head - without == counter.get_total_flops()
