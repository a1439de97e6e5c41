"""From a model folder to another, in FP8 and out of it: numbers equal numpy's, published bytes return, nothing is
lost.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.quantizers.quantizers_utils import should_convert_module

from ds_finetune.cli.main import main
from ds_finetune.config.sections import LoraConfig
from ds_finetune.errors import ExportError
from ds_finetune.export.adapter import AdapterBase, write_adapter
from ds_finetune.export.base_folder import BaseFolder
from ds_finetune.export.from_checkpoint import ExportResult, export_checkpoint
from ds_finetune.export.model_config import served_config
from ds_finetune.export.plain_source import copy_settings
from ds_finetune.export.safetensors_folder import FolderParts, write_folder
from ds_finetune.export.source import read_model_spec
from ds_finetune.export.verify.record import UNVERIFIED, ExportRecord
from ds_finetune.export.verify.verify import read_tensor_table, verify_exports
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora import Factors
from ds_finetune.model.weights.load import weights_digest
from tests.model.fp8_folder import (
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
from tests.model.weights.test_weights import published
from tests.running import metrics, start, tiny_task

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHANGED = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
COPIES = {
    "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.2.shared_head.head.weight": "lm_head.weight",
}
"""Tensors of the prediction layer that repeat one of the model, and which."""


def export(source: Path, out: Path, dtype: str, base: Path | None = None) -> ExportResult:
    return export_checkpoint(source, out, dtype=dtype, max_shard_bytes=10**5, base=base)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model: FP8 with scales of its own, and files beside the weights."""
    folder = publish(tmp_path_factory.mktemp("v3") / "base", with_other_scales(in_fp8(master())))
    (folder / "tokenizer.json").write_bytes(b"{ }\r\n")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_fp8(dtype: str, base: Path, tmp_path: Path) -> None:
    exported = export(base, tmp_path / "out", dtype)
    wanted = dequantised(read_all(base), DTYPES[dtype])
    assert_same(read_all(tmp_path / "out"), wanted)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["num_nextn_predict_layers"] == 1
    assert config["torch_dtype"] == str(DTYPES[dtype]).removeprefix("torch.")
    assert {key: config[key] for key in ("rope_theta", "rope_scaling")} == {
        key: V3[key] for key in ("rope_theta", "rope_scaling")
    }
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert (exported.num_tensors, exported.num_bytes) == (len(wanted), sum(tensor.nbytes for tensor in wanted.values()))
    assert exported.notes[0].startswith(
        f"{sum('layers.2.' in key for key in wanted)} tensors of {base} for which transformers' class has no module are kept"
    )
    publish(
        tmp_path / "plain", wanted, config={key: value for key, value in V3.items() if key != "quantization_config"}
    )
    ids = torch.arange(3, 20)[None]
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()(ids).logits
        for name in ("out", "plain")
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8"])
def test_out_of_fp8_and_back_are_the_published_bytes(dtype: str, base: Path, tmp_path: Path) -> None:
    export(base, tmp_path / "between", dtype)
    exported = export(tmp_path / "between", tmp_path / "out", "fp8", base)
    assert_same(read_all(tmp_path / "out"), read_all(base))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == V3["quantization_config"]
    assert config["torch_dtype"] == "bfloat16"
    blocks = sum(tensor.numel() for key, tensor in read_all(base).items() if key.endswith("_scale_inv"))
    kept = tmp_path / "between" if dtype == "fp8" else base
    assert (
        exported.notes[-1]
        == f"{blocks:,} of {blocks:,} quantised blocks equal those of {kept} and were copied byte for byte"
    )


def test_back_from_fp16_keeps_the_bytes_of_fp8_weights(base: Path, tmp_path: Path) -> None:
    """The other weights are rounded where they are below fp16's smallest normal number."""
    export(base, tmp_path / "between", "fp16")
    export(tmp_path / "between", tmp_path / "out", "fp8", base)
    found, wanted = read_all(tmp_path / "out"), read_all(base)
    linear = [
        key
        for key in wanted
        if key.removesuffix("_scale_inv") in wanted and is_published_in_fp8(key.removesuffix("_scale_inv"))
    ]
    assert_same({key: found[key] for key in linear}, {key: wanted[key] for key in linear})


