"""The layouts a state is saved at and restored at, and the tiny run they share."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import Batch, BatchPlan, training_batches
from ds_finetune.engine.engine import Engine
from ds_finetune.families.configs import DENSE
from ds_finetune.reference.selftest.cells import ROW_LEN, Cell, hf_config, rows, run_tree

BEFORE, AFTER = 2, 3
"""Steps before a save and after it, beyond the end of the first epoch (four steps, packed two)."""
LR = 1e-3
ROWS_A_STEP = 16


@dataclass(frozen=True)
class Layout:
    """A way of keeping state: ZeRO stage, offload of optimizer and parameters, precision, packing, optimizer and
    family.
    """

    stage: int
    optimizer: str = "none"
    param: str = "none"
    precision: str = "fp32"
    packing: bool = False
    name: str = "AdamW"
    family: str = "deepseek_v3"
    pp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    lora: int = 0
    vpp: int = 1

    @property
    def text(self) -> str:
        """A name for folders and test ids."""
        how = "packed" if self.packing else "padded"
        sizes = f"pp{self.pp}-sp{self.sp}-tp{self.tp}-ep{self.ep}"
        sizes += f"-vpp{self.vpp}" if self.vpp > 1 else ""
        sizes += f"-lora{self.lora}" if self.lora else ""
        where = f"{self.optimizer}-{self.param}"
        return f"z{self.stage}-{where}-{self.precision}-{how}-{self.name}-{self.family}-{sizes}"

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is kept on disk."""
        return "nvme" in (self.optimizer, self.param)


WIDE = DENSE | {"hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 1}
"""Slices above 1 MiB on each of four ranks, which DeepSpeed swaps."""
PLAIN = (
    Layout(0),
    Layout(1),
    Layout(2),
    Layout(3),
    Layout(1, "cpu"),
    Layout(2, "cpu"),
    Layout(3, "cpu"),
    Layout(3, "cpu", "cpu"),
)
NVME = (
    Layout(2, family="wide"),
    Layout(3, "nvme", family="wide"),
    Layout(3, "nvme", "nvme", family="wide"),
    Layout(3, "cpu", "nvme", family="wide"),
)
LAYOUTS = PLAIN + NVME
"""Every stage with every offload."""


def hf_config_of(family: str) -> PretrainedConfig:
    """The model of a family."""
    return AutoConfig.for_model("llama", **WIDE) if family == "wide" else hf_config(family)


def others(layout: Layout) -> list[Layout]:
    """The layouts of the same family."""
    return [other for other in LAYOUTS if other.family == layout.family]


def config_of(layout: Layout, model: Path, out: Path, *, dp: int, disk: Path) -> RunConfig:
    """The run file of a layout; one step holds sixteen rows."""
    disk.mkdir(exist_ok=True)
    norm = 0.0 if layout.name == "Muon" else 0.5
    cell = Cell(
        layout.family,
        layout.stage,
        1,
        layout.packing,
        precision=layout.precision,
        optimizer=layout.name,
        max_grad_norm=norm,
        pp=layout.pp,
        vpp=layout.vpp,
        sp=layout.sp,
        tp=layout.tp,
        ep=layout.ep,
    )
    tree = run_tree(cell, model, out, dp=dp // cell.sharing)
    tree["train"] |= {
        "global_batch_size": ROWS_A_STEP,
        "micro_batch_size": ROWS_A_STEP // max(dp, 2) if dp <= 4 else 1,
        "for": "8 steps",
    }
    zero: dict[str, Any] = tree["deepspeed"]["zero_optimization"]
    place = {"nvme_path": str(disk)}
    if layout.optimizer != "none":
        zero["offload_optimizer"] = {"device": layout.optimizer} | (place if layout.optimizer == "nvme" else {})
        zero["sub_group_size"] = 1_000_000 if layout.family == "wide" else 10_000
    if layout.param != "none":
        zero["offload_param"] = {"device": layout.param} | (
            place | {"buffer_size": 1_300_000} if layout.param == "nvme" else {}
        )
    tree["checkpoint"] = {"every": "1 steps"}
    if layout.lora:
        tree["lora"] = {"rank": layout.lora}
    return RunConfig.model_validate(tree)


def batches(engine: Engine, *, start_step: int, steps: int) -> Iterator[Batch]:
    """This rank's share of the batches from `start_step` (0-based) on."""
    train, is_packed = engine.plan.train, engine.plan.data.packing
    plan = BatchPlan(
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        rank=engine.plan.mesh.coordinate("dp"),
        dp=engine.plan.dp,
        seed=0,
        shuffle=True,
        pad_token_id=0,
        row_len=ROW_LEN if is_packed else None,
        multiple=engine.plan.mesh.sp,
    )
    return training_batches(
        rows(is_packed), plan, start_step=start_step, total_rows=(start_step + steps) * train.global_batch_size
    )
