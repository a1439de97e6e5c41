"""What an export refuses: one clear error, exit code 2, and no incomplete folder."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds_finetune.cli.demo import write_demo
from ds_finetune.cli.main import main
from ds_finetune.errors import ModelError
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.skeleton import read_hf_config
from tests.json_files import change_json
from tests.model.fp4_folder import V4, publish_v4
from tests.model.fp8_folder import V3, dequantised, in_fp8, master, publish, read_all
from tests.running import start

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("v3") / "model", in_fp8(master()))


@pytest.fixture
def source(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "source"))


def _shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def _truncate(folder: Path) -> None:
    _shard(folder).write_bytes(_shard(folder).read_bytes()[:-100])


def _index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = folder / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    change(tree["weight_map"])
    index.write_text(json.dumps(tree))


def _outside(folder: Path) -> None:
    shutil.copyfile(_shard(folder), folder.parent / "secret.safetensors")
    _index(folder, lambda weight_map: weight_map.update({EMBEDDING: "../secret.safetensors"}))


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)


def _grown(tensors: dict[str, torch.Tensor]) -> None:
    for key in (EMBEDDING, "lm_head.weight"):
        if key in tensors:
            tensors[key] = torch.cat([tensors[key], torch.zeros(4, V3["hidden_size"], dtype=torch.bfloat16)])


def _empty(tensors: dict[str, torch.Tensor]) -> None:
    key = "model.layers.2.enorm.weight"
    if key in tensors:
        tensors[key] = torch.zeros(0, dtype=torch.bfloat16)


def _config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(V3 | changes))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: _shard(f).unlink(), "names 1 files that are not there: model-00002-of-000003.safetensors"),
        (_truncate, "model-00002-of-000003.safetensors is not a complete safetensors file: its tensors end at byte"),
        (_outside, "names files outside its folder: ../secret.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not a model's configuration"),
        (lambda f: (f / "tokenizer_config.json").write_text('{"a": '), "tokenizer_config.json is not JSON"),
        (lambda f: _config(f, model_type="none"), "none"),
        (
            lambda f: _config(f, quantization_config={"quant_method": "awq"}),
            "weights quantised by {'quant_method': 'awq'} are not supported",
        ),
        (
            lambda f: _change(f, _grown),
            "its vocabulary has 100 rows: the config.json that is used must say `vocab_size` 100",
        ),
        (lambda f: _change(f, _empty), "`model.layers.2.enorm.weight` has shape (0,) and so no elements"),
    ],
    ids=["missing shard", "truncated", "outside", "config", "tokenizer", "model type", "awq", "grown", "empty"],
)
def test_a_damaged_model(
    damage: Callable[[Path], None], said: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(source)
    assert main(["export", "--no-verify", str(source), str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "secret.safetensors") == ["source"]


@pytest.mark.parametrize("command", ["ask OUT hi", "eval OUT --data ROWS"])
@pytest.mark.parametrize("size", [0, 7, 300, -1])
def test_weights_that_are_cut_are_named_where_they_are_read(
    command: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path, ranks=1, days=201)
    save_file({"x": torch.zeros(400)}, tmp_path / "model" / "model.safetensors")
    data = (tmp_path / "model" / "model.safetensors").read_bytes()
    (tmp_path / "model" / "model.safetensors").write_bytes(data[:size])
    paths = {"OUT": tmp_path / "model", "ROWS": tmp_path / "eval.jsonl"}
    assert main([str(paths.get(word, word)) for word in command.split()]) == 2
    printed = capsys.readouterr().err
    assert "model.safetensors is not a complete safetensors file" in printed
    assert "Traceback" not in printed


_FP6: dict[str, object] = {**AutoConfig.for_model("deepseek_v4", **V4).to_dict(), "expert_dtype": "fp6"}
_INT4: dict[str, object] = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}


def _pack(folder: Path) -> None:
    """Weights in bytes beside scales of their own, as FP4 and INT4 are stored."""
    keys = {"packed": torch.zeros(4, 4, dtype=torch.int8), "packed_scale": torch.ones(4, 1).to(torch.float8_e8m0fnu)}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(keys, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("place", "changes", "said"),
    [
        ("source", _FP6, "experts in fp6 are not supported"),
        ("source", _INT4, "weights quantised by {'quant_method': 'compressed-tensors'"),
        ("base", _INT4, "weights quantised by {'quant_method': 'compressed-tensors'"),
    ],
    ids=["fp6", "int4", "int4 base"],
)
def test_a_format_that_is_not_read_is_named(
    place: str, changes: dict[str, object], said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the tensors are looked at, whose dtypes and names say less."""
    packed = Path(shutil.copytree(model, tmp_path / "packed"))
    _pack(packed)
    _config(packed, **changes)
    named = [str(packed)] if place == "source" else [str(model), "--base", str(packed)]
    assert main(["export", "--no-verify", named[0], str(tmp_path / "out"), *named[1:]]) == 2
    assert f"{packed}/config.json: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["source", "base"])
