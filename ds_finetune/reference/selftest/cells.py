"""Cells of the selftest: combinations of settings with which the same optimizer step is taken on a tiny model.

A cell names a model family, ZeRO stage, precision, parallel sizes and so on. All cells of one model must give equal
results.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from transformers import PretrainedConfig

from ds_finetune.config.objectives import ObjectiveField
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.data.documents import Documents, TokenisedDocument
from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.prepared_rows import PreparedRows, Row
from ds_finetune.families.configs import VOCAB
from ds_finetune.families.table import FAMILIES
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import Objective, make_objective

SAMPLES, ROW_LEN, PACKED_ROWS = 64, 64, 32
TINY_MODELS: Mapping[str, dict[str, Any]] = {
    name: {"model_type": family.model_type, **config}
    for family in FAMILIES.values()
    if family.tiny_models is not None
    for name, config in {family.model_type: family.tiny_models.config, **family.tiny_models.variants}.items()
}
"""The config.json of tiny models by name, which is a model type or a variant of one."""
OBJECTIVES: Mapping[str, dict[str, Any]] = {
    "dpo": {"label_smoothing": 0.1, "nll_weight": 0.3},
    "orpo": {},
    "kto": {"desirable_weight": 1.3},
    "reward": {"center_weight": 0.1},
    "classification": {"label_smoothing": 0.1},
    "distill": {"temperature": 2.0, "label_weight": 0.3},
    "simpo": {},
    "cpo": {},
    "grpo": {"group_size": 2, "aggregation": "sequence", "clip_low": 0.1, "mismatch": "token", "mismatch_cap": 1.1},
}
"""Objectives of the standard selftest, with settings for which no term of the loss vanishes."""


@dataclass(frozen=True)
class Cell:
    """A combination of settings with which the selftest takes an optimizer step."""

    family: str
    stage: int
    accumulation: int
    packing: bool
    offload: str = "none"
    start: int = 0
    precision: str = "fp32"
    max_grad_norm: float = 0.0
    checkpointing: bool = False
    is_selective: bool = False
    """Whether activation checkpointing of the cell is selective."""
    optimizer: str = "AdamW"
    weight_decay: float = 0.0
    pp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    pp_layers: str = ""
    vpp: int = 1
    objective: str = "sft"
    balances: bool = False
    """Whether routers are trained with every balancing method that their family supports."""
    reduces_once: bool = False
    """Whether gradients are reduced once per step, at every ZeRO stage."""
    has_lora: bool = False
    """Whether LoRA adapters of every linear module are trained instead of the weights."""

    @property
    def recomputation(self) -> str:
        """Value of `train.activation_checkpointing` for this combination of settings."""
        return ("selective" if self.is_selective else "full") if self.checkpointing else "none"

    @property
    def layout(self) -> str:
        """Parallel sizes of the cell besides data parallelism, e.g. `pp 2 x tp 2`; `dp` if all are 1."""
        sizes = {axis: getattr(self, axis) for axis in ("pp", "vpp", "sp", "tp", "ep")}
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "dp"

    @property
    def sharing(self) -> int:
        """Number of ranks that process the same rows: pipeline x sequence x tensor parallel size."""
        return self.pp * self.sp * self.tp

    @property
    def name(self) -> str:
        """Name of this cell for files and tests: all settings that differ from their defaults."""
        defaults = {each.name: each.default for each in fields(self)}
        return "-".join(f"{key}={value}" for key, value in asdict(self).items() if value != defaults[key])


def hf_config(family: str) -> PretrainedConfig:
    """Configuration of a family's tiny model."""
    return AutoConfig.for_model(**TINY_MODELS[family])


