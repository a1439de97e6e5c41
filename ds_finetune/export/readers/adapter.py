"""Adapters merged into the weights of a base folder, read a bounded piece at a time."""

from collections.abc import Callable, Collection, Mapping
from functools import cached_property, lru_cache

import torch

from ds_finetune.errors import ExportError
from ds_finetune.export.source import TensorSource
from ds_finetune.families.family import Family
from ds_finetune.model.adapters.lora import Factors
from ds_finetune.model.weights.names import hub_pieces


class MergedSource:
    """A base's tensors with adapters added in fp32, as a TensorSource.

    `factors` gives the adapter of a weight; those of the last few weights are cached. Tensors of `whole` replace the
    base's; tensors of the base that are in `without` are left out.
    """

    def __init__(  # noqa: PLR0913
        self,
        base: TensorSource,
        names: Collection[str],
        factors: Callable[[str], Factors],
        family: Family,
        *,
        label: str,
        whole: TensorSource | None = None,
        without: Collection[str] = (),
    ) -> None:
        self._base, self._whole, self._without = base, whole, without
        self._factors = lru_cache(maxsize=8)(lambda name: factors(name).as_stored(name, family))
        self._adapted: dict[str, tuple[str, int]] = {}

        def pieces_of(name: str, shape: tuple[int, ...]) -> list[tuple[str, int, tuple[int, ...]]]:
            """Key, first element and shape of the base's tensors that make up a tensor of the model."""
            parts = [(piece.key, piece.first_element(shape), piece.shape) for piece in hub_pieces(name, shape, family)]
            return [(name, 0, shape)] if name in base.shapes else parts

        self._trained = {
            key: (name, begin, piece)
            for name, shape in ({} if whole is None else whole.shapes).items()
            for key, begin, piece in pieces_of(name, shape)
        }
        for name in names:
            shape = self._factors(name).shape
            pieces = pieces_of(name, shape)
            wrong = [
                f"{key} {piece_shape}, in the base {base.shapes.get(key, 'absent')}"
                for key, _, piece_shape in pieces
                if base.shapes.get(key) != piece_shape
            ]
            if wrong:
                raise ExportError(
                    f"{label} does not fit the base: `{name}` is {shape}, {'; '.join(wrong[:3])}",
                    hint="name the model it was trained on by --base",
                )
            self._adapted |= {key: (name, begin) for key, begin, _ in pieces}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the base's tensors, except those left out, and of the fully trained tensors."""
        kept = {name: shape for name, shape in self._base.shapes.items() if name not in self._without}
        return {**kept, **{key: shape for key, (_, _, shape) in self._trained.items()}}

    @property
    def fp32_names(self) -> Collection[str]:
        """Names of tensors that the base keeps in fp32."""
        return self._base.fp32_names

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements of the base's tensor; an adapted tensor is returned in fp32 with the adapter added."""
        if self._whole is not None and name in self._trained:
            own, begin, _ = self._trained[name]
            return self._whole.read(own, begin + start, numel)
        flat = self._base.read(name, start, numel)
        if name not in self._adapted:
            return flat
        weight, begin = self._adapted[name]
        return flat.float() + self._factors(weight).delta(begin + start, numel)
