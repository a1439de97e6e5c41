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
import resource, sys, threading, time
from ds_finetune.cli.main import main
own = 0
def watch():
    global own
    while True:
        own = max(own, next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")))
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
code = main(sys.argv[1:])
print("peak", own * 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""
"""Prints the largest memory of its own, and that with pages of mapped files, which the kernel can drop."""
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
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
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


def _peaks(*arguments: str) -> tuple[int, int]:
    done = start([sys.executable, "-c", MEASURE, *arguments], timeout=1200)
    assert done.returncode == 0, done.stderr
    own, whole = map(int, done.stdout.split()[-2:])
    return own, whole


def _fill(folder: Path) -> None:
    """Random numbers in place of zeros, of which a model computes nothing to compare."""
    numbers = (torch.randn(2**23, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    data = numbers.view(torch.uint8).numpy().tobytes()
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as file:
            size = path.stat().st_size - file.seek(8 + int.from_bytes(file.read(8), "little"))
            for begin in range(0, size, len(data)):
                file.write(data[: size - begin])


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
        peaks.append(_peaks("export", "--no-verify", *source)[1])
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


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("model_type", ONE_GB)
def test_a_gigabyte_is_streamed_to_gguf_and_to_a_graph(
    model_type: str, dtype: str, tmp_path: Path, shared_data: Path
) -> None:
    """The whole command, with verification. Of a graph, what ONNX Runtime and transformers map is left out."""
    sizes, tokenizer = ONE_GB[model_type]
    model, count = _published(tmp_path / "model", 0, model_type, **sizes)
    assert count > 5 * 10**8
    _fill(model)
    for file in (shared_data / "tokenizers" / tokenizer).iterdir():
        shutil.copyfile(file, model / file.name)
    kind = "gguf" if dtype in ("f16", "q8_0") else "onnx"
    pytest.importorskip("gguf" if kind == "gguf" else "onnxruntime")
    own, whole = _peaks("export", str(model), str(tmp_path / "out"), "--format", kind, "--quantise", dtype)
    shutil.rmtree(tmp_path / "out")
    sys.stdout.write(f"{model_type} {dtype}: {count:,} parameters, {own / GIB:.2f} GiB, mapped {whole / GIB:.2f}\n")
    assert (whole if kind == "gguf" else own) < 1.5 * GIB