def enlarged_config(config: PretrainedConfig, parallel: ParallelConfig) -> PretrainedConfig:
    """Enlarge a tiny model so that the sizes of `parallel` divide its heads, experts, widths and layers."""
    tree = config.to_dict()
    keys = math.lcm(tree["num_key_value_heads"], parallel.tp)
    if "o_groups" in tree:
        # DeepSeek-V4 has only one key-value head. Tensor parallelism divides its output groups.
        keys, tree["o_groups"] = 1, math.lcm(tree["o_groups"], parallel.tp)
    heads = math.lcm(tree["num_attention_heads"], parallel.tp * parallel.sp, keys, tree.get("o_groups", 1))
    tree["hidden_size"] = tree["hidden_size"] // tree["num_attention_heads"] * heads
    tree |= {"num_attention_heads": heads, "num_key_value_heads": heads if "kv_lora_rank" in tree else keys}
    experts = FAMILIES[config.model_type].expert_keys
    for name in {"intermediate_size", "vocab_size", *([experts.width_key] if experts else [])} & tree.keys():
        tree[name] = math.lcm(tree[name], parallel.tp)
    if experts:
        tree[experts.number_key(tree)] = math.lcm(experts.number(tree), parallel.ep)
    if parallel.pp > 1:
        tree["num_hidden_layers"] = parallel.pp * max(parallel.vpp, 2)
    derived = {"layer_types", "head_dim", "mlp_layer_types", "indexer_types"}
    for key in derived - TINY_MODELS[tree["model_type"]].keys():
        tree.pop(key, None)
    return AutoConfig.for_model(**tree)


@cache
def samples() -> list[tuple[np.ndarray, np.ndarray]]:
    """Make 64 documents of 3 to 30 random tokens as (ids, shifted labels); a third of the tokens is unsupervised."""
    rng = np.random.default_rng(7)
    documents = []
    for _ in range(SAMPLES):
        ids = rng.integers(3, VOCAB, size=int(rng.integers(3, 31))).astype(np.int32)
        labels = np.concatenate([ids[1:], [IGNORE_INDEX]]).astype(np.int32)
        labels[: int(rng.integers(0, len(ids) - 1))] = IGNORE_INDEX
        documents.append((ids, labels))
    return documents


def units(documents_per_unit: int = 0) -> list[list[int]]:
    """Groups of sample numbers that must share a row: pairs of answers, or single samples."""
    size = max(documents_per_unit, 1)
    return [[*range(first, first + size)] for first in range(0, SAMPLES, size)]


