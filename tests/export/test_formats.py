"""The table of export formats: each row is complete, and one that another package adds is exported, checked and loaded."""

import inspect
import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import ds_finetune
from ds_finetune.cli.main import main
from ds_finetune.errors import ConfigError, ExportError, OutputError
from ds_finetune.export import formats
from ds_finetune.export.formats import EngineModule, FormatModule
from ds_finetune.export.load import load_exported
from ds_finetune.export.output_folder import RECORD, replaced_folder
from ds_finetune.families.table import FAMILIES
from ds_finetune.serving.serve import choose_engine
from tests.conftest import ROOT
from tests.export.cells import CELLS, types_of
from tests.export.toy_format import TOY
from tests.model.weights.test_weights import published
from tests.running import start, tiny_task


def functions(protocol: type) -> list[str]:
    return [name for name in dir(protocol) if not name.startswith("_")]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that offers the format `toy`, which is forgotten afterwards."""
    info = tmp_path / "site" / "toy-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{formats.ENTRY_POINTS}]\ntoy = tests.export.toy_format:TOY\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(formats, "FORMATS", [*formats.FORMATS])
    monkeypatch.setattr(formats, "_load_entry_points", formats.cache(formats._load_entry_points.__wrapped__))


@pytest.mark.parametrize("row", [*formats.FORMATS, TOY], ids=lambda row: row.name)
def test_the_module_of_a_row_has_its_functions(row: formats.ExportFormat) -> None:
    for package in row.packages:
        pytest.importorskip(package)
    module = import_module(row.module)
    for name in functions(EngineModule if row.engines else FormatModule):
        expected = [*inspect.signature(getattr(EngineModule, name)).parameters][1:]
        parameters = [*inspect.signature(getattr(module, name)).parameters.values()]
        assert [each.name for each in parameters[: len(expected)]] == expected, name
        assert all(each.default is not each.empty for each in parameters[len(expected) :]), name
    assert row.engines or not hasattr(module, "load_model")


@pytest.mark.usefixtures("installed")
def test_a_format_of_another_package_by_the_command_and_by_the_api(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = published("qwen3", tmp_path / "hub")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "hub"), str(out), "--format", "toy"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"wrote {out}: " in said
    assert f"verified: {out} the bytes of the archive" in said
    written = ds_finetune.export_model(tmp_path / "hub", tmp_path / "again", format="toy")
    assert written.verdict is not None
    assert written.verdict.is_verified
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_exported(out)(ids).logits, model(ids).logits)
    assert choose_engine("auto", out) == "transformers"
    assert main(["serve", str(out), "--engine", "onnx"]) == 2
    assert "--engine onnx reads onnx folders" in capsys.readouterr().err
    assert main(["export", "--check", str(out)]) == 0
    (out / "weights.npz").write_bytes(b"other")
    assert main(["export", "--check", str(out)]) == 1
    assert "weights.npz has other bytes" in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_what_a_row_does_not_have_is_refused(tmp_path: Path) -> None:
    for options, told in (
        ({"verify": False}, "--no-verify is not valid with --format toy"),
        ({"dtype": "bf16"}, "--format toy does not support --dtype bf16"),
        ({"dtype": "int3"}, "unknown --dtype `int3`"),
        (
            {"with_cache": False},
            "--no-cache is not valid with --format toy\n  hint: leave the option out; it belongs to --format onnx",
        ),
    ):
        with pytest.raises((ConfigError, ExportError), match=told):
            ds_finetune.export_model(tmp_path, tmp_path / "out", format="toy", **options)
    with pytest.raises(
        ConfigError,
        match=r"format `tar` is not known\n  hint: known formats are safetensors, onnx, gguf, compressed-tensors, adapter, toy",
    ):
        ds_finetune.export_model(tmp_path, tmp_path / "out", format="tar")
    with pytest.raises(ExportError, match="models of type `bert` cannot be exported to toy"):
        TOY.check_model_type("bert")


@pytest.mark.usefixtures("installed")
def test_a_run_ends_with_each_of_its_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = tiny_task(tmp_path, export={"formats": ["safetensors", "toy"]})
    report = ds_finetune.train(run_file)
    assert [folder.name for folder in report.exports] == ["export", "export-toy"]
    said = capsys.readouterr().out
    assert "next: ds-finetune chat" in said
    assert "export-toy: " in said
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_exported(report.exports[1])(ids).logits, plain(ids).logits)
    record = tmp_path / "run" / "export-toy" / RECORD
    before = record.stat().st_mtime_ns
    assert ds_finetune.train(run_file).exports == report.exports
    assert record.stat().st_mtime_ns == before
    assert ds_finetune.train(run_file, ["train.for=4 steps"]).exports == report.exports
    assert record.stat().st_mtime_ns > before


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("[onnx]", "export.formats is ['onnx']"),
        ("[safetensors,safetensors]", "export.formats is ['safetensors', 'safetensors']"),
        ("[safetensors,tar]", "export.formats: format `tar` is not known"),
    ],
)
def test_formats_of_a_run_that_cannot_be(
    names: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file, override = tiny_task(tmp_path), f"export.formats={names}"
    with pytest.raises(ConfigError) as refused:
        ds_finetune.plan_run(ds_finetune.read_config(run_file, [override]), gpus=1)
    assert refused.value.message == told
    assert main(["plan", str(run_file), "--gpu", "h100-80g", override]) == 2
    assert told in capsys.readouterr().err


def test_a_model_type_without_a_format_is_refused_before_the_first_step(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    run_file = tiny_task(tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    done = start(["ds-finetune", "train", str(run_file), "export.formats=[safetensors,onnx]"])
    assert done.returncode == 2
    assert "do not support hidden_act `gelu`" in " ".join(done.stderr.split())


def test_only_a_folder_of_this_program_is_replaced(tmp_path: Path) -> None:
    """A folder `OUT.partial` is a user's; what a killed export has left is removed by the next one."""
    users, ours = tmp_path / "out.partial", tmp_path / "out.ds_finetune-partial"
    for folder in (users, ours):
        folder.mkdir()
        (folder / "file").touch()
    with replaced_folder(tmp_path / "out") as partial:
        assert partial == ours
        assert not list(partial.iterdir())
        (partial / "new").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "new", "out", "out.partial"]


