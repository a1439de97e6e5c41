"""An FP8 folder is verified by plain transformers over weights that plain torch dequantised.

Right folders pass; wrong ones are found where they differ by more than rounding.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.export.from_checkpoint import export_checkpoint
from ds_finetune.export.verify import plain_transformers
from ds_finetune.export.verify.record import UNVERIFIED, ExportRecord, sampled_logits
from ds_finetune.export.verify.verify import VerificationResult, verify_exports
from tests.export.rewriting import rewrite
from tests.model.fp8_folder import V3, decoded, dequantised, in_fp8, is_published_in_fp8, master, publish, read_all
from tests.model.weights.test_weights import published

SCALE = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"


def _exported(bf16: Path, out: Path) -> Path:
    """`bf16` in FP8 at `out`; its record has the logits of plain transformers over the bf16 weights."""
    export_checkpoint(bf16, out, dtype="fp8", max_shard_bytes=10**9, base=None)
    record = ExportRecord.read(out)
    model = AutoModelForCausalLM.from_pretrained(bf16, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = sampled_logits(
            (model(torch.tensor([prompt])).logits[0].float() for prompt in record.prompts),
            record.prompts,
            record.vocab_size,
        )
    replace(record, logits=logits, step=3).write(out)
    return out


def _swap_gate_and_up(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        if "gate_proj" in name:
            other = name.replace("gate_proj", "up_proj")
            tensors[name], tensors[other] = tensors[other], tensors[name]


def _invert_scales(tensors: dict[str, torch.Tensor]) -> None:
    """The meaning that the name `weight_scale_inv` suggests."""
    tensors.update({name: 1 / tensor for name, tensor in tensors.items() if name.endswith("_scale_inv")})


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "gate for up": (lambda f: rewrite(f, _swap_gate_and_up), "of the largest at nine tenths of the positions"),
    "inverse scales": (lambda f: rewrite(f, _invert_scales), "all logits are zero"),
    "another rope": (
        lambda f: (f / "config.json").write_text(
            json.dumps({k: v for k, v in V3.items() if k != "rope_scaling"} | {"rope_theta": 50})
        ),
        "of the largest at nine tenths of the positions",
    ),
    "a scale less": (
        lambda f: rewrite(f, lambda t: t.pop(SCALE)),
        f"plain transformers does not load it: exit code 1: KeyError: '{SCALE}'",
    ),
    "a weight less": (
        lambda f: rewrite(f, lambda t: (t.pop(SCALE), t.pop(SCALE.removesuffix("_scale_inv")))),
        f"plain transformers misses 1 tensors: {SCALE.removesuffix('_scale_inv')}",
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VerificationResult]:
    root = tmp_path_factory.mktemp("fp8")
    plain = {key: value for key, value in V3.items() if key != "quantization_config"}
    v3 = _exported(publish(root / "v3-bf16", master(), config=plain), root / "v3")
    published("qwen3", root / "qwen3-fp32")
    export_checkpoint(root / "qwen3-fp32", root / "qwen3-bf16", dtype="bf16", max_shard_bytes=10**9, base=None)
    folders = {"v3": v3, "qwen3": _exported(root / "qwen3-bf16", root / "qwen3")}
    for name, (spoil, _) in WRONG.items():
        folders[name] = Path(shutil.copytree(v3, root / name.replace(" ", "-")))
        spoil(folders[name])
    return dict(zip(folders, verify_exports(list(folders.values())), strict=True))


@pytest.mark.parametrize("name", ["v3", "qwen3"])
def test_a_right_folder_is_verified(name: str, results: dict[str, VerificationResult]) -> None:
    result = results[name]
    assert result.is_verified, result
    assert not (result.folder / UNVERIFIED).exists()
    assert "each with the bytes that were written" in result.lines[0]
    assert "logits of 8 prompts deviate by" in result.lines[-1]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folder_is_found(name: str, results: dict[str, VerificationResult]) -> None:
    assert WRONG[name][1] in (results[name].folder / UNVERIFIED).read_text(), results[name]


def test_the_process_dequantises_as_numpy_does(results: dict[str, VerificationResult]) -> None:
    tensors = read_all(results["v3"].folder)
    for key in filter(is_published_in_fp8, tensors):
        found = plain_transformers._dequantise(tensors[key], tensors[key + "_scale_inv"], None)
        assert torch.equal(found, decoded(tensors[key], tensors[key + "_scale_inv"]).bfloat16()), key


def test_numbers_are_perturbed_by_no_more_than_their_rounding() -> None:
    """Half the distance between neighbours in E4M3: 2^-4 of a number, 2^-10 of a block's scale below its smallest
    normal ones.
    """
    source = {key: tensor.float() for key, tensor in master().items()}
    source["model.layers.0.mlp.up_proj.weight"] *= torch.logspace(-6, 0, 160)
    coded = in_fp8(source)
    for key, plain in (
        (key, decoded(coded[key], coded[key + "_scale_inv"])) for key in filter(is_published_in_fp8, source)
    ):
        spread = (
            coded[key + "_scale_inv"]
            .repeat_interleave(128, 0)
            .repeat_interleave(128, 1)[: plain.shape[0], : plain.shape[1]]
        )
        half = torch.maximum(source[key].abs() * 2**-4, spread * 2**-10) * (1 + 1e-5)
        assert ((plain - source[key]).abs() <= half).all(), key
        moved = plain_transformers._dequantise(
            coded[key], coded[key + "_scale_inv"], torch.Generator().manual_seed(1)
        ).float()
        bound = torch.maximum(plain.abs() * 2**-4, spread * 2**-10) * (1 + 2**-7) + plain.abs() * 2**-8  # bf16
        assert ((moved - plain).abs() <= bound).all(), key
        assert ((moved - plain).abs() > bound / 2).float().mean() > 0.1


def test_dequantised_weights_are_those_of_the_plain_folder(tmp_path: Path) -> None:
    tensors = in_fp8(master())
    publish(tmp_path / "fp8", tensors)
    publish(
        tmp_path / "plain",
        dequantised(tensors, torch.bfloat16),
        config={k: v for k, v in V3.items() if k != "quantization_config"},
    )
    model, _ = plain_transformers._load_dequantised(tmp_path / "fp8", AutoConfig.from_pretrained(tmp_path / "fp8"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )
