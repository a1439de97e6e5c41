"""`ds-finetune export --format gguf`: a folder with one file for llama.cpp, and a Modelfile for Ollama."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xxhash
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ds_finetune.console.phase_line import count_parts
from ds_finetune.data.prompt_format import end_ids
from ds_finetune.errors import VerificationError
from ds_finetune.export.file_record import Runs, verify_files, write_file_record
from ds_finetune.export.formats import GGUF, ExportOptions, ExportResult
from ds_finetune.export.from_checkpoint import check_free_space
from ds_finetune.export.gguf.gguf_tensors import KINDS, GgufTensor, gguf_tensors
from ds_finetune.export.gguf.llama_tokenizer import add_tokenizer, choose_space_prefix
from ds_finetune.export.gguf.modelfile import modelfile
from ds_finetune.export.gguf.settings import add_settings, check_settings, notes_on
from ds_finetune.export.output_folder import as_output_errors, check_out_empty, replaced_folder
from ds_finetune.export.plain_source import plain_folder, plain_model
from ds_finetune.export.verify.verify import VerificationResult
from ds_finetune.families.table import family_of
from ds_finetune.model.build.hub_folder import HubFolder

_FORMAT = "gguf 1"


def write(source: Path, out: Path, options: ExportOptions) -> ExportResult:
    """Write the language model of `source` to the folder `out`, as one GGUF file that is named after `out`. Raises the
    errors of `FormatModule.write`; DataError if there is no tokenizer, which a GGUF file contains.
    """
    began = time.monotonic()
    check_out_empty(out)
    with plain_folder(source, out, options.base) as folder, replaced_folder(out) as new, as_output_errors(new):
        file = new / f"{out.name}.gguf"
        model, hub = plain_model(folder, check_model)
        config, family = model.config, family_of(model.config.model_type)
        tensors = gguf_tensors(hub, config, family, KINDS[options.dtype])
        check_free_space(file, sum(tensor.num_bytes for tensor in tensors))
        assert family.gguf is not None
        writer = gguf.GGUFWriter(file, family.gguf.name)
        writer.add_type("model")
        writer.add_name(file.stem)
        prefix = "ALL" if options.dtype == "f32" else "MOSTLY"
        writer.add_file_type(gguf.LlamaFileType[f"{prefix}_{options.dtype.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_settings(writer, config, family)
        tokenizer, token_notes = add_tokenizer(writer, folder, config, source)
        for tensor in tensors:
            # Without `raw_dtype`, gguf's writer would derive the tensor type from the dtype of a numpy array.
            fp32 = np.dtype(np.float32)
            writer.add_tensor_info(tensor.name, tensor.shape, fp32, tensor.num_bytes, raw_dtype=tensor.kind)
        try:
            ranges = _write_tensors(writer, file, tensors, hub)
        finally:
            writer.close()
        text, more = modelfile(file.name, tokenizer, end_ids(folder, config, tokenizer))
        notes = [*_notes(tensors, hub, options.dtype), *notes_on(config), *token_notes, *more]
        (new / "Modelfile").write_text(text, encoding="utf-8")
        write_file_record(new, {"format": _FORMAT, "dtype": options.dtype, "tensors": ranges})
    lines = (f"{len(ranges)} tensors were read back as written",)
    return ExportResult(
        folder=out,
        num_tensors=len(ranges),
        num_bytes=(out / file.name).stat().st_size,
        seconds=time.monotonic() - began,
        notes=(*notes, f"verified: {lines[0]}"),
        verdict=VerificationResult(out, lines=lines),
    )


def _tensors_at(_: Path, record: Mapping[str, Any], name: str, changed: Mapping[str, Runs]) -> list[str]:
    ranges = record["tensors"].items() if name.endswith(".gguf") else ()
    return [key for key, (begin, end) in ranges if any(begin <= b and a < end for a, b in changed[name])]


verify = partial(verify_files, kind=_FORMAT, parts_at=_tensors_at)


def check_model(
    config: PretrainedConfig, *, is_classifier: bool, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Raise ExportError if llama.cpp does not support the model type, a setting, the tokenizer or chat template."""
    check_settings(config, GGUF.check_language_model(config, is_classifier=is_classifier))
    if tokenizer is not None:
        choose_space_prefix(tokenizer)


def _write_tensors(
    writer: gguf.GGUFWriter, file: Path, tensors: list[GgufTensor], hub: HubFolder
) -> dict[str, tuple[int, int]]:
    """Write header, settings and tensors to a GGUF file, and read the tensors back. Returns the byte range of each
    tensor by name. VerificationError if the file has other bytes than were written. gguf's own reader is not used,
    because it takes 10 s for a vocabulary of 100,000 tokens.
    """
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    stream, ranges = writer.fout[0], {}
    writer.write_padding(stream, stream.tell())
    for tensor in count_parts("writing tensors", tensors, len(tensors)):
        digest, begin = xxhash.xxh3_64(), stream.tell()
        for piece in tensor.pieces(hub):
            stream.write(piece)
            digest.update(piece)
        ranges[tensor.name] = begin, stream.tell()
        writer.write_padding(stream, tensor.num_bytes)
        writer.flush()
        read = np.memmap(file, np.uint8, mode="r", offset=begin, shape=(tensor.num_bytes,))
        if xxhash.xxh3_64_digest(read.data) != digest.digest():
            raise VerificationError(
                f"{file} has other bytes for `{tensor.name}` than were written", hint="check the disk"
            )
    return ranges


def _notes(tensors: list[GgufTensor], hub: HubFolder, quantise: str) -> list[str]:
    in_f16 = [tensor for tensor in tensors if tensor.kind == KINDS["f16"]] if quantise == "q8_0" else []
    notes = [
        f"{len(in_f16)} tensors are kept in f16, since their rows are no multiple of 32 elements, e.g. {tensor.name} "
        f"with {tensor.shape[-1]}"
        for tensor in in_f16[:1]
    ]
    unwritten = sorted(hub.shapes.keys() - {key for tensor in tensors for key in tensor.keys})
    return [*notes, *(f"{len(unwritten)} tensors are left out, e.g. {key}" for key in unwritten[:1])]
