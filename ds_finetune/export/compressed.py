"""The export format `compressed-tensors`: safetensors with linear weights in 8 or 4 bits, for transformers, vLLM and
SGLang.

The library compressed-tensors rounds weights to nearest, with scales computed from the weights themselves. Embeddings,
head, norms, routers and biases stay unquantised, in bf16.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import FP8_DYNAMIC
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ds_finetune.console.phase_line import count_parts
from ds_finetune.console.quiet import show_loading_as_phase
from ds_finetune.errors import ExportError, VerificationError
from ds_finetune.export.file_record import verify_files, write_file_record
from ds_finetune.export.formats import COMPRESSED, ExportOptions, ExportResult
from ds_finetune.export.from_checkpoint import check_free_space
from ds_finetune.export.model_config import served_config
from ds_finetune.export.output_folder import as_output_errors, check_out_empty, replaced_folder
from ds_finetune.export.plain_source import SHARD_BYTES, copy_settings, plain_folder, plain_model
from ds_finetune.export.quantisation_loss import quantisation_loss
from ds_finetune.export.safetensors_folder import SECTION
from ds_finetune.export.safetensors_format import load_model, load_scorer
from ds_finetune.export.shards import PIECE_NUMEL, HubTensor, ShardWriter, plan_shards
from ds_finetune.export.source import check_finite
from ds_finetune.export.verify.verify import VerificationResult
from ds_finetune.families.table import family_of
from ds_finetune.foreign.auto_models import AutoModelForCausalLM
from ds_finetune.model.build.hub_folder import HubFolder, check_weight_files
from ds_finetune.model.weights.names import hub_pieces, is_kept_in_fp32

__all__ = ["check_model", "load_model", "load_scorer", "verify", "write"]
_FORMAT = "compressed-tensors 1"
verify = partial(verify_files, kind=_FORMAT)
_WEIGHT = ".weight"
_SLACK = 2**-6
"""Tolerance for rounding weights, scales and products to bf16: 4 x 2**-8 of a row's largest weight."""


