"""Distillations: their cells, the tiny models and stored scores, and the plain loop that they are compared with."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.config.sections import LoraConfig
from ds_finetune.data.prepared_rows import Row, RowDocuments
from ds_finetune.data.teacher_scores import DocumentScores, ScoreIdentity, StoredScores, write_manifest, write_shard
from ds_finetune.families.configs import VOCAB
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell, hf_config, rows, samples
from ds_finetune.reference.selftest.reference_loop import Steps, adamw
from tests.lora_twin import adapted, in_peft, lora_tree, write_adapter_of

STEPS = 3
TOP_K = 5
TEACHER = {"hidden_size": 48, "intermediate_size": 64, "tie_word_embeddings": True, "initializer_range": 0.3}
"""Wider than the models that are trained, with a tied head, and sure of itself."""
IDENTITY = ScoreIdentity("rows", "tokenizer", VOCAB, "teacher", "fp32", TOP_K, 24)


@dataclass(frozen=True)
class Distilled:
    """A cell whose targets are of a `live` teacher, of an `offloaded` one, or `stored`."""

    cell: Cell
    source: str
    temperature: float = 1.0
    label_weight: float = 0.0
    has_adapters: bool = False

    @property
    def name(self) -> str:
        """A name for files and test ids: what is not as usual."""
        usual = asdict(Cell("", 0, 1, False)) | {"family": "", "stage": ""}
        settings = [f"{key}={value}" for key, value in asdict(self.cell).items() if value != usual[key]]
        adapters = ["lora"] if self.has_adapters else []
        return "-".join([*settings, self.source, str(self.temperature), str(self.label_weight), *adapters])

    def sections(self, folder: Path) -> dict[str, Any]:
        """The objective and adapters of its run file, with the models and scores of `folder`."""
        adapters = {"lora": lora_tree(self.cell.family)} if self.has_adapters else {}
        return {"objective": self._objective(folder), **adapters}

    def _objective(self, folder: Path) -> dict[str, Any]:
        numbers = {"name": "distill", "temperature": self.temperature, "label_weight": self.label_weight}
        if self.source == "stored":
            return numbers | {"scores": str(folder / "scores")}
        offload = "cpu" if self.source == "offloaded" else "none"
        return numbers | {"teacher": str(folder / "teacher"), "teacher_offload": offload}


def of_tree(tree: dict[str, Any]) -> Distilled:
    """The cell of `asdict`."""
    return Distilled(**{**tree, "cell": Cell(**tree["cell"])})


def write_models(folder: Path, families: tuple[str, ...]) -> None:
    """Models of each family, a teacher, and the scores of that teacher on the samples."""
    for family in families:
        torch.manual_seed(11)
        AutoModelForCausalLM.from_config(hf_config(family)).float().save_pretrained(folder / family)
    torch.manual_seed(5)
    config = AutoConfig.for_model(**(TINY_MODELS["llama"] | TEACHER))
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / "teacher")
    scores = list(_scores(folder / "teacher"))
    for number, first in enumerate(range(0, len(scores), IDENTITY.shard_documents)):
        write_shard(folder / "scores", number, scores[first : first + IDENTITY.shard_documents], IDENTITY)
    write_manifest(folder / "scores", IDENTITY, number + 1, {})


def _scores(folder: Path) -> Iterator[DocumentScores]:
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for ids, labels in samples():
        log_probs = _teacher_log_probs(teacher, ids, labels, 1.0)
        top, best = log_probs.topk(TOP_K, dim=-1)
        others = (1 - top.exp().sum(-1, keepdim=True)).log()
        yield DocumentScores(best.int().numpy(), torch.cat([top, others], dim=-1).half().numpy())


def _teacher_log_probs(teacher: nn.Module, ids: np.ndarray, labels: np.ndarray, temperature: float) -> torch.Tensor:
    """Of the supervised tokens, fp64 [tokens, vocabulary]."""
    with torch.no_grad():
        logits = teacher(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0].double()
    return torch.log_softmax(logits[torch.from_numpy(labels != IGNORE_INDEX)] / temperature, dim=-1)


def numbered_rows(packing: bool) -> list[Row]:
    """The rows of the samples, which know their documents."""
    first, made = 0, []
    for row in rows(packing):
        lengths = np.diff(np.flatnonzero(row.position_ids == 0), append=len(row.position_ids))
        numbers = np.arange(first, first + len(lengths))
        made.append(replace(row, documents=RowDocuments(lengths, numbers, np.zeros(len(lengths)), lengths)))
        first += len(lengths)
    return made


def plain_distillation(folder: Path, distilled: Distilled) -> dict[str, Any]:
    """Three steps of a plain loop, one unpadded sample a forward, with the models of transformers."""
    model = (
        _adapted(folder / distilled.cell.family) if distilled.has_adapters else _plain(folder / distilled.cell.family)
    )
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32).eval()
    scores = StoredScores.open(folder / "scores") if distilled.source == "stored" else None
    supervised = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in samples())
    optimizer, results, first = adamw(model), Steps(), {}
    for _ in range(STEPS):
        sums = torch.zeros(3, dtype=torch.float64)
        for number, (ids, labels) in enumerate(samples()):
            wanted = _teacher_log_probs(teacher, ids, labels, distilled.temperature)
            logits = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0].double()
            parts = _parts(logits, labels, wanted, distilled.temperature, None if scores is None else scores[number])
            weights = (1 - distilled.label_weight) * distilled.temperature**2, distilled.label_weight
            loss = weights[0] * parts[0] + weights[1] * parts[1]
            (loss / supervised).backward()
            sums += torch.stack([loss, *parts]).detach()
        results.losses.append(sums[0].item() / supervised)
        results.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if len(results.losses) == 1:
            metrics = {"divergence": sums[1].item() / supervised, "label_loss": sums[2].item() / supervised}
        optimizer.step()
        optimizer.zero_grad()
    return asdict(results) | {"gradients": first, "metrics": metrics}


def _plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _adapted(folder: Path) -> Any:
    """The model with the adapters that a run begins with, in peft."""
    lora = LoraConfig.model_validate(lora_tree(folder.name))
    adapter = folder.with_name(f"{folder.name}-adapter")
    write_adapter_of(adapted(_plain(folder), lora, trained=False), lora, adapter, base=folder)
    return in_peft(_plain(folder), adapter, trainable=True)


def _parts(
    logits: torch.Tensor, labels: np.ndarray, wanted: torch.Tensor, temperature: float, scores: DocumentScores | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed divergence and cross entropy of a sample."""
    targets = torch.from_numpy(labels).long()
    logits, targets = logits[targets != IGNORE_INDEX], targets[targets != IGNORE_INDEX]
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    if scores is not None:
        wanted = torch.log_softmax(torch.from_numpy(np.array(scores.log_probs)).double(), dim=-1)
        top = log_probs.gather(1, torch.from_numpy(np.array(scores.ids)).long())
        log_probs = torch.cat([top, (1 - top.exp().sum(-1, keepdim=True)).log()], dim=-1)
    divergence = (wanted.exp() * (wanted - log_probs)).sum()
    return divergence, functional.cross_entropy(logits, targets, reduction="sum")


def data_parallel(families: tuple[str, ...]) -> list[Distilled]:
    """Every ZeRO stage, source of targets, cut of the batch and mix."""
    mixes = ((1.0, 0.0), (2.0, 0.3))
    return [
        Distilled(Cell(family, stage, accumulation, packing), source, temperature, weight)
        for family, stage, accumulation, packing, source, (temperature, weight) in itertools.product(
            families, (0, 1, 2, 3), (1, 4), (False, True), ("live", "offloaded", "stored"), mixes
        )
        if source != "stored" or temperature == 1
    ] + [
        Distilled(Cell(families[0], stage, 1, packing), "stored", 1.0, 0.3)
        for stage, packing in itertools.product((0, 3), (False, True))
    ]
