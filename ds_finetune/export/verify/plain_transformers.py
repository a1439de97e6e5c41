"""Loads exported folders with plain transformers: `python -P plain_transformers.py PARENT_PID OUT OTHERS FOLDER...`.

This file is started by its path in a process of its own, and imports nothing of ds_finetune. For folder number i it
writes a report on the loading, `OUT/i.json`, and files with logits of the prompts in the folder's verification.json
(ds_finetune/export/verify/record.py): `OUT/i.logits.npy` in the folder's dtype, `OUT/i.fp32.npy` in fp32. The report
also has the token ids that the folder's tokenizer gives for the record's texts.

`OTHERS` is JSON about folders whose model type the installed transformers does not know. It maps each path to three
values: a config.json of a model type whose classes fit; the `key_mapping` by which `from_pretrained` renames tensors;
and the name of layers with joined queries, keys and values, or null.

FP8 weights are dequantised here with plain torch, because transformers 5.23 fails on row counts that 128 does not
divide, and takes wrong blocks for some sizes (integrations/finegrained_fp8.py:1130-1175). `OUT/i.perturbed.npy` has
fp32 logits of the same model after every FP8 number was moved at random by up to half a step.

A classifier has one row of logits for each prompt. `OUT/i.padded.npy` has fp32 logits of one batch of all prompts,
padded on the right, if config.json names a padding token.
"""

import copy
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # PR_SET_PDEATHSIG of prctl(2) ends this process with its parent; it is set before the slow imports.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this one has ended")

import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Split, WeightConverter

_GPU_FACTOR, _GPU_FACTOR_FP8 = 2.2, 4.4
"""Free GPU memory that verification in fp32 needs, relative to the weight files: with 16-bit and FP8 weights."""
_BLOCK, _SCALE, _FP8 = 128, "_scale_inv", torch.float8_e4m3fn
_E2M1, _GROUP = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), 32
_GROUPED, _EAGER = "grouped_mm", "eager"
_MANTISSA, _SMALLEST_STEP = 3, 2.0**-9
"""Number of mantissa bits of FP8 E4M3, and the distance between its smallest numbers."""


def main() -> None:
    """Load every exported folder of the command line, and write the report and logits of each."""
    # NVIDIA's containers enable TF32, which would exceed the tolerance for fp32, so it is disabled here.
    torch.set_float32_matmul_precision("highest")
    out, others, folders = Path(sys.argv[2]), json.loads(sys.argv[3]), map(Path, sys.argv[4:])
    for number, folder in enumerate(folders):
        if str(folder) in others:
            tree, names, joined = others[str(folder)]
            config = AutoConfig.for_model(**tree)
            if joined:
                split = WeightConverter(joined, ["q_proj", "k_proj", "v_proj"], [Split(dim=0)])
                conversions = [*(get_checkpoint_conversion_mapping(config.model_type) or ()), split]
                register_checkpoint_conversion_mapping(config.model_type, conversions, overwrite=True)
        else:
            names, config = {}, AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        report, arrays = _inspect_folder(folder, config, names)
        for name, array in arrays.items():
            np.save(out / f"{number}.{name}.npy", array)
        (out / f"{number}.json").write_text(json.dumps(report), encoding="utf-8")


