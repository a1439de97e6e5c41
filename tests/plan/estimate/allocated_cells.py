"""Runs on CPU ranks whose allocations are compared with the estimate: models of 10 to 20 million parameters, beside which
constants are small.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_finetune.config.schema import RunConfig
from tests.features.toy_feature import SETTINGS

Tree = dict[str, Any]
_SIZES: Tree = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA: Tree = {"model_type": "llama", **_SIZES}
EXPERTS: Tree = {
    "model_type": "qwen3_moe",
    **_SIZES,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
V3: Tree = {**_SIZES, "model_type": "deepseek_v3", "q_lora_rank": 192, "kv_lora_rank": 128, "qk_rope_head_dim": 16}
V3 |= {"qk_nope_head_dim": 48, "v_head_dim": 64, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
V3 |= {"moe_intermediate_size": 256, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
V3 |= {"num_nextn_predict_layers": 1}
V4: Tree = {**_SIZES, "model_type": "deepseek_v4", "num_key_value_heads": 1, "num_attention_heads": 8, "head_dim": 64}
V4 |= {"qk_rope_head_dim": 16, "q_lora_rank": 192, "o_lora_rank": 96, "o_groups": 2, "sliding_window": 16}
V4 |= {"compress_ratios": [0, 4, 128, 4], "compress_rate_hca": 32, "index_topk": 8, "index_n_heads": 8}
V4 |= {"index_head_dim": 32, "hc_mult": 4, "hc_sinkhorn_iters": 4, "intermediate_size": 256, "swiglu_limit": 10.0}
V4 |= {
    "max_position_embeddings": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
}
"""Models by config.json."""
GATED: Tree = LLAMA | {"model_type": "gated_llama", "max_position_embeddings": 1024}
"""Model of the family of `tests/plan/toys.py`."""
TOKENS, MICRO_ROWS = 64, 2
_BUCKET = 1_000_000
"""Numbers of a bucket: CPUs give whole buckets addresses, which torch's allocator counts."""


@dataclass(frozen=True)
class AllocationCell:
    """A run of two ranks whose memory is estimated and measured."""

    stage: int
    precision: str = "fp32"
    forwards: int = 1
    """Forwards of a step."""
    recomputes: bool = True
    axis: str = ""
    """The axis of `parallel` that the two ranks divide; empty for data parallelism."""
    offload: str = ""
    """What is offloaded: optimizer, param, or nothing."""
    model: Mapping[str, Any] = field(default_factory=lambda: LLAMA)
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Further sections of the run file."""
    teacher: Mapping[str, Any] | None = None
    """The config.json of a teacher, whose folder lies in that of the model."""
    zero: Mapping[str, Any] = field(default_factory=dict)
    """Other options of `zero_optimization`."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """Further choices of `deepspeed`."""
    title: str = ""
    """What the sections and choices are for."""
    tokens: int = TOKENS
    """Tokens of a row; with many, activations and not states decide when most is held."""

    @property
    def loads_weights(self) -> bool:
        """Whether the run needs weights in the model's folder, as adapters do."""
        return "lora" in self.sections or "only" in self.sections.get("train", {})

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        words = [str(self.model["model_type"]), f"zero{self.stage}", self.precision, self.axis, self.title]
        words += ["" if self.forwards == 1 else f"{self.forwards}forwards", "" if self.recomputes else "kept"]
        words += [f"{self.offload}-offloaded" if self.offload else ""]
        return "-".join(filter(None, words))

    def run_tree(self, folder: Path) -> Tree:
        """The run file; the model's config.json is in `folder`."""
        zero: Tree = {"stage": self.stage, "reduce_bucket_size": _BUCKET, "stage3_prefetch_bucket_size": _BUCKET}
        zero |= {"stage3_param_persistence_threshold": 1000} if self.stage == 3 else {}
        zero |= {"offload_optimizer": {"device": "cpu"}} if self.offload else {}
        zero |= {"offload_param": {"device": "cpu"}} if self.offload == "param" else {}
        zero |= self.zero
        ranks_of_rows = 1 if self.axis in ("tp", "pp", "sp") else 2
        return {
            "model": {"path": str(folder), "weights": "load" if self.loads_weights else "random"},
            "data": {"train": "none.jsonl"},
            "output_dir": str(folder / "run"),
            "parallel": {self.axis: 2} if self.axis else {},
            "deepspeed": {"zero_optimization": zero if self.stage else {"stage": 0}, **self.choices},
            "train": {
                "for": "2 steps",
                "global_batch_size": MICRO_ROWS * self.forwards * ranks_of_rows,
                "micro_batch_size": MICRO_ROWS,
                "max_seq_len": self.tokens,
                "precision": self.precision,
                "activation_checkpointing": "full" if self.recomputes else "none",
                **self.sections.get("train", {}),
            },
            **{name: section for name, section in self.sections.items() if name != "train"},
            **({"objective": self._objective(folder)} if self.teacher is not None else {}),
        }

    def _objective(self, folder: Path) -> Tree:
        place = "cpu" if "teacher-offloaded" in self.title else "none"
        return {"name": "distill", "teacher": str(folder / "teacher"), "teacher_offload": place}

    def config(self, folder: Path) -> RunConfig:
        """The run file, checked."""
        return RunConfig.model_validate(self.run_tree(folder))


