"""Compares ONNX Runtime with plain transformers for several batches, with a growing cache, and in greedy decoding."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from ds_finetune.export.load import auto_class
from ds_finetune.export.onnx.runtime import OnnxCausalLM, OnnxModel, OnnxScorer
from ds_finetune.export.shards import PIECE_NUMEL
from ds_finetune.families.table import family_of
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.loss.score_config import is_classifier

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
TOLERANCES = {np.dtype(np.float32): 1e-4, np.dtype(np.float16): 2e-2}
"""Largest accepted difference of logits, relative to the largest logit, by dtype of the ONNX graph."""
FLIPPED_FRACTION = 0.1
"""Fraction of positions that may exceed the tolerance in fp16, where rounding can change the choice of experts."""
NEW_TOKENS = 8
GENERATED = (
    ((0,), 1, (1,)),
    ((0, 3), 9, (9,)),
    ((0, 11, 5), 33, (33,)),
    ((0,), 12, (8, 4)),
    ((2, 0), 21, (1, 9, 1, 1, 4, 1, 4)),
)
"""Test inputs of a language model: numbers of padding tokens at the start of the rows, length of a row with padding,
and lengths of the chunks in which the rows are fed. A chunk uses the cache of earlier chunks.
"""
PROMPTS = ((0, 4, 1, 7), 11)
"""Inputs for greedy decoding: number of padding tokens at the start of each row, and row length with padding."""
SCORED = (
    ((0,), 1, "right"),
    ((0,), 23, "right"),
    ((0, 3, 8), 9, "right"),
    ((0, 11, 5), 33, "right"),
    ((2, 0), 12, "left"),
)
"""Test inputs of a classifier: number of padding tokens of each row, row length with padding, side of padding."""


@dataclass(frozen=True, eq=False)
class Case:
    """A test input: rows of random tokens, and the fp32 logits that plain transformers computes for them."""

    name: str
    ids: Ints
    mask: Ints
    chunks: tuple[int, ...] = ()
    """Lengths of the chunks in which the test input is fed to a language model; empty for a classifier."""
    logits: Floats = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    """Logits of the test input: [tokens without padding, vocabulary], or [rows, labels] of a classifier. With a
    `stride` above 1, only some of them are compared.
    """
    stride: int = 1
    """At each position, every `stride`-th logit is compared: with 1 all logits, with 2 every second one."""
    largest: float = 0.0
    """Largest absolute logit of the test input, including logits that are not compared."""

    def inputs(self) -> dict[str, Ints]:
        """Inputs of a classifier by name. Half of the tokens have token type 0, half 1."""
        length = self.ids.shape[1]
        types = (np.arange(length) >= length // 2) * self.mask
        return {"input_ids": self.ids, "attention_mask": self.mask, "token_type_ids": types}


@dataclass(frozen=True)
class Reference:
    """The fp32 results of plain transformers, with which those of an ONNX graph are compared."""

    cases: tuple[Case, ...]
    experts: str
    """Number of routed experts that the test inputs reach, as text for messages; empty for a model without experts."""
    tokens: Ints | None = None
    """Prompts with the tokens that `generate` adds greedily, [rows, length + NEW_TOKENS]; None for a classifier."""
    leads: Floats | None = None
    """Lead of each generated token: (best - second best logit) / largest |logit|, [rows, NEW_TOKENS]."""
    chosen: Ints | None = None
    """Token that the reference chooses where each of `tokens` was generated, [rows, NEW_TOKENS]."""
    program: str = "transformers"
    """Name of the program that computed the reference results, for messages."""


@dataclass(frozen=True)
class OnnxComparison:
    """Result of comparing ONNX Runtime with the reference. Differences are relative to a test input's largest logit."""

    positions: int
    """Number of tokens whose logits were compared; for a classifier, number of texts."""
    beyond: int
    """Number of positions whose logits differ from the reference by more than `tolerance`."""
    largest: float
    """Largest difference between a logit of ONNX Runtime and of the reference, relative to the largest logit."""
    tolerance: float
    allowed_share: float
    """Fraction of positions, and of greedily generated tokens, that may exceed the tolerance."""
    new_tokens_differing: int | None
    """Number of greedily generated tokens that differ from the reference; None for a classifier."""
    experts: str
    program: str
    failures: tuple[str, ...]
    """Lines for the user on differences that are not accepted."""

    def line(self) -> str:
        """A line for the terminal with what was compared and the largest difference."""
        unit = "texts" if self.new_tokens_differing is None else "positions"
        reached = f", reaching {self.experts}" if self.experts else ""
        flipped = f", {self.beyond} beyond it by a router's near tie" if self.beyond else ""
        greedy = "" if self.new_tokens_differing is None else f", {self.new_tokens_differing} greedy tokens differ"
        return (
            f"ONNX Runtime on the CPU against {self.program}: {self.positions} {unit}{reached}, largest "
            f"difference {self.largest:.1e} of the largest logit (tolerance {self.tolerance:g}){flipped}{greedy}"
        )


