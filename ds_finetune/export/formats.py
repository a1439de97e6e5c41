"""The export formats: a row for each, which every command that handles formats reads.

Rows are plain values, so that planning and the command line import no torch. A format's module is imported at its first
use.
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
"""Group of entry points by which other packages add rows."""

Scorer = Callable[[Mapping[str, "torch.Tensor"]], "torch.Tensor"]
"""From inputs of a tokenizer, int64 [rows, tokens], to logits fp32 [rows, labels] on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `ds-finetune export`."""

    dtype: str = ""
    """Dtype of the weights; empty for the first dtype of the format's row."""
    base: Path | None = None
    """Folder of the model that was trained."""
    max_shard_size: str | None = None
    with_cache: bool = True
    verify: bool = True

    def given(self) -> dict[str, str]:
        """The given options that some formats lack, by name on the command line."""
        size = {} if self.max_shard_size is None else {"--max-shard-size": f"--max-shard-size {self.max_shard_size}"}
        flags = {"--no-cache": not self.with_cache, "--no-verify": not self.verify}
        return size | {name: name for name, is_given in flags.items() if is_given}


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The result of writing `folder`."""

    folder: Path
    num_bytes: int
    seconds: float
    num_tensors: int | None = None
    """Number of tensors; None where tensors are parts of a graph."""
    notes: tuple[str, ...] = ()
    """Lines on comparisons, and on results that may surprise the user, e.g. tensors copied from the base."""
    verdict: "VerificationResult | None" = None
    """The result of verifying the folder; None where it was not verified, or was compared while it was written."""

    def lines(self) -> list[str]:
        """The result as lines for the terminal."""
        tensors = "" if self.num_tensors is None else f"{self.num_tensors} tensors, "
        size = f"{tensors}{bytes_text(self.num_bytes)}"
        return [f"wrote {self.folder}: {size} in {self.seconds:.1f} s", *self.notes]


class FormatModule(Protocol):
    """The functions of a format's module."""

    def write(self, source: Path, out: Path, options: ExportOptions) -> ExportResult:
        """Convert the run, checkpoint, adapter or model in `source` to `out`, which appears only when complete.

        OutputError where `out` is not empty or does not fit on the disk; ExportError where the model cannot be exported
        so; VerificationError where the folder is compared before it gets its name, and differs.
        """
        ...

    def verify(self, folder: Path, base: Path | None) -> "VerificationResult":
        """Compare `folder` with its record, and mark it; `base` is the model it was trained from, if given."""
        ...

    def check_model(
        self, config: "PretrainedConfig", *, is_classifier: bool, tokenizer: "PreTrainedTokenizerBase | None" = None
    ) -> None:
        """ExportError where this format does not support the model type, a setting of config.json or the tokenizer."""
        ...


