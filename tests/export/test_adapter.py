"""Adapters written by peft and merged into their base without peft: equal to peft's result, or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ds_finetune import export_model
from ds_finetune.config.sections import LoraConfig
from ds_finetune.errors import ExportError, ModelError
from ds_finetune.export.from_checkpoint import export_checkpoint
from ds_finetune.model.adapters.peft_adapter import CONFIG, WEIGHTS
from ds_finetune.model.weights.load import weights_digest
from tests.json_files import change_json
from tests.lora_twin import adapted, base_model, named_in, write_adapter_of

peft = pytest.importorskip("peft", reason="peft is not installed")
MLA = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
BY_PEFT = {
    "llama all-linear": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "qwen2 rslora": ("qwen2", {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
    "llama patterns": (
        "llama",
        {
            "r": 4,
            "rank_pattern": {"o_proj": 2},
            "alpha_pattern": {"layers.1.*": 3},
            "target_modules": ["q_proj", "o_proj"],
        },
    ),
    "v3 attention": ("deepseek_v3", {"r": 4, "target_modules": MLA}),
    "v3 rewritten to experts": ("deepseek_v3", {"r": 4, "target_modules": [*MLA, *MLP]}),
    "v3 one of two": ("deepseek_v3", {"r": 4, "target_modules": [], "target_parameters": ["experts.gate_up_proj"]}),
    "v3 the other": ("deepseek_v3", {"r": 4, "target_modules": [], "target_parameters": ["experts.down_proj"]}),
    "v2 experts": (
        "deepseek_v2",
        {"r": 4, "target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "gpt_oss experts": (
        "gpt_oss",
        {"r": 4, "target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "mixtral by published names": ("mixtral", {"r": 4, "target_modules": ["q_proj", "w1", "w2", "w3", "gate"]}),
    "olmoe experts": ("olmoe", {"r": 4, "target_modules": [*MLP, "k_proj"]}),
    "v3 router": (
        "deepseek_v3",
        {"r": 4, "target_modules": [], "target_parameters": ["mlp.gate.weight", "shared_experts.up_proj.weight"]},
    ),
}
SHARD = 100_000


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits  # type: ignore[no-any-return]


def _plain(folder: Path) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    return model


# peft 0.21 warns of patterns that it has added itself for the parameters of experts, and uses them.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("name", BY_PEFT)
def test_an_adapter_of_peft_is_merged_as_peft_merges_it(name: str, tmp_path: Path) -> None:
    family, given = BY_PEFT[name]
    base = base_model(family)
    base.save_pretrained(tmp_path / "base", max_shard_size="60KB")
    before = _logits(base)
    torch.manual_seed(6)
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **given))
    theirs.save_pretrained(tmp_path / "adapter")
    export_checkpoint(
        tmp_path / "adapter", tmp_path / "out", dtype="fp32", max_shard_bytes=SHARD, base=tmp_path / "base"
    )
    wanted = _logits(theirs)
    assert (wanted - before).abs().max() > 1e-2
    assert torch.allclose(_logits(_plain(tmp_path / "out")), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("method", "is_merged"), {"pissa": False, "olora": False, "orthogonal": True}.items())
def test_adapters_are_merged_where_the_base_is_what_they_were_trained_on(
    method: str, is_merged: bool, tmp_path: Path
) -> None:
    base = base_model("llama")
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=method, r=4, target_modules=["q_proj", "v_proj"])
    theirs = peft.get_peft_model(base, config)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.3
    theirs.save_pretrained(tmp_path / "adapter")
    if not is_merged:
        with pytest.raises(ExportError, match=f"init_lora_weights '{method}'") as refused:
            _export(tmp_path)
        assert refused.value.hint
        with pytest.raises(ExportError, match=f"init_lora_weights '{method}'"):
            export_model(tmp_path / "adapter", tmp_path / "served", format="adapter", base=tmp_path / "base")
        assert not (tmp_path / "served").exists()
        return
    found = _export(tmp_path)
    wanted = dict(theirs.merge_and_unload().named_parameters())
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in wanted.items() if name in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": None}, "has r 8 and lora_alpha None, which should be numbers"),
        ({"r": "8"}, "has r '8' and lora_alpha 32, which should be numbers"),
        ({"rank_pattern": {"q_a_proj": 0}}, "has r 0 and lora_alpha 32, which should be numbers"),
        ({"rank_pattern": ["q_a_proj"]}, "cannot be read as an adapter"),
        ({"alpha_pattern": {"(q_a_proj": 2}}, "cannot be read as an adapter: missing \\)"),
    ],
)
def test_settings_of_a_wrong_type_are_one_error(changes: dict[str, Any], message: str, folder: Path) -> None:
    change_json(folder / "adapter" / CONFIG, changes)
    with pytest.raises(ExportError, match=message):
        _export(folder)


def test_the_weights_of_an_adapter_have_the_permissions_of_the_umask(folder: Path) -> None:
    assert (folder / "adapter" / WEIGHTS).stat().st_mode == (folder / "adapter" / CONFIG).stat().st_mode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base, and an adapter with every kind of module in it."""
    base_model("deepseek_v3").save_pretrained(tmp_path / "base")
    lora = LoraConfig(rank=8, target_modules=named_in("deepseek_v3"))
    write_adapter_of(adapted(base_model("deepseek_v3"), lora), lora, tmp_path / "adapter", base=tmp_path / "base")
    return tmp_path


