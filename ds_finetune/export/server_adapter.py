"""The export format `adapter`: LoRA adapters under the names that vLLM and SGLang look up, one for each routed expert.

peft stores the adapters of fused experts in one tensor, which `PeftModel.from_pretrained` supports and servers do not.
In this format all adapters get the largest rank, with zeros for missing ranks, and alpha / rank is multiplied into B.
"""

import json
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ds_finetune.errors import ExportError
from ds_finetune.export.adapter import write_weights
from ds_finetune.export.file_record import verify_files, write_file_record
from ds_finetune.export.formats import ADAPTER, ExportOptions, ExportResult
from ds_finetune.export.from_checkpoint import beside_weights, check_free_space
from ds_finetune.export.model_config import write_files
from ds_finetune.export.output_folder import as_output_errors, check_out_empty, replaced_folder
from ds_finetune.export.readers.sources import is_peft_adapter, open_adapter
from ds_finetune.export.source import read_model_spec
from ds_finetune.export.verify.verify import VerificationResult
from ds_finetune.families.server_lora import LARGEST_RANK, VLLM, VLLM_LORA
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.peft_adapter import CONFIG, KEY_PREFIX, PeftAdapter
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.weights.names import hub_pieces

_FORMAT = "adapter 1"
verify = partial(verify_files, kind=_FORMAT)
_PROJECTIONS = ("gate", "up", "down")
_MERGE = "merge the adapter into its base: ds-finetune export ADAPTER OUT --base MODEL"


def write(source: Path, out: Path, options: ExportOptions) -> ExportResult:
    """Write the adapter of the folder or run `source` to `out`, under the names of published weights. Raises the errors
    of `FormatModule.write`; ExportError also if `source` has no adapter, or the adapter does not fit its base.
    """
    began = time.monotonic()
    check_out_empty(out)
    folder = source if is_peft_adapter(source) else source / "adapter"
    if not is_peft_adapter(folder):
        raise ExportError(f"`{source}` has no adapter", hint="name the folder of an adapter, or of a run with `lora`")
    base = open_adapter(folder, options.base).base
    assert base is not None
    ADAPTER.check_not_composite(json.loads((base / "config.json").read_text(encoding="utf-8")))
    adapter, model_type = PeftAdapter.open(folder), read_model_spec(base).model_type
    check_servable(adapter, model_type)
    factors = {name: adapter.factors(name) for name in adapter.names}
    rank = max(each.a.shape[-2] for each in factors.values())
    tensors, dtype = dict[str, torch.Tensor](), PRECISION_DTYPES[options.dtype]
    for name, each in factors.items():
        missing = rank - each.a.shape[-2]
        a, b = pad(each.a, (0, 0, 0, missing)), pad(each.b.float() * each.scale, (0, missing))
        for piece in hub_pieces(name, each.shape, family_of(model_type)):
            # `piece.index` selects an expert. Fused gate and up share A, and the index also selects their rows of B.
            key = KEY_PREFIX + piece.key.removesuffix(".weight")
            tensors[f"{key}.lora_A.weight"] = a[piece.index[:1]].to(dtype).clone().contiguous()
            tensors[f"{key}.lora_B.weight"] = b[piece.index].to(dtype).clone().contiguous()
    size = sum(tensor.nbytes for tensor in tensors.values())
    with replaced_folder(out) as new, as_output_errors(new):
        check_free_space(new, size)
        write_weights(tensors, new, adapter.base)
        modules = sorted({key.removeprefix(KEY_PREFIX).rsplit(".", 3)[1] for key in tensors})
        tree = {
            **adapter.config,
            **{"r": rank, "lora_alpha": rank, "use_rslora": False, "target_modules": modules},
            **{"target_parameters": None, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}},
        }
        (new / CONFIG).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        write_files(new, beside_weights((folder,)), {})
        write_file_record(new, {"format": _FORMAT, "dtype": options.dtype, "rank": rank})
    lines = (f"{len(tensors)} tensors of {', '.join(modules)}, which {VLLM} looks up",)
    return ExportResult(
        folder=out,
        num_tensors=len(tensors),
        num_bytes=size,
        seconds=time.monotonic() - began,
        notes=(f"verified: {lines[0]}",),
        verdict=VerificationResult(out, lines=lines),
    )


def check_model(
    config: PretrainedConfig, *, is_classifier: bool, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Raise ExportError if vLLM supports no adapters for the model type, or if the model is a classifier."""
    ADAPTER.check_model_type(config.model_type)
    if is_classifier:
        raise ExportError(f"{VLLM} supports no adapters for classifiers of model_type {config.model_type}", hint=_MERGE)


def check_servable(adapter: PeftAdapter, model_type: str) -> None:
    """Raise ExportError if vLLM would refuse the LoRA adapter, or ignore a part of it."""
    ADAPTER.check_model_type(model_type)
    looked_up, family = VLLM_LORA[model_type], family_of(model_type)
    ends = tuple(f".{name}" for name in looked_up)
    sides: dict[str, set[str]] = defaultdict(set)
    ignored = set()
    for name in adapter.names:
        factors = adapter.factors(name)
        for piece in hub_pieces(name, factors.shape, family):
            module, _, leaf = piece.key.removesuffix(".weight").rpartition(".")
            ignored |= set() if f"{module}.{leaf}".endswith(ends) else {leaf}
            if ".experts." in module:
                sides[module].add(leaf)
        if factors.a.shape[-2] > LARGEST_RANK:
            raise ExportError(
                f"the adapter of `{name}` in {adapter.folder} has rank {factors.a.shape[-2]}, and {VLLM} allows at "
                f"most {LARGEST_RANK}",
                hint=_MERGE,
            )
    if ignored:
        raise ExportError(
            f"{adapter.folder} adapts {', '.join(sorted(ignored))}, which {VLLM} ignores for {model_type}",
            hint=f"{_MERGE}, or train adapters only for {', '.join(sorted(looked_up))}",
        )
    if adapter.fully_trained:
        raise ExportError(
            f"{adapter.folder} holds fully trained weights: {', '.join(adapter.fully_trained)}", hint=_MERGE
        )
    partly = [module for module, leaves in sides.items() if len(leaves) < len(_PROJECTIONS)]
    if partly:
        leaves = ", ".join(sorted(sides[partly[0]]))
        raise ExportError(
            f"{adapter.folder} adapts only {leaves} of `{partly[0]}`, which {VLLM} cannot load", hint=_MERGE
        )


def served_rank(folder: Path) -> int:
    """Smallest value of vLLM's `--max-lora-rank` that accepts an adapter which `write` has exported."""
    rank = int(json.loads((folder / CONFIG).read_text(encoding="utf-8"))["r"])
    return next(size for size in (1, 8, 16, 32, 64, 128, 256, 320, LARGEST_RANK) if size >= rank)
