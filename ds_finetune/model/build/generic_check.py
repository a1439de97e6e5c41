"""Tests on a tiny copy, before a run, whether a model type that is not in the table of families is trained correctly.

The test compares two documents in one row with each of them in a row of its own, a padded row with an unpadded one, and
this program's loss with the loss of the model's own logits. Equal results differ by about 1e-6 (relative, in fp32).
"""

import copy
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
import transformers
from torch.func import functional_call
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.config.sections import LoraConfig
from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora import AdapterPlacement, factors_of, install_lora, merge_adapters
from ds_finetune.model.attention.by_document import BY_LENGTHS, FLASH
from ds_finetune.model.build.meta_model import linear_weights
from ds_finetune.model.build.model_plan import task_of
from ds_finetune.model.build.skeleton import Task, build_skeleton, check_attention, full_fragment
from ds_finetune.model.build.tiny_config import Size, layer_kinds, layers_of_each_kind, tiny_config
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.score_head import install_score_head
from ds_finetune.model.loss.token_loss import TrainedModel, install_loss_head
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.model.weights.load import initialise_weights
from ds_finetune.model.weights.names import is_adapter
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import Objective, ScoreObjective, TokenObjective
from ds_finetune.plan.lora_targets import Shape, linear_targets
from ds_finetune.plan.name_patterns import last_part
from ds_finetune.plan.precision import ROW_BYTES, WEIGHT_BYTES, wider

_LANGUAGE_MODEL = TokenObjective("sft")
LIMIT = 1e-4
"""Relative difference from which two results of the test count as different: 100 times the usual rounding error."""
_NO_PACKING = "set data.packing: false"
_NO_PAIRS = "both answers of a pair are in one row; train pairs with a model of another type"
_LENGTHS = (27, 21)
"""Lengths of the two test documents in tokens. Both exceed a tiny model's attention window."""
_PADDING, _LAST = 11, 4
_SEEN = 1e-3
"""Earlier tokens affect later ones if hidden states differ by at least this fraction."""
_SEED = 5
_HEADS = (4, 2, 1, 8)
"""Numbers of attention heads to try in tiny models, the likeliest to work first."""
_MORE_LAYERS = (1, 3)
"""Factors for a tiny model's number of layers, tried in order. Models that share weights may need more layers."""
_NOISE, _HEAD_GAIN = 0.1, 8.0
_MAX_PARAMETERS = 60_000_000
_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|up_proj|gate_proj|down_proj)$")
_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    ArithmeticError,
    ImportError,
)
"""Errors that models raise if they cannot be built, or cannot run as in training."""


@dataclass(frozen=True)
class Trial:
    """Result of a test on a tiny copy of a model: relative differences (fp32) that should be near zero.

    - `packed`: two documents in one row, against each document in a row of its own.
    - `padded`: a document with padding after it, against one without.
    - `loss`: this program's loss, against the loss of the model's own logits.
    - `adapters`: loss, gradients and logits with adapters, against merged weights.
    - `untried`: why nothing could be compared, else empty.
    """

    packed: float = 0.0
    padded: float = 0.0
    loss: float = 0.0
    adapters: float = 0.0
    untried: str = ""


def check_generic_type(  # noqa: PLR0913
    hf_config: PretrainedConfig,
    *,
    attention: str,
    packing: bool,
    row_tokens: int,
    precision: str,
    objective: Objective = _LANGUAGE_MODEL,
    adapted: Collection[str] = (),
) -> tuple[str, ...]:
    """Test a model type that is not in the table of families. Returns lines for the user on what was tested. ModelError
    if it would be trained wrongly on rows like the run's.

    With an objective on pairs of answers, rows have two documents even without packing. `adapted` has the last parts of
    the names of modules with adapters or four-bit weights.
    """
    kind = hf_config.model_type
    if not family_of(kind).is_generic:
        return ()
    trial = try_model_type(hf_config, attention=attention, row_tokens=row_tokens, objective=objective, adapted=adapted)
    _check_expert_widths(hf_config, precision, task_of(objective))
    has_pairs = objective.documents_per_unit > 1
    packing = packing or has_pairs
    check_trial(kind, trial, packing=packing, packing_hint=_NO_PAIRS if has_pairs else _NO_PACKING)
    if trial.untried and adapted:
        raise ModelError(
            f"model_type `{kind}`: lora could not be tested on a tiny copy of the model: {trial.untried}",
            hint="leave the section lora out, to train all weights",
        )
    if trial.untried:
        return (
            f"model_type {kind} could not be tried on a tiny copy ({trial.untried}): its loss is not known to be right",
        )
    layout = f"packed rows {trial.packed:.0e}" if packing else f"padded rows {trial.padded:.0e}"
    layout += f", adapters {trial.adapters:.0e}" if adapted else ""
    return (f"model_type {kind} was tried on a tiny copy, relative differences: loss {trial.loss:.0e}, {layout}",)


