"""The slices of the programme: what each measures, in order of value, and the seconds that it may take."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.gpu.results import Recorder

Work = Callable[..., None]
"""Called with a Recorder, a folder for its files, and `is_tiny`."""


@dataclass(frozen=True)
class Part:
    """What one process measures."""

    name: str
    work: Work
    seconds: int
    """After which it is ended."""


def _kernels(module: str, function: str, recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """A function of this package that writes no files."""
    from importlib import import_module

    assert folder.is_dir()
    getattr(import_module(f"bench.gpu.{module}"), function)(recorder, is_tiny=is_tiny)


def _files(  # noqa: PLR0913 - what it calls, and what it calls it with
    module: str, function: str, argument: object, recorder: Recorder, folder: Path, *, is_tiny: bool
) -> None:
    """A function of this package that writes to a folder."""
    from importlib import import_module

    given = () if argument is None else (argument,)
    getattr(import_module(f"bench.gpu.{module}"), function)(recorder, folder, *given, is_tiny=is_tiny)


def _kernel(name: str, module: str, function: str, seconds: int) -> Part:
    return Part(name, partial(_kernels, module, function), seconds)


def _run(name: str, function: str, seconds: int, argument: object = None) -> Part:
    return Part(name, partial(_files, "throughput", function, argument), seconds)


def _check(name: str, module: str, function: str, seconds: int) -> Part:
    return Part(name, partial(_files, module, function, None), seconds)


@dataclass(frozen=True)
class Slice:
    """Parts that run one after another, by one command."""

    seconds: int
    """The slice ends within this time, whatever its parts may take: under ten minutes, and fifty in all."""
    parts: tuple[Part, ...]


_PARTS: dict[str, tuple[Part, ...]] = {
    "correctness": (
        _check("selftest", "checks", "run_selftest", 280),
        _check("tests", "checks", "gpu_tests", 100),
        _check("memory", "memory", "memory", 180),
    ),
    "kernels": (
        _kernel("matmul", "attention", "matmul", 60),
        _kernel("attention", "attention", "parity", 120),
        _kernel("attention-speed", "attention", "speed", 120),
        _kernel("latent-attention", "attention", "latent", 120),
        _kernel("head", "layers", "head", 120),
        _kernel("experts", "layers", "experts", 120),
        _kernel("four-bit", "layers", "four_bit", 60),
    ),
    "comparisons": (
        _check("variants", "comparisons", "variants", 300),
        _check("waits", "comparisons", "waits", 120),
        _check("checkpoint", "comparisons", "checkpoint", 120),
    ),
    "throughput": (
        _run("full-1.5b", "throughput", 180, "full 1.5B"),
        _run("lora-7b", "throughput", 180, "LoRA 7B"),
        _run("full-1.5b-by-document", "throughput", 150, "full 1.5B, attention by document"),
        _run("full-1.5b-no-recomputation", "throughput", 150, "full 1.5B, no recomputation"),
        _run("lora-7b-four-bit", "throughput", 180, "LoRA 7B in four bits"),
    ),
    "experts": (_run("lora-16b", "throughput", 240, "LoRA 16B of experts"),),
    "offload": (
        _run("offload", "offload", 420, 1.0),
        _run("offload-less", "offload", 300, 0.75),
        _run("offload-1.5b", "throughput", 120, "full 1.5B, optimizer on the host"),
        _run("superoffload-1.5b", "throughput", 120, "full 1.5B, SuperOffload, inexact"),
        _run("zenflow-1.5b", "throughput", 120, "full 1.5B, ZenFlow, inexact"),
    ),
    "longest": tuple(
        _run(f"tokens-{tokens}", "longest", 400, tokens) for tokens in (65_536, 131_072, 262_144, 524_288)
    ),
}
_SECONDS = {
    "correctness": 580,
    "kernels": 300,
    "comparisons": 560,
    "throughput": 480,
    "experts": 240,
    "offload": 420,
    "longest": 420,
}
SLICES = {name: Slice(seconds, _PARTS[name]) for name, seconds in _SECONDS.items()}
"""In order of value, for a machine that may not be held long enough for all."""
