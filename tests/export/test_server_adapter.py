"""Adapters under the names of servers: the same product as peft's folder, names that vLLM looks up, or a refusal."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

import ds_finetune
from ds_finetune.cli.main import main
from ds_finetune.config.sections import LoraConfig
from ds_finetune.errors import ConfigError, ExportError
from ds_finetune.export.formats import format_of, formats_of_run
from ds_finetune.export.server_adapter import served_rank
from ds_finetune.families.server_lora import VLLM_LORA
from ds_finetune.families.table import FAMILIES
from tests.export.cells import types_of
from tests.json_files import change_json
from tests.lora_twin import adapted, base_model, named_in, write_adapter_of
from tests.running import files_of_at_most

LATENT = (
    "gate",
    "experts",
    r".*\.(q_a|q_b|o|q)_proj",
    r".*\.kv_a_proj_with_mqa",
    r".*\.mlp\.(shared_experts\.)?\w+_proj",
)

OWN_NAMES = {
    "mixtral": ("gate", "experts", r".*\.self_attn\..*_proj"),
    "deepseek_v4": ("experts", r".*\.self_attn\.(q_a|q_b|kv|o_b)_proj", r".*\.mlp\.shared_experts\.\w+_proj"),
}


def _save(family: str, folder: Path, *targets: str) -> tuple[Path, Path]:
    """A base, and an adapter of the modules that vLLM knows, or of `targets`."""
    base_model(family).save_pretrained(folder / "base")
    has_latents = "kv_a_proj_with_mqa" in VLLM_LORA.get(family, ())
    named = targets or (LATENT if has_latents else named_in(family))
    if family in OWN_NAMES and not targets:
        named = OWN_NAMES[family]
    names = [name for name, _ in base_model(family).named_modules()]
    found = [
        name for name in named if any(name == each.rpartition(".")[2] or re.fullmatch(name, each) for each in names)
    ]
    lora = LoraConfig(rank=8, alpha=32, target_modules=found)
    write_adapter_of(adapted(base_model(family), lora), lora, folder / "adapter", base=folder / "base")
    return folder / "base", folder / "adapter"


IN_EVERY_SUITE = ("llama", "mixtral", "deepseek_v3", "deepseek_v4")


@pytest.mark.parametrize(
    "family",
    [
        name if name in IN_EVERY_SUITE else pytest.param(name, marks=pytest.mark.slow)
        for name in types_of("export/test_server_adapter.py", "names")
    ],
)
def test_it_is_the_same_adapter_by_names_that_vllm_looks_up(family: str, tmp_path: Path) -> None:
    base, adapter = _save(family, tmp_path)
    written = ds_finetune.export_model(adapter, tmp_path / "served", format="adapter")
    tensors = load_file(tmp_path / "served" / "adapter_model.safetensors")
    published = load_file(base / "model.safetensors")
    if family == "deepseek_v4":
        # DeepSeek's own checkpoint names layers so; transformers writes the model's name before it.
        published = {key.removeprefix("model."): tensor for key, tensor in published.items()}
    assert written.num_tensors == len(tensors)
    for key, tensor in tensors.items():
        name, _, side = key.removeprefix("base_model.model.").rpartition(".lora_")
        assert any(f".{name}".endswith(f".{known}") for known in VLLM_LORA[family])
        rows, columns = published[f"{name}.weight"].shape
        assert tensor.shape == ((8, columns) if side.startswith("A") else (rows, 8)), key
    config = json.loads((tmp_path / "served" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) <= {known.rpartition(".")[2] for known in VLLM_LORA[family]}
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (8, 8, None)
    assert format_of(tmp_path / "served").name == "adapter"
    assert format_of(adapter).name == "safetensors"
    # Merged, both give the same weights.
    for name in ("adapter", "served"):
        ds_finetune.export_model(tmp_path / name, tmp_path / f"m-{name}", base=base, dtype="fp32", verify=False)
    merged = [load_file(tmp_path / f"m-{name}" / "model.safetensors") for name in ("adapter", "served")]
    assert merged[0].keys() == merged[1].keys()
    assert all(torch.allclose(merged[0][key], merged[1][key], atol=1e-6) for key in merged[0])
    assert any(not torch.equal(merged[1][key], published[key]) for key in merged[1].keys() & published.keys())


def test_ranks_that_differ_are_filled_with_zeros(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = base_model("llama")
    model.save_pretrained(tmp_path / "base")
    torch.manual_seed(6)
    patterns = {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"layers.1.*": 3}}
    given = {"r": 12, "target_modules": ["q_proj", "o_proj"], "use_rslora": True, **patterns}
    peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **given)).save_pretrained(tmp_path / "adapter")
    for name in ("served", "again"):
        source = tmp_path / ("adapter" if name == "served" else "served")
        ds_finetune.export_model(source, tmp_path / name, format="adapter", base=tmp_path / "base")
    assert served_rank(tmp_path / "served") == 16
    for name in ("adapter", "again"):
        ds_finetune.export_model(
            tmp_path / name, tmp_path / f"m-{name}", base=tmp_path / "base", dtype="fp32", verify=False
        )
    merged = [load_file(tmp_path / f"m-{name}" / "model.safetensors") for name in ("adapter", "again")]
    assert all(torch.allclose(merged[0][key], merged[1][key], atol=1e-6) for key in merged[0])


@pytest.mark.parametrize("target", [r".*\.compressor\.kv_proj", r".*\.indexer\.q_b_proj", "gate"])
def test_layers_whose_weights_vllm_reads_itself_are_refused(target: str, tmp_path: Path) -> None:
    """Of the compressors, which have the last names of layers that vLLM computes with an adapter, and the router."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = base_model("deepseek_v4")
    model.save_pretrained(tmp_path / "base")
    given = {"target_parameters": [r"mlp.gate.weight"]} if target == "gate" else {"target_modules": target}
    peft.get_peft_model(model, peft.LoraConfig(r=4, **given)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ExportError, match=r"which vLLM 0\.32 ignores for deepseek_v4"):
        ds_finetune.export_model(tmp_path / "adapter", tmp_path / "out", format="adapter", base=tmp_path / "base")