def test_back_without_the_base_where_scales_came_from_bf16(tmp_path: Path) -> None:
    base = publish(tmp_path / "base", in_fp8(master()))
    export(base, tmp_path / "between", "bf16")
    export(tmp_path / "between", tmp_path / "out", "fp8")
    assert_same(read_all(tmp_path / "out"), read_all(base))


def test_only_changed_blocks_are_quantised_again(base: Path, tmp_path: Path) -> None:
    tuned = dequantised(read_all(base), torch.bfloat16)
    tuned[CHANGED][130, 150] += 1
    publish(tmp_path / "tuned", tuned, config=V3)
    exported = export(tmp_path / "tuned", tmp_path / "out", "fp8", base)
    found, wanted = read_all(tmp_path / "out"), read_all(base)
    weight, scale = coded(tuned[CHANGED])
    last = (slice(128, None), slice(128, None))
    wanted[CHANGED].view(torch.uint8)[last] = weight.view(torch.uint8)[last]
    wanted[CHANGED + "_scale_inv"][1, 1] = scale[1, 1]
    assert_same(found, wanted)
    blocks = sum(tensor.numel() for key, tensor in wanted.items() if key.endswith("_scale_inv"))
    assert exported.notes[-1].startswith(f"{blocks - 1:,} of {blocks:,} quantised blocks")


@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e8m0fnu], ids=["fp32", "byte"])
def test_a_base_with_scales_that_are_powers_of_two(stored: torch.dtype, tmp_path: Path) -> None:
    """As DeepSeek-V3.1: unchanged blocks come back, a changed one gets the power of two that transformers gives it."""
    section = V3["quantization_config"] | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}
    scales = {key: tensor for key, tensor in in_fp8(master()).items() if key.endswith("_scale_inv")}
    powers = {key: torch.exp2(torch.ceil(torch.log2(tensor.double()))).to(stored) for key, tensor in scales.items()}
    base = publish(tmp_path / "base", in_fp8(master()) | powers, config=V3 | {"quantization_config": section})
    tuned = dequantised(read_all(base), torch.bfloat16)
    tuned[CHANGED][2, 3] = 3.0
    plain = {key: value for key, value in V3.items() if key != "quantization_config"}
    publish(tmp_path / "tuned", tuned, config=plain)
    export(tmp_path / "tuned", tmp_path / "out", "fp8", base)
    found, wanted = read_all(tmp_path / "out"), read_all(base)
    config = FineGrainedFP8Config(scale_fmt="ue8m0")
    block = (slice(0, 128), slice(0, 128))
    made = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": tuned[CHANGED][block]})
    wanted[CHANGED].view(torch.uint8)[block] = made["a.weight"].view(torch.uint8)
    wanted[CHANGED + "_scale_inv"].view(torch.uint8 if stored.itemsize == 1 else torch.int32)[0, 0] = (
        made["a.weight_scale_inv"].to(stored).view(torch.uint8 if stored.itemsize == 1 else torch.int32)[0, 0]
    )
    assert_same(found, wanted)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == section
    export(tmp_path / "out", tmp_path / "again", "bf16")
    assert_same(read_all(tmp_path / "again"), dequantised(wanted, torch.bfloat16))


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3", "llama"])
def test_modules_that_are_not_in_fp8_are_listed(family: str, tmp_path: Path) -> None:
    """Servers build every other linear layer in FP8, the routers among them, and transformers as well."""
    published(family, tmp_path / "base")
    export(tmp_path / "base", tmp_path / "out", "fp8")
    found = read_all(tmp_path / "out")
    in_fp8 = {key.removesuffix(".weight") for key, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
    matrices = {key.removesuffix(".weight") for key, t in found.items() if key.endswith(".weight") and t.dim() == 2}
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    listed = section.pop("modules_to_not_convert")
    assert section == V3["quantization_config"]
    assert {name for name in matrices if should_convert_module(name, listed)} == in_fp8
    routers = {key.removesuffix(".weight") for key in found if key.endswith("mlp.gate.weight")}
    assert {"lm_head", *routers} <= set(listed)
    assert bool(routers) == (family != "llama")


def test_a_dense_model_in_fp8_is_what_plain_loops_make_and_transformers_reads(tmp_path: Path) -> None:
    published("qwen3", tmp_path / "base")
    export(tmp_path / "base", tmp_path / "out", "fp8")
    plain, found = read_all(tmp_path / "base"), read_all(tmp_path / "out")
    linear = {key for key in plain if key.endswith("_proj.weight")}
    assert found.keys() == plain.keys() | {key + "_scale_inv" for key in linear}
    for key, tensor in plain.items():
        wanted = coded(tensor)[0].view(torch.uint8) if key in linear else tensor.bfloat16()
        assert torch.equal(found[key].view(wanted.dtype), wanted), key
    publish(
        tmp_path / "plain",
        dequantised(found, torch.bfloat16),
        config=json.loads((tmp_path / "base" / "config.json").read_text()),
    )
    ids = torch.arange(3, 20)[None]
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).eval()(ids).logits
        for name in ("out", "plain")
    )
    assert torch.equal(ours, theirs)


