"""ONNX Runtime compared with plain transformers: batch sizes, lengths, padding, a growing cache, greedy decoding."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from ds_finetune.export.onnx.runtime import OnnxModel
from ds_finetune.foreign.auto_models import AutoModelForCausalLM

TOLERANCES = {np.dtype(np.float32): 1e-4, np.dtype(np.float16): 2e-2}
"""Difference of logits, divided by the largest logit of the case, up to which they count as equal; by graph dtype."""
FLIPPED_SHARE = 0.1
"""Share of positions that may exceed the tolerance in fp16 models with routed experts, whose choice rounding may
change.
"""
NEW_TOKENS = 16


@dataclass(frozen=True)
class InputCase:
    """Rows of random tokens."""

    pads: tuple[int, ...]
    """Number of padding tokens at the start of each row."""
    length: int
    """Tokens of every row, with padding."""
    chunks: tuple[int, ...]
    """Sizes of the pieces in which the tokens are fed; the cache carries over from piece to piece."""

    @property
    def name(self) -> str:
        """The case in messages."""
        return f"{len(self.pads)} rows of {self.length} with {self.pads} pads, fed in pieces of {self.chunks}"

    def mask(self) -> np.ndarray:
        """Attention mask [rows, length] in int64, with padding first."""
        return np.array([[0] * pads + [1] * (self.length - pads) for pads in self.pads], dtype=np.int64)


WHOLE = (InputCase((0,), 1, (1,)), InputCase((0, 3), 9, (9,)), InputCase((0, 11, 5), 33, (33,)))
"""Cases whose tokens are fed in one piece."""
STEPS = (InputCase((0,), 12, (8, 1, 1, 1, 1)), InputCase((2, 0), 21, (1, 9, 1, 1, 4, 1, 4)))
"""Cases whose tokens are fed in several pieces, with a growing cache."""
PROMPTS = InputCase((0, 4), 11, (11,))
"""The prompts of greedy decoding."""


@dataclass(frozen=True)
class Reference:
    """What plain transformers computes in fp32."""

    logits: Mapping[InputCase, np.ndarray]
    """[rows, length, vocabulary]; those where `is_sampled` is true for the case's stride are compared."""
    ids: Mapping[InputCase, np.ndarray]
    """Token ids of each case, int64 [rows, length]."""
    tokens: np.ndarray
    """Prompts and the tokens that `generate` greedily adds, int64 [rows, length + NEW_TOKENS]."""
    leads: np.ndarray
    """For each new token, (best - second best logit) / largest |logit|, [rows, NEW_TOKENS]."""
    experts: str
    """How many of the routed experts the tokens reach, for messages."""
    strides: Mapping[InputCase, int] = field(default_factory=dict)
    """Distance between the sampled logits of a position; 1 for cases that are absent."""
    largest: Mapping[InputCase, float] = field(default_factory=dict)
    """Largest |logit| of a case; only for cases of which `logits` has not all of them."""


@dataclass(frozen=True)
class OnnxComparison:
    """How far ONNX Runtime is from the reference. Distances are divided by the largest logit of the case."""

    positions: int
    """Tokens whose logits were compared, or texts of a classifier."""
    beyond: int
    """Positions whose distance exceeds `tolerance`."""
    largest: float
    """Largest distance."""
    tolerance: float
    allowed_share: float
    """Share of positions, and of new tokens, that may be beyond the tolerance."""
    new_tokens_differing: int | None
    """None for a classifier, which generates no tokens."""
    experts: str
    failures: tuple[str, ...]
    """Differences that are not allowed."""

    def line(self) -> str:
        """What was compared, and how near it is, for the terminal."""
        differing = self.new_tokens_differing
        reached = f", reaching {self.experts}" if self.experts else ""
        flipped = f", {self.beyond} beyond it by a router's near tie" if self.beyond else ""
        greedy = "" if differing is None else f", {differing} greedy tokens differ"
        return (
            f"ONNX Runtime on the CPU against transformers: {self.positions} "
            f"{'texts' if differing is None else 'positions'}{reached}, largest difference {self.largest:.1e} of the "
            f"largest logit (tolerance {self.tolerance:g}){flipped}{greedy}"
        )