@pytest.mark.parametrize("kind", types_of("export/test_server_adapter.py", "vLLM"))
def test_adapters_of_peft_for_types_that_are_not_trained_with_lora(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = _qwen2_moe() if kind == "qwen2_moe" else base_model("gpt_oss")
    model.save_pretrained(tmp_path / "base")
    before = load_file(tmp_path / "base" / "model.safetensors")
    named = ["q_proj", "o_proj", *["gate_proj", "down_proj", "up_proj"] * (kind == "qwen2_moe")]
    torch.manual_seed(6)
    adapted_model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=named, init_lora_weights=False))
    adapted_model.save_pretrained(tmp_path / "adapter")
    ds_finetune.export_model(tmp_path / "adapter", tmp_path / "served", format="adapter", base=tmp_path / "base")
    served = load_file(tmp_path / "served" / "adapter_model.safetensors")
    wanted = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    scale = peft.LoraConfig().lora_alpha / 4
    assert served.keys() == wanted.keys()
    for key, tensor in served.items():
        assert key.removeprefix("base_model.model.").replace(".lora_A.", ".").replace(".lora_B.", ".") in before
        assert torch.allclose(tensor, wanted[key] * (scale if ".lora_B." in key else 1), atol=1e-6)


def _qwen2_moe() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=96, shared_expert_intermediate_size=8, **sizes, **heads))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_keys_and_values_of_latent_attention_are_refused(family: str, tmp_path: Path) -> None:
    _, adapter = _save(family, tmp_path, "kv_b_proj", "o_proj")
    with pytest.raises(ExportError, match=f"adapts kv_b_proj, which vLLM 0.32 ignores for {family}"):
        ds_finetune.export_model(adapter, tmp_path / "served", format="adapter")
    assert not (tmp_path / "served").exists()