class EngineModule(FormatModule, Protocol):
    """The functions of a format's module whose folders this program can run."""

    def load_model(self, folder: Path, device: str) -> "PreTrainedModel":
        """The causal LM of `folder` for `generate`.

        `device` `auto` means all GPUs, and empty a GPU if there is one.
        """
        ...

    def load_scorer(self, folder: Path) -> Scorer:
        """The classifier of `folder`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A format: its folders, the programs that read them, and its options of `ds-finetune export`."""

    name: str
    """Name in `--format` and `export.formats`; `format` in the record of a folder begins with it."""
    title: str
    """Name in sentences."""
    module: str
    """Name of the format's module, which has the functions of `FormatModule`."""
    weights: tuple[str, ...]
    """Patterns of weight files, by which a folder of the format is recognised."""
    read_by: str
    """Programs that read folders of the format."""
    uses: tuple[str, ...]
    """Commands that run the folder OUT in these programs, for model cards and docs."""
    dtypes: tuple[str, ...]
    """Values of `--dtype`; the first is the default."""
    engines: tuple[str, ...]
    """Engines of `ds-finetune serve` that read the folders; `auto` takes the first that can run. May be empty."""
    options: tuple[str, ...] = ()
    """Options of `ExportOptions.given` that the format has."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Hints for unsupported values of `--dtype`, if listing the supported values is not enough."""
    packages: tuple[str, ...] = ()
    """Packages that the format's module needs."""
    extra: str = ""
    """The extra of this package that installs `packages`."""
    has_family: Callable[[Family], bool] = lambda _: True
    """Whether models of a family can be exported; for an encoder, whether classifiers can."""
    is_of_model: bool = True
    """Whether the folders hold a full model, and so can be made from the export of a run."""
    has_card: bool = False
    """Whether the folder gets a model card."""

    @property
    def wheels(self) -> str:
        """Arguments of `pip install` for `packages`."""
        return f"'ds_finetune[{self.extra}]'" if self.extra else " ".join(self.packages).replace("_", "-")

    def resolved(self, options: ExportOptions) -> ExportOptions:
        """`options` with the default dtype filled in; ConfigError or ExportError for unsupported ones."""
        for name, given in options.given().items():
            if name not in self.options:
                others = " or ".join(row.name for row in formats() if name in row.options)
                raise ConfigError(
                    f"{given} is not valid with --format {self.name}",
                    hint=f"leave it out: it is an option of --format {others}",
                )
        if options.dtype in self.reasons:
            raise ConfigError(
                f"--quantise {options.dtype} is not written with --format {self.name}", hint=self.reasons[options.dtype]
            )
        if options.dtype and options.dtype not in {dtype for row in formats() for dtype in row.dtypes}:
            raise ConfigError(f"dtype is `{options.dtype}`", hint=f"name one of {', '.join(self.dtypes)}")
        if options.dtype and options.dtype not in self.dtypes:
            others = " or ".join(row.name for row in formats() if options.dtype in row.dtypes)
            raise ExportError(
                f"--format {self.name} has no --dtype {options.dtype}",
                hint=f"export with --dtype {' or '.join(self.dtypes)}, or with --format {others}",
            )
        return replace(options, dtype=options.dtype or self.dtypes[0])

    def check_model_type(self, model_type: str) -> Family:
        """The family of `model_type`; ExportError where this format does not support the family."""
        family = family_of(model_type)
        if not self.has_family(family):
            decoders, encoders = (", ".join(self.model_types(is_encoder=is_encoder)) for is_encoder in (False, True))
            others = f", and of classifiers also for {encoders}" if encoders else ""
            raise ExportError(
                f"model_type `{model_type}` has no export to {self.title}", hint=f"supported are {decoders}{others}"
            )
        return family

    def check_language_model(self, config: "PretrainedConfig", *, is_classifier: bool) -> Family:
        """The family of a language model; ExportError where this format does not support it, or for a classifier."""
        family = self.check_model_type(config.model_type)
        if is_classifier:
            raise ExportError(
                f"config.json names the classifier {', '.join(config.architectures or [])}, and {self.title} is for "
                "language models only",
                hint="export it with --format safetensors or onnx",
            )
        return family

    def model_types(self, *, is_encoder: bool) -> list[str]:
        """Model types of the table of families that can be exported, in order."""
        rows = FAMILIES.items()
        return sorted(name for name, row in rows if self.has_family(row) and (row.encoder is not None) == is_encoder)

    def check_not_composite(self, config: Mapping[str, Any]) -> None:
        """ExportError where the config.json `config` is that of a composite model, which this format cannot hold."""
        if is_composite(config) and self is not SAFETENSORS:
            raise ExportError(
                f"model_type `{config.get('model_type')}` is a model of text and other media, and has no export to "
                f"{self.title}",
                hint="export it with --format safetensors, to which its other parts are copied",
            )

    def holds_weights(self, folder: Path) -> bool:
        """Whether `folder` has weight files of this format."""
        return any(any(folder.glob(pattern)) for pattern in self.weights)

    def check_runs_here(self, folder: Path) -> None:
        """ExportError where this program does not run models of this format, such as that in `folder`."""
        if not self.engines:
            raise ExportError(
                f"`{folder}` is a {self.title} folder, which {self.read_by} run, and not this program",
                hint="name the safetensors export of the model",
            )

    def load(self) -> FormatModule:
        """The format's module; ExportError where a package that it needs is not installed."""
        absent = [name for name in self.packages if find_spec(name) is None]
        if absent:
            raise ExportError(
                f"the {self.title} export needs {' and '.join(absent)}", hint=f"pip install {self.wheels}"
            )
        if self.extra:
            check_versions(self.extra)
        return cast(FormatModule, import_module(self.module))

    def load_engine(self, folder: Path) -> EngineModule:
        """The format's module, to run `folder`; ExportError where this program does not run the format."""
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
"""The formats of this package, followed by those that other packages have registered."""
ENGINES = ("vllm", "transformers", "onnx")
"""The engines of `ds-finetune serve`."""


def register_format(row: ExportFormat) -> None:
    """Add a format of another package."""
    assert row.name not in {other.name for other in FORMATS}, row.name
    assert set(row.engines) <= set(ENGINES), row.engines
    FORMATS.append(row)


def formats() -> list[ExportFormat]:
    """All formats, including those of installed packages."""
    _load_entry_points()
    return FORMATS


@cache
def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        register_format(entry.load())


def format_named(name: str, where: str = "format") -> ExportFormat:
    """The format of this name; ConfigError, which quotes `where` the name was given, if there is none."""
    row = next((row for row in formats() if row.name == name), None)
    if row is None:
        names = [row.name for row in formats()]
        near = get_close_matches(name, names, n=1)
        meant = f"did you mean `{near[0]}`? " if near else ""
        raise ConfigError(f"{where} `{name}` is not known", hint=f"{meant}known formats are {', '.join(names)}")
    return row


def formats_of_run(names: Sequence[str]) -> list[ExportFormat]:
    """The formats of `export.formats`; ConfigError where one is unknown or they do not begin with safetensors."""
    if list(names) != list(dict.fromkeys((SAFETENSORS.name, *names))):
        raise ConfigError(
            f"export.formats is {list(names)}",
            hint=f"begin with {SAFETENSORS.name}, from which the others are made, and name each format once",
        )
    rows = [format_named(name, "export.formats: format") for name in names]
    for row in rows:
        if not row.is_of_model:
            raise ConfigError(
                f"export.formats names {row.name}, which is made from `adapter/` of a run that has ended",
                hint=f"leave it out, and afterwards: ds-finetune export RUN OUT --format {row.name}",
            )
    return rows


def format_of(folder: Path) -> ExportFormat:
    """The format of an exported folder: by its record, else by its weight files, else safetensors."""
    try:
        tree = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        tree = None
    name = str(tree.get("format")).partition(" ")[0] if isinstance(tree, dict) else ""
    # A folder of another format may also have a safetensors file.
    others = (row for row in formats() if row.is_of_model and row.weights != SAFETENSORS.weights)
    rows = [SAFETENSORS, *(row for row in others if row.holds_weights(folder))]
    return next((row for row in formats() if row.name == name), rows[-1])
