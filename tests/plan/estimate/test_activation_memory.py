"""The arithmetic of activations against the tensors that autograd saves, in every family."""

import json
from bisect import bisect_left
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ds_finetune.families.configs import COMPRESSED
from ds_finetune.families.table import FAMILIES
from ds_finetune.model.activation_memory import install_tiled_mlps
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.fused import formulas, install
from ds_finetune.model.fused.install import install_fused
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.plan.estimate.activation_memory import activation_bytes
from tests.conftest import ROOT
from tests.described import described_tree
from tests.model.tiny import CONFIGS

PUBLISHED = json.loads((ROOT / "scripts" / "published_models.json").read_text())
TOKENS = 1024
"""From here on attention pads values on the CPU."""
MANY = 2**30
WIDER = {"hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": TOKENS, "num_hidden_layers": 3}
WIDER_V4 = {"head_dim": 32, "compress_rate_hca": 128, "compress_ratios": [0, 4, 128], "hc_sinkhorn_iters": 20}
WIDER_V4 |= {"bos_token_id": 1, "eos_token_id": 2}
UNLIMITED = {"sliding_window": TOKENS, "index_topk": TOKENS}


def config(family: str) -> dict[str, Any]:
    tree = CONFIGS[family] | WIDER
    tree |= {"head_dim": 32} if "head_dim" in tree or family == "mixtral" else {}
    tree |= {"intermediate_size": 64} if family in ("mixtral", "olmoe", "gpt_oss") else {}
    tree |= {"moe_intermediate_size": 64} if "moe_intermediate_size" in tree else {}
    tree |= {key: value for key, value in UNLIMITED.items() if key in tree}
    return AutoConfig.for_model(FAMILIES[family].built_as or family, **tree).to_dict()


def saved_by_layer(tree: dict[str, Any], dtype: torch.dtype, *, is_tiled: bool, kernels: str) -> list[float]:
    """Bytes a token that autograd saves in each layer, but parameters, rotary tables and the layer's input."""
    hf_config = AutoConfig.for_model(**tree)
    lm = build_skeleton(hf_config, attention="sdpa", dtype=dtype, device="cpu")
    for param in lm.parameters():
        param.data.normal_(0, 0.05)
    install_fused(lm, kernels)
    if is_tiled:
        install_tiled_mlps(lm, tiles=4)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*lm.parameters(), *lm.buffers())}
    saved: list[list[torch.Tensor]] = [[] for _ in lm.base_model.layers]
    where: list[int | None] = [None]
    # As long as they live, no other tensor has their memory.
    inputs: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if where[0] is not None and pointer not in known:
            known.add(pointer)
            saved[where[0]].append(tensor)
        return tensor

    for number, layer in enumerate(lm.base_model.layers):

        def enter(_: Any, args: Any, number: int = number) -> None:
            where[0] = number
            inputs.append(args[0])
            known.add(args[0].untyped_storage().data_ptr())

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(lambda *_: where.__setitem__(0, None))
    lm.base_model.rotary_emb.register_forward_hook(
        lambda _, __, tables: known.update(table.untyped_storage().data_ptr() for table in tables)
    )
    ids, positions = (torch.arange(TOKENS) % 90)[None], torch.arange(TOKENS)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        TrainedModel(lm).hidden(ids, positions, ((TOKENS,),))
    return [sum(tensor.untyped_storage().nbytes() for tensor in layer) / TOKENS for layer in saved]


@pytest.mark.parametrize("family", CONFIGS)
def test_what_layers_keep(family: str) -> None:
    _compare(family, "bf16", is_tiled=False)


@pytest.mark.parametrize("family", CONFIGS)
def test_what_layers_keep_with_fused_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "kernels_of", lambda _: formulas)
    _compare(family, "bf16", is_tiled=False, kernels="liger")


