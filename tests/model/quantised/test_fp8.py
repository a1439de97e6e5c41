"""Checkpoints in FP8 blocks: dequantised as plain numpy does, for any shard, and complete to the last scale."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.model.build.hub_folder import HubFolder
from ds_finetune.model.build.skeleton import (
    Fragment,
    build_skeleton,
    full_fragment,
    in_memory,
    model_class,
    read_hf_config,
)
from ds_finetune.model.parallel.expert import build_local_experts
from ds_finetune.model.parallel.pipeline import (
    PipelineGroup,
    build_meta_model,
    build_only_layers,
    install_pipeline_stage,
)
from ds_finetune.model.parallel.sharding import UNSHARDED, ModelShard
from ds_finetune.model.parallel.tensor import local_config
from ds_finetune.model.quantised.fp8 import dequantise, is_quantised, quantise
from ds_finetune.model.weights.load import load_weights
from ds_finetune.model.weights.names import hub_pieces
from ds_finetune.reference.selftest.cells import hf_config
from tests.model.fp8_folder import (
    MTP,
    TABLE,
    V3,
    coded,
    decoded,
    dequantised,
    in_fp8,
    is_published_in_fp8,
    master,
    publish,
    read_all,
    with_other_scales,
)

FAMILY = family_of("deepseek_v3")
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("v3") / "fp8", with_other_scales(in_fp8(master())))


@pytest.fixture(scope="module")
def reference(published: Path) -> AutoModelForCausalLM:
    """A model of transformers with the weights that numpy dequantised."""
    plain = dequantised(read_all(published), torch.bfloat16)
    config = {key: value for key, value in V3.items() if key != "quantization_config"}
    publish(published.parent / "plain", plain, config=config)
    return AutoModelForCausalLM.from_pretrained(published.parent / "plain", dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("shape", [(576, 7168), (576, 260), (128, 128), (1, 1), (300, 129)])
def test_blocks_as_numpy_multiplies_them_out(shape: tuple[int, int], tmp_path: Path) -> None:
    """All bytes that are numbers; rows and columns that fill no block; any rows, columns and flat ranges."""
    rows, columns = shape
    numbers = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    weight = numbers[torch.randint(len(numbers), shape)].view(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.1
    save_file({"w": weight, "w_scale_inv": scale}, tmp_path / "model.safetensors")
    wanted, hub = decoded(weight, scale), HubFolder(tmp_path)
    assert torch.equal(dequantise(weight, scale), wanted)
    assert dict(hub.shapes) == {"w": shape}
    for first, last in ((0, rows), (rows // 2, rows), (rows - 1, rows), (rows // 3, rows // 2 + 1)):
        assert torch.equal(hub.rows("w", first, last), wanted[first:last])
        for part in (slice(columns // 2, columns), slice(columns // 3, columns // 2 + 1)):
            assert torch.equal(hub.rows("w", first, last, (part,)), wanted[first:last, part])
    for start, numel in ((0, rows * columns), (rows * columns // 3, -(-rows * columns // 2)), (rows * columns - 1, 1)):
        assert torch.equal(hub.read("w", start, numel), wanted.reshape(-1)[start : start + numel])
    assert torch.equal(hub.full_tensor("w"), wanted)


def test_the_cast_and_the_table_agree() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(every.nan_to_num(1000), torch.from_numpy(TABLE).nan_to_num(1000))


@pytest.mark.parametrize("shape", [(128, 256), (10, 130), (1, 1)])
def test_a_row_of_blocks_is_quantised_as_plain_loops_do(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).bfloat16()
    values, scale = quantise(weight.float())
    wanted, wanted_scale = coded(weight)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scale, wanted_scale[0])


def test_blocks_of_zeros_and_of_the_smallest_numbers_stay_finite() -> None:
    weight = torch.zeros(3, 300)
    weight[0, 200], weight[1, 299] = 1e-45, -1e-30
    values, scale = quantise(weight)
    again = dequantise(values, scale[None])
    assert torch.isfinite(again).all()
    assert again[0, :128].eq(0).all()
    assert again[1, 299].item() == pytest.approx(-1e-30)


def test_bytes_come_back_from_bf16_where_the_scale_came_from_bf16() -> None:
    """Every byte under the scale of every mantissa a bf16 weight can have: proves the rule, for the exponent only
    shifts both.
    """
    largest = torch.arange(0x3F80, 0x4000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    assert len(largest) == 128
    numbers = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    for scale in largest / 448:
        plain = (numbers.float() * scale).bfloat16()
        values, again = quantise(torch.nn.functional.pad(plain.float(), (0, 128 - len(numbers) % 128))[None])
        assert torch.equal(values[0, : len(numbers)].float(), numbers.float())
        assert again[:2].eq(scale).all()


def test_which_weights_are_published_in_fp8() -> None:
    for key, tensor in master().items():
        assert is_quantised(key, tuple(tensor.shape), FAMILY) == is_published_in_fp8(key), key
    assert is_quantised("model.layers.1.mlp.shared_experts.up_proj.weight", (2, 2), FAMILY)
    assert not is_quantised("model.layers.0.self_attn.q_proj.bias", (2,), FAMILY)


def test_which_weights_of_qwen3s_experts_are_published_in_fp8() -> None:
    """All matrices but embedding, head and router, as in Qwen3-30B-A3B-FP8's `modules_to_not_convert`."""
    family = family_of("qwen3_moe")
    for name, param in build_meta_model(hf_config("qwen3_moe")).named_parameters():
        for piece in hub_pieces(name, tuple(param.shape), family):
            is_other = piece.key.endswith(("embed_tokens.weight", "lm_head.weight", "norm.weight", "mlp.gate.weight"))
            assert is_quantised(piece.key, piece.shape, family) != is_other, piece.key


