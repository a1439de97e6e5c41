"""Started by path in a process of its own as `python -P fresh.py OUT FOLDER...`: load exported folders with plain transformers alone.

Nothing of ds_finetune is imported here. For folder number i, `OUT/i.json` says what loading said, and `OUT/i.own.npy` holds the kept
logits of the folder's verification.json (ds_finetune/export/record.py) in the folder's dtype, `OUT/i.fp32.npy` in fp32.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

_ROOM = 2.2
"""Times the files' size that a GPU must have free: the model once in fp32 beside its 16-bit weights, and some activations."""


def main() -> None:
    """Do every folder."""
    out, *folders = map(Path, sys.argv[1:])
    for number, folder in enumerate(folders):
        report, arrays = _looked_at(folder)
        for name, array in arrays.items():
            np.save(out / f"{number}.{name}.npy", array)
        (out / f"{number}.json").write_text(json.dumps(report), encoding="utf-8")


def _looked_at(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    record = json.loads((folder / "verification.json").read_text(encoding="utf-8"))
    model, said = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True, local_files_only=True)
    model.eval().to(_device(folder))
    reached = _watch_experts(model)
    arrays = {"own": _kept_logits(model, record)}
    dtype = model.dtype
    if dtype != torch.float32:
        arrays["fp32"] = _kept_logits(model.float(), record)
    report = {
        **{name: sorted(map(str, said[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")},
        "dtype": str(dtype).removeprefix("torch."),
        "device": model.device.type,
        "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "experts": sum(size for _, size in reached),
        "experts_reached": sum(len(seen) for seen, _ in reached),
        "ours": sorted(name for name in sys.modules if name.partition(".")[0] == "ds_finetune"),
    }
    return report, arrays


def _device(folder: Path) -> str:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return "cuda" if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > _ROOM * size else "cpu"


def _kept_logits(model: PreTrainedModel, record: dict[str, Any]) -> np.ndarray:
    stride, position, parts = record["stride"], 0, []
    for prompt in record["prompts"]:
        ids = torch.tensor([prompt], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        for row in logits:
            parts.append(row[position % stride :: stride].float().cpu().numpy())
            position += 1
    return np.concatenate(parts)


def _watch_experts(model: PreTrainedModel) -> list[tuple[set[int], int]]:
    """For each layer of routed experts (fused [experts, rows, columns] in transformers 5), those that tokens have reached, and how many there are."""
    watched = []
    for module in model.modules():
        weight = getattr(module, "gate_up_proj", None)
        if isinstance(weight, torch.nn.Parameter) and weight.dim() == 3:
            seen: set[int] = set()
            module.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.update(inputs[1].unique().tolist()))
            watched.append((seen, len(weight)))
    return watched


if __name__ == "__main__":
    main()