def _check_expert_widths(hf_config: PretrainedConfig, precision: str, task: Task) -> None:
    lm = build_meta_model(hf_config, task)
    if lm.config._experts_implementation != "grouped_mm":
        return
    for name, param in lm.named_parameters():
        if _EXPERTS.search(name) and param.shape[-1] * WEIGHT_BYTES[precision] % ROW_BYTES:
            raise ModelError(
                f"`{name}` has rows of {param.shape[-1]} x {WEIGHT_BYTES[precision]} bytes in {precision}, "
                f"but torch's grouped matrix product needs a multiple of {ROW_BYTES} bytes",
                hint=wider(precision),
            )


def check_trial(kind: str, trial: Trial, *, packing: bool, packing_hint: str = _NO_PACKING) -> None:
    """ModelError if `trial` shows that packed or padded rows would be trained wrongly, or could not test packing."""
    subject = f"model_type `{kind}`"
    if trial.loss > LIMIT:
        raise ModelError(
            f"{subject}: the loss is not that of the model's own logits, {_difference_text(trial.loss)}",
            hint="the model changes logits after its head, which the chunked loss does not support; use another model",
        )
    if trial.adapters > LIMIT:
        raise ModelError(
            f"{subject}: the model with adapters differs from the model with merged weights, "
            f"{_difference_text(trial.adapters)}",
            hint="name other modules in lora.target_modules (without lora.quantize), or train all weights",
        )
    if trial.untried and packing:
        raise ModelError(f"{subject}: packing could not be tried, {trial.untried}", hint=packing_hint)
    if trial.packed > LIMIT and trial.padded > LIMIT:
        raise ModelError(
            f"{subject}: documents of a packed row see each other, {_difference_text(trial.packed)}, "
            f"and padding changes a document's results, {_difference_text(trial.padded)}",
            hint="train a model of another type",
        )
    if packing and trial.packed > LIMIT:
        raise ModelError(
            f"{subject}: documents of a packed row see each other, {_difference_text(trial.packed)}", hint=packing_hint
        )
    if not packing and trial.padded > LIMIT:
        raise ModelError(
            f"{subject}: padding changes a document's results, {_difference_text(trial.padded)}",
            hint="set data.packing: true",
        )


def _difference_text(difference: float) -> str:
    return f"relative difference {difference:.0e} on a tiny copy, limit {LIMIT:.0e}"