def test_what_vllm_has_no_adapters_for_is_refused(tmp_path: Path) -> None:
    unread = {"gemma3_text", "gemma4_text", "minimax_m2", "mistral", "ministral3", "phi3", "qwen3_next"}
    unread |= {"exaone", "exaone4", "qwen3_5_moe_text", "qwen3_5_text", "sarvam_mla", "sarvam_moe"}
    assert {name for name, row in FAMILIES.items() if row.has_lora} - unread == VLLM_LORA.keys() - {"qwen2_moe"}
    _, adapter = _save("deepseek_v32", tmp_path, "o_proj")
    change_json(tmp_path / "base" / "config.json", {"model_type": "phi3"})
    with pytest.raises(ExportError, match="models of type `phi3` cannot be exported to adapter"):
        ds_finetune.export_model(adapter, tmp_path / "served", format="adapter")
    with pytest.raises(ExportError, match="has no adapter"):
        ds_finetune.export_model(tmp_path / "base", tmp_path / "served", format="adapter")
    with pytest.raises(ConfigError, match=r"export\.formats names adapter, which is made after training"):
        formats_of_run(["safetensors", "adapter"])


def test_one_weight_of_the_experts_and_a_large_rank_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    for number, (given, told) in enumerate(
        (
            (
                {"target_modules": [], "target_parameters": ["experts.down_proj"]},
                "adapts only down_proj of .* cannot load",
            ),
            ({"target_modules": ["o_proj"], "r": 513}, "has rank 513, and vLLM 0.32 allows at most 512"),
        )
    ):
        model = base_model("deepseek_v3")
        model.save_pretrained(tmp_path / "base")
        peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, **given})).save_pretrained(tmp_path / f"a{number}")
        with pytest.raises(ExportError, match=told):
            ds_finetune.export_model(
                tmp_path / f"a{number}", tmp_path / "served", format="adapter", base=tmp_path / "base"
            )


def test_a_full_disk_leaves_nothing_and_a_changed_byte_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, adapter = _save("llama", tmp_path)
    with files_of_at_most(2000):
        assert main(["export", str(adapter), str(tmp_path / "served"), "--format", "adapter"]) == 2
    assert "served` cannot be written: " in capsys.readouterr().err
    assert not list(tmp_path.glob("served*"))
    assert main(["export", str(adapter), str(tmp_path / "served"), "--format", "adapter"]) == 0
    assert main(["export", "--check", str(tmp_path / "served")]) == 0
    change_json(tmp_path / "served" / "adapter_config.json", {"r": 4})
    assert main(["export", "--check", str(tmp_path / "served")]) == 1
    assert "adapter_config.json holds other bytes" in capsys.readouterr().err


def test_serve_tells_vllm_of_the_adapter_or_refuses_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program `vllm` that writes its arguments, and whether the adapter is there, and ends."""
    base, adapter = _save("qwen3_moe", tmp_path)
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nfor last; do :; done\nls "${{last#*=}}" >> {tmp_path}/arguments\nexit 3\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    command = ["serve", str(base), "--engine", "vllm", "--port", "8399", "--adapter"]
    assert main([*command, str(adapter)]) != 0
    arguments, *files = (tmp_path / "arguments").read_text().splitlines()
    assert f"--enable-lora --max-lora-rank 8 --lora-modules {adapter}=" in arguments
    assert files == ["adapter_config.json", "adapter_model.safetensors", "verification.json"]
    (tmp_path / "arguments").unlink()
    _, refused = _save("deepseek_v3", tmp_path / "latent", "kv_b_proj")
    assert main(["serve", str(refused.parent / "base"), *command[2:], str(refused)]) == 2
    assert "adapts kv_b_proj, which vLLM 0.32 ignores" in capsys.readouterr().err
    assert main([*command, str(refused)]) == 2
    assert main(["serve", str(base), "--engine", "transformers", "--adapter", str(adapter)]) == 2
    assert f"--adapter {adapter} is not valid with --engine transformers" in capsys.readouterr().err
    assert not (tmp_path / "arguments").exists()
