"""Memory and time of converting an FP8 folder to bf16 and back: `python tests/export/fp8_memory_worker.py FOLDER
LAYERS`.

Writes a Llama of LAYERS layers (13.6 M linear weights each) in FP8 blocks of random bytes. Prints JSON: bytes of its
files, and for each conversion the seconds and the growth of the resident set.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from ds_finetune.export.from_checkpoint import export_checkpoint

HIDDEN, INNER, VOCAB = 1024, 3072, 4096
SHAPES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, INNER),
}


def write_folder(folder: Path, layers: int) -> int:
    """Write one file for each layer; returns the bytes of all files."""
    folder.mkdir(parents=True)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=VOCAB,
    )
    config.save_pretrained(folder)
    for layer in range(layers):
        tensors = {}
        for name, (rows, columns) in SHAPES.items():
            key = f"model.layers.{layer}.{name}.weight"
            tensors[key] = torch.randint(0, 0x7E, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
            tensors[key + "_scale_inv"] = torch.rand(rows // 128, columns // 128) / 1000
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        save_file(tensors, folder / f"layer-{layer}.safetensors")
    ends = {
        "model.embed_tokens.weight": torch.ones(VOCAB, HIDDEN),
        "lm_head.weight": torch.ones(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    save_file({name: tensor.bfloat16() for name, tensor in ends.items()}, folder / "ends.safetensors")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _status(key: str) -> int:
    return (
        int(
            next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)).split()[1]
        )
        * 1024
    )


def measured(work: Callable[[], object]) -> tuple[int, float]:
    """Growth of the resident set in bytes, and seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, began = _status("VmRSS"), time.monotonic()
    work()
    return _status("VmHWM") - before, time.monotonic() - began


def main(folder: Path, layers: int) -> None:
    """Convert a small folder twice, and then the whole one twice."""
    found = {}
    for name, count in (("warm", 1), ("whole", layers)):
        base, plain, back = (folder / f"{name}-{kind}" for kind in ("fp8", "bf16", "back"))
        found["bytes"] = write_folder(base, count)
        convert = partial(export_checkpoint, max_shard_bytes=5 * 10**9)
        found["to_bf16"] = measured(partial(convert, base, plain, dtype="bf16", base=None))
        found["to_fp8"] = measured(partial(convert, plain, back, dtype="fp8", base=base))
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