def try_model_type(
    hf_config: PretrainedConfig,
    *,
    attention: str,
    row_tokens: int,
    objective: Objective = _LANGUAGE_MODEL,
    adapted: Collection[str] = (),
) -> Trial:
    """Build a tiny model with all kinds of layers of the configured one, and compare results that should be equal.

    ModelError if transformers cannot build the configured model.
    """
    task = task_of(objective)
    check_attention(hf_config, attention, task)
    # FlashAttention does not run on CPUs, so a slow attention with the same arguments replaces it.
    attention = BY_LENGTHS if attention == FLASH else attention
    try:
        full = _build(hf_config, attention, task, device="meta")
        layers, kinds = layers_of_each_kind(full), layer_kinds(full)
    except _FAILURES as broken:
        if attention == BY_LENGTHS:
            return Trial(untried=f"without a GPU it fails with {_first_line(broken)}")
        raise ModelError(
            f"transformers {transformers.__version__} cannot build model_type `{hf_config.model_type}`: "
            f"{_first_line(broken)}",
            hint="check the model's config.json",
        ) from broken
    reason = "no smaller configuration has all its kinds of layers"
    for more, heads in product(_MORE_LAYERS, _HEADS):
        try:
            tiny = tiny_config(hf_config, Size(heads, layers * more, row_tokens))
            outline = _build(tiny, attention, task, device="meta")
            num_params = sum(param.numel() for param in outline.parameters())
            if layer_kinds(outline) == kinds and num_params <= _MAX_PARAMETERS:
                lm, eager = (_build_initialised(tiny, kind, task) for kind in (attention, "eager"))
                difference = _adapter_difference(lm, adapted) if adapted else 0.0
                return replace(_compare(lm, eager, objective), adapters=difference)
        except _FAILURES as broken:
            reason = f"a tiny copy fails with {_first_line(broken)}"
    return Trial(untried=reason)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{f': {lines[0]}' if lines else ''}"


def _build(config: PretrainedConfig, attention: str, task: Task, *, device: str) -> PreTrainedModel:
    return build_skeleton(copy.deepcopy(config), attention=attention, dtype=torch.float32, device=device, task=task)


def _build_initialised(config: PretrainedConfig, attention: str, task: Task) -> PreTrainedModel:
    """Build a model with larger random weights than usual, because small or zero weights would hide differences."""
    lm = _build(config, attention, task, device="cpu")
    initialise_weights(lm, seed=_SEED)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for param in lm.parameters():
            if param.dim() > 1:
                param.normal_(std=param.shape[-1] ** -0.5, generator=generator)
            else:
                param.add_(torch.randn(param.shape, generator=generator), alpha=_NOISE)
        lm.get_input_embeddings().weight.normal_(generator=generator)
        if lm.get_output_embeddings() is not None:
            lm.get_output_embeddings().weight.mul_(_HEAD_GAIN)
    return lm.eval()


@torch.no_grad()
def _compare(lm: PreTrainedModel, eager: PreTrainedModel, objective: Objective) -> Trial:
    """Compare packed and padded documents with single documents in `lm`. Compare the loss of `lm` with that of `eager`,
    the same model with eager attention. ModelError if `lm` fails when it runs as in training.
    """
    first, second = _documents(lm)
    logits = eager(input_ids=first, position_ids=_positions(first), use_cache=False).logits[0].float()
    scored = objective if isinstance(objective, ScoreObjective) else None
    expected = logits if scored else functional.cross_entropy(logits[:-1], first[0, 1:], reduction="sum")
    model = TrainedModel(lm)
    try:
        if scored:
            head, last = install_score_head(lm, scored), torch.tensor([first.shape[1] - 1])
            actual = head.scores(model.hidden(first, _positions(first), None), last)[0]
        else:
            install_loss_head(lm)
            labels = functional.pad(first[:, 1:], (0, 1), value=IGNORE_INDEX)
            actual = model(ForwardRows(first, _positions(first), labels)).loss
        one_document = [model.hidden(ids, _positions(ids), None)[0] for ids in (first, second)]
    except _FAILURES as broken:
        raise ModelError(
            f"model_type `{lm.config.model_type}` does not run without its head on token ids and positions alone: "
            f"{_first_line(broken)}",
            hint="train a model of another type",
        ) from broken
    same_end = [torch.cat([document[:, :_LAST], first[:, -_LAST:]], dim=1) for document in (first, second)]
    last_hidden = [model.hidden(ids, _positions(ids), None)[0, -_LAST:] for ids in same_end]
    if _difference(*last_hidden) < _SEEN:
        # If earlier tokens hardly affect later ones, comparing results would detect no error.
        raise ArithmeticError("earlier tokens hardly change later ones")
    orders = ((first, second), (second, first))
    ids = torch.cat([torch.cat(order, dim=1) for order in orders])
    positions = torch.cat([torch.cat([_positions(document) for document in order], dim=1) for order in orders])
    packed = model.hidden(ids, positions, (_LENGTHS, _LENGTHS[::-1]))
    length, pad_id = max(_LENGTHS) + _PADDING, int(first[0, 0])
    with_padding = [functional.pad(each, (0, length - each.shape[1]), value=pad_id) for each in (first, second)]
    padded = model.hidden(torch.cat(with_padding), torch.arange(length).expand(2, -1), None)
    return Trial(
        packed=_difference(packed, torch.stack([torch.cat(one_document), torch.cat(one_document[::-1])])),
        padded=max(_difference(row[: len(hidden)], hidden) for row, hidden in zip(padded, one_document, strict=True)),
        loss=_difference(actual, expected),
    )