def test_a_type_whose_row_has_no_list_takes_from_its_base_which_weights_are_in_fp8(tmp_path: Path) -> None:
    tree = {
        key: V3[key]
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "q_lora_rank",
        )
    }
    tree |= {
        key: V3[key]
        for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_hidden_layers")
    }
    config = AutoConfig.for_model("glm_moe_dsa", **tree, first_k_dense_replace=2, index_n_heads=4, index_head_dim=64)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    plain = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    in_blocks = {key for key in plain if re.search(r"(_proj|_with_mqa|indexer\.wq_b|indexer\.wk)\.weight$", key)} - {
        key for key in plain if "weights_proj" in key
    }
    assert any("indexer.wk." in key for key in in_blocks)
    blocks = {key: dict(zip(("", "_scale_inv"), coded(plain[key]), strict=True)) for key in in_blocks}
    published_in_fp8 = {key + end: tensor for key, pair in blocks.items() for end, tensor in pair.items()}
    saved = config.to_dict() | {"architectures": ["GlmMoeDsaForCausalLM"], "dtype": "bfloat16"}
    base = publish(
        tmp_path / "base",
        {key: tensor for key, tensor in plain.items() if key not in in_blocks} | published_in_fp8,
        config=saved | {"quantization_config": V3["quantization_config"]},
    )
    export(base, tmp_path / "bf16", "bf16")
    with pytest.raises(ExportError, match="for model_type glm_moe_dsa it is not known which weights belong in FP8"):
        export(tmp_path / "bf16", tmp_path / "none", "fp8")
    export(tmp_path / "bf16", tmp_path / "out", "fp8", base)
    assert_same(read_all(tmp_path / "out"), read_all(base))


def test_deepseek_in_fp8_is_read_by_plain_transformers(tmp_path: Path) -> None:
    """At widths that are multiples of 128, since transformers 5.23 takes wrong blocks at others
    (integrations/finegrained_fp8.py:1130-1175).
    """
    whole = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "kv_lora_rank": 128,
        "q_lora_rank": 128,
    }
    whole |= {"qk_rope_head_dim": 128, "qk_nope_head_dim": 32, "v_head_dim": 32}
    tree = {key: value for key, value in (V3 | whole).items() if key != "quantization_config"}
    export(publish(tmp_path / "base", master(**whole), config=tree), tmp_path / "out", "fp8")
    plain = dequantised(read_all(tmp_path / "out"), torch.bfloat16)
    publish(
        tmp_path / "plain",
        plain,
        config={key: value for key, value in (V3 | whole).items() if key != "quantization_config"},
    )
    ids = torch.arange(3, 20)[None]
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).eval()(ids).logits
        for name in ("out", "plain")
    )
    assert torch.equal(ours, theirs)


