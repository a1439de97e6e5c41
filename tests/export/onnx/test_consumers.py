"""What ONNX Runtime GenAI and transformers.js compute with an ONNX folder, and weights in 8 and 4 bits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ds_finetune
from ds_finetune.cli.main import main
from ds_finetune.errors import ExportError
from ds_finetune.export.load import load_exported
from ds_finetune.families.table import FAMILIES
from tests.conftest import ROOT
from tests.export.cells import types_of
from tests.export.gguf.models import greedy, save

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'ds_finetune[onnx]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'ds_finetune[onnx]'")

from ds_finetune.export.onnx.consumers import write_settings  # noqa: E402 - it needs onnx

HERE = ROOT / "tests" / "export" / "onnx"
DECODERS = {name: row.onnx.attention for name, row in FAMILIES.items() if row.onnx and not row.encoder}
TIED = ("llama tied", "qwen2 tied")
"""Their graph multiplies by the embedding as it is stored."""
TOKENS, PROMPTS = 36, ([5, 6, 7, 8], [3, 9, 10, 11, 12, 13], [20])


def _write(name: str, folder: Path, dtype: str = "fp32") -> Path:
    family, _, tied = name.partition(" ")
    save(family, folder / "hub", tie_word_embeddings=bool(tied))
    ds_finetune.export_model(folder / "hub", folder / dtype, format="onnx", dtype=dtype)
    return folder / dtype


def _of_transformers(hub: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(hub).eval()
    return [greedy(model, prompt, TOKENS)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_names_of_genai_are_those_of_the_graph(name: str, tmp_path: Path) -> None:
    folder = _write(name, tmp_path)
    assert (folder / "genai_config.json").is_file() == (DECODERS[name] == "grouped_query")
    if name == "deepseek_v3":
        return
    tree = json.loads((folder / "genai_config.json").read_text())["model"]
    decoder = tree["decoder"]
    graph = onnx.load(folder / decoder["filename"]).graph
    layers = range(decoder["num_hidden_layers"])
    for kind, ends in (("inputs", graph.input), ("outputs", graph.output)):
        named = [text % n for text in decoder[kind].values() for n in (layers if "%d" in text else [()])]
        assert {end.name for end in ends} == set(named)
    shapes = {end.name: [part.dim_value for part in end.type.tensor_type.shape.dim] for end in graph.input}
    wanted = (decoder["num_key_value_heads"], decoder["head_size"])
    assert tuple(shapes["past_key_values.1.key"][1::2]) == tuple(shapes["past_key_values.1.value"][1::2]) == wanted
    assert (tree["eos_token_id"], tree["bos_token_id"], tree["vocab_size"]) == (1, 0, 128)


def test_a_model_without_an_end_gets_no_settings_of_genai(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", eos_token_id=None)
    notes = write_settings(tmp_path, config, dtype="fp32", with_cache=True)
    assert notes == ["no genai_config.json: neither config.json nor generation_config.json has an eos_token_id"]
    assert not (tmp_path / "genai_config.json").exists()
    assert write_settings(tmp_path, AutoConfig.for_model("llama", eos_token_id=7), dtype="fp32", with_cache=True) == []
    assert json.loads((tmp_path / "genai_config.json").read_text())["model"]["pad_token_id"] == 7


@pytest.mark.parametrize("name", [*types_of("export/onnx/test_consumers.py", "onnxruntime-genai"), *TIED])
def test_tokens_of_genai_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai", reason="it is not installed: pip install onnxruntime-genai")
    folder = _write(name, tmp_path)
    command = [sys.executable, str(HERE / "genai_worker.py"), str(folder), str(TOKENS)]
    done = subprocess.run(command, input=json.dumps(PROMPTS), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == _of_transformers(tmp_path / "hub")


@pytest.mark.parametrize("is_external", [False, True])
@pytest.mark.parametrize("name", [*types_of("export/onnx/test_consumers.py", "transformers.js"), *TIED])
def test_tokens_of_transformers_js_equal_those_of_transformers(
    name: str, is_external: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights within the graph, and in a file of their own."""
    package = os.environ.get("DS_FINETUNE_TRANSFORMERS_JS")
    if not package:
        pytest.skip("DS_FINETUNE_TRANSFORMERS_JS names no folder in which npm has installed @huggingface/transformers")
    if is_external:
        monkeypatch.setattr("ds_finetune.export.onnx.folder.INLINE_BYTES", 0)
    folder = _write(name, tmp_path)
    assert (folder / "onnx" / "model.onnx_data").is_file() == is_external
    script = Path(package) / "ds_finetune_worker.mjs"
    shutil.copy(HERE / "transformers_js_worker.mjs", script)
    command = ["node", str(script), str(folder), str(TOKENS), json.dumps(PROMPTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    script.unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == _of_transformers(tmp_path / "hub")


@pytest.mark.parametrize(
    ("family", "dtype", "largest"),
    [("qwen3_moe", "int8", 0.02), ("qwen3_moe", "int4", 1.0), ("deepseek_v3", "int8", 0.1)],
)
def test_weights_in_few_bits_are_written_with_what_they_cost(
    family: str,
    dtype: str,
    largest: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights within the graph, or for int8 in a file of their own."""
    pytest.importorskip("onnx_ir", reason="onnx_ir is not installed: pip install 'ds_finetune[onnx]'")
    if dtype == "int8":
        monkeypatch.setattr("ds_finetune.export.onnx.folder.INLINE_BYTES", 0)
    save(family, tmp_path / "hub")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "hub"), str(out), "--format", "onnx", "--quantise", dtype]) == 0
    said = " ".join(capsys.readouterr().out.split())
    words = said[said.index(f"{dtype}: loss ") :].split()
    before, after, divergence = float(words[2]), float(words[5]), float(words[9])
    assert abs(after - before) < largest
    assert 0 < divergence < largest
    graph = onnx.load(out / "onnx" / "model.onnx").graph
    nodes, kept = graph.node, {tensor.name for tensor in graph.initializer}
    assert sum(name.endswith(".mlp.gate.weight") for name in kept) > 1
    assert (out / "onnx" / "model.onnx_data").is_file() == (dtype == "int8")
    bits = {attribute.i for node in nodes for attribute in node.attribute if attribute.name == "bits"}
    assert bits == {8 if dtype == "int8" else 4}
    assert main(["export", "--check", str(out)]) == 0
    data = bytearray((out / "onnx" / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (out / "onnx" / "model.onnx").write_bytes(data)
    assert main(["export", "--check", str(out)]) == 1
    assert "onnx/model.onnx holds other bytes than were written" in " ".join(capsys.readouterr().err.split())


def test_few_bits_need_a_package_and_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path / "hub")
    monkeypatch.setattr("ds_finetune.export.onnx.folder.find_spec", lambda name: None)
    with pytest.raises(ExportError, match="--dtype int4 needs onnx_ir"):
        ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="onnx", dtype="int4")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_the_graph_beside_the_config_still_runs(tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    folder = _write("llama", tmp_path)
    (folder / "onnx" / "model.onnx").rename(folder / "model.onnx")
    (folder / "verification.json").unlink()
    ids = torch.tensor([PROMPTS[0]])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hub").eval()
    with torch.no_grad():
        torch.testing.assert_close(load_exported(folder)(ids).logits, plain(ids).logits, atol=1e-3, rtol=1e-4)
