"""Experts in MXFP4: read as transformers reads them, bit for bit, in any part and for any shape."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ds_finetune.cli.main import main
from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.model.build.hub_folder import HubFolder
from ds_finetune.model.build.skeleton import Fragment, build_skeleton, in_memory, model_class, read_hf_config
from ds_finetune.model.parallel.expert import build_local_experts
from ds_finetune.model.parallel.sharding import ModelShard
from ds_finetune.model.parallel.tensor import local_config
from ds_finetune.model.quantised.mxfp4 import dequantise
from ds_finetune.model.weights.load import load_weights, weights_digest
from tests.model.fp8_folder import read_all
from tests.model.mxfp4_folder import GPT_OSS, publish_gpt_oss, random_parts

FAMILY = family_of("gpt_oss")
DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_gpt_oss(tmp_path_factory.mktemp("gpt-oss") / "mxfp4")


@pytest.fixture(scope="module")
def reference(published: Path) -> torch.nn.Module:
    """transformers' own reading of the folder."""
    config = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(published, dtype=torch.bfloat16, quantization_config=config).eval()


def test_every_byte_under_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(255, 1, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1, 1).expand(255, 1, 16).contiguous()
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)
    found = dequantise(blocks, scales).bfloat16()
    assert torch.equal(found.view(torch.int16), wanted.contiguous().view(torch.int16))
    assert dequantise(blocks[:1], torch.full_like(scales[:1], 255)).isnan().all()


@pytest.mark.parametrize("seed", range(12))
def test_any_part_of_any_shape(seed: int, tmp_path: Path) -> None:
    """Shapes of odd sizes; random experts, inputs, outputs and flat ranges of them."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    experts, outputs, groups = rng.randint(1, 5), rng.randint(1, 41), rng.randint(1, 5)
    blocks, scales = random_parts(experts, outputs, groups)
    save_file({"w_blocks": blocks, "w_scales": scales, "w_bias": torch.ones(2)}, tmp_path / "model.safetensors")
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    hub = HubFolder(tmp_path)
    assert dict(hub.shapes) == {"w": (experts, groups * 32, outputs), "w_bias": (2,)}
    assert torch.equal(hub.full_tensor("w"), wanted)

    def part(size: int) -> slice:
        first = rng.randrange(size)
        return slice(first, rng.randint(first + 1, size))

    for _ in range(10):
        some, *within = (part(size) for size in wanted.shape)
        assert torch.equal(hub.rows("w", some.start, some.stop), wanted[some])
        for ranges in (within[:1], within):
            assert torch.equal(hub.rows("w", some.start, some.stop, tuple(ranges)), wanted[(some, *ranges)])
        flat = part(wanted.numel())
        assert torch.equal(hub.read("w", flat.start, flat.stop - flat.start), wanted.reshape(-1)[flat])


def test_a_folder_becomes_plain_bf16(
    published: Path, reference: torch.nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Converted by the command, verified by it, and reloaded by plain transformers: the bits of its own reading."""
    assert main(["export", str(published), str(tmp_path / "out")]) == 0, capsys.readouterr().err
    found, wanted = read_all(tmp_path / "out"), reference.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.bfloat16, name
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert {key: config[key] for key in GPT_OSS if key != "quantization_config"} == {
        key: value for key, value in GPT_OSS.items() if key != "quantization_config"
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    ids = torch.arange(5, 25)[None]
    assert torch.equal(model(ids).logits, reference(ids).logits)
    assert weights_digest(published) == weights_digest(tmp_path / "out")


@pytest.mark.parametrize(
    "sizes",
    [(1, 0, 1, 0), (2, 0, 1, 0), (2, 1, 1, 0), (1, 0, 2, 1), (2, 1, 2, 1)],
    ids=["whole", "tp0", "tp1", "ep", "both"],
)
def test_a_rank_reads_its_part(sizes: tuple[int, ...], published: Path, reference: torch.nn.Module) -> None:
    """Shards of heads, inner widths and experts, as ZeRO-3 slices of two ranks."""
    config = read_hf_config(str(published))
    shard = ModelShard(*sizes, has_transposed_experts=True)
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(2):
        with build_local_experts(model_class(config), FAMILY, ep_size=shard.ep_size, mark=lambda _: None):
            local = local_config(config, shard.tp_size)
            model = build_skeleton(local, attention="sdpa", dtype=torch.bfloat16, device="cpu")
        held = dict[int, torch.Tensor]()

        def where(param: torch.Tensor, held: dict[int, torch.Tensor] = held, rank: int = rank) -> Fragment:
            size = -(-param.numel() // 2)
            flat = held.setdefault(id(param), torch.zeros(size, dtype=param.dtype))
            return in_memory(flat, start=rank * size, shape=tuple(param.shape))

        load_weights(model, published, family=FAMILY, where=where, model_shard=shard)
        for name, param in model.named_parameters():
            parts.setdefault(name, []).append(held[id(param)])
    wanted = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        found = torch.cat(parts[name])[: param.numel()]
        assert torch.equal(shard.tensor_shard(name, tuple(param.shape)).slice(wanted[name]), found), name


def test_mxfp4_is_not_written(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(published), str(tmp_path / "out"), "--dtype", "fp8"]) == 2
    assert "'quant_method': 'mxfp4'}; exports in FP8 support only" in capsys.readouterr().err


def _without(end: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.pop(DOWN + end, None)  # type: ignore[arg-type, return-value]


def _change(end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda t: t.update({key: change(t[key]) for key in (DOWN + end,) if key in t})


def _add_plain(tensors: dict[str, torch.Tensor]) -> None:
    if DOWN + "_blocks" in tensors:
        tensors[DOWN] = torch.zeros(4, 64, 96)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without("_scales"), rf"1 weights in MXFP4 without `_blocks` or `_scales`: {DOWN}\n"),
        (_without("_blocks"), rf"1 weights in MXFP4 without `_blocks` or `_scales`: {DOWN}\n"),
        (_change("_scales", lambda t: t[:, :-1].clone()), r"has blocks \(4, 96, 2, 16\) of torch.uint8 and scales"),
        (_change("_blocks", lambda t: t[..., :8].clone()), r"has blocks \(4, 96, 2, 8\) of torch.uint8"),
        (_change("_scales", lambda t: t.float()), r"scales \(4, 96, 2\) of torch.float32"),
        (_add_plain, rf"has `{DOWN}` twice, once in MXFP4"),
    ],
    ids=["no scales", "no blocks", "few scales", "short blocks", "fp32 scales", "twice"],
)
def test_what_does_not_belong_together_is_named(
    damage: Callable[[dict[str, torch.Tensor]], None], said: str, published: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(published, tmp_path / "copy"))
    for file in copy.glob("*.safetensors"):
        tensors = load_file(file)
        damage(tensors)
        save_file(tensors, file)
    weight_map = {key: file.name for file in copy.glob("*.safetensors") for key in load_file(file)}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=said):
        HubFolder(copy)