def test_an_unverified_folder_of_a_user_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "out.unverified").mkdir()
    (tmp_path / "out.unverified" / "mine").touch()
    with pytest.raises(OutputError, match=r"out\.unverified` is not empty: mine"):
        ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="onnx")
    assert (tmp_path / "out.unverified" / "mine").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--format", "onnx"], "cannot be combined with --format"),
        (["--dtype", "fp8", "--no-cache"], "cannot be combined with --dtype and --no-cache"),
        (["--no-verify"], "cannot be combined with --no-verify"),
        (["--quantise", "q8_0"], "cannot be combined with --dtype"),
        (["--max-shard-size", "1GB"], "cannot be combined with --max-shard-size"),
        ([], "is not a folder"),
    ],
)
def test_options_without_effect_on_a_check_are_refused(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--check", str(tmp_path / "none"), *options]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("family", types_of("export/test_formats.py"))
def test_families_without_a_layout_are_verified_as_safetensors(family: str, tmp_path: Path) -> None:
    """The others: test_safetensors_folder.py, and DeepSeek-V4 in tests/trainer/test_deepseek_v4.py."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"moe_intermediate_size": 16, "num_experts": 4, "num_key_value_heads": 4} if family == "qwen2_moe" else {}
    tokens = {"vocab_size": 96, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **sizes, **tokens)
    kind = AutoModelForCausalLM if family == "qwen2_moe" else AutoModelForSequenceClassification
    kind.from_config(config).save_pretrained(tmp_path / "hub")
    ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", dtype="fp32")
    assert not (tmp_path / "out" / "UNVERIFIED").exists()
    _, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("row", formats.FORMATS, ids=lambda row: row.name)
def test_a_cell_without_a_test_is_refused(row: formats.ExportFormat, model_type: str) -> None:
    tests = [cells.test for cells in CELLS if cells.format == row.name and model_type in cells.types]
    if tests:
        row.check_model_type(model_type)
        assert all(f'types_of("{test}"' in (ROOT / "tests" / test).read_text() for test in tests)
    else:
        with pytest.raises(ExportError, match=f"models of type `{model_type}` cannot be exported to {row.title}"):
            row.check_model_type(model_type)
