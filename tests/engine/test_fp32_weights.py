"""In bf16, DeepSeek-V4 computes in fp32 with what transformers keeps in fp32, at all stages of ZeRO and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finetune.families.table import family_of
from ds_finetune.model.build.skeleton import build_skeleton, read_hf_config
from ds_finetune.model.weights.fp32_weights import Fp32Weights
from ds_finetune.model.weights.load import load_weights
from tests.engine.fp32_worker import CELLS, write_odd_model
from tests.running import start, torchrun

CHOSEN = ("1-none-full", "3-none-lora")
REST = tuple(name for name in CELLS if name not in CHOSEN)


def _run(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    done = start(torchrun(str(Path(__file__).with_name("fp32_worker.py")), str(folder), *names))
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("chosen"), CHOSEN)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("rest"), REST)


def _check(case: dict[str, Any], *, is_full: bool, is_stage: bool = False) -> None:
    assert case["number"] == (58 if not is_stage else 26)
    assert case["is_odd"], "the values would be the same in bf16"
    assert case["is_loaded"], "modules compute with what the folder has"
    assert case["agrees"], "and with the optimizer's copies"
    assert len(case["changed"]) == (54 if is_full else 0) or is_stage, "all are trained but the indexer's"
    assert case["is_exported"]
    assert case["is_resumed"]
    assert case["resumed_losses"] == case["losses"][1:]


@pytest.mark.parametrize("name", CHOSEN)
def test_forwards_use_the_values_in_fp32(name: str, found: dict[str, Any]) -> None:
    _check(found[name], is_full=name.endswith("full"))


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_other_stages_and_layouts_use_the_values_in_fp32(name: str, rest: dict[str, Any]) -> None:
    _check(rest[name], is_full=not name.endswith("lora"), is_stage=name.endswith("pp"))


def test_modules_compute_as_those_of_transformers(tmp_path: Path) -> None:
    """But for the order of sums; and the same tensors are in fp32."""
    write_odd_model(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    lm = build_skeleton(read_hf_config(str(tmp_path)), attention="sdpa", dtype=torch.bfloat16, device="cpu")
    in_fp32 = Fp32Weights(lm)
    load_weights(lm, tmp_path, family=family_of("deepseek_v4"), where=in_fp32.where)
    in_fp32.round_into_parameters()
    in_fp32.install(lm)
    params = dict(plain.named_parameters())
    assert in_fp32.params.keys() == {name for name, param in params.items() if param.dtype == torch.float32}
    streams = torch.randn(1, 6, 4, plain.config.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()
    for name in ("layers.1.attn_hc", "layers.2.ffn_hc", "hc_head", "layers.0.input_layernorm"):
        given = streams[:, :, 0] if "norm" in name else streams
        ours, wanted = (model.model.get_submodule(name)(given) for model in (lm, plain))
        if name.endswith(("attn_hc", "ffn_hc")):
            post, comb, collapsed = wanted
            pairs = tuple(zip(ours, (collapsed, post, comb.to(streams.dtype).mT @ streams), strict=True))
        else:
            pairs = ((ours, wanted),)
        for one, other in pairs:
            assert one.dtype == other.dtype, name
            torch.testing.assert_close(one, other, rtol=2e-6 if one.dtype == torch.float32 else 2**-7, atol=1e-6)
            # Rounded to 16 bits once, of sums that differ by less.
            assert one.dtype == torch.float32 or (one != other).float().mean() < 0.01, name
        (ours[0] if isinstance(ours, tuple) else ours).sum().backward()
    trained = dict(lm.named_parameters())
    assert all(trained[f"model.layers.1.attn_hc.{leaf}"].grad.dtype == torch.bfloat16 for leaf in ("fn", "base"))