def _export(folder: Path, *, dtype: str = "fp32", base: str | None = "base") -> dict[str, torch.Tensor]:
    export_checkpoint(
        folder / "adapter", folder / "out", dtype=dtype, max_shard_bytes=10**9, base=folder / base if base else None
    )
    return load_file(folder / "out" / "model.safetensors")


def test_layers_that_the_class_does_not_build_are_carried_over(folder: Path) -> None:
    file = folder / "base" / "model.safetensors"
    extra = {
        "model.layers.2.eh_proj.weight": torch.randn(32, 64),
        "model.layers.2.mlp.experts.0.up_proj.weight": torch.randn(16, 32),
    }
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    found = _export(folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in extra.items())


def test_a_base_with_fused_names_is_merged_too_and_its_bias_stays_fp32(folder: Path) -> None:
    wanted = _export(folder)
    shutil.rmtree(folder / "out")
    base_model("deepseek_v3").save_pretrained(folder / "base", save_original_format=False)
    found = _export(folder)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    shutil.rmtree(folder / "out")
    kinds = {name: tensor.dtype for name, tensor in _export(folder, dtype="bf16").items()}
    assert {name for name, dtype in kinds.items() if dtype == torch.float32} == {
        "model.layers.1.mlp.gate.e_score_correction_bias"
    }


def _change_config(folder: Path, **values: Any) -> None:
    file = folder / "adapter" / CONFIG
    change_json(file, values)


def _change_tensors(folder: Path, change: Any) -> None:
    file = folder / "adapter" / WEIGHTS
    save_file(dict(change(load_file(file))), file, metadata={"format": "pt"})


def _tear(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-10])


def _index(folder: Path) -> None:
    part = (folder / "base" / "model.safetensors").rename(folder / "base" / "part.safetensors")
    text = json.dumps({"weight_map": dict.fromkeys(load_file(part), "../base/part.safetensors")})
    (folder / "base" / "model.safetensors.index.json").write_text(text)


SPOILED: dict[str, tuple[Any, str]] = {
    "dora": (lambda f: _change_config(f, use_dora=True), "use_dora True"),
    "an unknown setting": (lambda f: _change_config(f, of_next_year={"a": 1}), "of_next_year {'a': 1}"),
    "aLoRA": (lambda f: _change_config(f, alora_invocation_tokens=[3, 4]), r"alora_invocation_tokens \[3, 4\]"),
    "trained tokens": (lambda f: _change_config(f, trainable_token_indices=[3]), "trainable_token_indices"),
    "other kind": (lambda f: _change_config(f, peft_type="LOHA"), "peft_type 'LOHA'"),
    "half": (lambda f: _change_tensors(f, lambda t: list(t.items())[1:]), "without A or B for 1 adapters"),
    "unknown tensor": (
        lambda f: _change_tensors(f, lambda t: t | {"x.magnitude": torch.zeros(1)}),
        "tensor x.magnitude",
    ),
    "other rank": (lambda f: _change_config(f, r=16), "which do not fit rank 16"),
    "other shape": (
        lambda f: _change_tensors(f, lambda t: {k: v[:, :-1].clone() if "lora_A" in k else v for k, v in t.items()}),
        "does not fit the base",
    ),
    "torn adapter": (lambda f: _tear(f, f"adapter/{WEIGHTS}"), "cannot be read as an adapter"),
    "torn base": (lambda f: _tear(f, "base/model.safetensors"), "is not a complete safetensors file"),
    "no base weights": (lambda f: (f / "base" / "model.safetensors").unlink(), "no safetensors weights"),
    "file outside": (_index, "names files outside its folder: ../base"),
    "another family": (lambda f: base_model("llama").save_pretrained(f / "base"), "does not fit the base"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_does_not_fit_is_one_clear_error_and_nothing_is_written(name: str, folder: Path) -> None:
    spoil, said = SPOILED[name]
    spoil(folder)
    with pytest.raises((ExportError, ModelError), match=said) as refused:
        _export(folder)
    assert refused.value.hint
    assert not (folder / "out").exists()


def test_a_missing_base_is_named(folder: Path) -> None:
    shutil.move(folder / "base", folder / "elsewhere")
    with pytest.raises(ExportError, match="of the adapters in") as refused:
        _export(folder, base=None)
    assert "--base" in refused.value.hint
    assert _export(folder, base="elsewhere")


def test_an_adapter_that_names_no_base_needs_one(folder: Path) -> None:
    _change_config(folder, base_model_name_or_path=None)
    with pytest.raises(ExportError, match="does not say which base model"):
        _export(folder, base=None)


def test_the_digest_differs_for_other_weights_and_not_for_other_dtypes(tmp_path: Path) -> None:
    model = base_model("llama")
    model.bfloat16().save_pretrained(tmp_path / "bf16")
    model.float().save_pretrained(tmp_path / "fp32")
    model.model.layers[1].mlp.up_proj.weight.data[0, 3] += 0.1
    model.save_pretrained(tmp_path / "other")
    digests = [weights_digest(tmp_path / name) for name in ("bf16", "fp32", "other")]
    assert digests[0] == digests[1] != digests[2]