def is_sampled(shape: tuple[int, ...], stride: int) -> np.ndarray:
    """Mask [positions, width] of the logits to compare: position n has logits n % stride, n % stride + stride, ..."""
    positions, width = shape
    return (np.arange(width) - np.arange(positions)[:, None]) % stride == 0  # type: ignore[no-any-return]


def make_reference(folder: Path) -> Reference:
    """Compute the logits of all test inputs with the model of `folder`, in fp32 with plain transformers on the CPU."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = auto_class(config).from_pretrained(folder, dtype="auto", trust_remote_code=False).eval()
    model.set_experts_implementation("eager")
    for parameter in model.parameters():
        parameter.data = parameter.float() if parameter.dim() == 1 else parameter.data
    decoded: tuple[Ints, Floats, Ints] | tuple[None, None, None] = None, None, None
    with torch.no_grad(), _ProductsInFp32(), _recorded_experts(model) as reached:
        if is_classifier(config):
            # An encoder classifies a text by its first token, so padding on the left is not tested.
            is_encoder = family_of(config.model_type).encoder is not None
            cases = [scored_case(config, *shape) for shape in SCORED if not (is_encoder and shape[-1] == "left")]
        else:
            cases = [generated_case(config.vocab_size, *shape) for shape in GENERATED]
            tokens, logits = generate_tokens(model)
            decoded = tokens, leads_of(logits), tokens[:, -NEW_TOKENS:]
        cases = [with_logits(case, model) for case in cases]
    counts, routers = [len(experts) for experts in reached.values()], (model.get_submodule(name) for name in reached)
    experts = f"{min(counts)} to {max(counts)} of {len(next(routers).weight)} experts a layer" if counts else ""
    reference = Reference(tuple(cases), experts, *decoded)
    # Only the garbage collector frees the model's memory, since its modules refer to each other.
    del model
    gc.collect()
    return reference


class _ProductsInFp32(TorchFunctionMode):
    """torch function mode that multiplies 16-bit weights in fp32. It casts some rows at a time, which saves memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - every function of torch
        if function is not functional.linear or args[1].dtype == torch.float32:
            out = function(*args, **(kwargs or {}))
            return out.float() if function is functional.embedding else out
        inputs, weight, bias = (*args, None)[:3]
        out, first = inputs.new_empty(*inputs.shape[:-1], len(weight)), 0
        # One buffer is used for all chunks of a weight, because a new buffer for each would fragment the heap.
        buffer = torch.empty(max(PIECE_NUMEL // weight.shape[1], 1), weight.shape[1])
        for part in weight.split(len(buffer)):
            out[..., first : first + len(part)] = function(inputs, buffer[: len(part)].copy_(part))
            first += len(part)
        return out if bias is None else out + bias


def generated_case(vocab: int, pads: tuple[int, ...], length: int, chunks: tuple[int, ...]) -> Case:
    """Make rows of random tokens with padding on the left for a language model. Each call returns the same tokens."""
    mask = np.array([[0] * count + [1] * (length - count) for count in pads], dtype=np.int64)
    ids = np.random.default_rng([len(pads), length]).integers(0, vocab, size=mask.shape, dtype=np.int64) * mask
    return Case(f"{len(pads)} rows of {length} with {pads} pads, fed in pieces of {chunks}", ids, mask, chunks)


def scored_case(config: PretrainedConfig, pads: tuple[int, ...], length: int, side: str) -> Case:
    """Make rows of random tokens for a classifier, without the padding token, which would end a text."""
    rng, pad = np.random.default_rng([len(pads), length]), config.pad_token_id
    if pad is None:
        pads = pads[:1]
    ids = rng.integers(0, config.vocab_size - 1, size=(len(pads), length), dtype=np.int64)
    ids += ids >= (config.vocab_size if pad is None else pad)
    mask = np.ones_like(ids)
    for row, count in enumerate(pads):
        mask[row, length - count :] = 0
    mask = mask if side == "right" else mask[:, ::-1].copy()
    name = f"{len(pads)} texts of {length} tokens with {pads} pads on the {side}"
    return Case(name, np.where(mask == 1, ids, 0 if pad is None else pad), mask)


def compare(folder: Path, reference: Reference) -> OnnxComparison:
    """Run the ONNX graph of `folder` on all test inputs of `reference` with ONNX Runtime on the CPU, and compare the
    results.

    Every position must be within the tolerance. In fp16 with routed experts, `FLIPPED_FRACTION` of all positions may
    exceed it: if two experts have nearly equal scores, rounding can select another expert than in fp32.
    """
    engine = None if reference.tokens is None else OnnxCausalLM.from_pretrained(folder, is_mapped=True)
    model = OnnxScorer(folder) if engine is None else engine.runtime
    tolerance = TOLERANCES[model.dtype]
    allowed = FLIPPED_FRACTION if reference.experts and model.dtype == np.float16 else 0.0
    # A graph without a cache cannot be fed in chunks.
    cases = [case for case in reference.cases if len(case.chunks) < 2 or getattr(model, "has_cache", False)]
    distances = [_distances(model, case) for case in cases]
    all_distances = np.concatenate(distances)
    beyond = int((~(all_distances <= tolerance)).sum())
    differing = None
    if engine is not None and reference.tokens is not None and reference.leads is not None:
        # The graph gets the reference's earlier tokens before each choice. A token that differs from the reference's
        # counts only if the reference's two best logits differ by more than the tolerance.
        best = generate_tokens(engine, reference.tokens)[1].argmax(dim=-1).numpy()
        differing = int(((best != reference.chosen) & (reference.leads > tolerance)).sum())
    failures = []
    if beyond > allowed * len(all_distances) or not np.isfinite(all_distances).all():
        worst = int(np.argmax([np.nan_to_num(each, nan=np.inf).max() for each in distances]))
        by = f"worst by {distances[worst].max():.2e} with {cases[worst].name}"
        unit = "texts" if differing is None else "positions"
        failures.append(f"{beyond} of {len(all_distances)} {unit} are beyond it, {by}")
    if differing is not None and reference.leads is not None and differing > allowed * reference.leads.size:
        failures.append(f"{differing} of {reference.leads.size} greedy tokens differ")
    about = differing, reference.experts, reference.program, tuple(failures)
    return OnnxComparison(len(all_distances), beyond, float(all_distances.max()), tolerance, allowed, *about)


def _distances(model: OnnxModel | OnnxScorer, case: Case) -> np.ndarray:
    """Largest difference of the compared logits at each position, relative to the largest logit of the test input."""
    if isinstance(model, OnnxScorer):
        logits = model.logits(case.inputs())
    else:
        logits = model.logits(case.ids, case.mask, case.chunks)[case.mask.astype(bool)].astype(np.float32)
    # NaN and infinity always count as a difference, even at logits that are otherwise not compared.
    is_compared = is_sampled(case.logits.shape, case.stride) | ~np.isfinite(logits)
    gaps = np.where(is_compared, np.abs(logits - case.logits), 0).max(axis=-1)
    return gaps / case.largest  # type: ignore[no-any-return]


def with_logits(case: Case, model: PreTrainedModel) -> Case:
    """Add to the test input the logits that `model` computes."""
    inputs = {name: torch.from_numpy(part) for name, part in case.inputs().items()}
    if case.chunks or getattr(model.config, "type_vocab_size", 1) < 2:
        del inputs["token_type_ids"]
    if case.chunks:
        mask = inputs["attention_mask"]
        out = model(**inputs, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False)
        logits = out.logits.float()[mask.bool()].numpy()
    else:
        logits = model(**inputs).logits.numpy()
    return replace(case, logits=logits, largest=float(np.abs(logits).max()))


def generate_tokens(model: PreTrainedModel, tokens: Ints | None = None) -> tuple[Ints, torch.Tensor]:
    """Generate NEW_TOKENS tokens greedily after each of PROMPTS. If `tokens` are given, they are appended instead
    of the best tokens. Returns all tokens, [rows, length + NEW_TOKENS], and the logits before each new token, [rows,
    NEW_TOKENS, vocabulary].
    """
    prompts = generated_case(model.config.vocab_size, *PROMPTS, chunks=(PROMPTS[1],))
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    settings.use_cache = model.generation_config.use_cache
    # The model's own generation settings may sample or end early; the comparison needs the best token of each step.
    model.generation_config = settings
    # `forced` allows one token per step. The returned logits are still those of the model, before this restriction.
    forced = None if tokens is None else lambda row, ids: [tokens[row, len(ids)]]
    inputs = {"attention_mask": torch.from_numpy(prompts.mask), "prefix_allowed_tokens_fn": forced}
    out: Any = model.generate(torch.from_numpy(prompts.ids), **inputs)
    return out.sequences.numpy(), torch.stack(out.logits, dim=1)


def leads_of(logits: torch.Tensor) -> Floats:
    """Lead of each token, (best - second best logit) / largest |logit|; `logits` is [rows, tokens, vocabulary]."""
    best = logits.topk(2).values
    leads: Floats = ((best[..., 0] - best[..., 1]) / logits.abs().amax(dim=-1)).numpy()
    return leads


@contextmanager
def _recorded_experts(model: PreTrainedModel) -> Iterator[dict[str, set[int]]]:
    routers = {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}
    experts: dict[str, set[int]] = {name: set() for name in routers}

    hooks = [
        module.register_forward_hook(lambda _, __, out, seen=experts[name]: seen.update(out[2].flatten().tolist()))
        for name, module in routers.items()
    ]
    try:
        yield experts
    finally:
        for hook in hooks:
            hook.remove()
