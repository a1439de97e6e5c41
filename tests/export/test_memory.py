"""Exporting a model of a billion parameters takes less than a GiB in every streaming way; to GGUF and ONNX, of 1 GB."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.config.sections import LoraConfig
from ds_finetune.export.adapter import AdapterBase, write_adapter
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora import Factors
from ds_finetune.model.weights.names import hub_pieces
from tests.running import start

pytestmark = pytest.mark.slow

GIB = 2**30
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
SIZES |= {"tie_word_embeddings": False, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
SHARDS = 3
MEASURE = """
import resource, sys
from ds_finetune.cli.main import main
code = main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


WRITE_GRAPH = """
import resource, sys
from pathlib import Path
from ds_finetune.export.formats import ExportOptions
from ds_finetune.export.onnx import folder, quantise
from ds_finetune.export.plain_source import plain_model
source, out, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
model, hub = plain_model(source, lambda _: None)
out.mkdir()
folder._write_graph(model, hub, out, ExportOptions(dtype=dtype))
if dtype in quantise.BITS:
    quantise._quantise(out, quantise.BITS[dtype], folder.INLINE_BYTES)
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
QWEN2 = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 6}
QWEN2 |= {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
V2_LITE = {"vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408}
V2_LITE |= {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 8}
V2_LITE |= {"num_experts_per_tok": 6, "q_lora_rank": None, "first_k_dense_replace": 1}
V2_LITE |= {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
ONE_GB = {"qwen2": (QWEN2, "deepseek-r1-distill-qwen"), "deepseek_v2": (V2_LITE, "deepseek-llm")}
"""Models of 1.0 and 1.2 GB in bf16 with the widths of Qwen2-1.5B and DeepSeek-V2-Lite, and a tokenizer of each."""


def _published(folder: Path, layers: int, model_type: str = "llama", **sizes: object) -> tuple[Path, int]:
    """A model of `layers` layers in bf16 whose files are sparse and hold zeros, and its number of parameters."""
    folder.mkdir()
    config = AutoConfig.for_model(model_type, **{**SIZES, "num_hidden_layers": layers, **sizes})
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    shapes = {
        piece.key: piece.shape
        for name, tensor in state.items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
        for piece in hub_pieces(name, tuple(tensor.shape), family_of(model_type))
    }
    weight_map = {name: f"model-{i % SHARDS + 1:05d}-of-{SHARDS:05d}.safetensors" for i, name in enumerate(shapes)}
    for file in set(weight_map.values()):
        header, end = {}, 0
        for name in (name for name in shapes if weight_map[name] == file):
            size = 2 * torch.Size(shapes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder, sum(torch.Size(shape).numel() for shape in shapes.values())


def _adapter(folder: Path, layers: int) -> Path:
    """Rank 16 on every linear module."""
    hidden, wide = SIZES["hidden_size"], SIZES["intermediate_size"]
    sides = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"} | {
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
    }
    sides |= {"mlp.down_proj": (hidden, wide)}
    factors = {
        f"model.layers.{layer}.{name}.weight": Factors(torch.randn(16, inner), torch.randn(outer, 16), 2.0)
        for layer in range(layers)
        for name, (outer, inner) in sides.items()
    }
    lora = LoraConfig(rank=16, target_modules=tuple(name.rpartition(".")[2] for name in sides))
    write_adapter(factors, lora, folder, AdapterBase(name="", digest="", family=family_of("llama")))
    return folder


def _peak(*arguments: str, program: str = MEASURE) -> int:
    done = start([sys.executable, "-c", program, *arguments], timeout=600)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize("way", ["bf16", "fp32", "fp8", "merge"])
def test_a_billion_parameters_take_less_than_a_gib(way: str, tmp_path: Path) -> None:
    peaks = []
    for layers in (1, 18):
        model, count = _published(tmp_path / f"model-{layers}", layers)
        source = [
            str(_adapter(tmp_path / f"adapter-{layers}", layers)),
            str(tmp_path / f"out-{layers}"),
            "--base",
            str(model),
        ]
        source = source if way == "merge" else [str(model), str(tmp_path / f"out-{layers}"), "--dtype", way]
        peaks.append(_peak("export", "--no-verify", *source))
    written = sum(file.stat().st_size for file in (tmp_path / "out-18").glob("*.safetensors"))
    # pytest keeps the folders of three sessions.
    shutil.rmtree(tmp_path / "out-18")
    assert count > 10**9
    assert written > count
    sys.stdout.write(
        f"{way}: {count:,} parameters, peak {peaks[1] / GIB:.2f} GiB, of one layer {peaks[0] / GIB:.2f} GiB\n"
    )
    assert peaks[1] - peaks[0] < 0.5 * GIB
    assert peaks[1] < GIB


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "fp32", "int8", "int4"])
@pytest.mark.parametrize("model_type", ONE_GB)
def test_a_gigabyte_is_streamed_to_gguf_and_to_a_graph(
    model_type: str, dtype: str, tmp_path: Path, shared_data: Path
) -> None:
    """The writing; a graph is then compared with plain transformers, which holds the model in fp32."""
    sizes, tokenizer = ONE_GB[model_type]
    model, count = _published(tmp_path / "model", 0, model_type, **sizes)
    assert count > 5 * 10**8
    for file in (shared_data / "tokenizers" / tokenizer).iterdir():
        shutil.copyfile(file, model / file.name)
    if dtype in ("f16", "q8_0"):
        pytest.importorskip("gguf")
        command = ["export", str(model), str(tmp_path / "out"), "--format", "gguf", "--quantise", dtype]
        peak = _peak(*command)
    else:
        pytest.importorskip("onnxruntime")
        peak = _peak(str(model), str(tmp_path / "out"), dtype, program=WRITE_GRAPH)
    shutil.rmtree(tmp_path / "out")
    sys.stdout.write(f"{model_type} {dtype}: {count:,} parameters, peak {peak / GIB:.2f} GiB\n")
    assert peak < 1.5 * GIB
