"""FLOPs and bytes of memory of a forward and its backward on one rank, by class of operators, from config.json.

Products are counted as torch's FlopCounterMode counts them: two FLOPs for each multiply-add. Attention is counted for
the pairs that causal kernels compute, which is half of what that counter takes for them.
tests/plan/estimate/test_operations.py compares both in every family.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Self

from ds_finetune.config.objectives import is_grpo
from ds_finetune.config.sections import LoraConfig
from ds_finetune.families.parameters import ModelConfig
from ds_finetune.families.table import family_of
from ds_finetune.families.tensors import EMBEDDING
from ds_finetune.plan.estimate.activation_memory import SINK_COLUMNS, activation_bytes
from ds_finetune.plan.estimate.compressed_layers import attended_pairs, scored_pairs
from ds_finetune.plan.estimate.rank_weights import RankWeights, is_trained, part_of, shape_of_model
from ds_finetune.plan.estimate.states import TensorKind
from ds_finetune.plan.forward import head_chunk
from ds_finetune.plan.model_shape import Shape
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.tested_layouts import WEIGHT_BYTES


@dataclass(frozen=True)
class RowShape:
    """A row as it is computed."""

    num_tokens: int
    """Tokens of a row, with padding."""
    num_supervised: float
    documents: tuple[int, ...]
    """Lengths of the documents of a row; padding counts as a document."""

    @classmethod
    def full(cls, num_tokens: int, *, supervised_share: float = 1.0) -> Self:
        """One document as long as the row: what a plan assumes where it has read no data."""
        return cls(num_tokens, supervised_share * num_tokens, (num_tokens,))

    def pairs(self, limit: int | None) -> float:
        """Pairs of tokens of which one attends to the other, where a token attends to `limit` positions at most."""
        return sum(_pairs(length, limit) for length in self.documents)

    @property
    def mean_attended(self) -> float:
        """Positions that a token attends to on average, without a limit."""
        return self.pairs(None) / self.num_tokens


def _pairs(length: int, limit: int | None) -> float:
    if limit is None or length <= limit:
        return length**2 / 2
    return limit**2 / 2 + (length - limit) * limit


Unit = Literal["matmul", "head", "grouped", "attention", "memory"]
"""What limits an operator, and so which share of the peak it reaches."""
_NAMES = {
    "attention": "attention projections",
    "dense MLP": "dense MLPs",
    "multi-token prediction": "prediction layer",
    "router": "routers",
    "indexer": "indexers",
}
_ATTENTION_BACKWARD = 2.5
"""Operations of backward in those of forward: kernels compute the scores again, and four products in place of two."""
_PASSES_OVER_ACTIVATIONS = 4
"""Each kept activation is written and read in forward, and read with its gradient in backward; about one more tensor is
passed for each that is kept.
"""
_PASSES_OVER_LOGITS = 4
"""The logits of a supervised token are written, read for the largest, turned into gradients, and read."""
_NEVER_ADAPTED = ("indexer", "multi-token prediction", "embedding", "head", "norms")
_READS_INPUT = re.compile(r"\.self_attn\.((q|k|v|q_a)_proj|kv_a_proj_with_mqa)\.")
"""Weights that are multiplied with a layer's input."""
_CPU_PADDED_FROM = 1024
"""Tokens of a document from which CPUs pad values to the width of keys (model/attention/kernels.py)."""


class Operation(NamedTuple):
    """The work of one class of operators in a forward and its backward on a rank."""

    name: str
    unit: Unit
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class Work:
    """A planned run and a typical row of its data."""

    plan: Plan
    model: ModelConfig
    rows: RowShape

    @property
    def num_rows(self) -> int:
        """Rows of a forward."""
        return self.plan.batch.micro_batch_size

    @property
    def num_tokens(self) -> float:
        """Tokens of a forward that a rank computes."""
        return self.num_rows * self.rows.num_tokens / self.plan.mesh.sp

    @property
    def num_supervised(self) -> float:
        """Supervised tokens of a forward whose logits a rank computes."""
        return self.num_rows * self.rows.num_supervised / self.plan.mesh.sp

    @property
    def width(self) -> int:
        """Bytes of a number in the run's precision."""
        return WEIGHT_BYTES[self.plan.precision]

    @cached_property
    def experts_per_token(self) -> int:
        """Routed experts that a token chooses; 0 in models without."""
        keys = family_of(str(self.model["model_type"])).expert_keys
        return keys.per_token(self.model) if keys else 0

    @cached_property
    def extra_forwards(self) -> float:
        """Forwards of the model itself that a step does beside the trained one: that of a reference, which is the model
        without its adapters, and of the steps of a rollout after the first one, before which log-probabilities are
        read.
        """
        objective = self.plan.objective
        if is_grpo(objective):
            steps, has_adapters = self.plan.rollout.steps_per_rollout, self.plan.lora is not None
            return objective.has_reference(has_adapters=has_adapters) + (steps - 1) / steps
        return float(getattr(objective, "reference", "cache") == "adapters_off")