def test_the_indexer_of_deepseek_v32_does_not_follow_v3() -> None:
    """DeepSeek-V3.2-Exp, inference/model.py:441-444."""
    family, layer = family_of("deepseek_v32"), "model.layers.1"
    quantised = ("indexer.wq_b", "indexer.wk", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    plain = ("indexer.weights_proj", "indexer.k_norm", "q_a_layernorm")
    for name in (*quantised, *plain):
        assert is_quantised(f"{layer}.self_attn.{name}.weight", (2, 2), family) == (name in quantised), name
    for key, tensor in master().items():
        assert is_quantised(key, tuple(tensor.shape), family) == is_published_in_fp8(key), key


def _skeleton(folder: Path) -> torch.nn.Module:
    return build_skeleton(read_hf_config(str(folder)), attention="sdpa", dtype=torch.bfloat16, device="cpu")


def test_what_is_loaded_equals_plain_transformers(published: Path, reference: torch.nn.Module) -> None:
    model = _skeleton(published)
    report = load_weights(model, published, family=FAMILY)
    wanted = reference.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert model.state_dict().keys() == wanted.keys()
    assert model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").dtype == torch.float32
    assert report.skipped == tuple(sorted(key for key in master() if key.startswith(f"model.layers.{MTP}.")))
    # Experts of CPUs round in other places.
    model.set_experts_implementation("grouped_mm")
    ids = torch.arange(3, 20)[None]
    assert torch.equal(model.eval()(ids).logits, reference(ids).logits)


def test_the_model_knows_nothing_of_the_quantisation(published: Path) -> None:
    config = read_hf_config(str(published))
    assert not hasattr(config, "quantization_config")
    assert {p.dtype for p in _skeleton(published).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": [1, 128]},
        {"quant_method": "fp8", "scale_fmt": "e5m3"},
        {"bits": 4},
    ],
)
def test_other_kinds_of_quantisation_are_refused(given: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3 | {"quantization_config": given}))
    with pytest.raises(ModelError, match=r"config\.json: weights quantised by .* are not supported") as caught:
        read_hf_config(str(tmp_path))
    assert "[128, 128]" in caught.value.hint


@pytest.mark.parametrize("ranks", [2, 3])
def test_fragments_of_ranks(ranks: int, published: Path, reference: torch.nn.Module) -> None:
    """Each rank reads its flat slice, as ZeRO-3 lays it out."""
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(ranks):
        model, held = _skeleton(published), dict[int, torch.Tensor]()

        def where(param: torch.Tensor, held: dict[int, torch.Tensor] = held, rank: int = rank) -> Fragment:
            size = math.ceil(param.numel() / ranks)
            flat = held.setdefault(id(param), torch.zeros(size, dtype=param.dtype))
            return in_memory(flat, start=rank * size, shape=tuple(param.shape))

        load_weights(model, published, family=FAMILY, where=where)
        for name, param in model.named_parameters():
            parts.setdefault(name, []).append(held[id(param)])
    for name, param in reference.named_parameters():
        assert torch.equal(torch.cat(parts[name])[: param.numel()].view_as(param), param), name


@pytest.mark.parametrize(
    "model_shard",
    [ModelShard(2, 0), ModelShard(2, 1), ModelShard(ep_size=2, ep_rank=1), ModelShard(2, 1, 2, 1)],
    ids=str,
)
def test_shards_of_tensors_and_experts(model_shard: ModelShard, published: Path, reference: torch.nn.Module) -> None:
    config = read_hf_config(str(published))
    with build_local_experts(model_class(config), FAMILY, ep_size=model_shard.ep_size, mark=lambda _: None):
        model = build_skeleton(
            local_config(config, model_shard.tp_size), attention="sdpa", dtype=torch.bfloat16, device="cpu"
        )
    load_weights(model, published, family=FAMILY, model_shard=model_shard)
    wanted = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(model_shard.tensor_shard(name, tuple(param.shape)).slice(wanted[name]), param.view(-1)), name


def test_stages_of_a_pipeline(published: Path, reference: torch.nn.Module) -> None:
    config, wanted = read_hf_config(str(published)), reference.state_dict()
    seen: set[str] = set()
    for place in range(2):
        with build_only_layers(model_class(config), range(place, place + 1)):
            model = build_skeleton(config, attention="sdpa", dtype=torch.bfloat16, device="cpu")
        install_pipeline_stage(model, PipelineGroup(None, 2, place), outputs=config.vocab_size)
        load_weights(
            model,
            published,
            family=FAMILY,
            where=full_fragment,
            model_shard=UNSHARDED,
            skeleton=build_meta_model(config),
        )
        state = model.state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())
        seen |= state.keys()
    assert seen == wanted.keys()