def test_a_format_that_only_the_model_optimizer_names(
    place: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As NVIDIA publishes NVFP4: config.json says nothing of it."""
    packed = Path(shutil.copytree(model, tmp_path / "packed"))
    file = packed / "hf_quant_config.json"
    file.write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    named = [str(packed)] if place == "source" else [str(model), "--base", str(packed)]
    assert main(["export", "--no-verify", named[0], str(tmp_path / "out"), *named[1:]]) == 2
    assert f"{file}: weights in NVFP4 are not supported" in capsys.readouterr().err
    with pytest.raises(ModelError, match="weights in NVFP4 are not supported"):
        read_hf_config(str(packed))
    file.write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    read_hf_config(str(packed))


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_v4(tmp_path_factory.mktemp("v4"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_intermediate_size": 32}, "layers.0.ffn.experts.0.w1.weight: model (32, 128), checkpoint (64, 128)"),
        ({"n_routed_experts": 2}, "18 unexpected: layers.0.ffn.experts.2.w1.weight"),
        ({"num_hash_layers": 2}, "1 missing: layers.1.ffn.gate.tid2eid; 1 unexpected: layers.1.ffn.gate.bias"),
        ({"compress_ratios": [0, 128, 4]}, "6 missing: layers.2.attn.indexer.compressor.ape"),
        ({"vocab_size": 95}, "its vocabulary has 96 rows: the config.json that is used must say `vocab_size` 96"),
    ],
    ids=["experts' width", "experts", "table", "compression", "vocabulary"],
)
def test_a_config_that_the_tensors_in_fp4_do_not_fit(
    changes: dict[str, object], said: str, v4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(shutil.copytree(v4, tmp_path / "source"))
    change_json(source / "config.json", changes)
    assert main(["export", str(source), str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert f"{source} does not fit DeepseekV4ForCausalLM: " in printed
    assert said in printed
    assert "hint: " in printed
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "damage", [lambda f: _shard(f).unlink(), _truncate, lambda f: _change(f, _grown), lambda f: _change(f, _empty)]
)
def test_a_damaged_base(
    damage: Callable[[Path], None], model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named by --base, for a model that lacks the prediction layer."""
    plain = dequantised(read_all(model), torch.bfloat16)
    tuned = publish(
        tmp_path / "tuned", {key: tensor for key, tensor in plain.items() if "layers.2." not in key}, config=V3
    )
    damage(source)
    assert (
        main(["export", "--no-verify", str(tuned), str(tmp_path / "out"), "--base", str(source), "--dtype", "fp8"]) == 2
    )
    printed = capsys.readouterr().err
    assert str(source) in printed or "`model.layers.2.enorm.weight` has shape (0,)" in printed
    assert not list(tmp_path.glob("out*"))


def test_a_grown_vocabulary_is_exported_where_the_config_knows_of_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused with a base whose prediction layer has fewer tokens."""
    _change(source, _grown)
    _config(source, vocab_size=100)
    assert main(["export", "--no-verify", str(source), str(tmp_path / "out")]) == 0
    assert read_all(tmp_path / "out")[EMBEDDING].shape == (100, V3["hidden_size"])
    base = publish(tmp_path / "base", in_fp8(master()))
    assert main(["export", "--no-verify", str(source), str(tmp_path / "other"), "--base", str(base)]) == 2
    assert (
        f"{base} does not fit DeepseekV3ForCausalLM: 2 of another shape: lm_head.weight: model (100, 160), checkpoint (96, 160)"
        in (capsys.readouterr().err)
    )


def test_an_output_that_is_not_empty_and_an_unknown_dtype(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    assert main(["export", "--no-verify", str(source), str(tmp_path / "out")]) == 2
    assert main(["export", "--no-verify", str(source), str(source)]) == 2
    assert main(["export", "--no-verify", str(source), str(tmp_path / "new"), "--dtype", "int3"]) == 2
    assert "unknown --dtype `int3`" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").read_text() == "x"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "qwen2_vl", "text_config": {"vocab_size": 96}}, "has no causal LM of its text part"),
        ({"model_type": "phi3", "pad_token_id": 32000, "vocab_size": 96}, "Padding_idx must be within"),
        ({"model_type": "phi3", "vocab_size": None}, "Field 'vocab_size' expected int"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}},
            "Missing required keys in `rope_parameters`",
        ),
    ],
    ids=["pictures", "padding", "null", "rope"],
)
def test_configurations_that_transformers_builds_no_language_model_of(
    changes: dict[str, object], said: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "config.json").write_text(json.dumps(changes))
    assert main(["export", "--no-verify", str(source), str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "hint:" in printed


def test_an_output_inside_of_the_model_and_a_model_without_tokenizer(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--no-verify", str(source), str(source / "sub")]) == 2
    assert f"OUT `{source / 'sub'}` lies inside SOURCE" in capsys.readouterr().err
    assert main(["export", "--no-verify", str(source), str(tmp_path / "out")]) == 0
    assert f"{tmp_path / 'out'} has no tokenizer" in capsys.readouterr().out
    (source / "tokenizer.json").write_text("{}")
    assert main(["export", "--no-verify", str(source), str(tmp_path / "other")]) == 0
    assert "has no tokenizer" not in capsys.readouterr().out


def test_fp8_of_a_format_that_is_not_written(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _config(source, quantization_config=V3["quantization_config"] | {"activation_scheme": "static"})
    assert main(["export", "--no-verify", str(source), str(tmp_path / "out"), "--dtype", "fp8"]) == 2
    assert "exports in FP8 support only" in capsys.readouterr().err
    assert main(["export", "--no-verify", str(source), str(tmp_path / "out"), "--dtype", "bf16"]) == 0


@pytest.mark.parametrize("kib", [4, 50])
def test_a_disk_that_takes_no_more(kib: int, source: Path, tmp_path: Path) -> None:
    """The system refuses to let a file grow, as a disk that becomes full does."""
    command = f"export PYTHONDONTWRITEBYTECODE=1; ulimit -f {kib}; exec {sys.executable} -m ds_finetune export {source} {tmp_path / 'out'}"
    done = start(["bash", "-c", command])
    assert done.returncode == 2, done.stderr
    assert f"error: `{tmp_path / 'out'}` cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_disk_that_is_too_small_is_refused_before_writing(source: Path, tmp_path: Path) -> None:
    """A file system of 64 KiB, where this process may mount one."""
    command = f"mount -t tmpfs -o size=64k none {tmp_path} 2>/dev/null || exit 77; exec {sys.executable} -m ds_finetune export {source} {tmp_path}/out"
    kept = Path(shutil.copytree(source, tmp_path.parent / f"{tmp_path.name}-kept"))
    done = start(["unshare", "--mount", "bash", "-c", command.replace(str(source), str(kept))])
    if done.returncode in (1, 77) and "error" not in done.stderr:
        pytest.skip(f"no file system may be made here: {done.stderr.strip()}")
    assert done.returncode == 2, done.stderr
    assert "and the disk has 64.00 KiB free" in done.stderr