class Passes(NamedTuple):
    """How often a product is computed."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """In forward and backward."""
        return self.forward + self.backward


def operations(work: Work, weights: RankWeights, *, is_last: bool) -> tuple[Operation, ...]:
    """What a rank of a pipeline stage, which holds `weights`, computes for one micro-batch: forward, recomputation and
    backward. Tokens are assumed to be divided evenly over routed experts.
    """
    found: dict[tuple[str, Unit], list[float]] = {}
    for operation in (*_products(work, weights, is_last=is_last), *_attention(work, weights), *_memory(work, weights)):
        sums = found.setdefault((operation.name, operation.unit), [0.0, 0.0])
        sums[0] += operation.flops
        sums[1] += operation.num_bytes
    return tuple(Operation(*key, *sums) for key, sums in found.items())


def shape_of(work: Work) -> Shape:
    """The parameters of the model and the cost of its attention."""
    return shape_of_model(work.model, mtp_layers=1 if work.plan.mtp.train else 0)


def is_head(kind: TensorKind, weights: RankWeights, *, is_last: bool) -> bool:
    """Whether a tensor is multiplied with hidden states to make logits or scores: a tied head is the embedding."""
    if kind.name == EMBEDDING:
        return is_last and not any(part_of(other.name) == "head" for other in weights.kinds)
    return part_of(kind.name) == "head"


def _products(work: Work, weights: RankWeights, *, is_last: bool) -> Iterator[Operation]:
    for kind in weights.kinds:
        part = part_of(kind.name)
        if is_head(kind, weights, is_last=is_last):
            yield from _head(work, kind)
            continue
        if part == "routed experts" and kind.name.endswith("bias"):
            yield _expert_bias(work, kind, _passes(work, kind, weights))
            continue
        if len(kind.local) == 1 or kind.name.endswith("bias") or part in ("norms", "embedding"):
            continue
        is_grouped = part == "routed experts"
        rows = work.num_tokens * (work.experts_per_token if is_grouped else 1)
        numel = kind.numel / kind.local[0] if is_grouped else kind.numel
        passes = _passes(work, kind, weights)
        unit: Unit = "grouped" if is_grouped else "matmul"
        columns = sum(kind.local[-2:]) * kind.count
        moved = kind.numel * passes.total + rows * columns * passes.total
        yield Operation(_NAMES.get(part, part), unit, 2 * rows * numel * passes.total, work.width * moved)
        if adapter_parts(work.plan.lora, kind):
            yield _adapters(work, kind, unit, rows=rows, below=passes)
        if is_quantised(work.plan.lora, part):
            # Four bits are read, and numbers of 16 bits are written, for each product but that of the weight gradient.
            yield Operation("dequantised weights", "memory", 0, passes.total * kind.numel * (0.5 + work.width))


def _expert_bias(work: Work, kind: TensorKind, passes: Passes) -> Operation:
    """The product of each row's choice of an expert, as zeros and a one, with the biases of all experts."""
    # Rows of a token are summed before the bias of the down projection, but with expert parallelism only afterwards.
    is_down = "down_proj" in kind.name
    rows = work.num_tokens * (1 if is_down and work.plan.mesh.ep == 1 else work.experts_per_token)
    # Only routing weights, which are in the input of the second, want its gradient.
    number = passes.total - (0 if is_down else 1)
    columns = sum(kind.local[-2:]) * kind.count
    return Operation("routed experts", "matmul", 2 * rows * kind.numel * number, work.width * rows * columns * number)


def _adapters(work: Work, kind: TensorKind, unit: Unit, *, rows: float, below: Passes) -> Operation:
    """The products of adapters with so many rows; those of their weights are computed as often as `below` says."""
    lora = work.plan.lora
    assert lora is not None
    # A reference is the model without them, and has no backward.
    passes = below.forward - work.extra_forwards + 2
    flops = 2 * rows * passes * adapter_elements(lora, kind, of_all_experts=False)
    # Where the weight needs no gradient of its input, A needs none.
    flops -= 2 * rows * (1 - below.backward) * lora.rank * kind.local[-1] * kind.count
    return Operation("adapters", unit, flops, work.width * rows * sum(kind.local[-2:]) * kind.count * passes)


