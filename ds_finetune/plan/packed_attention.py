"""How packed rows are attended: one call for all documents of a forward on GPUs, a call for each document elsewhere."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ds_finetune.config.sections import OWN_ATTENTIONS
from ds_finetune.families.table import family_of

MAX_WIDTH = 256
"""Columns of a head that FlashAttention takes at most, as torch 2.11 and 2.13 have it
(aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd)."""
HALF_PRECISIONS = ("bf16", "fp16")
"""The precisions that FlashAttention computes in."""
_OLDEST = (8, 0)
"""Compute capability from which FlashAttention runs."""
_NO_BACKWARD = {(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)}
"""Compute capabilities with too little shared memory for its backward pass at 193 to 224 columns (torch 2.13,
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:531)."""


class HeadWidths(NamedTuple):
    """Columns of one attention head."""

    keys: int
    """Of queries and keys."""
    values: int

    @property
    def widest(self) -> int:
        """Columns that FlashAttention computes with: it takes queries, keys and values of one width."""
        return max(self)


def head_widths(tree: Mapping[str, Any]) -> HeadWidths:
    """The columns of a head, from config.json."""
    if tree.get("qk_nope_head_dim"):
        return HeadWidths(tree["qk_nope_head_dim"] + tree["qk_rope_head_dim"], tree["v_head_dim"])
    width = tree.get("head_dim") or tree["hidden_size"] // tree["num_attention_heads"]
    return HeadWidths(width, width)


def varlen_problem(tree: Mapping[str, Any], *, precision: str, capability: tuple[int, int] = _OLDEST) -> str:
    """Why the kernel cannot attend to all documents of a forward at once; empty where it can.

    `tree` is config.json, `capability` the GPU's.
    """
    family = family_of(tree["model_type"])
    if family.is_generic:
        return "transformers' own attention is used for model types outside the table"
    width, gpu = head_widths(tree).widest, _dotted(capability)
    halves = " and ".join(HALF_PRECISIONS)
    problems = (
        (precision not in HALF_PRECISIONS, f"train.precision {precision}, and the kernel computes in {halves}"),
        (family.has_sinks, "its attention has sinks, which the kernel does not know"),
        (width > MAX_WIDTH, f"heads of {width} columns, and the kernel takes at most {MAX_WIDTH}"),
        (capability < _OLDEST, f"compute capability {gpu}, and the kernel needs {_dotted(_OLDEST)}"),
        (
            capability in _NO_BACKWARD and 192 < width <= 224,
            f"heads of {width} columns, and the kernel has no backward pass for 193 to 224 on {gpu}",
        ),
    )
    return next((text for is_set, text in problems if is_set), "")


def attention_lines(attention: str, tree: Mapping[str, Any], *, device: str, precision: str) -> list[tuple[str, str]]:
    """Name and text of the decision, for people; none on CPUs, and none for kernels of transformers."""
    if device == "cpu" or attention not in OWN_ATTENTIONS or family_of(tree["model_type"]).is_generic:
        return []
    if attention == "by_document":
        return [("attention", "a call for each document")]
    problem = varlen_problem(tree, precision=precision)
    return [("attention", f"a call for each document: {problem}" if problem else "one call for all documents")]


def problem_of_calls(tree: Mapping[str, Any], longest: int) -> str:
    """Why some calls would not use the kernel, although it fits the model; empty where all do. `longest` is the maximum
    number of tokens of a document.
    """
    dropout = tree.get("attention_dropout") or tree.get("attention_probs_dropout_prob") or 0.0
    if dropout:
        return f"dropout {dropout} of its attention, which the kernel does not have"
    chosen = tree.get("index_topk") if family_of(tree["model_type"]).indexer is not None else None
    if chosen and longest > chosen:
        return f"documents of {longest} tokens, whose queries attend to the {chosen} that an indexer chooses"
    return ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