def test_what_layers_keep_with_tiled_mlps() -> None:
    _compare("deepseek_v3", "fp32", is_tiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_tiled", [False, True], ids=["whole", "tiled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_what_layers_keep_in_every_way(family: str, precision: str, *, is_tiled: bool) -> None:
    _compare(family, precision, is_tiled=is_tiled)


@pytest.mark.parametrize(("precision", "kernels"), [("bf16", "torch"), ("fp32", "torch"), ("bf16", "liger")])
def test_what_layers_of_deepseek_v4_keep(precision: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of attention, routers and streams."""
    monkeypatch.setattr(install, "kernels_of", lambda _: formulas)
    monkeypatch.setitem(CONFIGS, "deepseek_v4", COMPRESSED | WIDER_V4)
    _compare("deepseek_v4", precision, is_tiled=False, kernels=kernels)


def _compare(family: str, precision: str, *, is_tiled: bool, kernels: str = "torch") -> None:
    tree = config(family)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    measured = saved_by_layer(tree, dtype, is_tiled=is_tiled, kernels=kernels)
    planned = activation_bytes(described_tree(tree | {"model_type": family}), precision=precision, kernels=kernels)
    for layer, found in zip(planned.layers, measured, strict=True):
        kept = layer.kept - layer.mlp if is_tiled else layer.kept
        assert found == pytest.approx(kept, rel=0.02)
    assert planned.layer_input == tree.get("hc_mult", 1) * tree["hidden_size"] * dtype.itemsize


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("DeepSeek-V3, R1, V3.1", "deepseek-ai--DeepSeek-V3"),
        ("DeepSeek-V2-Lite", "deepseek-ai--DeepSeek-V2-Lite"),
        ("Moonlight-16B-A3B", "moonshotai--Moonlight-16B-A3B"),
        ("Qwen3-30B-A3B", "Qwen--Qwen3-30B-A3B"),
        ("R1-Distill-Qwen-7B", "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B"),
        ("R1-Distill-Llama-8B", "deepseek-ai--DeepSeek-R1-Distill-Llama-8B"),
    ],
)
def test_the_sizes_of_the_table_are_published(shared_data: Path, name: str, folder: str) -> None:
    published = json.loads((shared_data / "configs" / folder / "config.json").read_text())
    assert {key: published[key] for key in PUBLISHED[name]} == PUBLISHED[name]


def test_peaks_of_deepseek_v3() -> None:
    each = activation_bytes(described_tree(PUBLISHED["DeepSeek-V3, R1, V3.1"]), precision="bf16")
    assert each.inputs() == 61 * 7168 * 2
    tokens = 131072
    assert each.peak(tokens) == tokens * each.inputs() + each.working_set(tokens)
    assert each.peak(tokens, is_offloaded=True) == tokens * 7168 * 2 + each.working_set(tokens)
    assert each.peak(tokens) < each.peak(tokens, recomputation="none")


def tiles_pay_from(name: str, *, ep: int = 1) -> int:
    """Tokens of a rank from which `train.tiled_mlp` lowers what one layer holds."""
    each = activation_bytes(described_tree(PUBLISHED[name]), precision="bf16", ep=ep)
    return bisect_left(range(MANY), x=True, key=lambda n: each.working_set(n, is_tiled=True) < each.working_set(n))


@pytest.mark.parametrize("name", PUBLISHED)
def test_tiles_pay_from_a_number_of_tokens(name: str) -> None:
    assert tiles_pay_from(name) > 0
    # Attention of DeepSeek-V4-Flash holds more than its experts.
    assert (tiles_pay_from(name) == MANY) is (name == "DeepSeek-V4-Flash")


def test_tiles_of_fewer_experts_pay_earlier() -> None:
    assert tiles_pay_from("Qwen3-30B-A3B", ep=8) * 4 < tiles_pay_from("Qwen3-30B-A3B")


def test_tensor_parallel_ranks_have_a_part_of_heads_and_widths() -> None:
    whole, part = (
        activation_bytes(described_tree(PUBLISHED["Qwen3-8B"]), precision="bf16", tp=tp).layers[0] for tp in (1, 4)
    )
    assert whole.mlp == 4 * part.mlp
    # The norms of queries and keys and the attention itself, not the norms over hidden states.
    assert part.attention < whole.attention < 4 * part.attention