def test_tensors_that_only_the_base_has_are_carried_over(base: Path, tmp_path: Path) -> None:
    """As transformers saves it after training: without the prediction layer."""
    plain = dequantised(read_all(base), torch.bfloat16)
    built = {key: tensor for key, tensor in plain.items() if "layers.2." not in key}
    tuned = publish(tmp_path / "tuned", built, config=V3)
    exported = export(tuned, tmp_path / "with", "bf16", base)
    assert_same(read_all(tmp_path / "with"), plain)
    assert (
        f"copied from {base}, since transformers' class has no module for them: "
        f"{len(plain) - len(built) - len(COPIES)} tensors" in exported.notes[0]
    )
    exported = export(tuned, tmp_path / "without", "bf16")
    assert_same(read_all(tmp_path / "without"), built)
    assert json.loads((tmp_path / "without" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert exported.notes == ("config.json: num_nextn_predict_layers 1 -> 0, as many as have tensors",)


def _tuned(base: Path) -> dict[str, torch.Tensor]:
    """The weights of `base` after full training, as transformers saves them.

    Embedding and head have changed, and the prediction layer is missing.
    """
    plain = {
        key: tensor for key, tensor in dequantised(read_all(base), torch.float32).items() if "layers.2." not in key
    }
    return plain | {original: plain[original] * 1.5 for original in COPIES.values()}


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8"])
def test_copies_of_embedding_and_head_are_the_trained_ones_where_the_bases_were_copies(
    dtype: str, base: Path, tmp_path: Path
) -> None:
    """vLLM drafts with the prediction layer's copies where they differ from the model's own."""
    exported = export(publish(tmp_path / "tuned", _tuned(base), config=V3), tmp_path / "out", dtype, base)
    found, published = read_all(tmp_path / "out"), read_all(base)
    for copy, original in COPIES.items():
        assert torch.equal(found[copy], found[original]), copy
        assert not torch.equal(found[copy].float(), published[copy].float()), copy
    said = ", ".join(f"{copy} from {original}" for copy, original in COPIES.items())
    assert f"written as copies of the trained tensor, as they are in {base}: {said}" in exported.notes


def test_a_prediction_layer_with_a_head_of_its_own_keeps_it(tmp_path: Path) -> None:
    head = "model.layers.2.shared_head.head.weight"
    own = torch.randn(V3["vocab_size"], V3["hidden_size"]).bfloat16()
    base = publish(tmp_path / "base", in_fp8(master() | {head: own}))
    exported = export(publish(tmp_path / "tuned", _tuned(base), config=V3), tmp_path / "out", "bf16", base)
    found = read_all(tmp_path / "out")
    assert torch.equal(found[head], own)
    assert torch.equal(found["model.layers.2.embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert not any(head in note for note in exported.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_live_export_writes_the_same_copies(dtype: torch.dtype, base: Path, tmp_path: Path) -> None:
    """As a run exports: one tensor after another, each released before the next one."""
    spec = read_model_spec(base)
    parts = FolderParts(
        family=family_of("deepseek_v3"), config=V3, architecture=spec.architecture, dtype=dtype, files=()
    )
    parts, notes = BaseFolder.read(base, spec).with_base_tensors(parts)
    specs = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in spec.shapes.items()}
    live = ((name, torch.randn(shape).to(dtype)) for name, shape in spec.shapes.items())
    write_folder(live, specs, tmp_path / "out", parts, max_shard_bytes=10**5)
    found = read_all(tmp_path / "out")
    assert found.keys() == dequantised(read_all(base), dtype).keys()
    for copy, original in COPIES.items():
        assert found[copy].dtype == dtype
        assert torch.equal(found[copy], found[original]), copy
    assert "written as copies of the trained tensor" in notes[-1]


def test_an_adapter_of_the_head_changes_its_copy(base: Path, tmp_path: Path) -> None:
    factors = {"lm_head.weight": Factors(torch.randn(4, V3["hidden_size"]), torch.randn(V3["vocab_size"], 4), 0.5)}
    lora = LoraConfig(rank=4, alpha=2, target_modules=("lm_head",))
    write_adapter(
        factors,
        lora,
        tmp_path / "adapter",
        AdapterBase(name=str(base), digest=weights_digest(base), family=family_of("deepseek_v3")),
    )
    export(tmp_path / "adapter", tmp_path / "out", "bf16")
    found = read_all(tmp_path / "out")
    assert torch.equal(found["model.layers.2.shared_head.head.weight"], found["lm_head.weight"])
    assert not torch.equal(found["lm_head.weight"], read_all(base)["lm_head.weight"])


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "OwnTokenizer"])
def test_code_that_is_not_exported_is_not_named_where_transformers_has_the_class(
    name: str, base: Path, tmp_path: Path
) -> None:
    """As DeepSeek publishes its models. Programs that trust code would look for the file; llama.cpp's converter always
    does.
    """
    source = Path(shutil.copytree(base, tmp_path / "source"))
    code = {
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        }
    }
    (source / "config.json").write_text(json.dumps(V3 | code))
    tokenizer = {"tokenizer_class": name, "model_max_length": 7}
    (source / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}})
    )
    exported = export(source, tmp_path / "out", "bf16")
    with pytest.raises(OSError, match="configuration_deepseek"):
        AutoConfig.from_pretrained(source, trust_remote_code=True)
    assert AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True).model_type == "deepseek_v3"
    assert (
        "config.json: without auto_map, since transformers has the class and the code is not exported" in exported.notes
    )
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    is_known = name != "OwnTokenizer"
    assert is_known == (written == tokenizer)
    said = (
        "without auto_map, since transformers has the class" if is_known else "auto_map names code that is not exported"
    )
    assert f"tokenizer_config.json: {said}" in exported.notes[-1]
    (tmp_path / "copy").mkdir()
    copy_settings(source, tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == V3
    assert is_known == (json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text()) == tokenizer)


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    published("qwen2", tmp_path / "base")
    plain = read_all(tmp_path / "base")
    twice = publish(
        tmp_path / "twice", plain | {"lm_head.weight": plain["model.embed_tokens.weight"].clone()}, shards=1
    )
    shutil.copyfile(tmp_path / "base" / "config.json", twice / "config.json")
    for source, given in ((twice, None), (twice, twice), (tmp_path / "base", twice)):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        export(source, tmp_path / "out", "fp32", given)
        assert_same(read_all(tmp_path / "out"), plain)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in bf16 from an FP8 folder; its learning rate is 0, so that no weight changes."""
    folder = tmp_path_factory.mktemp("run")
    sections = {
        "train": {"precision": "bf16"},
        "optim": {"lr": 1e-50, "weight_decay": 0.0},
        "checkpoint": {"every": "3 steps"},
        "export": {"verify": True},
        "log": {"verbose": True},
    }
    run_file = tiny_task(folder, model={"path": str(folder / "fp8"), "weights": "load"}, **sections)
    publish(folder / "fp8", with_other_scales(in_fp8(master(vocab_size=128))), config=V3 | {"vocab_size": 128})
    for file in (folder / "model").glob("token*"):
        shutil.copyfile(file, folder / "fp8" / file.name)
    done = start([sys.executable, "ds_finetune/train.py", str(run_file)])
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "said").write_text(done.stdout)
    return folder


def test_a_run_from_fp8_carries_the_prediction_layer_to_its_export(run: Path) -> None:
    assert [record["step"] for record in metrics(run)] == [1, 2, 3]
    assert_same(read_all(run / "run" / "export"), dequantised(read_all(run / "fp8"), torch.bfloat16))
    assert (
        f"copied from {run / 'fp8'}, since transformers' class has no module for them: " in (run / "said").read_text()
    )
    config = json.loads((run / "run" / "export" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    assert "quantization_config" not in config


def test_its_export_is_verified_with_the_carried_tensors(run: Path) -> None:
    out = run / "run" / "export"
    assert not (out / UNVERIFIED).exists()
    assert (ExportRecord.read(out).digests or {}).keys() == read_all(out).keys()
    assert f"{len(read_all(out))} tensors on the disk, each with the bytes that were written" in " ".join(
        (run / "said").read_text().split()
    )


def test_an_export_with_carried_tensors_is_verified_also_without_the_base(run: Path, tmp_path: Path) -> None:
    """Against the run's logits; the prediction layer, which transformers does not know, is summed and may be there."""
    out = tmp_path / "out"
    assert main(["export", str(run / "run"), str(out)]) == 0
    assert ExportRecord.read(out).step == 3
    (result,) = verify_exports([out], base=tmp_path / "gone")
    assert result.is_verified, result
    assert "logits of 16 prompts deviate" in result.lines[-1]
    key = "model.layers.2.enorm.weight"
    _flip(out, key)
    (result,) = verify_exports([out])
    assert result.problems == (f"1 tensors hold other bytes than were written: {key}",)


