"""Table of the export formats, with one row per format. Every command that handles formats reads this table.

Rows are plain values, so that planning and the command line import no torch. The module of a format is imported when it
is first used.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from ds_finetune.config.units import bytes_text
from ds_finetune.errors import ConfigError, ExportError
from ds_finetune.export.output_folder import RECORD
from ds_finetune.families.family import Family
from ds_finetune.families.server_lora import VLLM_LORA
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.families.text_part import is_composite
from ds_finetune.system.versions import check_versions

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ds_finetune.export.verify.verify import VerificationResult

ENTRY_POINTS = "ds_finetune.formats"
"""Group of Python entry points by which other packages register export formats."""

Scorer = Callable[[Mapping[str, "torch.Tensor"]], "torch.Tensor"]
"""Function from token ids of texts, int64 [rows, tokens], to class logits, fp32 [rows, labels] on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export, from the command line or from Python."""

    dtype: str = ""
    """Dtype of the exported weights; empty for the format's first dtype."""
    base: Path | None = None
    """Folder of the base model from which training started."""
    max_shard_size: str | None = None
    with_cache: bool = True
    verify: bool = True

    def given(self) -> dict[str, str]:
        """Options that the user gave and that not every format supports, by name on the command line."""
        size = {} if self.max_shard_size is None else {"--max-shard-size": f"--max-shard-size {self.max_shard_size}"}
        flags = {"--no-cache": not self.with_cache, "--no-verify": not self.verify}
        return size | {name: name for name, is_given in flags.items() if is_given}


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """Result of an export to the folder `folder`."""

    folder: Path
    num_bytes: int
    seconds: float
    num_tensors: int | None = None
    """Number of tensors in the exported weight files; None for ONNX, whose tensors are parts of a graph."""
    notes: tuple[str, ...] = ()
    """Lines for the user on comparisons and on surprising results, e.g. tensors that were copied from the base."""
    verdict: "VerificationResult | None" = None
    """Result of verifying the exported folder; None if it was not verified."""

    def lines(self) -> list[str]:
        """Lines for the terminal that describe the exported folder."""
        tensors = "" if self.num_tensors is None else f"{self.num_tensors} tensors, "
        size = f"{tensors}{bytes_text(self.num_bytes)}"
        return [f"wrote {self.folder}: {size} in {self.seconds:.1f} s", *self.notes]


class FormatModule(Protocol):
    """Functions that the module of an export format must have."""

    def write(self, source: Path, out: Path, options: ExportOptions) -> ExportResult:
        """Convert the run, checkpoint, adapter or model in `source` to the folder `out`, which appears only when
        complete. OutputError if `out` is not empty or does not fit on the disk; ExportError if the model cannot be
        exported to this format; VerificationError if the written folder differs from the model when it is compared.
        """

    def verify(self, folder: Path, base: Path | None) -> "VerificationResult":
        """Compare an exported folder with its record, and mark it as verified or not. `base` is the base model."""

    def check_model(
        self, config: "PretrainedConfig", *, is_classifier: bool, tokenizer: "PreTrainedTokenizerBase | None" = None
    ) -> None:
        """Raise ExportError if the format does not support the model type, a setting, or the tokenizer."""