def _passes(work: Work, kind: TensorKind, weights: RankWeights) -> Passes:
    """Passes of a product in a layer: a frozen weight has no gradient, and an indexer that is not trained no backward.
    Below adapters no gradient goes back to embeddings.
    """
    part = part_of(kind.name)
    is_frozen = work.plan.lora is not None or not is_trained(work.plan, work.model, kind)
    again = work.plan.recomputes_kept if _keeps_products(work, part) else work.plan.recomputes
    forward = 1.0 + again + work.extra_forwards
    forward += work.plan.train.tiled_mlp and part in ("dense MLP", "routed experts", "shared experts")
    if part == "indexer":
        return Passes(forward, 0 if is_frozen else 2) if _runs_indexers(work) else Passes(0, 0)
    if work.plan.lora is not None and 0 in weights.layers and _READS_INPUT.search(kind.name):
        return Passes(forward, 1 - 1 / kind.count)
    return Passes(forward, 1 if is_frozen else 2)


def _keeps_products(work: Work, part: str) -> bool:
    """Whether selective recomputation keeps the products of a part of a layer; tiles are computed again as a whole."""
    return part == "routed experts" and not work.plan.train.tiled_mlp


def _head(work: Work, kind: TensorKind) -> Iterator[Operation]:
    """Logits and their gradients; a score head takes one token of each document."""
    is_score = kind.name.startswith("score")
    rows = len(work.rows.documents) * work.num_rows / work.plan.mesh.sp if is_score else work.num_supervised
    is_frozen = work.plan.lora is not None and not is_score
    passes = 1 + work.extra_forwards + (1 if is_frozen else 2 + _logits_again(work, kind))
    mtp = work.plan.mtp
    # The loss of a prediction layer trains the head where its gradient is not detached.
    passes += (3 - mtp.detach) if mtp.train else 0
    flops = 2 * rows * kind.numel * passes
    logits = rows * kind.local[0] * (1 + mtp.train)
    # The gradient of the weight is added up in fp32, chunk by chunk.
    moved = work.width * kind.numel * passes + _PASSES_OVER_LOGITS * (work.width + 4) / 2 * logits
    yield Operation("head and loss", "head", flops, moved)


def _logits_again(work: Work, kind: TensorKind) -> float:
    """Share of the logits that are computed a second time: where the loss is one of documents' log-probabilities, all
    but those of the last chunk (model/loss/log_probs.py).
    """
    if work.plan.objective.row.head != "documents":
        return 0
    chunk = head_chunk(kind.local[0], precision=work.plan.precision, device=work.plan.device)
    before_last = math.ceil(work.num_supervised / chunk) - 1
    return max(0.0, before_last * chunk / work.num_supervised) if work.num_supervised else 0


def _attention(work: Work, weights: RankWeights) -> Iterator[Operation]:
    """Scores and sums of values, within documents; each rank has some heads of all tokens of a row."""
    shape, mesh = shape_of(work), work.plan.mesh
    width = executed_width(work, work.model, shape) / (mesh.tp * mesh.sp)
    if family_of(str(work.model["model_type"])).compresses:
        own = _over_documents(work, weights, attended_pairs)
    else:
        limits = shape.attended_limits or (None,) * shape.layers
        pairs = {limit: work.num_rows * _executed_pairs(work, limit) for limit in set(limits)}
        own = sum(pairs[limits[layer]] for layer in weights.layers if layer < len(limits))
    forward = 1.0 + work.plan.recomputes_kept + work.extra_forwards
    flops = 2 * width * own * (forward + _ATTENTION_BACKWARD)
    yield Operation("attention", "attention", flops, 0)
    heads = work.model.get("index_n_heads")
    chooser = heads * work.model["index_head_dim"] if heads and family_of(str(work.model["model_type"])).indexer else 0
    if chooser and _runs_indexers(work):
        scored = work.num_rows * work.rows.pairs(None) * sum(kind.has_indexer for kind in weights.layer_kinds)
        if family_of(str(work.model["model_type"])).compresses:
            scored = _over_documents(work, weights, scored_pairs) / (2 * mesh.sp)
        backward = 2 if work.plan.indexer.train else 0
        # Scores of all pairs, those of later tokens too (model/attention/indexed_attention.py).
        yield Operation("indexers", "matmul", 4 * chooser * scored * (forward + backward), 0)


