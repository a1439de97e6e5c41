"""Objectives on scores of documents: the cells, the examples, and a plain loop over them."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from ds_finetune.config.sections import LoraConfig
from ds_finetune.data.prepared_rows import Row, RowDocuments
from ds_finetune.families.configs import VOCAB
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.reference.selftest.reference_loop import adamw
from tests.lora_twin import adapted, lora_tree
from tests.parity.four_bit import TWIN, WIDE

STEPS = 2
NUMBER = 7
"""Examples, or pairs, of a step: no number of ranks but one divides it."""
GLOBAL_BATCH = 12
OBJECTIVES: dict[str, dict[str, Any]] = {
    "classes": {"name": "classification", "num_labels": 3, "label_smoothing": 0.1},
    "regression": {"name": "classification", "num_labels": 1},
    "reward": {"name": "reward", "center_weight": 0.1},
}
OUTPUTS = {"classes": 3, "regression": 1, "reward": 1}


@dataclass(frozen=True)
class ScoreCell:
    """Settings under which the same step is taken."""

    objective: str
    family: str
    stage: int
    accumulation: int
    packing: bool
    axis: str = ""
    has_lora: bool = False
    quantize: str = ""
    """How the weights under the adapters are held: `nf4`, or as they are."""
    vpp: int = 1

    @property
    def folder(self) -> str:
        """The folder of the base model."""
        return WIDE if self.quantize else self.family

    @property
    def twin(self) -> str:
        """The folder of a base model with the same weights that plain transformers can train adapters on."""
        return TWIN if self.quantize else self.family

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        parts = [self.objective, self.family, f"zero{self.stage}", f"acc{self.accumulation}", self.axis]
        parts += [f"vpp{self.vpp}"] if self.vpp > 1 else []
        return "-".join([*parts, "packed" * self.packing, "lora" * self.has_lora, self.quantize])

    @property
    def sharing(self) -> int:
        """Ranks that process the same rows."""
        return 2 ** len(set(self.axes) - {"ep"})

    @property
    def axes(self) -> list[str]:
        """The sizes of 2."""
        return self.axis.split("+") if self.axis else []

    def tree(self, folder: Path, out: Path, *, ranks: int) -> dict[str, Any]:
        """The run file on so many ranks."""
        dp = ranks // self.sharing
        sizes = dict.fromkeys(self.axes, 2) | {"vpp": self.vpp}
        cell = Cell(self.family, self.stage, self.accumulation, self.packing, checkpointing=self.packing, **sizes)
        tree = run_tree(cell, folder, out, dp=dp)
        tree["train"] |= {
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": GLOBAL_BATCH // (dp * self.accumulation),
        }
        quantize = {"quantize": self.quantize} if self.quantize else {}
        lora = {"lora": lora_tree(self.family) | quantize} if self.has_lora else {}
        return tree | {"objective": OBJECTIVES[self.objective]} | lora


def examples(objective: str) -> list[tuple[list[np.ndarray], list[float]]]:
    """Units: the documents of each, of 2 to 17 tokens, with their targets."""
    rng = np.random.default_rng(5)
    made = []
    for _ in range(NUMBER):
        documents = [rng.integers(3, VOCAB, size=int(rng.integers(2, 18))) for _ in range(1 + (objective == "reward"))]
        target = {"classes": float(rng.integers(3)), "regression": float(rng.normal()), "reward": 0.25}[objective]
        made.append((documents, [target, 0.0][: len(documents)]))
    return made


def rows(objective: str, *, packing: bool) -> list[Row]:
    """One unit in each row, or with `packing` some."""
    units = examples(objective)
    sizes = (1, 3, 1, 2) if packing and objective != "reward" else (1, 1, 2, 1, 1, 1) if packing else (1,) * NUMBER
    made, done = [], 0
    for size in sizes:
        some = units[done : done + size]
        documents, targets = [ids for each, _ in some for ids in each], [one for _, each in some for one in each]
        made.append(_row(documents, targets, first=done * len(units[0][0])))
        done += size
    return made


def _row(documents: list[np.ndarray], targets: list[float], *, first: int) -> Row:
    lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
    ids = np.concatenate(documents).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    parts = RowDocuments(lengths, first + np.arange(len(documents)), np.array(targets, dtype=np.float64), lengths)
    return Row(ids, positions, np.full(len(ids), IGNORE_INDEX, dtype=np.int32), 0, parts)


@cache
def plain_steps(
    folder: Path, objective: str, has_lora: bool, score: tuple[tuple[float, ...], ...], *, family: str
) -> dict[str, Any]:
    """Losses, scores, and the gradients of the first step, of a plain loop that begins with the head `score`."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, num_labels=OUTPUTS[objective]
    )
    if has_lora:
        adapted(model, LoraConfig.model_validate(lora_tree(family)), trained=False)
        model.score.requires_grad_(True)
    model.score.weight.data.copy_(torch.tensor(score))
    optimizer = adamw(model)
    found: dict[str, Any] = {"losses": [], "norms": [], "scores": [], "gradients": {}}
    for _ in range(STEPS):
        scores, losses = zip(*(_unit(model, objective, *unit) for unit in examples(objective)), strict=True)
        loss = torch.stack(losses).mean()
        loss.backward()
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        found["gradients"] = found["gradients"] or {name: param.grad.clone() for name, param in trained.items()}
        found["norms"].append(float(nn.utils.clip_grad_norm_(trained.values(), math.inf)))
        found["losses"].append(loss.item())
        found["scores"].append(torch.cat(scores).detach())
        optimizer.step()
        optimizer.zero_grad()
    return found


def _unit(
    model: PreTrainedModel, objective: str, documents: list[np.ndarray], targets: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [documents, outputs] and loss of one unit, whose documents are not padded."""
    scores = torch.stack([_score(model, ids) for ids in documents])
    if objective == "classes":
        logp = functional.log_softmax(scores[0], dim=0)
        return scores, -0.9 * logp[int(targets[0])] - 0.1 * logp.mean()
    if objective == "regression":
        return scores, (scores[0, 0] - targets[0]) ** 2
    chosen, rejected = scores[:, 0]
    return scores, torch.log1p(torch.exp(-(chosen - rejected - targets[0]))) + 0.1 * (chosen + rejected) ** 2


def _score(model: Any, ids: np.ndarray) -> torch.Tensor:
    hidden = model.model(input_ids=torch.from_numpy(ids)[None], use_cache=False).last_hidden_state
    return model.score(hidden[0, -1])  # type: ignore[no-any-return]


def save_base(family_config: Any, folder: Path) -> None:
    """A tiny causal LM, to which a head is added."""
    torch.manual_seed(11)
    AutoModelForCausalLM.from_config(family_config).float().save_pretrained(folder)
