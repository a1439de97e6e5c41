"""transformers' import: modules that it imports with every model and that a training step does not use.

They take a third of the CPU time of a start. Here they are imported at their first use.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from ds_finetune.patches.deferred_compiler import marking_later
from ds_finetune.patches.deferred_names import deferring
from ds_finetune.patches.foreign import is_tested
from ds_finetune.patches.import_contexts import import_inside
from ds_finetune.patches.kept_scan import Structure, scan_or_read

_STYLES = ("transformers.distributed.expert_parallel", "transformers.distributed.tensor_parallel")
"""They register transformers' own parallel layers, for which they import torch's DTensor, its rules and sympy."""
_PARALLEL = "transformers.distributed.parallel_utils"
_DTENSOR = ("torch.distributed.tensor", "torch.distributed.tensor._utils", "torch.distributed.tensor.placement_types")
_DETECTION = ("deformable_detr", "for_object_detection", "grounding_dino", "lw_detr", "rf_detr", "rt_detr")
DEFERRED: Mapping[str, Collection[str]] = {
    "transformers.modeling_utils": _STYLES,
    "transformers.generation.utils": _STYLES,
    "transformers.distributed.mixin": _STYLES,
    _PARALLEL: _DTENSOR,
    "transformers.distributed.sharding_utils": _DTENSOR,
    "transformers.distributed.checkpoint": (*_DTENSOR, "torch.distributed.checkpoint.hf_storage"),
    "transformers.distributed.fsdp": ("torch.distributed._composable.fsdp", "torch.distributed.fsdp"),
    "transformers.masking_utils": ("torch._dynamo._trace_wrapped_higher_order_op",),
    **{f"transformers.loss.loss_{name}": ("scipy.optimize",) for name in _DETECTION},
    "httpcore2._synchronization": ("trio",),
    "httpcore2._backends.trio": ("trio",),
}
"""Modules of transformers 5.23 and of what it imports, each with modules that it does not use in a training step."""
MARKING = (
    "transformers.modeling_utils",
    "transformers.generation.continuous_batching.cache",
    "transformers.integrations.eager_paged",
    "transformers.integrations.flex_attention",
    "transformers.integrations.deepgemm",
    "transformers.integrations.finegrained_fp8",
    "transformers.integrations.sonicmoe",
)
"""Modules of transformers 5.23 that decorate functions for torch's compiler."""


_SCANNER = "transformers.utils.import_utils"


def import_what_is_used() -> None:
    """From now on an import of transformers imports less, where it and torch have the versions whose source was read.

    Other versions are imported as they are.
    """
    if not is_tested("torch", "transformers"):
        return
    import_inside(_SCANNER, _scanning_once)
    for importer in {**DEFERRED, **dict.fromkeys(MARKING)}:
        import_inside(importer, partial(_importing_less, importer))


@contextmanager
def _importing_less(importer: str) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(deferring(importer, DEFERRED.get(importer, ())))
        if importer in MARKING:
            stack.enter_context(marking_later())
        yield
    if importer == _PARALLEL:
        interface = sys.modules[_PARALLEL].ParallelInterface
        interface._global_mapping = _Styles(interface._global_mapping)


class _Styles:
    """The registry of parallel layers, filled when it is read."""

    def __init__(self, styles: dict[str, Any]) -> None:
        self._styles = styles

    def __get__(self, instance: object, owner: type) -> dict[str, Any]:
        """All layers by name."""
        for module in _STYLES:
            import_module(module)
        return self._styles


@contextmanager
def _scanning_once() -> Iterator[None]:
    """Let transformers read the source of its models for their names once, not at every start and for two modules."""
    yield
    module: Any = sys.modules[_SCANNER]
    scanner = Path(module.__file__)
    scan = module.create_import_structure_from_path
    module.create_import_structure_from_path = remember_folders(
        scan, models=scanner.parents[1] / "models", scanner=scanner
    )


def remember_folders(scan: Callable[[str], Structure], *, models: Path, scanner: Path) -> Callable[[str], Structure]:
    """`scan`, which takes a folder or a file in it, called once for each folder; for `models` it is kept on disk.

    `scanner` is the file with the source of `scan`.
    """
    known: dict[Path, Structure] = {}

    @wraps(scan)
    def scan_once(module_path: str) -> Structure:
        path = Path(module_path)
        folder = path.parent if path.suffix == ".py" else path
        if folder == models and folder not in known:
            known[folder] = scan_or_read(scan, folder, also=scanner)
            known.update({folder / name: inner for name, inner in known[folder].items() if isinstance(name, str)})
        elif folder not in known:
            known[folder] = scan(module_path)
        return _copy(known[folder])

    return scan_once


def _copy(structure: Any) -> Any:  # noqa: ANN401 - dicts of dicts of sets
    if isinstance(structure, dict):
        return {key: _copy(value) for key, value in structure.items()}
    return set(structure)