@dataclass(frozen=True)
class _Quantiser:
    layout: str
    weights: QuantizationArgs
    activations: QuantizationArgs | None
    error: float
    """Maximum rounding error of a number, relative to the largest number in its row."""

    @property
    def scheme(self) -> QuantizationScheme:
        return QuantizationScheme(targets=["Linear"], weights=self.weights, input_activations=self.activations)

    def compress(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantise `rows` of a weight, fp32 [rows, columns]. Returns the tensors to store, by name suffix."""
        groups = rows.view(len(rows), -1, self.weights.group_size or rows.shape[1])
        scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), self.weights)
        compressor = BaseCompressor.get_value_from_registry(self.layout)
        stored = compressor.compress({"weight": rows, "weight_scale": scales.bfloat16().float()}, self.scheme)
        return {**stored, "weight_scale": stored["weight_scale"].bfloat16()}

    def section(self, ignored: list[str]) -> dict[str, object]:
        config = QuantizationConfig(
            config_groups={"group_0": self.scheme}, format=self.layout, ignore=ignored, quantization_status="compressed"
        )
        return dict(config.model_dump(mode="json"))


_INTEGER = partial(QuantizationArgs, type="int", symmetric=True)
_QUANTISERS = {
    "w8a16": _Quantiser("pack-quantized", _INTEGER(num_bits=8, strategy="channel"), None, 1 / 255),
    "w4a16": _Quantiser("pack-quantized", _INTEGER(num_bits=4, strategy="group", group_size=128), None, 1 / 15),
    "fp8": _Quantiser("float-quantized", FP8_DYNAMIC["weights"], FP8_DYNAMIC["input_activations"], 1 / 16),
}


def write(source: Path, out: Path, options: ExportOptions) -> ExportResult:
    """Write the quantised language model of `source` to `out`. Raises the errors of `FormatModule.write`."""
    began, quantiser = time.monotonic(), _QUANTISERS[options.dtype]
    check_out_empty(out)
    with plain_folder(source, out, options.base) as folder, replaced_folder(out) as partial_out:
        model, hub = plain_model(folder, check_model)
        check_weight_files(folder)
        keys, size = _linear_keys(model), quantiser.weights.group_size or 1
        weights = frozenset(key for key in keys if hub.shapes[key][1] % size == 0)
        unfit = [key for key in keys if key not in weights]
        # Servers read all routed experts in one dtype, so either all of their weights are quantised or none.
        if wrong := [key for key in unfit if ".experts." in key] or ([] if weights else keys):
            raise ExportError(
                f"the rows of `{wrong[0]}` have {hub.shapes[wrong[0]][1]} elements, no multiple of the quantisation "
                f"group size {size}",
                hint="export with --dtype w8a16 or fp8",
            )
        with as_output_errors(partial_out):
            tensors = _write_files(hub, partial_out, model, weights, quantiser)
        lines = _compare(source, folder, partial_out, options.dtype, weights)
        with as_output_errors(partial_out):
            write_file_record(partial_out, {"format": _FORMAT, "dtype": options.dtype})
    text = f"{len(unfit)} weights stay in bf16, since 128 does not divide their rows, e.g."
    notes = [f"{text} {key}" for key in unfit[:1]]
    return ExportResult(
        folder=out,
        num_tensors=len(tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        seconds=time.monotonic() - began,
        notes=(*notes, *(f"verified: {line}" for line in lines)),
        verdict=VerificationResult(out, lines=lines),
    )


def check_model(
    config: PretrainedConfig, *, is_classifier: bool, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Raise ExportError where the model type cannot be exported to this format, or the model is a classifier."""
    COMPRESSED.check_language_model(config, is_classifier=is_classifier)


def _linear_keys(model: PreTrainedModel) -> list[str]:
    """Published names of the weights of linear layers and routed experts, without the head and the routers."""
    head, family = model.get_output_embeddings(), family_of(model.config.model_type)
    modules = [(name, module) for name, module in model.named_modules() if module is not head]
    linear = {name for name, module in modules if isinstance(module, torch.nn.Linear)}
    return [
        piece.key
        for name, parameter in model.named_parameters()
        if name.removesuffix(_WEIGHT) in linear or ".experts." in name
        for piece in hub_pieces(name, tuple(parameter.shape), family)
    ]


def _named(key: str, end: str) -> str:
    return f"{key.removesuffix(_WEIGHT)}.{end}"


def _write_files(
    hub: HubFolder, out: Path, model: PreTrainedModel, weights: frozenset[str], quantiser: _Quantiser
) -> list[HubTensor]:
    family, tensors = family_of(model.config.model_type), dict[str, list[HubTensor]]()
    for key, shape in hub.shapes.items():
        if key not in weights:
            dtype = torch.float32 if is_kept_in_fp32(key, family) else torch.bfloat16
            tensors[key] = [HubTensor(key, shape, dtype)]
            continue
        tensors[key] = []
        for end, part in quantiser.compress(torch.zeros(1, shape[1])).items():
            size = part.shape if end == "weight_shape" else (shape[0], *part.shape[1:])
            tensors[key].append(HubTensor(_named(key, end), tuple(size), part.dtype))
    all_tensors = [tensor for parts in tensors.values() for tensor in parts]
    check_free_space(out, sum(tensor.num_bytes for tensor in all_tensors))
    with closing(ShardWriter(out, plan_shards(all_tensors, SHARD_BYTES))) as writer:
        for key in count_parts("quantising tensors", tensors, len(tensors)):
            for end, start, part in _parts_of(hub, key, tensors[key][0].dtype, quantiser if key in weights else None):
                writer.write(_named(key, end) if end else key, start, part.reshape(-1))
        writer.finish()
    copy_settings(hub.folder, out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config = served_config(config, family, list(tensors))
    matrices = [key for key, shape in hub.shapes.items() if len(shape) == 2 and key not in weights]
    unquantised = dict.fromkeys([*(key.removesuffix(_WEIGHT) for key in matrices), "lm_head"])
    config |= {"dtype": "bfloat16", SECTION: quantiser.section([*unquantised])}
    (out / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return all_tensors


def _parts_of(
    hub: HubFolder, key: str, dtype: torch.dtype, quantiser: _Quantiser | None
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the tensors stored for the weight `key` in chunks: suffix of the tensor's name, first index, elements."""
    shape = hub.shapes[key]
    columns = math.prod(shape[1:])
    step = max(PIECE_NUMEL // columns, 1)
    for first in range(0, shape[0] if shape else 1, step):
        rows = hub.rows(key, first, min(first + step, shape[0])) if shape else hub.full_tensor(key)
        check_finite(key, rows, rows, others="w8a16")
        if quantiser is None:
            yield "", first * columns, rows.to(dtype).contiguous()
            continue
        for end, part in quantiser.compress(rows.float()).items():
            if end != "weight_shape":
                yield end, first * part[0].numel(), part.contiguous()
    if quantiser is not None and quantiser.layout == "pack-quantized":
        yield "weight_shape", 0, torch.tensor(shape)


def _compare(source: Path, folder: Path, out: Path, dtype: str, weights: frozenset[str]) -> tuple[str, ...]:
    """Load the quantised folder `out` with plain transformers, and compare its weights and loss with those of `folder`,
    the unquantised export of `source`. VerificationError if a tensor is missing, or a weight differs by more than
    rounding explains.
    """
    show_loading_as_phase()
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.bfloat16, trust_remote_code=False)
    plain = load(folder).eval()
    loaded, info = load(out, output_loading_info=True)
    sizes = [sum(file.stat().st_size for file in each.glob("*.safetensors")) for each in (folder, out)]
    # This comes before the comparison of weights, because its forward pass dequantises the weights of `loaded`.
    cost = quantisation_loss(dtype, source, plain, loaded.eval(), (sizes[0], sizes[1]))
    family, problems = family_of(plain.config.model_type), [str(key) for key in info["missing_keys"]]
    stored = loaded.state_dict()
    for name, weight in plain.state_dict().items():
        keys = [piece.key for piece in hub_pieces(name, tuple(weight.shape), family)]
        limit = 0.0 if weights.isdisjoint(keys) else _QUANTISERS[dtype].error + _SLACK
        # transformers 5.24 loads routers in fp32 (`_keep_in_fp32_modules_strict`), so they are compared unrounded.
        expected = weight if any(is_kept_in_fp32(key, family) for key in keys) else weight.bfloat16()
        largest = expected.abs().amax(-1, keepdim=True)
        if name not in stored or ((stored[name] - expected).abs() > limit * largest).any():
            problems.append(name)
    if problems or not math.isfinite(cost.loss_after):
        raise VerificationError(
            f"in plain transformers, the quantised model has wrong tensors or loss: {', '.join(problems[:5]) or 'NaN'}",
            hint="please report this",
        )
    return f"{len(stored)} tensors in plain transformers, each within its rounding", cost.line()