def test_an_export_in_fp8_is_verified_against_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run / "run"), str(out), "--dtype", "fp8"]) == 0
    assert not (out / UNVERIFIED).exists()
    said = " ".join(capsys.readouterr().out.split())
    assert f"{len(read_all(out))} tensors on the disk, each with the bytes that were written" in said
    assert f"names, shapes and dtypes of all {len(read_all(out))} tensors are those of the base" in said
    assert "logits of 16 prompts deviate by" in said
    key = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    _flip(out, key)
    assert main(["export", "--check", str(out)]) == 1
    assert (out / UNVERIFIED).read_text() == f"1 tensors hold other bytes than were written: {key}\n"


def _flip(folder: Path, key: str) -> None:
    """Change the last bit of a tensor's first byte."""
    held = read_tensor_table(folder)[key]
    with held.file.path.open("r+b") as file:
        file.seek(held.begin)
        byte = file.read(1)[0]
        file.seek(held.begin)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_adapters_are_merged_into_an_fp8_base_and_the_rest_is_as_published(
    dtype: str, base: Path, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    name, other = "model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight"
    plain, published = dequantised(read_all(base), torch.float32), read_all(base)
    factors = {
        key: Factors(torch.randn(4, plain[key].shape[1]), torch.randn(plain[key].shape[0], 4), 0.5)
        for key in (name, other)
    }
    lora = LoraConfig(rank=4, alpha=2, target_modules=("o_proj", "up_proj"))
    digest = weights_digest(base)
    adapted = AdapterBase(name=str(base), digest=digest, family=family_of("deepseek_v3"))
    write_adapter(factors, lora, tmp_path / "adapter", adapted)
    exported = export(tmp_path / "adapter", tmp_path / "out", dtype)
    found = read_all(tmp_path / "out")
    untouched = published if dtype == "fp8" else dequantised(published, torch.bfloat16)
    changed = {key for weight in factors for key in (weight, weight + "_scale_inv")}
    assert_same(
        {key: t for key, t in found.items() if key not in changed},
        {key: t for key, t in untouched.items() if key not in changed},
    )
    for key, adapter in factors.items():
        wanted = plain[key] + 0.5 * adapter.b @ adapter.a
        ours = decoded(found[key], found[key + "_scale_inv"]) if dtype == "fp8" else found[key].float()
        # Half a step of E4M3's three bits of mantissa, of bf16's seven.
        assert torch.allclose(ours, wanted, rtol=2**-4 if dtype == "fp8" else 2**-8, atol=1e-3), key
        assert (wanted - plain[key]).abs().max() > 1
    assert not any("nothing was copied" in note for note in exported.notes)
    assert f"tensors of {base} for which transformers' class has no module are kept" in exported.notes[0]
    export(base, tmp_path / "copy", "bf16")
    assert weights_digest(tmp_path / "copy") == digest


def test_a_checkpoint_knows_its_base(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The published bytes return after three steps that changed nothing; in bf16 the files equal those of the run's own
    export.
    """
    assert main(["export", "--no-verify", str(run / "run"), str(tmp_path / "fp8"), "--dtype", "fp8"]) == 0
    assert_same(read_all(tmp_path / "fp8"), read_all(run / "fp8"))
    assert "were copied byte for byte" in capsys.readouterr().out
    assert main(["export", "--no-verify", str(run / "run"), str(tmp_path / "bf16")]) == 0
    for file in (run / "run" / "export").iterdir():
        assert (tmp_path / "bf16" / file.name).read_bytes() == file.read_bytes(), file.name


def test_an_export_without_the_base_says_what_is_missing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = run / "fp8-moved"
    (run / "fp8").rename(moved)
    try:
        assert main(["export", "--no-verify", str(run / "run"), str(tmp_path / "out")]) == 0
        said = capsys.readouterr().out
        assert main(["export", "--no-verify", str(run / "run"), str(tmp_path / "named"), "--base", str(moved)]) == 0
    finally:
        moved.rename(run / "fp8")
    assert f"nothing was copied from a base: the weights of {run / 'fp8'} are not here" in said
    assert "num_nextn_predict_layers 1 -> 0" in said
    assert not any("layers.2." in key for key in read_all(tmp_path / "out"))
    assert_same(read_all(tmp_path / "named"), read_all(run / "run" / "export"))


def test_rotary_settings_in_both_schemas_mean_the_same(shared_data: Path, tmp_path: Path) -> None:
    """Published configs of the families, and those that transformers writes of them, are read again by transformers."""
    seen = 0
    for file in sorted((shared_data / "configs").glob("*/config.json")):
        given = json.loads(file.read_text())
        given.pop("quantization_config", None)
        given.pop("auto_map", None)
        family = family_of(given["model_type"])
        if family.is_generic:
            continue
        seen += 1
        (tmp_path / "config.json").write_text(json.dumps(given))
        wanted = AutoConfig.from_pretrained(tmp_path)
        wanted.save_pretrained(tmp_path / "new")
        new = json.loads((tmp_path / "new" / "config.json").read_text())
        # transformers keeps DeepSeek-V4's two bases at the top level, and its scaling for each kind of layer.
        is_by_layer = given["model_type"] == "deepseek_v4"
        assert ("rope_theta" in new) == is_by_layer
        for config in (given, new, served_config(given, family, ())):
            served = served_config(config, family, ())
            (tmp_path / "config.json").write_text(json.dumps(served))
            read = AutoConfig.from_pretrained(tmp_path).rope_parameters
            assert {**read, "type": None} == {**wanted.rope_parameters, "type": None}, file.parent.name
            assert served["rope_theta"] == given["rope_theta"]
            scaling = given.get("rope_scaling") or {}
            if is_by_layer:
                number = given["num_hidden_layers"]
                assert served["compress_ratios"][:number] == given["compress_ratios"][:number]
                assert served["num_hash_layers"] == given["num_hash_layers"]
            assert {
                key: value for key, value in (served.get("rope_scaling") or {}).items() if key in scaling
            } == scaling, file.parent.name
    assert seen > 10


def test_a_partial_rotary_factor_is_in_both_schemas(tmp_path: Path) -> None:
    """GLM-4.5 publishes it beside `rope_theta`; vLLM reads it in `rope_parameters`, and takes 0.5 where it is absent."""
    given = {"model_type": "glm4_moe", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(given))
    wanted = AutoConfig.from_pretrained(tmp_path).rope_parameters
    for config in (given, {"model_type": "glm4_moe", "rope_parameters": wanted}):
        served = served_config(config, family_of("glm4_moe"), ())
        assert served["partial_rotary_factor"] == served["rope_parameters"]["partial_rotary_factor"] == 0.25
        (tmp_path / "config.json").write_text(json.dumps(served))
        read = AutoConfig.from_pretrained(tmp_path).rope_parameters
        assert {**read, "type": None} == {**wanted, "type": None}


def test_which_weights_are_in_fp8(base: Path, tmp_path: Path) -> None:
    export(base, tmp_path / "bf16", "bf16")
    export(tmp_path / "bf16", tmp_path / "out", "fp8")
    found = read_all(tmp_path / "out")
    assert {key for key, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn} == {
        key for key in master() if is_published_in_fp8(key)
    }
    assert {
        key for key, tensor in found.items() if tensor.dtype == torch.float32 and not key.endswith("_scale_inv")
    } == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
