"""Parts of the ONNX export: experts under any routing, attention, rotary angles at large positions, and comparisons."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ModelError
from ds_finetune.export.formats import ExportOptions
from ds_finetune.export.onnx import folder as onnx_folder
from ds_finetune.families.table import family_of
from ds_finetune.model.weights.names import hub_pieces
from tests.model.tiny import CONFIGS

onnx = pytest.importorskip("onnx", reason="the onnx extra is not installed: pip install 'ds_finetune[onnx]'")
onnxruntime = pytest.importorskip(
    "onnxruntime", reason="the onnx extra is not installed: pip install 'ds_finetune[onnx]'"
)

from ds_finetune.export.onnx import comparison as onnx_comparison  # noqa: E402 - they need onnx
from ds_finetune.export.onnx import experts as onnx_experts  # noqa: E402 - they need onnx
from ds_finetune.export.onnx import graph as onnx_graph  # noqa: E402 - they need onnx
from ds_finetune.export.onnx import layers as onnx_layers  # noqa: E402 - they need onnx
from ds_finetune.export.onnx.folder import verify  # noqa: E402 - they need onnx
from ds_finetune.export.onnx.runtime import OnnxCausalLM  # noqa: E402 - they need onnx

FP32 = np.dtype(np.float32)
MANY = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
CELLS = {
    "v2-greedy": ("deepseek_v2", {"topk_method": "greedy"}),
    "v2-groups": ("deepseek_v2", {"topk_method": "group_limited_greedy"}),
    "v3": ("deepseek_v3", {}),
    "v3-not-normalised": ("deepseek_v3", {"norm_topk_prob": False}),
    "mixtral": ("mixtral", {"num_local_experts": 16}),
    "qwen3": ("qwen3_moe", {"num_experts": 16, "norm_topk_prob": True}),
    "qwen3-not-normalised": ("qwen3_moe", {"num_experts": 16, "norm_topk_prob": False}),
}


def run(graph: onnx_graph.Graph, folder: Path, output: str, rank: int, **feeds: np.ndarray) -> np.ndarray:
    """The fp32 value `output`, of `rank` dimensions, of a graph with the inputs `feeds`, whose sizes vary."""
    folder.mkdir(exist_ok=True)
    inputs = [
        onnx_graph.value(name, array.dtype, [f"{name}_{dim}" for dim in range(array.ndim)])
        for name, array in feeds.items()
    ]
    onnx_graph.write_model(
        graph,
        (inputs, [onnx_graph.value(output, FP32, [f"out_{dim}" for dim in range(rank)])]),
        folder,
        inline_bytes=2**30,
    )
    session = onnxruntime.InferenceSession(str(folder / "onnx/model.onnx"), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def published(lm: nn.Module) -> Callable[[str], torch.Tensor]:
    """The tensors of a model under the names of published checkpoints."""
    family = family_of(lm.config.model_type)
    return {
        piece.key: tensor[piece.index]
        for name, tensor in lm.state_dict().items()
        for piece in hub_pieces(name, tuple(tensor.shape), family)
    }.__getitem__


def one_layer_of(config: PretrainedConfig) -> PreTrainedModel:
    """A model whose only layer has experts and large weights."""
    torch.manual_seed(11)
    lm = AutoModelForCausalLM.from_config(config).eval()
    for parameter in lm.parameters():
        nn.init.normal_(parameter, std=0.3)
    if config.model_type == "deepseek_v3":
        lm.model.layers[0].mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 16))
    return lm.requires_grad_(False)


def skewed(moe: nn.Module, hidden: int) -> dict[str, torch.Tensor]:
    """Inputs for routers: one token; the same experts for all; every expert, its neighbours in turn; many random
    tokens.
    """
    torch.manual_seed(12)
    toward = moe.gate.weight / moe.gate.weight.norm(dim=1, keepdim=True)
    return {
        "one token": torch.randn(1, 1, hidden),
        "the same for all": (8 * toward[3]).expand(2, 9, hidden) + 0.01 * torch.randn(2, 9, hidden),
        "every expert": 4 * toward.repeat(3, 1)[None],
        "many": torch.randn(5, 61, hidden),
        "nothing in it": torch.zeros(1, 4, hidden),
    }


@pytest.mark.parametrize("cell", CELLS)
def test_experts_under_any_routing(cell: str, tmp_path: Path) -> None:
    model_type, options = CELLS[cell]
    sizes = MANY | options if model_type.startswith("deepseek") else {"num_experts_per_tok": 3} | options
    config = AutoConfig.for_model(model_type, **(CONFIGS[model_type] | {"num_hidden_layers": 1} | sizes))
    config._experts_implementation = "eager"
    lm = one_layer_of(config)
    graph, moe = onnx_graph.Graph(FP32), lm.model.layers[0].mlp
    layers = onnx_layers.Layers(graph, lm, published(lm))
    output, reached = onnx_experts.moe(layers, "x", "model.layers.0.mlp", config), set()
    for name, x in skewed(moe, config.hidden_size).items():
        _, _, chosen = moe.gate(x)
        reached |= set(chosen.flatten().tolist())
        wanted = moe(x).numpy()
        found = run(graph, tmp_path, output, 3, x=x.numpy())
        if name != "nothing in it":  # every score is the same, so which experts are chosen is anybody's
            np.testing.assert_allclose(found, wanted, atol=2e-5 * max(1, np.abs(wanted).max()), err_msg=name)
        assert np.isfinite(found).all()
    assert len(reached) >= 12


def test_attention_shares_keys_and_survives_padding(tmp_path: Path) -> None:
    """Six heads on two keys equal torch's attention; a row that may attend to nothing is the mean of the values."""
    torch.manual_seed(2)
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 4)
    allowed = torch.rand(2, 1, 5, 7) < 0.6
    allowed[1, 0, 2] = False
    graph = onnx_graph.Graph(FP32)
    mask = onnx_layers.Mask(graph, "allowed", graph.op("Shape", "key", start=2, end=3))
    feeds = {"query": query.numpy(), "key": key.numpy(), "values": value.numpy(), "allowed": allowed.numpy()}
    mixed = mask.attend("query", "key", "values", heads=6, key_heads=2)
    found = torch.from_numpy(run(graph, tmp_path, mixed, 4, **feeds))
    wide_key, wide_value = (part.repeat_interleave(3, dim=1) for part in (key, value))
    wanted = nn.functional.scaled_dot_product_attention(query, wide_key, wide_value, attn_mask=allowed, scale=1.0)
    wanted[1, :, 2] = wide_value[1].mean(dim=1)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "deepseek_v3"])