def _inspect_folder(
    folder: Path, config: PretrainedConfig, names: dict[str, str]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    record = json.loads((folder / "verification.json").read_text(encoding="utf-8"))
    is_fp8 = hasattr(config, "quantization_config")
    if is_fp8:
        model, loading = _load_dequantised(folder, config)
    else:
        settings = {"dtype": "auto", "local_files_only": True, "trust_remote_code": False, "key_mapping": names or None}
        kind = AutoModelForSequenceClassification if _is_classifier(config) else AutoModelForCausalLM
        # If a model has parts for images or sound, AutoModelForCausalLM fails or loads only the text part.
        kind = AutoModelForMultimodalLM if hasattr(config, "text_config") else kind
        model, loading = kind.from_pretrained(folder, config=config, output_loading_info=True, **settings)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed = size * (_GPU_FACTOR_FP8 if is_fp8 else _GPU_FACTOR)
    model.eval().to("cuda" if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > needed else "cpu")
    reached = _count_reached_experts(model)
    experts = _choose_experts(model, record)
    arrays = {"logits": _logits(model, record)}
    dtype = model.dtype
    if dtype != torch.float32:
        arrays["fp32"] = _logits(model.float(), record)
    if record.get("num_labels") and model.config.pad_token_id is not None:
        arrays["padded"] = _padded_logits(model, record["prompts"])
    device = model.device
    if is_fp8:
        del model
        model = _load_dequantised(folder, config, perturbed=True)[0].eval().to(device).float()
        if experts:
            model.set_experts_implementation(_EAGER)
        arrays["perturbed"] = _logits(model, record)
    report = {
        **{name: sorted(map(str, loading[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")},
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "eager_experts": experts,
        "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "experts": sum(size for _, size in reached),
        "experts_reached": sum(len(seen) for seen, _ in reached),
        **_tokenise(folder, config, record),
        "ours": sorted(name for name in sys.modules if name.partition(".")[0] == "ds_finetune"),
    }
    return report, arrays


def _choose_experts(model: PreTrainedModel, record: dict[str, Any]) -> str:
    """Compute experts one by one if torch's grouped matrix product does not support the model. Returns the reason, or
    an empty text. torch 2.13 requires that rows have a multiple of 16 bytes (aten, GroupedMMUtils.h).
    """
    if getattr(model.config, "_experts_implementation", None) != _GROUPED:
        return ""
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([record["prompts"][0]], device=model.device))
    except RuntimeError as refused:
        model.set_experts_implementation(_EAGER)
        return str(refused).splitlines()[0]
    return ""


def _is_classifier(config: PretrainedConfig) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def _load_dequantised(
    folder: Path, config: PretrainedConfig, *, perturbed: bool = False
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load an FP8 folder with its weights dequantised to bf16. Returns the model and transformers' loading report. If
    `perturbed`, every FP8 number is moved at random by up to half the distance to the next one.
    """
    config = copy.deepcopy(config)
    del config.quantization_config
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            stored |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a dict
    generator = torch.Generator().manual_seed(0) if perturbed else None
    weights = {}
    short = {key: key.removesuffix("weight") + "scale" for key in stored if key.endswith(".weight")}
    scales = {key: short[key] for key in short if short[key] in stored}
    for key in [key for key in stored if not key.endswith(_SCALE) and key not in scales.values()]:
        tensor = stored.pop(key)
        read = {_FP8: _dequantise, torch.int8: _dequantise_fp4}.get(tensor.dtype)
        weights[key] = tensor if read is None else read(tensor, stored[scales.get(key, key + _SCALE)], generator)
    kinds = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if _is_classifier(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    kind = kinds[type(config)]
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=torch.bfloat16, output_loading_info=True)


def _dequantise(values: torch.Tensor, scale: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Multiply FP8 `values` by their blocks' scales, in bf16. A `generator` moves each value by up to half a step."""
    plain = values.float()
    if generator is not None:
        step = torch.exp2(plain.frexp().exponent - 1.0 - _MANTISSA).clamp_(min=_SMALLEST_STEP)
        step.masked_fill_(plain == 0, _SMALLEST_STEP)
        plain += step * (torch.rand(plain.shape, generator=generator) - 0.5)
    spread = scale.float().repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[: plain.shape[0], : plain.shape[1]]
    return (plain * spread).to(torch.bfloat16)


def _dequantise_fp4(packed: torch.Tensor, scale: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Dequantise FP4 to bf16: each byte has two E2M1 numbers, the lower half first, and 32 numbers share a scale. A
    `generator` moves each number by up to half a step.
    """
    numbers = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    plain = numbers[torch.stack([packed & 15, packed >> 4 & 15], dim=-1).flatten(-2).long()]
    if generator is not None:
        step = torch.exp2(plain.abs().clamp(min=1).log2().floor() - 1)
        plain = plain + step * (torch.rand(plain.shape, generator=generator) - 0.5)
    return (plain * scale.float().repeat_interleave(_GROUP, 1)).to(torch.bfloat16)


def _tokenise(folder: Path, config: PretrainedConfig, record: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Tokenise the texts of the verification record as a pipeline does, with the exported tokenizer. If the record has
    ids of chats, each text is also tokenised as a user's message in the chat template.
    """
    texts = record.get("texts") or []
    if not texts:
        return {"tokenised": [], "chats": []}
    tokenizer = AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)
    asked = [[{"role": "user", "content": text}] for text in texts] if record.get("chat_ids") else []
    chats = [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=True) for each in asked]
    return {
        "tokenised": [tokenizer(text)["input_ids"] for text in texts],
        "chats": [each["input_ids"] for each in chats],
    }


def _logits(model: PreTrainedModel, record: dict[str, Any]) -> np.ndarray:
    rows = [torch.tensor([prompt], device=model.device) for prompt in record["prompts"]]
    if record.get("num_labels"):
        with torch.no_grad():
            parts = [model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0] for ids in rows]
        return torch.cat(parts).float().cpu().numpy()
    stride, position, sampled = record["stride"], 0, []
    for ids in rows:
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        for row in logits:
            sampled.append(row[position % stride :: stride].float().cpu().numpy())
            position += 1
    return np.concatenate(sampled)


def _padded_logits(model: PreTrainedModel, prompts: list[list[int]]) -> np.ndarray:
    rows = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits.flatten().float().cpu().numpy()


def _count_reached_experts(model: PreTrainedModel) -> list[tuple[set[int], int]]:
    """Add hooks that record which experts tokens reach. Returns for each layer with routed experts the set that its
    hook fills, and the number of experts. In transformers 5, fused experts are [experts, rows, columns].
    """
    layers = []
    for module in model.modules():
        weight = getattr(module, "gate_up_proj", None)
        if isinstance(weight, torch.nn.Parameter) and weight.dim() == 3:
            number, seen = len(weight), set[int]()
            module.register_forward_pre_hook(
                lambda _, inputs, seen=seen, number=number: seen.update(_reached_experts(inputs, number))
            )
            layers.append((seen, number))
    return layers


def _reached_experts(inputs: tuple[torch.Tensor, ...], number: int) -> list[int]:
    """Which of a layer's `number` experts compute something for `inputs`: the tokens, and the experts chosen for each.
    Llama 4's experts get only the tokens, once for each expert, multiplied by 0 where the expert is not chosen.
    """
    if len(inputs) > 1:
        return inputs[1].unique().tolist()  # type: ignore[no-any-return]
    return inputs[0].view(number, -1).any(1).nonzero().flatten().tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
