"""ONNX Runtime against plain transformers: other batch sizes and lengths, padding, a cache that grows, greedy
decoding.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ds_finetune.export.onnx.runtime import OnnxModel

TOLERANCES = {np.dtype(np.float32): 1e-4, np.dtype(np.float16): 2e-2}
"""Largest difference of logits over the largest logit of the case that counts as equal, by the graph's dtype."""
FLIPPED_SHARE = 0.1
"""Share of positions that may differ more where routed experts are chosen from fp16 activations."""
NEW_TOKENS = 16


@dataclass(frozen=True)
class InputCase:
    """Rows of random tokens: how many pads stand before each, their common length, and how many tokens are given at a
    time.
    """

    pads: tuple[int, ...]
    length: int
    chunks: tuple[int, ...]

    @property
    def name(self) -> str:
        """For messages."""
        return f"{len(self.pads)} rows of {self.length} with {self.pads} pads, {self.chunks} at a time"

    def mask(self) -> np.ndarray:
        """Attention mask [rows, length], int64, pads first."""
        return np.array([[0] * pads + [1] * (self.length - pads) for pads in self.pads], dtype=np.int64)


WHOLE = (InputCase((0,), 1, (1,)), InputCase((0, 3), 9, (9,)), InputCase((0, 11, 5), 33, (33,)))
"""Rows without a past."""
STEPS = (InputCase((0,), 12, (8, 1, 1, 1, 1)), InputCase((2, 0), 21, (1, 9, 1, 1, 4, 1, 4)))
"""Rows of which all but the first chunk are given with a cache."""
PROMPTS = InputCase((0, 4), 11, (11,))
"""What greedy decoding goes on from."""


@dataclass(frozen=True)
class Reference:
    """What plain transformers computes in fp32 for the tokens `ids` of each case, and which part of the experts they
    reach.
    """

    logits: Mapping[InputCase, np.ndarray]
    """[rows, length, vocabulary], compared where `is_kept` says so for the case's stride, which is 1 where none is
    given.
    """
    ids: Mapping[InputCase, np.ndarray]
    tokens: np.ndarray
    """Prompts and what `generate` greedily goes on with, int64 [rows, length + NEW_TOKENS]."""
    leads: np.ndarray
    """Best less second best logit over the largest of each new token, [rows, NEW_TOKENS]."""
    experts: str
    strides: Mapping[InputCase, int] = field(default_factory=dict)
    largest: Mapping[InputCase, float] = field(default_factory=dict)
    """Largest logit of a case, where not all of them are here."""


@dataclass(frozen=True)
class OnnxComparison:
    """How far ONNX Runtime is from the reference: distances are over the largest logit of a case, failures are what is
    not allowed.
    """

    positions: int
    """Tokens whose logits were compared."""
    beyond: int
    """Those farther than `tolerance`."""
    largest: float
    tolerance: float
    allowed_share: float
    new_tokens_differing: int
    experts: str
    failures: tuple[str, ...]