def tokens_of(case: InputCase, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Random token ids and the attention mask of a case, int64 [rows, length]; the same at each call."""
    rng = np.random.default_rng([len(case.pads), case.length])
    mask = case.mask()
    return rng.integers(0, vocab, size=mask.shape, dtype=np.int64) * mask, mask


def is_sampled(shape: tuple[int, ...], stride: int) -> np.ndarray:
    """Mask of `shape` [tokens, vocabulary]; of token n, the logits n % stride, n % stride + stride, ... are sampled."""
    tokens, vocab = shape
    return (np.arange(vocab) - np.arange(tokens)[:, None]) % stride == 0  # type: ignore[no-any-return]


def make_reference(folder: Path) -> Reference:
    """Run every case through the model of `folder`, loaded with plain transformers in fp32 on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    vocab = model.config.vocab_size
    with torch.no_grad(), record_experts(model) as reached:
        logits = {case: _plain_logits(model, *tokens_of(case, vocab)) for case in (*WHOLE, *STEPS)}
        tokens, leads = _plain_greedy(model, *tokens_of(PROMPTS, vocab))
    ids = {case: tokens_of(case, vocab)[0] for case in logits}
    return Reference(logits, ids, tokens, leads, describe_experts(model, reached))


def compare(folder: Path, reference: Reference) -> OnnxComparison:
    """Run folder/model.onnx on every case of `reference` in ONNX Runtime on the CPU.

    Every position must be within the tolerance. With routed experts in fp16, a share of `FLIPPED_SHARE` may be beyond
    it: where two experts' scores are nearly equal, rounding may choose the other expert than in fp32.
    """
    model = OnnxModel(folder)
    tolerance = TOLERANCES[model.dtype]
    allowed = FLIPPED_SHARE if reference.experts and model.dtype == np.float16 else 0.0
    cases = [case for case in reference.logits if model.has_cache or len(case.chunks) == 1]
    distances = {case: _distances(model, case, reference) for case in cases}
    every = np.concatenate(list(distances.values()))
    beyond, differing = int((~(every <= tolerance)).sum()), _differing_tokens(model, reference, tolerance)
    worst = max(cases, key=lambda case: np.nan_to_num(distances[case], nan=np.inf).max())
    failures = []
    if beyond > allowed * len(every) or not np.isfinite(every).all():
        failures.append(
            f"{beyond} of {len(every)} positions are beyond it, worst by {distances[worst].max():.2e} with {worst.name}"
        )
    if differing > allowed * reference.leads.size:
        failures.append(f"{differing} of {reference.leads.size} greedy tokens differ")
    return OnnxComparison(
        len(every), beyond, float(every.max()), tolerance, allowed, differing, reference.experts, tuple(failures)
    )


def _distances(model: OnnxModel, case: InputCase, reference: Reference) -> np.ndarray:
    """For each token, the largest difference of its sampled logits, divided by the largest logit of the case."""
    mask = case.mask()
    is_token = mask.astype(bool)
    expected = reference.logits[case][is_token]
    logits = model.logits(reference.ids[case], mask, case.chunks)[is_token].astype(np.float32)
    # NaN and infinity count also where they are not sampled.
    is_compared = is_sampled(expected.shape, reference.strides.get(case, 1)) | ~np.isfinite(logits)
    gaps = np.where(is_compared, np.abs(logits - expected), 0).max(axis=-1)
    return gaps / (reference.largest.get(case) or np.abs(expected).max())  # type: ignore[no-any-return]


def _differing_tokens(model: OnnxModel, reference: Reference, tolerance: float) -> int:
    """Number of the reference's new tokens that ONNX Runtime would not choose greedily after the same tokens.

    0 means that greedy decoding gives the same tokens. A token whose lead over the second best is within the tolerance
    is not counted. With a cache, tokens are fed one at a time.
    """
    ids = reference.tokens[:, :-1]
    mask = np.concatenate([PROMPTS.mask(), np.ones((len(ids), NEW_TOKENS - 1), dtype=np.int64)], axis=1)
    chunks = (PROMPTS.length, *[1] * (NEW_TOKENS - 1)) if model.has_cache else (ids.shape[1],)
    best = model.logits(ids, mask, chunks)[:, -NEW_TOKENS:].argmax(axis=-1)
    return int(((best != reference.tokens[:, -NEW_TOKENS:]) & (reference.leads > tolerance)).sum())


def _plain_logits(model: PreTrainedModel, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    attention_mask = torch.from_numpy(mask)
    out = model(
        input_ids=torch.from_numpy(ids),
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    )
    return out.logits.float().numpy()  # type: ignore[no-any-return]


def _plain_greedy(model: PreTrainedModel, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    # The model's own settings may sample or end early; the best token of every step is compared.
    model.generation_config = settings
    out: Any = model.generate(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
    best = torch.stack(out.logits, dim=1).topk(2).values
    leads = (best[..., 0] - best[..., 1]) / torch.stack(out.logits, dim=1).abs().amax(dim=-1)
    return out.sequences.numpy(), leads.numpy()


def describe_experts(model: PreTrainedModel, reached: Mapping[str, set[int]]) -> str:
    """How many experts of a layer tokens chose, from what `record_experts` recorded; empty where there are none."""
    counts = [len(experts) for experts in reached.values()]
    routers = (model.get_submodule(name) for name in reached)
    return f"{min(counts)} to {max(counts)} of {len(next(routers).weight)} experts a layer" if counts else ""


@contextmanager
def record_experts(model: PreTrainedModel) -> Iterator[dict[str, set[int]]]:
    """The sets of experts that tokens choose within the context, by the name of the router."""
    routers = {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}
    experts: dict[str, set[int]] = {name: set() for name in routers}

    def recorder(name: str) -> Any:  # noqa: ANN401 - a hook
        return lambda _module, _inputs, output: experts[name].update(output[2].flatten().tolist())

    hooks = [module.register_forward_hook(recorder(name)) for name, module in routers.items()]
    try:
        yield experts
    finally:
        for hook in hooks:
            hook.remove()