def _damage(folder: Path, change: object) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if DOWN in tensors or DOWN + "_scale_inv" in tensors:
            change(tensors)  # type: ignore[operator]
            save_file(tensors, file)
    index = folder / "model.safetensors.index.json"
    weight_map = {key: file.name for file in folder.glob("*.safetensors") for key in load_file(file)}
    index.write_text(json.dumps({"weight_map": weight_map}))


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    if DOWN in tensors:
        tensors[DOWN].view(torch.uint8)[3, 5] = 0x7F


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(DOWN + "_scale_inv", None), rf"1 FP8 weights without `_scale_inv`: {DOWN}\n"),
        (lambda t: t.pop(DOWN, None), rf"1 scales without an FP8 weight: {DOWN}_scale_inv\n"),
        (
            lambda t: t.update({key: t[key][:1].clone() for key in (DOWN + "_scale_inv",) if key in t}),
            r"has scales \(1, 3\) of torch.float32, not \(2, 3\)",
        ),
        (
            lambda t: t.update({key: t[key].int() for key in (DOWN + "_scale_inv",) if key in t}),
            r"of torch.int32, not",
        ),
        (
            lambda t: t.update({key: t[key].to(torch.float8_e5m2) for key in (DOWN,) if key in t}),
            r"1 scales without an FP8 weight",
        ),
        (_nan, rf"tensor `{DOWN}` of .* holds NaN"),
    ],
    ids=["no scale", "no weight", "few scales", "int32 scales", "e5m2", "nan"],
)
def test_what_does_not_belong_together_is_named(change: object, said: str, published: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(published, tmp_path / "copy"))
    _damage(copy, change)
    with pytest.raises(ModelError, match=said):
        load_weights(_skeleton(copy), copy, family=FAMILY)


@pytest.mark.parametrize("seed", range(6))
def test_scales_that_are_powers_of_two(seed: int, tmp_path: Path) -> None:
    """DeepSeek-V3.1's UE8M0, in one byte and in fp32: the same numbers, and those that transformers makes of them."""
    torch.manual_seed(seed)
    rows, columns = (int(size) for size in torch.randint(1, 400, (2,)))
    blocks = (-(-rows // 128), -(-columns // 128))
    weight = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.randint(0, 255, blocks, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for name, stored in (("byte", scale), ("fp32", scale.float())):
        (tmp_path / name).mkdir()
        save_file({"w": weight, "w_scale_inv": stored}, tmp_path / name / "model.safetensors")
        hub = HubFolder(tmp_path / name)
        padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
        wanted = Fp8Dequantize(None)._dequantize_one(padded, stored, torch.float32)[:rows, :columns]
        assert torch.equal(hub.full_tensor("w"), wanted)
        assert torch.equal(hub.full_tensor("w"), decoded(weight, scale.float()))
        first, column = rows // 3, columns // 2
        assert torch.equal(hub.rows("w", first, rows, (slice(column, columns),)), wanted[first:, column:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_in_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """As Qwen3 is published in FP8: the numbers that transformers makes of them."""
    torch.manual_seed(0)
    weight = torch.randint(0, 0x7F, (384, 256), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = (torch.rand(3, 2) * 1e-2).to(dtype)
    save_file({"w": weight, "w_scale_inv": scale}, tmp_path / "model.safetensors")
    hub = HubFolder(tmp_path)
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    assert torch.equal(hub.full_tensor("w"), wanted)
    assert torch.equal(hub.rows("w", 100, 300, (slice(130, 256),)), wanted[100:300, 130:])
    assert hub.scales("w", 0, 384).dtype == torch.float32


def test_a_folder_with_scales_in_ue8m0_is_loaded(published: Path, reference: torch.nn.Module, tmp_path: Path) -> None:
    """Config and scales of V3.1 in one byte each, against transformers over the same numbers."""
    tensors = {
        key: tensor.to(torch.float8_e8m0fnu) if key.endswith("_scale_inv") else tensor
        for key, tensor in read_all(published).items()
    }
    as_v31 = V3["quantization_config"] | {"scale_fmt": "ue8m0"}
    publish(tmp_path / "v31", tensors, config=V3 | {"quantization_config": as_v31})
    model = _skeleton(tmp_path / "v31")
    load_weights(model, tmp_path / "v31", family=FAMILY)
    in_fp32 = {k: t.float() if t.dtype == torch.float8_e8m0fnu else t for k, t in tensors.items()}
    plain = {key: value for key, value in V3.items() if key != "quantization_config"}
    publish(tmp_path / "plain", dequantised(in_fp32, torch.bfloat16), config=plain)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert any(not torch.equal(tensor, reference.state_dict()[name]) for name, tensor in wanted.items())
