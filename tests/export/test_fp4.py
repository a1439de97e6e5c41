"""DeepSeek-V4-Flash's experts in FP4 become bf16 by their published names, bit for bit as transformers reads them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ds_finetune import read_config, train
from ds_finetune.cli.main import main
from ds_finetune.errors import ModelError
from ds_finetune.export.verify.record import UNVERIFIED
from ds_finetune.families.table import family_of
from ds_finetune.model.build.hub_folder import HubFolder
from ds_finetune.model.build.skeleton import build_skeleton, read_hf_config
from ds_finetune.model.quantised.mxfp4 import pack
from ds_finetune.model.weights.load import load_weights
from tests.model.fp4_folder import decoded_fp4, publish_v4
from tests.model.fp8_folder import decoded, read_all
from tests.running import tiny_task


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_v4(tmp_path_factory.mktemp("v4"))


def test_every_tensor_by_its_published_name(v4: Path, tmp_path: Path) -> None:
    assert main(["export", "--no-verify", str(v4), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    found, stored = read_all(tmp_path / "out"), read_all(v4)
    assert found.keys() == {key for key in stored if not key.endswith(".scale")}
    for key, tensor in found.items():
        scale = stored.get(key.removesuffix("weight") + "scale")
        kind = stored[key].dtype
        wanted = stored[key]
        if kind == torch.int8:
            wanted = decoded_fp4(stored[key], scale).bfloat16()
        elif kind == torch.float8_e4m3fn:
            wanted = decoded(stored[key], scale).bfloat16()
        elif family_of("deepseek_v4").is_in_fp32(key):
            wanted = stored[key].float()
        assert tensor.dtype == wanted.dtype, key
        assert torch.equal(tensor, wanted), key
    config, given = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", v4))
    # The newer schema of the same rotary settings.
    assert config.pop("rope_parameters")["rope_theta"] == 10000.0
    assert {key: value for key, value in given.items() if key not in ("quantization_config", "expert_dtype")} == config
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in (v4, tmp_path / "out")]
    ours, theirs = (model.state_dict() for model in models)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    ids = torch.arange(3, 23)[None]
    assert torch.equal(*(model.eval()(ids).logits for model in models))


def test_parts_of_a_matrix(v4: Path) -> None:
    key, hub = "layers.0.ffn.experts.1.w2.weight", HubFolder(v4)
    whole = hub.full_tensor(key)
    assert (hub.shapes[key], hub.dtype(key), hub.is_quantised(key)) == ((128, 64), torch.float32, True)
    assert torch.equal(hub.read(key, 70, 200), whole.view(-1)[70:270])
    assert torch.equal(hub.rows(key, 3, 9, (slice(33, 60),)), whole[3:9, 33:60])


@pytest.mark.parametrize("with_base", [False, True])
def test_its_own_format_keeps_its_bytes(v4: Path, with_base: bool, tmp_path: Path) -> None:
    base = ["--base", str(v4)] if with_base else []
    assert main(["export", "--no-verify", str(v4), str(tmp_path / "out"), "--dtype", "fp8", *base]) == 0
    found, stored = read_all(tmp_path / "out"), read_all(v4)
    assert found.keys() == stored.keys()
    for key, tensor in found.items():
        wanted = stored[key].float() if family_of("deepseek_v4").is_in_fp32(key) else stored[key]
        assert tensor.dtype == wanted.dtype, key
        assert torch.equal(_bytes(tensor), _bytes(wanted)), key
    config, given = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", v4))
    assert {key: value for key, value in config.items() if key != "rope_parameters"} == given


def test_weights_go_straight_into_training(v4: Path) -> None:
    """Each rank's rows of a tensor are dequantised, without a copy of the folder."""
    lm = build_skeleton(read_hf_config(str(v4)), attention="sdpa", dtype=torch.bfloat16, device="cpu")
    report = load_weights(lm, v4, family=family_of("deepseek_v4"))
    assert report.skipped == ("mtp.0.norm.weight",)
    stored = read_all(v4)
    for expert, part, index in ((1, "w1", slice(0, 64)), (2, "w3", slice(64, 128))):
        key = f"layers.1.ffn.experts.{expert}.{part}"
        wanted = decoded_fp4(stored[f"{key}.weight"], stored[f"{key}.scale"])
        assert torch.equal(lm.model.layers[1].mlp.experts.gate_up_proj[expert, index].float(), wanted)
    key = "layers.2.attn.wq_b"
    wanted = decoded(stored[f"{key}.weight"], stored[f"{key}.scale"]).bfloat16()
    assert torch.equal(lm.model.layers[2].self_attn.q_b_proj.weight, wanted)


