"""Bytes within one layer: how wide its numbers are, what a norm keeps, and what is held at moments of backward."""

from dataclasses import dataclass
from typing import NamedTuple

WIDE = 4
"""Bytes of a number in fp32, in which norms and routers compute at any precision."""


class Held(NamedTuple):
    """Bytes at a moment of backward."""

    by_token: int
    fixed: int = 0
    """Bytes whatever the tokens are: a weight's gradient before it is added to others."""

    def of(self, tokens: int) -> int:
        """Bytes for so many tokens."""
        return self.by_token * tokens + self.fixed


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a token within one layer, on a rank that computes the token."""

    attention: int
    """Kept for backward by the norms and by attention."""
    router: int
    """Kept by the router of experts."""
    mlp: int
    """Kept within the MLP, or within routed and shared experts."""
    moments: tuple[Held, ...]
    """What is held beside the layer's input at the moments of its backward that may be the fullest."""
    tiled: tuple[Held, ...]
    """What is held at these moments with `train.tiled_mlp`."""
    keeps_input: bool = True
    """Whether its input is kept where it is not recomputed; a norm in 16 bits keeps an fp32 copy instead."""
    forward: int = 0
    """At most beside the layer's input in a forward without gradients."""
    attention_out: int = 0
    """Outputs of attention, which selective recomputation keeps."""
    products: int = 0
    """Outputs of the products of routed experts, which it keeps as well, but for tiles."""
    repeated: int = 0
    """At most beside its input while attention is computed again, when outputs of routed experts have gradients."""
    combined: int = 0
    """At most beside what it keeps, while the outputs of routed experts are added up."""

    def kept_selectively(self, *, is_tiled: bool = False) -> int:
        """What selective recomputation keeps of the layer beside its input; nothing before the first adapter."""
        return (self.attention_out + (0 if is_tiled else self.products)) * (self.kept > 0)

    @property
    def kept(self) -> int:
        """All that backward needs of the layer beside its input."""
        return self.attention + self.router + self.mlp

    def most(self, tokens: int, *, is_tiled: bool = False) -> int:
        """Bytes that backward holds at most beside the input."""
        return max(held.of(tokens) for held in (self.tiled if is_tiled else self.moments))


@dataclass(frozen=True)
class Widths:
    """How wide numbers are, into how many parts ranks divide a layer, and what of it is trained."""

    number: int
    """Bytes of a number."""
    tp: int
    ep: int
    is_packed: bool
    rank: int = 0
    """Rank of adapters; 0 where the weights themselves are trained."""
    adapted: frozenset[str] = frozenset()
    """Modules of the layer that have adapters."""
    kernels: str = "torch"
    """What computes norms, rotary embeddings and SwiGLU."""
    kind: str = ""
    """The kind of its attention, where layers differ."""
    has_head_norms: bool = False
    """Whether queries and keys are normalised within attention."""
    keeps_rows: bool = False
    """Whether norms keep their input and nothing else, whatever the kernels are (model/norm.py)."""
    is_beginning: bool = False
    """Whether no layer before has adapters: gradients begin after the first adapter of this one."""

    @property
    def is_fused(self) -> bool:
        """Whether these keep only what their kernels of backward read."""
        return self.kernels != "torch"

    @property
    def keeps_inputs(self) -> bool:
        """Whether norms keep their input itself, not a copy in fp32."""
        return self.is_fused or self.number == WIDE

    def keeps(self, *modules: str) -> bool:
        """Whether the input of these modules is kept: that of a frozen weight is not."""
        return not self.rank or not self.adapted.isdisjoint(modules)

    def reaches(self, *before: str) -> bool:
        """Whether what follows these modules has a gradient."""
        return not (self.is_beginning and self.adapted.isdisjoint(before))

    def low_rank(self, *modules: str) -> int:
        """Bytes kept between A and B of the adapters of these modules, for each row."""
        return self.number * self.rank * len(self.adapted.intersection(modules))


def norm_bytes(columns: int, widths: Widths, *, normalised: int | None = None, roots: int = 1) -> int:
    """Bytes that an RMSNorm keeps beside its output: its input in fp32, the normalised one if its weight is trained,
    and a root for each group of columns.
    """
    kept = WIDE * columns + (0 if widths.rank else (normalised or widths.number) * columns)
    return (widths.number * columns if widths.is_fused or widths.keeps_rows else kept) + WIDE * roots