def _adapter_difference(lm: PreTrainedModel, names: Collection[str]) -> float:
    """Largest relative difference of loss, gradients and logits between a model with adapters and one with merged
    weights. It is large if a module reads its weight directly, because adapters then have no effect.
    """
    shapes = ((name, tuple(param.shape)) for name, param in lm.named_parameters())
    targets = [each for each in linear_targets(shapes, linear_weights(lm)) if last_part(each.name) in names]
    lora, generator = LoraConfig(rank=4, alpha=4), torch.Generator().manual_seed(_SEED)

    def initial(_: str, shape: Shape) -> dict[str, torch.Tensor]:
        a, b = (torch.randn(size, generator=generator) for size in ((lora.rank, shape[1]), (shape[0], lora.rank)))
        return {"A": a * shape[1] ** -0.5, "B": b * _NOISE}

    ours, ids = copy.deepcopy(lm), _documents(lm)[0]
    install_lora(ours, targets, lora, seed=_SEED, placement=AdapterPlacement(full_fragment), start=initial)
    adapters = {name: param for name, param in ours.named_parameters() if is_adapter(name)}
    sides = {name: param.detach().clone().requires_grad_() for name, param in adapters.items()}
    plain = {name: param.detach() for name, param in lm.named_parameters()}
    weights = {
        f"{each.name}.weight": plain[f"{each.name}.weight"]
        + sides[f"{each.name}.lora_B"] @ sides[f"{each.name}.lora_A"] * lora.scale
        for each in targets
    }
    rows = {"input_ids": ids, "position_ids": _positions(ids), "use_cache": False}

    def run(
        model: PreTrainedModel, adapted: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...]]:
        out = functional_call(model, dict(adapted), kwargs=rows)
        logits = out.logits.float()
        loss = logits[0].logsumexp(-1).square().mean()
        return logits.detach(), loss.detach(), torch.autograd.grad(loss, leaves, allow_unused=True)

    with torch.enable_grad():
        logits, loss, gradients = run(ours, {}, [*adapters.values()])
        expected_logits, expected_loss, expected_gradients = run(lm, weights, [*sides.values()])
    factors = factors_of({name: side.detach() for name, side in sides.items()}, lora.scale)
    merged = merge_adapters(iter(plain.items()), factors, family_of(lm.config.model_type))
    exported = functional_call(lm, {name: each for name, each in merged if each is not None}, kwargs=rows).logits
    largest = max((float(grad.norm()) for grad in expected_gradients if grad is not None), default=0.0)
    if not largest:
        raise ArithmeticError("adapters get no gradient")
    differences = [
        float(((0 if mine is None else mine) - (0 if theirs is None else theirs)).norm())  # type: ignore[union-attr]
        / max(0.0 if theirs is None else float(theirs.norm()), _SEEN * largest)
        for mine, theirs in zip(gradients, expected_gradients, strict=True)
        if mine is not None or theirs is not None
    ]
    return max(
        *differences,
        _difference(loss, expected_loss),
        _difference(logits, expected_logits),
        _difference(exported.float(), expected_logits),
    )


def _documents(lm: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    vocabulary = lm.get_input_embeddings().weight.shape[0]
    tokens = (vocabulary // 16, vocabulary * 3 // 4)
    first, second = (torch.randint(*tokens, (1, length), generator=generator) for length in _LENGTHS)
    return first, second


def _positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1])[None]


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = float((actual - expected).abs().max() / expected.abs().max())
    if not math.isfinite(difference):
        raise ArithmeticError("its results are not finite")
    return difference