def test_a_run_is_exported_as_it_was_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not trained, with adapters on attention, keeps its bytes; plain transformers computes what the run did."""
    v4 = publish_v4(tmp_path / "published", vocab_size=128, max_position_embeddings=512)
    run_file = tiny_task(
        tmp_path,
        model={"path": str(v4), "weights": "load"},
        train={"precision": "bf16", "for": "2 steps", "max_seq_len": 160},
        data={"packing": True},
        optim={"lr": 1e-3},
        lora={"rank": 4, "target_modules": ["q_a_proj", "o_b_proj"]},
    )
    for file in (tmp_path / "model").glob("token*"):
        shutil.copyfile(file, v4 / file.name)
    train(read_config(run_file))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "fp8"]) == 0
    assert "quantised blocks equal those of" in capsys.readouterr().out
    found, stored = read_all(tmp_path / "out"), read_all(v4)
    in_fp32 = {key for key in stored if family_of("deepseek_v4").is_in_fp32(key)}
    stored |= {key: stored[key].float() for key in in_fp32}
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in found.items()} == {
        key: (tensor.dtype, tensor.shape) for key, tensor in stored.items()
    }
    changed = {key for key, tensor in found.items() if not torch.equal(_bytes(tensor), _bytes(stored[key]))}
    assert changed
    assert all(key.endswith(("wq_a.weight", "wq_a.scale", "wo_b.weight", "wo_b.scale")) for key in changed)
    given, config = (json.loads((folder / "config.json").read_text()) for folder in (v4, tmp_path / "out"))
    assert (config["expert_dtype"], config["quantization_config"]) == ("fp4", given["quantization_config"])
    assert not (tmp_path / "out" / UNVERIFIED).exists()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_numbers_are_rounded_to_fp4() -> None:
    """To the nearest, and between two to the even one, with the smallest scale that holds the largest."""
    values = torch.zeros(2, 32)
    values[0, :8] = torch.tensor([6.0, 0.25, 0.75, -1.25, 1.75, -2.5, 3.5, 5.0])
    values[1, :3] = torch.tensor([6.1, 0.4, -3.1])
    packed, scales, kept = pack(values, None)
    wanted = torch.zeros(2, 32)
    wanted[0, :8] = torch.tensor([6.0, 0.0, 1.0, -1.0, 2.0, -2.0, 4.0, 4.0])
    wanted[1, :3] = torch.tensor([6.0, 0.0, -3.0])
    assert torch.equal(decoded_fp4(packed, scales), wanted)
    assert scales.float().flatten().tolist() == [1.0, 2.0]
    assert kept == 0
    bytes_of = torch.randint(-128, 128, (4, 64), dtype=torch.int8)
    exponents = torch.randint(100, 140, (4, 4), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    again = pack(decoded_fp4(bytes_of, exponents), (bytes_of, exponents))
    assert torch.equal(again[0], bytes_of)
    assert torch.equal(_bytes(again[1]), _bytes(exponents))
    assert again[2] == 16
    assert torch.equal(decoded_fp4(*pack(decoded_fp4(bytes_of, exponents), None)[:2]), decoded_fp4(bytes_of, exponents))


@pytest.mark.parametrize("scale", [torch.zeros(4, 3).to(torch.float8_e8m0fnu), torch.ones(4, 2)], ids=["shape", "fp32"])
def test_scales_that_do_not_fit(scale: torch.Tensor, tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 32, dtype=torch.int8), "a.scale": scale}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"`a.weight` \(4, 32\) of torch.int8 has scales"):
        HubFolder(tmp_path)


def test_columns_that_fill_no_group(tmp_path: Path) -> None:
    scale = torch.zeros(4, 2).to(torch.float8_e8m0fnu)
    save_file({"a.weight": torch.zeros(4, 24, dtype=torch.int8), "a.scale": scale}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"`a\.weight` has 48 columns in FP4, no multiple of the group size 32"):
        HubFolder(tmp_path)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (-1, "has 126 columns in FP4, no multiple of the group size 32"),
        (-16, "(64, 48) of torch.int8 has scales (64, 4)"),
    ],
)
def test_odd_widths_end_a_run_before_it_trains(
    columns: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    v4, weight = publish_v4(tmp_path / "published", vocab_size=128), "layers.1.ffn.experts.0.w1.weight"
    sections = {"model": {"path": str(v4), "weights": "load"}, "train": {"max_seq_len": 128}}
    run_file = tiny_task(tmp_path, **sections)
    for file in (tmp_path / "model").glob("token*"):
        shutil.copyfile(file, v4 / file.name)
    for file in v4.glob("model-*.safetensors"):
        tensors = load_file(file)
        if weight in tensors:
            save_file(tensors | {weight: tensors[weight][:, :columns].clone()}, file)
    assert main(["train", str(run_file)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("metrics.jsonl"))