_CHUNKS: Tree = {"parallel": {"pp": 2, "vpp": 2}}
_LORA: Tree = {"lora": {"rank": 8}}
_ONLY: Tree = {"only": [r".*\.(gate|up|down)_proj"]}
_WIDE_LORA: Tree = {"lora": {"rank": 128}}
"""Adapters of the routed experts that take more than the model."""
_SMALL_BUCKET: Tree = {"reduce_bucket_size": 200_000}
"""Fewer numbers than adapters have: the allocator counts also what of a bucket is never written."""
_TEACHER: Tree = LLAMA | {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
_TEACHER |= {"num_key_value_heads": 12}
_WIDE_SUMS: Tree = {"data_types": {"grad_accum_dtype": "fp32"}}
_FETCHING: dict[str, Tree] = {
    "default-fetching": {"stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000},
    "no-prefetch": {"stage3_prefetch_bucket_size": 0},
    "short-reuse": {"stage3_max_reuse_distance": 3_000_000},
    "few-live": {"stage3_max_live_parameters": 3_000_000},
    "short-reuse-few-live": {"stage3_max_reuse_distance": 3_000_000, "stage3_max_live_parameters": 3_000_000},
    "nothing-ahead": {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
}
"""Ways of fetching weights at stage 3."""
DEFAULT = [
    AllocationCell(2, "bf16"),
    AllocationCell(3, "bf16", forwards=2),
    AllocationCell(3, "bf16", zero=_FETCHING["default-fetching"], title="default-fetching"),
    AllocationCell(
        2, "bf16", recomputes=False, model=GATED, sections={"features": {"toy": SETTINGS}}, tokens=1024, title="toy"
    ),
]
"""Measured by default."""
OTHERS = [
    *(AllocationCell(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")),
    *(AllocationCell(stage, "bf16", forwards=2) for stage in (0, 1, 2, 3)),
    *(AllocationCell(stage, "bf16", recomputes=False) for stage in (1, 3)),
    *(AllocationCell(stage, "bf16", offload="optimizer") for stage in (1, 2, 3)),
    AllocationCell(3, "bf16", offload="param"),
    *(AllocationCell(1, "bf16", axis=axis) for axis in ("tp", "pp", "sp")),
    AllocationCell(1, "bf16", 4, recomputes=False, axis="pp"),
    AllocationCell(1, "bf16", 4, recomputes=False, axis="pp", sections=_CHUNKS, title="vpp2"),
    AllocationCell(3, "bf16", axis="sp"),
    AllocationCell(2, "bf16", axis="ep", model=EXPERTS),
    *(AllocationCell(stage, "bf16", model=EXPERTS) for stage in (2, 3)),
    *(AllocationCell(stage, "bf16", forwards=2, choices=_WIDE_SUMS, title="fp32-sums") for stage in (2, 3)),
    *(AllocationCell(stage, "bf16", sections=_LORA, zero=_SMALL_BUCKET, title="lora") for stage in (2, 3)),
    AllocationCell(3, "bf16", sections=_LORA, zero=_FETCHING["default-fetching"], title="lora-default-fetching"),
    AllocationCell(3, "bf16", axis="ep", model=EXPERTS),
    *(AllocationCell(stage, "bf16", sections={"train": _ONLY}, title="only") for stage in (1, 2)),
    *(
        AllocationCell(stage, "bf16", axis="ep", model=EXPERTS, sections=_WIDE_LORA, title="lora")
        for stage in (1, 2, 3)
    ),
    *(AllocationCell(1, "bf16", axis=axis, sections=_WIDE_LORA, title="lora") for axis in ("tp", "pp", "sp")),
    *(AllocationCell(1, "bf16", axis=axis, model=EXPERTS, sections=_WIDE_LORA, title="lora") for axis in ("tp", "pp")),
    *(AllocationCell(3, "bf16", zero=zero, title=title) for title, zero in _FETCHING.items()),
    *(AllocationCell(stage, "bf16", teacher=_TEACHER, title="teacher") for stage in (2, 3)),
    AllocationCell(2, "bf16", teacher=_TEACHER, title="teacher-offloaded"),
    AllocationCell(2, "fp32", teacher=_TEACHER, title="teacher"),
    AllocationCell(3, "bf16", recomputes=False, zero=_FETCHING["short-reuse-few-live"], title="short-reuse-few-live"),
    AllocationCell(3, "bf16", model=EXPERTS, zero=_FETCHING["default-fetching"], title="default-fetching"),
]
OTHERS += [
    AllocationCell(2, "bf16", axis=axis, model=model, sections=_WIDE_LORA, title="lora")
    for model in (V3, V4)
    for axis in ("", "ep")
]
OTHERS += [
    AllocationCell(stage, "bf16", axis=axis, model=V4) for stage, axis in ((1, "tp"), (1, "sp"), (2, "ep"), (3, ""))
]
OTHERS += [AllocationCell(1, "bf16", axis="pp", model=model) for model in (V3, V4)]
OTHERS += [
    AllocationCell(2, "bf16", axis=axis, recomputes=recomputes, model=V4, tokens=1024, title="long")
    for axis in ("", "sp")
    for recomputes in (True, False)
]
OTHERS += [AllocationCell(2, "bf16", axis="ep", model=V3, sections={"mtp": {"train": True}}, title="mtp")]
OTHERS = [cell for cell in OTHERS if cell.name not in {chosen.name for chosen in DEFAULT}]
