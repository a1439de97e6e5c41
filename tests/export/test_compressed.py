"""Quantised safetensors. They need the wheel `compressed-tensors`, which writes and reads them, and `loguru`."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ds_finetune
from ds_finetune.cli.main import main
from ds_finetune.errors import ExportError
from ds_finetune.export.formats import COMPRESSED, format_of
from ds_finetune.export.load import load_exported
from ds_finetune.families.table import FAMILIES
from tests.export.cells import types_of
from tests.model.weights.test_weights import published
from tests.running import files_of_at_most
from tests.test_round_trip import vllm_answers

pytest.importorskip("compressed_tensors", reason="it is not installed: pip install compressed-tensors")

WIDE: Mapping[str, object] = {"hidden_size": 128, "intermediate_size": 256}
"""Changes of a tiny configuration by which groups of 128 divide some rows."""
WIDE_EXPERTS = {"moe_intermediate_size": 128}
IN_EVERY_SUITE = {("qwen2", "w8a16"), ("deepseek_v3", "w4a16"), ("qwen3_moe", "fp8")}


def save(family: str, folder: Path) -> None:
    published(family, folder, **WIDE, **(WIDE_EXPERTS if FAMILIES[family].fused_experts else {}))


def unpacked(stored: torch.Tensor, dtype: str) -> torch.Tensor:
    """The numbers of a weight: one byte each, or half of one from the lowest bits on, of which 128 or 8 is zero."""
    if dtype == "fp8":
        return stored.float()
    parts = stored.view(torch.uint8).int()
    return (parts - 128 if dtype == "w8a16" else torch.stack([parts & 15, parts >> 4], -1).flatten(1) - 8).float()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=[] if (family, dtype) in IN_EVERY_SUITE else [pytest.mark.slow])
        for family in types_of("export/test_compressed.py", "transformers")
        for dtype in COMPRESSED.dtypes
    ],
)
def test_plain_transformers_computes_with_quantised_weights(family: str, dtype: str, tmp_path: Path) -> None:
    save(family, tmp_path / "hub")
    out = tmp_path / "out"
    written = ds_finetune.export_model(tmp_path / "hub", out, format="compressed-tensors", dtype=dtype)
    assert "each within its rounding" in written.notes[-2]
    assert f"{dtype}: loss" in written.notes[-1]
    stored = load_file(out / "model.safetensors")
    end = "weight" if dtype == "fp8" else "weight_packed"
    kind = torch.float8_e4m3fn if dtype == "fp8" else torch.int32
    quantised = {key for key, tensor in stored.items() if tensor.dtype == kind}
    assert quantised
    assert all(("_proj" in key or ".experts." in key) and key.endswith(f".{end}") for key in quantised)
    assert FAMILIES[family].fused_experts == any(".experts." in key for key in quantised)
    originals = load_file(tmp_path / "hub" / "model.safetensors")
    for key in quantised:
        start, original = key.removesuffix(end), originals[f"{key.removesuffix(end)}weight"]
        numbers = unpacked(stored[key], dtype)[:, : original.shape[1]]
        scales = stored[f"{start}weight_scale"].float()
        own = numbers * scales.repeat_interleave(original.shape[1] // scales.shape[1], 1)
        limit = {"w8a16": 0.02, "w4a16": 0.09, "fp8": 0.08}[dtype]
        assert ((own - original).abs() <= limit * original.abs().amax(1, keepdim=True)).all(), key
    with torch.no_grad():
        assert load_exported(out)(torch.arange(24)[None]).logits.isfinite().all()
    assert format_of(out) is COMPRESSED
    assert format_of(tmp_path / "hub").name == "safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("family", types_of("export/test_compressed.py", "vLLM"))
@pytest.mark.parametrize("dtype", ["w4a16", "fp8"])
def test_vllm_computes_with_quantised_weights(family: str, dtype: str, tmp_path: Path) -> None:
    """On a CPU in bf16, where it has no kernel for w8a16. It rounds activations to fp8 too, which transformers does not:
    then the two may differ by as much as fp8 weights change the model.
    """
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    published(family, tmp_path / "hub", hidden_size=256, intermediate_size=512, **heads)
    ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="compressed-tensors", dtype=dtype)
    prompts = [[3, 5, 8, 13, 21], [7, 2, 9]]
    answers = vllm_answers(tmp_path, "out", prompts, "bfloat16")
    own, base = (_log_probs(tmp_path / name, prompts) for name in ("out", "hub"))
    limit = 0.1 if dtype == "w4a16" else (own - base).abs().max().item()
    assert torch.tensor([log for answer in answers for log in answer["logprobs"]]) == pytest.approx(own, abs=limit)


def _log_probs(folder: Path, prompts: list[list[int]]) -> torch.Tensor:
    plain, found = load_exported(folder), []
    for prompt in prompts:
        with torch.no_grad():
            logs = plain(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        found.append(logs[range(len(prompt) - 1), prompt[1:]])
    return torch.cat(found)


def test_rows_that_groups_do_not_divide(tmp_path: Path) -> None:
    """Attention has rows of 24 here, which stay in bf16; experts of 32 are read in one dtype, so that w4a16 is refused."""
    published("deepseek_v3", tmp_path / "hub", **WIDE, **WIDE_EXPERTS, q_lora_rank=24)
    written = ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="compressed-tensors", dtype="w4a16")
    assert "weights stay in bf16, since 128 does not divide their rows" in written.notes[0]
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.self_attn.q_b_proj" in section["ignore"]
    published("deepseek_v3", tmp_path / "narrow", **WIDE)
    with pytest.raises(ExportError, match=r"experts\.0\.down_proj.weight` have \d+ elements, no multiple of"):
        ds_finetune.export_model(tmp_path / "narrow", tmp_path / "no", format="compressed-tensors", dtype="w4a16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "narrow", "out"]


def test_a_changed_byte_is_found_and_other_ways_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("qwen2", tmp_path / "hub")
    out = str(tmp_path / "out")
    command = ["export", str(tmp_path / "hub"), out, "--format", "compressed-tensors", "--quantise"]
    for name, told in (("awq", "does not install beside transformers 5.23"), ("int4", "does not support --dtype int4")):
        assert main([*command, name]) == 2
        assert told in " ".join(capsys.readouterr().err.split())
    with files_of_at_most(20_000):
        assert main([*command, "w8a16"]) == 2
    assert "cannot be written: File too large" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["hub"]
    assert main([*command, "w8a16"]) == 0
    assert main(["export", "--check", out]) == 0
    with (tmp_path / "out" / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\xff\x01\xff")
    assert main(["export", "--check", out]) == 1
    assert "model.safetensors holds other bytes than were written" in capsys.readouterr().err
    assert main(["export", out, str(tmp_path / "again"), "--format", "gguf"]) == 2
    assert "is quantised (compressed-tensors)" in capsys.readouterr().err
