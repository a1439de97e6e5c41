"""DeepSeek-V4-Flash's experts in FP4 become bf16 by their published names, bit for bit as transformers reads them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from ds_finetune.cli.main import main
from ds_finetune.errors import ExportError, ModelError
from ds_finetune.export.from_checkpoint import export_checkpoint
from ds_finetune.model.build.hub_folder import HubFolder
from ds_finetune.model.build.skeleton import read_hf_config
from tests.model.fp4_folder import decoded_fp4, publish_v4
from tests.model.fp8_folder import decoded, read_all


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
        assert tensor.dtype == wanted.dtype, key
        assert torch.equal(tensor, wanted), key
    config, given = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", v4))
    assert {key: value for key, value in given.items() if key not in ("quantization_config", "expert_dtype")} == config
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in (v4, tmp_path / "out")]
    ours, theirs = (model.state_dict() for model in models)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    ids = torch.arange(3, 23)[None]
    assert torch.equal(*(model.eval()(ids).logits for model in models))


def test_parts_of_a_matrix(v4: Path) -> None:
    key, hub = "layers.0.ffn.experts.1.w2.weight", HubFolder(v4)
    whole = hub.whole(key)
    assert (hub.shapes[key], hub.dtype(key), hub.is_quantised(key)) == ((128, 64), torch.float32, True)
    assert torch.equal(hub.read(key, 70, 200), whole.view(-1)[70:270])
    assert torch.equal(hub.rows(key, 3, 9, (slice(33, 60),)), whole[3:9, 33:60])


def test_what_is_refused(v4: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="experts in fp4, as DeepSeek-V4-Flash is published, are converted and not"):
        read_hf_config(str(v4))
    for dtype, base, said in (("fp8", None, "--dtype fp8"), ("bf16", v4, "--base")):
        with pytest.raises(ExportError, match=f"has experts in fp4: {said}"):
            export_checkpoint(v4, tmp_path / "out", dtype=dtype, max_shard_bytes=10**9, base=base)


@pytest.mark.parametrize("scale", [torch.zeros(4, 3).to(torch.float8_e8m0fnu), torch.ones(4, 2)], ids=["shape", "fp32"])
def test_scales_that_do_not_fit(scale: torch.Tensor, tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 32, dtype=torch.int8), "a.scale": scale}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"`a.weight` \(4, 32\) of torch.int8 has scales"):
        HubFolder(tmp_path)