def test_large_positions(family: str, tmp_path: Path) -> None:
    """Angles of a hundred thousand positions are those of transformers, so long contexts do not drift."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **(CONFIGS[family] | {"max_position_embeddings": 131_072}))
    ).eval()
    model.save_pretrained(tmp_path / "hub")
    onnx_folder.write(tmp_path / "hub", tmp_path / "out", ExportOptions(dtype="fp32", with_cache=False))
    case = onnx_comparison.generated_case(96, (0,), 12, (12,))
    ids, mask = case.ids, case.mask
    positions = np.array([[0, 1, 5, 900, 901, 4_096, 32_768, 99_991, 99_992, 120_000, 131_070, 131_071]])
    session = onnxruntime.InferenceSession(
        str(tmp_path / "out" / "onnx/model.onnx"), providers=["CPUExecutionProvider"]
    )
    found = session.run(None, {"input_ids": ids, "attention_mask": mask, "position_ids": positions})[0]
    with torch.no_grad():
        wanted = model(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), position_ids=torch.from_numpy(positions)
        ).logits.numpy()
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, onnx_comparison.Reference]:
    """An exported folder, and the reference that transformers computes."""
    folder = tmp_path_factory.mktemp("dense")
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **CONFIGS["qwen3"])).save_pretrained(folder / "hub")
    onnx_folder.write(folder / "hub", folder / "out", ExportOptions(dtype="fp32"))
    return folder / "out", onnx_comparison.make_reference(folder / "hub")


def test_an_engine_that_ignores_its_cache_is_not_verified(
    dense: tuple[Path, onnx_comparison.Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it did when transformers 5.24 passed the cache by a new keyword: every logit of the graph was right."""
    folder, reference = dense
    forward = OnnxCausalLM.forward

    def without_cache(model: OnnxCausalLM, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        return forward(model, input_ids, attention_mask[:, -input_ids.shape[1] :])

    monkeypatch.setattr(OnnxCausalLM, "forward", without_cache)
    result = onnx_comparison.compare(folder, reference)
    assert result.beyond == 0
    assert re.fullmatch(r"\d+ of 32 greedy tokens differ", *result.failures)
    assert not verify(folder, None).is_verified


@pytest.mark.parametrize("keyword", ["past_key_values", "cache"])
def test_the_engine_takes_a_cache_by_either_keyword_and_no_other_argument(
    dense: tuple[Path, onnx_comparison.Reference], keyword: str
) -> None:
    model, ids = OnnxCausalLM.from_pretrained(dense[0]), torch.arange(1, 9)[None]
    cache, whole = DynamicCache(config=model.config), model(ids).logits
    parts = [model(part, **{keyword: cache}).logits for part in ids.split([5, 1, 2], dim=1)]
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-4 * whole.abs().max()
    moved = model(ids, position_ids=torch.arange(3, 11)[None] * 2).logits
    assert not torch.allclose(moved, whole, atol=1e-3)
    with pytest.raises(TypeError, match="has no argument `inputs_embeds`"):
        model(ids, inputs_embeds=ids)


def test_a_comparison_allows_ties_and_no_more(dense: tuple[Path, onnx_comparison.Reference]) -> None:
    folder, reference = dense
    assert onnx_comparison.compare(folder, reference).failures == ()
    chosen, sure = reference.chosen.copy(), np.full_like(reference.leads, 0.5)
    chosen[1, -1] = (chosen[1, -1] + 1) % 96
    result = onnx_comparison.compare(folder, replace(reference, chosen=chosen, leads=sure))
    assert result.failures == ("1 of 32 greedy tokens differ",)
    tied = sure.copy()
    tied[1, -1] = 1e-5
    assert onnx_comparison.compare(folder, replace(reference, chosen=chosen, leads=tied)).failures == ()


@pytest.mark.parametrize(("change", "beyond"), [(np.nan, 1), (1e-3, 1), (1e-6, 0)])
def test_a_comparison_sees_one_position(
    dense: tuple[Path, onnx_comparison.Reference], change: float, beyond: int
) -> None:
    folder, reference = dense
    first, case, *others = reference.cases
    logits = case.logits.copy()
    logits[-1, 7] += change * case.largest
    changed = replace(case, logits=logits)
    result = onnx_comparison.compare(folder, replace(reference, cases=(first, changed, *others)))
    assert result.beyond == beyond
    assert len(result.failures) == min(beyond, 1)
    assert beyond == 0 or case.name in result.failures[0]


def test_padding_is_not_compared(dense: tuple[Path, onnx_comparison.Reference]) -> None:
    folder, reference = dense
    first, case, *others = reference.cases
    assert case.mask[1, 0] == 0
    ids = np.where(case.mask == 1, case.ids, 5)
    changed = replace(case, ids=ids)
    assert onnx_comparison.compare(folder, replace(reference, cases=(first, changed, *others))).beyond == 0


def test_an_incomplete_weight_is_noticed(tmp_path: Path) -> None:
    graph = onnx_graph.Graph(FP32)
    name = graph.weight("w", (4, 2), lambda: iter((np.zeros((3, 2), FP32),)))
    ends = ([onnx_graph.value("x", FP32, (1, 4))], [onnx_graph.value("y", FP32, (1, 2))])
    graph.op("MatMul", "x", name, name="y")
    for limit in (0, 2**20):
        with pytest.raises(AssertionError, match="w"):
            onnx_graph.write_model(graph, ends, tmp_path, inline_bytes=limit)


def test_constants_are_stored_once_for_each_dtype() -> None:
    graph = onnx_graph.Graph(np.dtype(np.float16))
    assert graph.ints(0, -1) == replace(graph, nodes=[]).ints(0, -1)
    names = {graph.ints(1), graph.ints(1, 1), graph.scalar(1), graph.scalar(1, FP32), graph.scalar(1, np.int64)}
    assert len(names) == len(graph.constants) - 1 == 5


@pytest.mark.parametrize(
    ("index", "message"),
    [({"a": "../other.safetensors"}, "names files outside its folder"), ({"a": "no.safetensors"}, "not there")],
)
def test_an_index_that_names_other_files(index: dict[str, str], message: str, tmp_path: Path) -> None:
    import json

    source = tmp_path / "hub"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIGS["llama"])).save_pretrained(source)
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelError, match=message):
        onnx_folder.write(source, tmp_path / "out", ExportOptions(dtype="fp32"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["hub"]
