"""FLOPs by arithmetic against those that torch counts while a tiny model is trained, in every family."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import LoraConfig
from ds_finetune.families.table import FAMILIES
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.attention.by_document import mask_context
from ds_finetune.model.build.skeleton import build_skeleton, whole
from ds_finetune.model.loss.cross_entropy import chunked_cross_entropy
from ds_finetune.model.loss.head_chunks import NeededGradients
from ds_finetune.model.loss.log_probs import HeadInputs, TwoPassHead
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.model.mtp import mtp_layer_inputs, run_mtp_layer, set_mtp_layers
from ds_finetune.model.quantised.four_bit import four_bit_or, install_four_bit
from ds_finetune.plan.estimate import operations as operations_module
from ds_finetune.plan.estimate.operations import RowShape, Work, operations
from ds_finetune.plan.estimate.rank_weights import weights_of_run
from ds_finetune.plan.estimate.step_time import teacher_flops
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.lora_twin import adapted
from tests.model.tiny import CONFIGS
from tests.plan.estimate.test_activation_memory import config

TOKENS = 1024
ATEN = torch.ops.aten


def work_of(tree: dict[str, Any], *, supervised: float = 0, **sections: Any) -> Work:
    """A step of one row."""
    train = {"global_batch_size": 1, "max_seq_len": TOKENS, "precision": "fp32", "activation_checkpointing": "none"}
    train |= sections.pop("train", {})
    run = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o", "train": train, **sections}
    run |= {"deepspeed": {"zero_optimization": {"stage": 1}}}
    found = RunConfig.model_validate(run)
    plan = make_plan(RunSettings.of(found), world=World(0, 1, 0, 1, "a test"), device="cpu")
    return Work(plan, tree, RowShape.full(TOKENS, supervised_share=supervised))


def planned(tree: dict[str, Any], *, supervised: float = 0, **sections: Any) -> dict[str, float]:
    """FLOPs of the estimate."""
    work = work_of(tree, supervised=supervised, **sections)
    (weights,) = weights_of_run(work.plan, tree)
    flops = dict.fromkeys(("attention", "products", "adapters"), 0.0)
    for operation in operations(work, weights, is_last=True):
        flops[operation.name if operation.name in flops else "products"] += operation.flops
    return flops


IDS, POSITIONS = (torch.arange(TOKENS) % 90)[None], torch.arange(TOKENS)[None]


def built(tree: dict[str, Any], *, predicts: bool = False) -> Any:
    """A model with random weights."""
    hf_config = AutoConfig.for_model(**tree)
    set_mtp_layers(hf_config, int(predicts))
    lm = build_skeleton(hf_config, attention="sdpa", dtype=torch.float32, device="cpu")
    for param in lm.parameters():
        param.data.normal_(0, 0.05)
    return lm


def counted(tree: dict[str, Any], *, recomputes: bool = False) -> dict[str, float]:
    """What torch counts in the layers of a model: products, and attention as if it were not causal."""
    lm = built(tree)
    if recomputes:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
        lm.train()
    return counted_in(lambda: states_of(lm).sum().backward())


def states_of(lm: Any) -> torch.Tensor:
    """Hidden states of one document."""
    hidden = TrainedModel(lm).hidden(IDS, POSITIONS, ((TOKENS,),))
    return hidden[0] if isinstance(hidden, tuple) else hidden


def counted_in(compute: Callable[[], object]) -> dict[str, float]:
    """What torch counts while something is computed."""
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

    def four_bits(rows: Any, packed: Any, shape: Any, *_: Any, **__: Any) -> int:
        """Of bitsandbytes' product, forward alone: backward multiplies with the weight in fp32."""
        return 2 * math.prod(rows) * shape[0]

    mapping = {
        **({torch.ops.bitsandbytes.gemm_4bit: four_bits} if hasattr(torch.ops.bitsandbytes, "gemm_4bit") else {}),
        ATEN._grouped_mm: grouped,
        ATEN._scaled_dot_product_flash_attention_for_cpu: forward,
        ATEN._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        compute()
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
    found, expected = planned(tree, train={"activation_checkpointing": "full"}), counted(tree, recomputes=True)
    # torch may end the recomputation of a layer before its last product, whose output no backward needs.
    last = 2 * TOKENS * tree["hidden_size"] * tree["intermediate_size"] * tree["num_hidden_layers"]
    assert found["products"] - last <= expected["products"] <= found["products"]
    assert found["products"] - last > planned(tree, train={"activation_checkpointing": "none"})["products"]
    assert 2 * found["attention"] == expected["attention"]


def test_adapters_of_one_module() -> None:
    tree, section = config("qwen3") | {"model_type": "qwen3"}, {"rank": 4, "target_modules": ["q_proj"]}
    lm = adapted(built(tree).requires_grad_(False), LoraConfig.model_validate(section))
    found = planned(tree, lora=section)
    assert found["products"] + found["adapters"] == counted_in(lambda: states_of(lm).sum().backward())["products"]
    columns, layers = tree["num_attention_heads"] * tree["head_dim"], tree["num_hidden_layers"]
    # Embeddings are frozen, so that the first A has no gradient of its input.
    flops = 3 * layers * (tree["hidden_size"] + columns) - tree["hidden_size"]
    assert found["adapters"] == 2 * TOKENS * 4 * flops


@pytest.mark.parametrize("quantize", [None, pytest.param("nf4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_adapters_and_what_is_below_them(family: str, quantize: str | None) -> None:
    tree = config(family) | {"model_type": family}
    section = {"rank": 8, "quantize": quantize}
    lora, lm = LoraConfig.model_validate(section), built(tree).requires_grad_(False)
    for target in plan_lora(lm.config, lora).quantised:
        install_four_bit(lm, [target.name], device="cpu")
        weight: Any = lm.get_submodule(target.name).weight
        with four_bit_or(whole)(weight).opened() as values:
            values.normal_(0, 0.05)
    adapted(lm, lora)
    found, expected = planned(tree, lora=section), counted_in(lambda: states_of(lm).sum().backward())
    assert found["products"] + found["adapters"] == expected["products"]
    assert 2 * found["attention"] == expected["attention"]


@pytest.mark.parametrize("detach", [True, False])
def test_prediction_layers(detach: bool) -> None:
    tree = config("deepseek_v3") | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    lm = built(tree, predicts=True)
    layer, arguments = lm.model.layers[-1], TrainedModel(lm).document_arguments(((TOKENS,),), IDS.device)

    def compute() -> None:
        hidden, embedded = states_of(lm), lm.get_input_embeddings()(IDS)
        joined = mtp_layer_inputs(layer, *((each.detach() if detach else each) for each in (embedded, hidden)))
        with mask_context(lm):
            states = run_mtp_layer(lm, layer, joined, POSITIONS, **arguments)
        (hidden.sum() + states.sum()).backward()

    found, expected = planned(tree, mtp={"train": True, "detach": detach}), counted_in(compute)
    assert found["products"] == expected["products"]
    assert 2 * found["attention"] == expected["attention"]
    # Its head is computed from states that have a gradient, with a weight that has none where it is detached.
    share, head = 300 / TOKENS, 2 * 300 * tree["hidden_size"] * tree["vocab_size"]
    both = planned(tree, supervised=share, mtp={"train": True, "detach": detach})["products"] - found["products"]
    assert both == head * (3 + (2 if detach else 3))


def test_references_and_teachers_are_forwards(tmp_path: Path) -> None:
    tree = config("deepseek_v3") | {"model_type": "deepseek_v3"}
    lm = built(tree)

    def forward() -> None:
        with torch.no_grad():
            states_of(lm)

    once, lora = counted_in(forward), {"rank": 8}
    plain, again = (
        planned(tree, lora=lora, objective={"name": "dpo", "reference": reference})
        for reference in ("cache", "adapters_off")
    )
    assert again["products"] - plain["products"] == once["products"]
    assert again["attention"] - plain["attention"] == once["attention"] / 2
    assert again["adapters"] == plain["adapters"]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    run = {"name": "distill", "teacher": str(tmp_path)}
    head = 2 * TOKENS * tree["hidden_size"] * tree["vocab_size"]
    expected = once["products"] + once["attention"] / 2 + head / 4
    assert teacher_flops(work_of(tree, supervised=1 / 4, objective=run), tree) == expected


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