class EngineModule(FormatModule, Protocol):
    """Functions of a format's module, for export formats that this program can also run."""

    def load_model(self, folder: Path, device: str) -> "PreTrainedModel":
        """Load the causal LM of `folder` to generate text. With `device` `auto` it is spread over all GPUs; with an
        empty `device` it is put on a GPU if there is one.
        """

    def load_scorer(self, folder: Path) -> Scorer:
        """Load the classifier of `folder`, as a function from token ids to class logits."""


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """An export format: its files, the programs that read it, and the options of `ds-finetune export` it supports."""

    name: str
    """Name of the export format in `--format` and `export.formats`; the record's entry `format` begins with it."""
    title: str
    module: str
    weights: tuple[str, ...]
    """Glob patterns of weight files, by which a folder of the export format is recognised."""
    read_by: str
    """Programs that read the export format, as words in a sentence."""
    uses: tuple[str, ...]
    """Example commands that run an exported folder OUT, for model cards and docs."""
    dtypes: tuple[str, ...]
    """Values of `--dtype` that the export format supports; the first is the default."""
    engines: tuple[str, ...]
    """Engines of `ds-finetune serve` that read the format; `auto` takes the first that can run. May be empty."""
    options: tuple[str, ...] = ()
    """Names of the options in `ExportOptions.given` that the export format supports."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Hints for unsupported values of `--dtype` where the list of supported values does not help."""
    packages: tuple[str, ...] = ()
    """Python packages that the export format's module imports."""
    extra: str = ""
    has_family: Callable[[Family], bool] = lambda _: True
    """Whether the export format supports the models of a family; for encoder families, only classifiers count."""
    is_of_model: bool = True
    """Whether the format has the full model instead of only adapters; `export.formats` accepts only such formats."""
    has_card: bool = False

    @property
    def wheels(self) -> str:
        """Arguments of `pip install` for the packages of the export format."""
        return f"'ds_finetune[{self.extra}]'" if self.extra else " ".join(self.packages).replace("_", "-")

    def resolved(self, options: ExportOptions) -> ExportOptions:
        """Fill in the default dtype of `options`; ConfigError or ExportError for an option the format lacks."""
        for name, given in options.given().items():
            if name not in self.options:
                others = " or ".join(row.name for row in formats() if name in row.options)
                raise ConfigError(
                    f"{given} is not valid with --format {self.name}",
                    hint=f"leave the option out; it belongs to --format {others}",
                )
        if options.dtype in self.reasons:
            raise ConfigError(
                f"--format {self.name} does not support --dtype {options.dtype}", hint=self.reasons[options.dtype]
            )
        if options.dtype and options.dtype not in {dtype for row in formats() for dtype in row.dtypes}:
            raise ConfigError(f"unknown --dtype `{options.dtype}`", hint=f"take one of {', '.join(self.dtypes)}")
        if options.dtype and options.dtype not in self.dtypes:
            others = " or ".join(row.name for row in formats() if options.dtype in row.dtypes)
            raise ExportError(
                f"--format {self.name} does not support --dtype {options.dtype}",
                hint=f"export with --dtype {' or '.join(self.dtypes)}, or with --format {others}",
            )
        return replace(options, dtype=options.dtype or self.dtypes[0])

    def check_model_type(self, model_type: str) -> Family:
        """Look up the family of `model_type`; ExportError where this format does not support the family."""
        family = family_of(model_type)
        if not self.has_family(family):
            decoders, encoders = (", ".join(self.model_types(is_encoder=is_encoder)) for is_encoder in (False, True))
            others = f", and of classifiers also for {encoders}" if encoders else ""
            raise ExportError(
                f"models of type `{model_type}` cannot be exported to {self.title}",
                hint=f"{self.title} supports {decoders}{others}",
            )
        return family

    def check_language_model(self, config: "PretrainedConfig", *, is_classifier: bool) -> Family:
        """Look up the family of a language model; ExportError for classifiers and unsupported families."""
        family = self.check_model_type(config.model_type)
        if is_classifier:
            raise ExportError(
                f"the model is a classifier ({', '.join(config.architectures or [])}), and {self.title} supports "
                "language models only",
                hint="export it with --format safetensors or onnx",
            )
        return family

    def model_types(self, *, is_encoder: bool) -> list[str]:
        """Sorted model types that can be exported to this format: encoders if `is_encoder`, else decoders."""
        rows = FAMILIES.items()
        return sorted(name for name, row in rows if self.has_family(row) and (row.encoder is not None) == is_encoder)

    def check_not_composite(self, config: Mapping[str, Any]) -> None:
        """Raise ExportError if the model combines text with images or sound, unless this format is safetensors."""
        if is_composite(config) and self is not SAFETENSORS:
            raise ExportError(
                f"model_type `{config.get('model_type')}` combines text with images or sound, and cannot be "
                f"exported to {self.title}",
                hint="export with --format safetensors, which includes the parts for images and sound",
            )

    def holds_weights(self, folder: Path) -> bool:
        """Whether `folder` has weight files of this export format."""
        return any(any(folder.glob(pattern)) for pattern in self.weights)

    def check_runs_here(self, folder: Path) -> None:
        """Raise ExportError if this program cannot run models of this format, such as the one in `folder`."""
        if not self.engines:
            raise ExportError(
                f"this program cannot run `{folder}`: its format {self.title} is for {self.read_by}",
                hint="name the safetensors export of the model instead",
            )

    def load(self) -> FormatModule:
        """Import the format's module. ExportError if a package that it needs is not installed."""
        absent = [name for name in self.packages if find_spec(name) is None]
        if absent:
            raise ExportError(
                f"the {self.title} export needs {' and '.join(absent)}", hint=f"pip install {self.wheels}"
            )
        if self.extra:
            check_versions(self.extra)
        return cast(FormatModule, import_module(self.module))

    def load_engine(self, folder: Path) -> EngineModule:
        """Import the format's module in order to run `folder`. ExportError if this program cannot run the format."""
        self.check_runs_here(folder)
        return cast(EngineModule, self.load())