def targets() -> np.ndarray:
    """Made-up targets of the samples, fp64: half are 1 and half are 0, also among the even-numbered samples.
    KTO reads 1 as a good answer. A reward model reads the targets of even-numbered samples as margins of pairs.
    """
    return ((np.arange(SAMPLES) + 1) // 2 % 2).astype(np.float64)


@cache
def answer_log_probs(number: int) -> np.ndarray:
    """Made-up log-probabilities of a sample's answer tokens, fp32 [3, tokens], near those of random weights. The rows
    are: under the weights that sampled the answer, as reported by the sampler, and under a reference model.
    """
    noise = np.random.default_rng([17, number]).normal(size=(3, len(parts_of(number)[1])))
    return (0.2 * noise - math.log(VOCAB)).astype(np.float32)


def answer_advantages() -> np.ndarray:
    """Made-up advantages for GRPO, fp64: one for each sample, which counts as a sampled answer."""
    return 2 * targets() - 1


def rows(packing: bool, documents_per_unit: int = 0) -> list[Row]:
    """Make rows of samples: each row has one unit (a sample, or a pair of answers), or with `packing` several units."""
    prepared = _prepared_rows(row_numbers(packing, documents_per_unit))
    return [prepared[number] for number in range(len(prepared))]


def _prepared_rows(bins: list[list[int]]) -> PreparedRows:
    documents = Documents.of(
        [
            TokenisedDocument(ids.tolist(), [False, *(labels[:-1] != IGNORE_INDEX).tolist()], target)
            for (ids, labels), target in zip(samples(), targets().tolist(), strict=True)
        ]
    )
    return PreparedRows(documents, np.concatenate(bins), np.cumsum([0, *map(len, bins)]), documents.counts)


def row_numbers(packing: bool, documents_per_unit: int = 0) -> list[list[int]]:
    """Numbers of the samples in each row that `rows` makes."""
    bins: list[list[int]] = []
    for unit in units(documents_per_unit):
        if not packing or not bins or sum(len(samples()[n][0]) for n in [*bins[-1], *unit]) > ROW_LEN:
            bins.append([])
        bins[-1] += unit
    return bins


def objective_of(section: object) -> Objective:
    """Objective for a section of the run file, or for the name of an objective with default settings."""
    return make_objective(TypeAdapter(ObjectiveField).validate_python(section))


def router_section(family: str) -> dict[str, float]:
    """Section `router` with every balancing method of a family, strong enough to change the choice of experts."""
    kind = FAMILIES[TINY_MODELS[family]["model_type"]].router
    assert kind is not None, family
    return {"balance": 0.5} | ({"bias_update": 0.03} if kind.bias else {})


def run_tree(cell: Cell, model: Path, out: Path, *, dp: int) -> dict[str, Any]:
    """Run file for the settings `cell` and data parallel size `dp`. Each optimizer step has all samples."""
    rows_per_rank = dp * cell.accumulation
    per_unit = objective_of(cell.objective).documents_per_unit
    size = -(-(PACKED_ROWS if cell.packing else len(units(per_unit))) // rows_per_rank)
    zero: dict[str, Any] = {"stage": cell.stage, "stage3_param_persistence_threshold": 40}
    if cell.stage == 3 and cell.optimizer == "Muon":
        zero["reduce_scatter"] = False
    if cell.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if cell.offload == "param":
        zero["offload_param"] = {"device": "cpu"}
    sampled: dict[str, Any] = {}
    if cell.objective == "grpo":
        rollout = {"prompts_per_step": size * rows_per_rank // 2, "max_new_tokens": ROW_LEN // 2}
        sampled = {"objective": {"name": "grpo", "group_size": 2}, "rollout": rollout, "rewards": ["exact_match"]}
    return {
        "model": str(model),
        "data": {"train": "none.jsonl", "packing": cell.packing, "shuffle": False},
        "deepspeed": {"zero_optimization": zero},
        "objective": cell.objective,
        "router": router_section(cell.family) if cell.balances else None,
        "lora": {"rank": 8, "alpha": 32} if cell.has_lora else None,
        "parallel": {
            "pp": cell.pp,
            "pp_layers": [int(layers) for layers in cell.pp_layers.split()],
            "vpp": cell.vpp,
            "sp": cell.sp,
            "tp": cell.tp,
            "ep": cell.ep,
        },
        "train": {
            "for": "1 steps",
            "global_batch_size": size * rows_per_rank,
            "micro_batch_size": size,
            "max_seq_len": -(-ROW_LEN // cell.sp) * cell.sp,
            "precision": cell.precision,
            "max_grad_norm": cell.max_grad_norm,
            "activation_checkpointing": cell.recomputation,
            "reduction_every": "step" if cell.reduces_once else "auto",
        },
        "optim": {"name": cell.optimizer, "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": cell.weight_decay},
        "output_dir": str(out),
        **sampled,
    }


_MEAN_RATIO = 4.0
"""The reference model's log-probability of a mismatched answer is set to that of uniformly random tokens minus this
number of nats. The tiny policy's is only 1 to 2 nats below that of random tokens, so KTO's z0, the mean log-ratio of
policy and reference model, is positive.
"""


@cache
def mismatched_answers(*, packing: bool) -> MismatchedAnswers:
    """Mismatched answers (a sample's prompt with another sample's answer), as the program itself makes them."""
    rows = _prepared_rows(row_numbers(packing))
    return MismatchedAnswers(rows, seed=0, max_seq_len=ROW_LEN, is_packed=packing)


@cache
def mismatched_samples() -> list[tuple[np.ndarray, np.ndarray]]:
    """For each sample, its prompt with the answer of another sample, as (ids, shifted labels)."""
    mismatched, answers = [], mismatched_answers(packing=False)
    for number in range(SAMPLES):
        prompt, answer = parts_of(number)[0], parts_of(answers.partner(number))[1]
        ids = np.concatenate([prompt, answer])
        labels = np.concatenate([ids[1:], [IGNORE_INDEX]]).astype(np.int32)
        labels[: len(prompt) - 1] = IGNORE_INDEX
        mismatched.append((ids, labels))
    return mismatched


def parts_of(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and answer of a sample as token ids."""
    ids, labels = samples()[number]
    first = 1 + int(np.flatnonzero(labels != IGNORE_INDEX)[0])
    return ids[:first], ids[first:]


@cache
def all_reference_log_probs() -> np.ndarray:
    """Made-up reference log-probabilities, fp64, near those of random weights: of samples, then of mismatched ones."""
    own, mismatched = (
        -math.log(VOCAB) * np.array([(labels != IGNORE_INDEX).sum() for _, labels in each])
        for each in (samples(), mismatched_samples())
    )
    noise, small_noise = (np.random.default_rng(seed).normal(size=SAMPLES) for seed in (13, 17))
    return np.concatenate([own + noise, mismatched - _MEAN_RATIO + small_noise / 10])