def tokens_of(case: InputCase, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and attention mask [rows, length] int64, pads first; the same for the same case."""
    rng = np.random.default_rng([len(case.pads), case.length])
    mask = case.mask()
    return rng.integers(0, vocab, size=mask.shape, dtype=np.int64) * mask, mask


def is_kept(shape: tuple[int, ...], stride: int) -> np.ndarray:
    """Which logits of `shape` [tokens, vocabulary] are compared: n % stride, n % stride + stride, .. of token n."""
    tokens, vocab = shape
    return (np.arange(vocab) - np.arange(tokens)[:, None]) % stride == 0  # type: ignore[no-any-return]


def make_reference(folder: Path) -> Reference:
    """Load `folder` with plain transformers in fp32 on the CPU, run every case, and let go of the model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    vocab = model.config.vocab_size
    with torch.no_grad(), _experts_seen(model) as seen:
        logits = {case: _plain_logits(model, *tokens_of(case, vocab)) for case in (*WHOLE, *STEPS)}
        tokens, leads = _plain_greedy(model, *tokens_of(PROMPTS, vocab))
    counts = [len(experts) for experts in seen.values()]
    ids = {case: tokens_of(case, vocab)[0] for case in logits}
    return Reference(
        logits,
        ids,
        tokens,
        leads,
        f"{min(counts)} to {max(counts)} of {model.config.n_routed_experts} experts a layer" if counts else "",
    )


def compare(folder: Path, reference: Reference) -> OnnxComparison:
    """Run folder/model.onnx on every case of `reference` in ONNX Runtime on the CPU.

    Every position has to be within the tolerance. With routed experts in fp16 a share of `FLIPPED_SHARE` may be
    beyond it: a router's near tie falls the other way, and the token takes another expert than in fp32.
    """
    model = OnnxModel(folder)
    tolerance = TOLERANCES[model.dtype]
    allowed = FLIPPED_SHARE if reference.experts and model.dtype == np.float16 else 0.0
    cases = [case for case in reference.logits if model.has_cache or len(case.chunks) == 1]
    distances = {case: _distances(model, case, reference) for case in cases}
    found = np.concatenate(list(distances.values()))
    beyond, differing = int((~(found <= tolerance)).sum()), _differing_tokens(model, reference, tolerance)
    worst = max(cases, key=lambda case: np.nan_to_num(distances[case], nan=np.inf).max())
    failures = []
    if beyond > allowed * len(found) or not np.isfinite(found).all():
        failures.append(
            f"{beyond} of {len(found)} positions are beyond it, worst by {distances[worst].max():.2e} with {worst.name}"
        )
    if differing > allowed * reference.leads.size:
        failures.append(f"{differing} of {reference.leads.size} greedy tokens differ")
    return OnnxComparison(
        len(found), beyond, float(found.max()), tolerance, allowed, differing, reference.experts, tuple(failures)
    )


def _distances(model: OnnxModel, case: InputCase, reference: Reference) -> np.ndarray:
    """Largest difference at each token [tokens] of the logits that are compared, over the largest logit of the case."""
    mask = case.mask()
    is_token = mask.astype(bool)
    wanted = reference.logits[case][is_token]
    found = model.logits(reference.ids[case], mask, case.chunks)[is_token].astype(np.float32)
    # What is not a number counts wherever it is.
    at = is_kept(wanted.shape, reference.strides.get(case, 1)) | ~np.isfinite(found)
    gaps = np.where(at, np.abs(found - wanted), 0).max(axis=-1)
    return gaps / (reference.largest.get(case) or np.abs(wanted).max())  # type: ignore[no-any-return]


def _differing_tokens(model: OnnxModel, reference: Reference, tolerance: float) -> int:
    """How many of the reference's new tokens are not the best ones here, given those before, one at a time where there
    is a cache.

    None means that greedy decoding gives the same tokens. One whose lead over the next is within the tolerance is a
    tie.
    """
    ids = reference.tokens[:, :-1]
    mask = np.concatenate([PROMPTS.mask(), np.ones((len(ids), NEW_TOKENS - 1), dtype=np.int64)], axis=1)
    chunks = (PROMPTS.length, *[1] * (NEW_TOKENS - 1)) if model.has_cache else (ids.shape[1],)
    best = model.logits(ids, mask, chunks)[:, -NEW_TOKENS:].argmax(axis=-1)
    return int(((best != reference.tokens[:, -NEW_TOKENS:]) & (reference.leads > tolerance)).sum())


def _plain_logits(model: PreTrainedModel, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    given = torch.from_numpy(mask)
    out = model(
        input_ids=torch.from_numpy(ids),
        attention_mask=given,
        position_ids=(given.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    )
    return out.logits.float().numpy()  # type: ignore[no-any-return]


def _plain_greedy(model: PreTrainedModel, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    # The model's own settings may sample, or end at a token; what is compared is the largest logit of every step.
    model.generation_config = settings
    out: Any = model.generate(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
    best = torch.stack(out.logits, dim=1).topk(2).values
    leads = (best[..., 0] - best[..., 1]) / torch.stack(out.logits, dim=1).abs().amax(dim=-1)
    return out.sequences.numpy(), leads.numpy()


@contextmanager
def _experts_seen(model: PreTrainedModel) -> Iterator[dict[str, set[int]]]:
    """The experts that tokens of any case chose, by the name of the router."""
    routers = {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}
    seen: dict[str, set[int]] = {name: set() for name in routers}

    def look(name: str) -> Any:  # noqa: ANN401 - a hook
        return lambda _module, _inputs, output: seen[name].update(output[2].flatten().tolist())

    hooks = [module.register_forward_hook(look(name)) for name, module in routers.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
