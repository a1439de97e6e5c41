"""Exporting a model of a billion parameters takes less than a GiB beyond the interpreter, in every streaming way."""

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


def _published(folder: Path, layers: int) -> tuple[Path, int]:
    """A Llama of `layers` layers in bf16 whose files are sparse and hold zeros, and its number of parameters."""
    folder.mkdir()
    config = AutoConfig.for_model("llama", num_hidden_layers=layers, **SIZES)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            name: tuple(tensor.shape) for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()
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


def _peak(*arguments: str) -> int:
    done = start([sys.executable, "-c", MEASURE, "export", "--no-verify", *arguments], timeout=600)
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
        peaks.append(_peak(*source))
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
