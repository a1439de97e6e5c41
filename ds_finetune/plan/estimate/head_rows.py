"""Memory of the head and the loss of a rank, by objective."""

from collections.abc import Iterator
from typing import NamedTuple

from ds_finetune.config.objectives import DistillObjective, ObjectiveConfig, is_distillation
from ds_finetune.plan.combinations import WEIGHT_BYTES
from ds_finetune.plan.estimate.activation_memory import ActivationBytes, HeadBytes
from ds_finetune.plan.estimate.rows import MemoryRow, Place
from ds_finetune.plan.head_chunk import CPU_TOKENS, DISTILLATION_TOKENS
from ds_finetune.plan.plan import Plan

_WIDE = 4
_MICRO_BATCH = "train.micro_batch_size"


class _Logits(NamedTuple):
    """The logits of a chunk of tokens and what is made of them, in bytes for each of them."""

    chunk: int
    """Tokens of a chunk."""
    one_chunk: int
    later_chunk: int
    """With what is left of the chunk before."""

    def num_bytes(self, tokens: int, columns: int) -> int:
        """At most, for so many supervised tokens and a vocabulary of so many columns."""
        each = self.one_chunk if tokens <= self.chunk else self.later_chunk
        return each * min(tokens, self.chunk) * columns


def head_rows(plan: Plan, own: ActivationBytes, tokens: int) -> Iterator[MemoryRow]:
    """Rows for the last norm, the head and the loss on a rank with `tokens`, all of them supervised."""
    home: Place = "host" if plan.device == "cpu" else "gpu"
    head, is_frozen, width = own.head, plan.lora is not None, WEIGHT_BYTES[plan.precision]
    yield MemoryRow("last norm", home, head.by_token * tokens, _MICRO_BATCH, ("head", "head backward"))
    if plan.objective.row.head == "scores":
        return
    is_of_documents = plan.objective.row.head == "documents"
    yield MemoryRow("hidden states of supervised tokens", home, head.by_supervised * tokens, _MICRO_BATCH, ("head",))
    logits = _logits_bytes(plan.objective, head, tokens, width)
    yield MemoryRow("logits of a chunk", home, logits, "parallel.tp", ("head",))
    gradient = 0 if is_frozen else head.gradient
    yield MemoryRow("fp32 gradient of the head", home, gradient, "parallel.tp", ("head", "head backward"))
    # The loss of documents multiplies that by its factor in a copy (model/loss/log_probs.py), the others in place.
    rounded = 0 if is_frozen else head.rounded + (head.gradient if is_of_documents else 0)
    rounded += 3 * head.by_supervised * tokens // 2
    yield MemoryRow("rounded gradient of the head", home, rounded, "parallel.tp", ("head backward",))
    if plan.device == "cpu" and width < _WIDE and not is_frozen:
        # On CPUs a product of 16-bit numbers is rounded, then made fp32 to be added (model/products.py).
        size = head.gradient + head.rounded
        yield MemoryRow("gradient of the head by a chunk", "host", size, "", ("head",))


def _logits_bytes(objective: ObjectiveConfig, head: HeadBytes, tokens: int, width: int) -> int:
    if objective.row.head == "documents":
        return _of_documents(width).num_bytes(tokens, head.columns)
    if is_distillation(objective):
        return _of_distillation(objective, width).num_bytes(tokens, head.columns)
    return head.logits_of(tokens)


def _of_documents(width: int) -> _Logits:
    """Products, logits and their rounded gradient, or the gradient of the chunk before (model/loss/log_probs.py)."""
    if width == _WIDE:
        return _Logits(CPU_TOKENS, _WIDE, _WIDE)
    return _Logits(CPU_TOKENS, 2 * width + _WIDE, width + 2 * _WIDE)


def _of_distillation(section: DistillObjective, width: int) -> _Logits:
    """Products and log-probabilities of the model, with a teacher its own and their exponentials, with stored scores
    the tokens that are not stored, and a gradient (model/loss/soft_targets.py). Another temperature needs both of its
    log-probabilities. The gradient of the chunk before is there until the next one.
    """
    copies = (3 if section.teacher is None else 4) + (section.temperature != 1)
    each = copies * _WIDE + (0 if width == _WIDE else width)
    return _Logits(DISTILLATION_TOKENS, each, each + _WIDE)