SAFETENSORS = ExportFormat(
    name="safetensors",
    title="safetensors",
    module="ds_finetune.export.safetensors_format",
    weights=("*.safetensors", "*.bin"),
    read_by="transformers, vLLM, SGLang and llama.cpp's converter",
    uses=(
        "vllm serve OUT",
        "python -m sglang.launch_server --model-path OUT",
        "mlx_lm.generate --model OUT --prompt TEXT",
    ),
    dtypes=("bf16", "fp16", "fp32", "fp8"),
    engines=("vllm", "transformers"),
    options=("--max-shard-size", "--no-verify"),
    has_card=True,
)
ONNX = ExportFormat(
    name="onnx",
    title="ONNX",
    module="ds_finetune.export.onnx.folder",
    weights=("onnx/model.onnx", "model.onnx"),
    read_by="ONNX Runtime",
    uses=(
        'await pipeline("text-generation", "./OUT", {dtype: "fp32"})',
        'onnxruntime_genai.Model("OUT")',
    ),
    dtypes=("fp32", "fp16", "int8", "int4"),
    engines=("onnx",),
    options=("--no-cache",),
    packages=("onnx", "onnxruntime"),
    extra="onnx",
    has_family=lambda family: family.onnx is not None,
    has_card=True,
)
GGUF = ExportFormat(
    name="gguf",
    title="GGUF",
    module="ds_finetune.export.gguf.folder",
    weights=("*.gguf",),
    read_by="llama.cpp and Ollama",
    uses=("llama-server -m OUT/NAME.gguf", "cd OUT && ollama create NAME -f Modelfile"),
    dtypes=("bf16", "f16", "f32", "q8_0"),
    engines=(),
    reasons={"q4_k_m": "the library gguf has no quantiser for it: write f16, then llama-quantize OUT/NAME.gguf Q4_K_M"},
    packages=("gguf",),
    extra="gguf",
    has_family=lambda family: family.gguf is not None,
    has_card=True,
)
ADAPTER = ExportFormat(
    name="adapter",
    title="adapter",
    module="ds_finetune.export.server_adapter",
    weights=("adapter_model.safetensors",),
    read_by="vLLM and SGLang",
    uses=(
        "vllm serve MODEL --enable-lora --max-lora-rank 16 --lora-modules NAME=OUT --tokenizer OUT "
        "--generation-config OUT",
        "python -m sglang.launch_server --model-path MODEL --lora-paths NAME=OUT",
    ),
    dtypes=("fp32", "bf16", "fp16"),
    engines=(),
    has_family=lambda family: family.model_type in VLLM_LORA,
    is_of_model=False,
    has_card=True,
)
_CALIBRATED = "it needs calibration by llmcompressor, which does not install beside transformers 5.23: take w4a16"
COMPRESSED = ExportFormat(
    name="compressed-tensors",
    title="compressed-tensors",
    module="ds_finetune.export.compressed",
    weights=SAFETENSORS.weights,
    read_by="transformers, vLLM and SGLang",
    uses=("vllm serve OUT", "python -m sglang.launch_server --model-path OUT"),
    dtypes=("w8a16", "w4a16", "fp8"),
    engines=SAFETENSORS.engines,
    reasons={"awq": _CALIBRATED, "gptq": _CALIBRATED},
    packages=("compressed_tensors",),
    extra="compressed",
    has_family=lambda family: family.onnx is not None and family.encoder is None,
    has_card=True,
)
FORMATS = [SAFETENSORS, ONNX, GGUF, COMPRESSED, ADAPTER]
"""All known export formats: this package's own, then the formats that other packages registered."""
ENGINES = ("vllm", "transformers", "onnx")


def register_format(row: ExportFormat) -> None:
    """Add an export format of another package to the known formats."""
    assert row.name not in {other.name for other in FORMATS}, row.name
    assert set(row.engines) <= set(ENGINES), row.engines
    FORMATS.append(row)


def formats() -> list[ExportFormat]:
    """All known export formats, including those of installed packages."""
    _load_entry_points()
    return FORMATS


@cache
def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        register_format(entry.load())


def format_named(name: str, where: str = "format") -> ExportFormat:
    """Look up the export format `name`. For an unknown name, the ConfigError says `where` it was given."""
    row = next((row for row in formats() if row.name == name), None)
    if row is None:
        names = [row.name for row in formats()]
        near = get_close_matches(name, names, n=1)
        suggestion = f"did you mean `{near[0]}`? " if near else ""
        raise ConfigError(f"{where} `{name}` is not known", hint=f"{suggestion}known formats are {', '.join(names)}")
    return row


def formats_of_run(names: Sequence[str]) -> list[ExportFormat]:
    """Look up the formats in `export.formats`. ConfigError unless safetensors is first and all contain a model."""
    if list(names) != list(dict.fromkeys((SAFETENSORS.name, *names))):
        raise ConfigError(
            f"export.formats is {list(names)}",
            hint=f"list {SAFETENSORS.name} first, because the other formats are made from it, and each format once",
        )
    rows = [format_named(name, "export.formats: format") for name in names]
    for row in rows:
        if not row.is_of_model:
            raise ConfigError(
                f"export.formats names {row.name}, which is made after training from the run's folder `adapter/`",
                hint=f"leave {row.name} out, and after training: ds-finetune export RUN OUT --format {row.name}",
            )
    return rows


def format_of(folder: Path) -> ExportFormat:
    """Format of an exported folder: as its record says, else recognised by its weight files, else safetensors."""
    try:
        tree = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        tree = None
    name = str(tree.get("format")).partition(" ")[0] if isinstance(tree, dict) else ""
    # Folders of other formats may contain safetensors files too, so the other formats are tried first.
    others = (row for row in formats() if row.is_of_model and row.weights != SAFETENSORS.weights)
    rows = [SAFETENSORS, *(row for row in others if row.holds_weights(folder))]
    return next((row for row in formats() if row.name == name), rows[-1])