def _over_documents(work: Work, weights: RankWeights, pairs: Callable[[ModelConfig, str, int], float]) -> float:
    """The pairs of all documents of a forward, in all layers of a rank that compress tokens or could."""
    rules = family_of(str(work.model["model_type"])).parameters
    assert rules is not None
    kinds = Counter(rules.type_of(work.model, layer) for layer in weights.layers)
    each = (
        (number, pairs(work.model, kind, length)) for kind, number in kinds.items() for length in work.rows.documents
    )
    return work.num_rows * sum(number * of_document for number, of_document in each)


def _runs_indexers(work: Work) -> bool:
    """Whether some document is longer than what its tokens may attend to, or indexers are trained."""
    indexer = family_of(str(work.model["model_type"])).indexer
    if indexer is None:
        return False
    return work.plan.indexer.train or max(work.rows.documents) > indexer.longest_document(work.model)


def _executed_pairs(work: Work, limit: int | None) -> float:
    """Pairs of a row that kernels compute: all of them, later tokens too, where chosen tokens make a mask."""
    if work.model.get("index_topk") is not None and _runs_indexers(work):
        return 2 * work.rows.pairs(None)
    return work.rows.pairs(limit)


def executed_width(work: Work, model: ModelConfig, shape: Shape) -> float:
    """Multiply-adds in a layer of the run's model, or of its teacher, for one attended position: values that are
    narrower than keys are padded, and sinks take further columns.
    """
    family = family_of(str(model["model_type"]))
    if family.has_sinks and not family.compresses:
        return shape.attention_width + 2 * SINK_COLUMNS * float(model["num_attention_heads"])
    if model.get("kv_lora_rank") is None:
        return shape.attention_width
    key, value = model["qk_nope_head_dim"] + model["qk_rope_head_dim"], model["v_head_dim"]
    is_padded = work.plan.device != "cpu" or max(work.rows.documents) >= _CPU_PADDED_FROM
    return float(model["num_attention_heads"] * (key + (max(key, value) if is_padded else value)))


def _memory(work: Work, weights: RankWeights) -> Iterator[Operation]:
    """Norms, rotations, gates and sums: their time is that of the memory that they read and write."""
    plan, kernels = work.plan, work.plan.kernels.of(family_of(str(work.model["model_type"])))
    each = activation_bytes(work.model, precision=plan.precision, tp=plan.mesh.tp, kernels=kernels)
    layers = [each.layers[min(layer, len(each.layers) - 1)] for layer in weights.layers]
    kept = sum(layer.kept + each.layer_input for layer in layers) * work.num_tokens
    forwards = _PASSES_OVER_ACTIVATIONS + 2 * (work.plan.recomputes + work.extra_forwards)
    yield Operation("activations", "memory", 0, forwards * kept)


class AdapterPart(NamedTuple):
    """A or B of an adapter, of all experts where its weight is that of experts."""

    numel: int
    is_whole: bool
    """Whether tensor parallel ranks hold all of it, though its weight is cut."""


def adapter_elements(lora: LoraConfig | None, kind: TensorKind, *, of_all_experts: bool = True) -> float:
    """Elements of the adapters of tensors; of one expert's, with which a row is multiplied, or of all experts'."""
    experts = 1 if of_all_experts or len(kind.local) < 3 else kind.local[0]
    return kind.count * sum(part.numel for part in adapter_parts(lora, kind)) // experts


def adapter_parts(lora: LoraConfig | None, kind: TensorKind) -> tuple[AdapterPart, ...]:
    """A and B of the adapter of one tensor; nothing where it has none."""
    if lora is None or len(kind.local) == 1 or part_of(kind.name) in _NEVER_ADAPTED:
        return ()
    module = kind.name.removesuffix(".weight")
    name = "experts" if ".mlp.experts." in module else module.rpartition(".")[2]
    if lora.target_modules is None:
        is_adapted = part_of(kind.name) != "router"
    else:
        is_adapted = any(name == target or re.fullmatch(target, module) for target in lora.target_modules)
    if not is_adapted:
        return ()
    sides = tuple(zip(kind.whole[-2:], kind.local[-2:], strict=True))
    is_cut = any(local < whole for whole, local in sides)
    each = lora.rank * math.prod(kind.local[:-2])
    return tuple(AdapterPart(each * local, is_cut and local == whole) for whole, local in sides)


def is_quantised(lora: LoraConfig | None, part: str) -> bool:
    """Whether the weights of a part of the model are held in four bits."""
    return lora is not None and lora.quantize is not None and part in ("attention", "dense MLP", "shared experts")
