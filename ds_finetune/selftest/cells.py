"""Cells: settings under which the same optimizer step is taken; with the tiny models and samples that they train on.

A cell names a model family, ZeRO stage, precision, parallel sizes and so on. All cells must give the same results.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, PretrainedConfig

from ds_finetune.config.schema import ParallelConfig
from ds_finetune.data.rows import Row
from ds_finetune.families.table import FAMILIES
from ds_finetune.families.tiny import VOCAB
from ds_finetune.labels import IGNORE_INDEX

SAMPLES, ROW_LEN, PACKED_ROWS = 64, 64, 32
TINY_MODELS: Mapping[str, dict[str, Any]] = {
    name: {"model_type": family.model_type, **config}
    for family in FAMILIES.values()
    if family.tiny_models is not None
    for name, config in {family.model_type: family.tiny_models.config, **family.tiny_models.variants}.items()
}
"""The contents of config.json by name: a model type, or a variant of one."""


@dataclass(frozen=True)
class Cell:
    """The settings of one way to take the optimizer step."""

    family: str
    stage: int
    accumulation: int
    packing: bool
    offload: str = "none"
    start: int = 0
    precision: str = "fp32"
    max_grad_norm: float = 0.0
    checkpointing: bool = False
    optimizer: str = "AdamW"
    weight_decay: float = 0.0
    pp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    pp_layers: str = ""

    @property
    def layout(self) -> str:
        """A text of the parallel sizes other than data parallelism, e.g. `pp 2 x tp 2`; `dp` for none."""
        return (
            " x ".join(f"{axis} {getattr(self, axis)}" for axis in ("pp", "sp", "tp", "ep") if getattr(self, axis) > 1)
            or "dp"
        )

    @property
    def sharing(self) -> int:
        """Number of ranks that process the same rows."""
        return self.pp * self.sp * self.tp

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        return "-".join(f"{key}={value}" for key, value in asdict(self).items())


def hf_config(family: str) -> PretrainedConfig:
    """The tiny model of a family."""
    return AutoConfig.for_model(**TINY_MODELS[family])


def enlarged_config(config: PretrainedConfig, parallel: ParallelConfig) -> PretrainedConfig:
    """A tiny model with enough heads, experts, columns and layers for the sizes of `parallel` to divide."""
    tree = config.to_dict()
    keys = math.lcm(tree["num_key_value_heads"], parallel.tp)
    heads = math.lcm(tree["num_attention_heads"], parallel.tp * parallel.sp, keys)
    tree["hidden_size"] = tree["hidden_size"] // tree["num_attention_heads"] * heads
    tree |= {"num_attention_heads": heads, "num_key_value_heads": heads if "kv_lora_rank" in tree else keys}
    for name in ("intermediate_size", "moe_intermediate_size", "vocab_size"):
        if name in tree:
            tree[name] = math.lcm(tree[name], parallel.tp)
    if "n_routed_experts" in tree:
        tree["n_routed_experts"] = math.lcm(tree["n_routed_experts"], parallel.ep)
    if parallel.pp > 1:
        tree["num_hidden_layers"] = 2 * parallel.pp
    for derived in {"layer_types", "head_dim", "mlp_layer_types"} - TINY_MODELS[tree["model_type"]].keys():
        tree.pop(derived, None)
    return AutoConfig.for_model(**tree)


def samples() -> list[tuple[np.ndarray, np.ndarray]]:
    """64 documents of 3 to 30 tokens as (ids, shifted labels); about a third of the tokens is not supervised."""
    rng = np.random.default_rng(7)
    documents = []
    for _ in range(SAMPLES):
        ids = rng.integers(3, VOCAB, size=int(rng.integers(3, 31))).astype(np.int32)
        labels = np.concatenate([ids[1:], [IGNORE_INDEX]]).astype(np.int32)
        labels[: int(rng.integers(0, len(ids) - 1))] = IGNORE_INDEX
        documents.append((ids, labels))
    return documents


def rows(packing: bool) -> list[Row]:
    """One sample per row, or with `packing` several samples per row, each of which starts at position 0."""
    bins: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for document in samples():
        if not packing or not bins or sum(len(ids) for ids, _ in bins[-1]) + len(document[0]) > ROW_LEN:
            bins.append([])
        bins[-1].append(document)
    return [_row(documents) for documents in bins]


def _row(documents: list[tuple[np.ndarray, np.ndarray]]) -> Row:
    ids, labels = (np.concatenate(parts) for parts in zip(*documents, strict=True))
    positions = np.concatenate([np.arange(len(i)) for i, _ in documents]).astype(np.int32)
    return Row(input_ids=ids, position_ids=positions, labels=labels, supervised=int((labels != IGNORE_INDEX).sum()))


def run_tree(cell: Cell, model: Path, out: Path, *, dp: int) -> dict[str, Any]:
    """The run file of a cell with data parallel size `dp`.

    One optimizer step has all samples, and empty rows where the batch is larger.
    """
    share = dp * cell.accumulation
    size = -(-(PACKED_ROWS if cell.packing else SAMPLES) // share)
    zero: dict[str, Any] = {"stage": cell.stage, "stage3_param_persistence_threshold": 40}
    if cell.stage == 3 and cell.optimizer == "Muon":
        zero["reduce_scatter"] = False
    if cell.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if cell.offload == "param":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "model": str(model),
        "data": {"train": "none.jsonl", "packing": cell.packing, "shuffle": False},
        "deepspeed": {"zero_optimization": zero},
        "parallel": {
            "pp": cell.pp,
            "pp_layers": [int(layers) for layers in cell.pp_layers.split()],
            "sp": cell.sp,
            "tp": cell.tp,
            "ep": cell.ep,
        },
        "train": {
            "for": "1 steps",
            "global_batch_size": size * share,
            "micro_batch_size": size,
            "max_seq_len": -(-ROW_LEN // cell.sp) * cell.sp,
            "precision": cell.precision,
            "max_grad_norm": cell.max_grad_norm,
            "activation_checkpointing": cell.checkpointing,
        },
        "optim": {"name": cell.optimizer, "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": cell.weight_decay},
        "output_dir": str(out),
    }
