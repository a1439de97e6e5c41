"""Run cells with options of adapters, or with frozen parameters, inside one launched world.

Started by the tests as `torchrun --nproc-per-node N options_worker.py MODELS_DIR OUT_DIR CELLS.json`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_finetune.reference.selftest.cells import Cell, run_tree
from tests.lora_twin import lora_tree
from tests.parity.lora_worker import steps_of
from tests.parity.serving import Launched, serve

START = "start"
"""Folder of the adapters, by family, from which cells with `start` begin."""
LORA: dict[str, dict[str, Any]] = {
    "all": {"rslora": True, "modules_to_save": ["embed_tokens", "lm_head", r".*layernorm"], "start": START},
    "dropout": {"rslora": True, "dropout": 0.2},
}
"""Options of adapters."""
FROZEN: dict[str, dict[str, Any]] = {
    "only": {"only": ["o_proj", "lm_head", r".*layernorm"], "freeze": [r"model\.layers\.0\.input_layernorm"]},
    "freeze": {"freeze": ["embed_tokens", r".*\.self_attn\..*"]},
    "experts": {"only": ["experts", "norm", "o_proj"]},
    "one layer": {"only": [r"model\.layers\.1\..*"]},
}
"""Options of what is trained."""


@dataclass(frozen=True)
class OptionCell:
    """A cell with the options of `LORA` or `FROZEN` that have the name `option`."""

    option: str
    cell: Cell

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        return f"{self.option}-{self.cell.name}"


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """The first steps of a cell with its options."""
    found, ranks = OptionCell(tree["option"], Cell(**tree["cell"])), launched.world.world_size
    run_file = run_tree(found.cell, launched.models / found.cell.family, launched.out, dp=ranks // found.cell.sharing)
    run_file["train"] |= FROZEN.get(found.option, {})
    if found.option in LORA:
        run_file["lora"] = lora_tree(found.cell.family) | LORA[found.option]
        if "start" in run_file["lora"]:
            run_file["lora"]["start"] = str(Path(launched.out, START, found.cell.family))
    with launched.engine(run_file) as engine:
        return f"{found.name}-world={ranks}", steps_of(engine)


if __name__ == "__main__":
    serve(run)
