"""Losses of one full forward, and those of sampled answers with their gradients, equal those of TRL 1.16, which is
installed in an environment of its own.
"""

import json
import os
import site
import subprocess
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ds_finetune.config.objectives import GrpoObjective, ObjectiveField
from ds_finetune.data.batches import BatchPlan, MicroBatch, Position, make_batch
from ds_finetune.data.prepared_rows import Row, RowDocuments
from ds_finetune.engine.rank_rows import host_rows
from ds_finetune.model.attention.by_document import BY_DOCUMENT
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import StepNumbers, TrainedModel, install_loss_head
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import DocumentObjective, LossAndSums, make_objective
from tests.model.tiny import CONFIGS
from tests.objectives.test_grpo import answers as grpo_answers
from tests.objectives.test_grpo import logps
from tests.objectives.test_grpo import ours as grpo_loss

TRL = "1.16.0"
VOCABULARY, PAIRS, MARKED = 96, 8, 8
SECONDS = 900
Ids = list[int]
SMOOTHED = {"label_smoothing": 0.1}
DPO = ("sigmoid", "hinge", "ipo", "apo_zero", "apo_down", "sigmoid_norm")
CASES: tuple[tuple[dict[str, Any], str, dict[str, Any]], ...] = (
    *(({"name": "dpo", "loss": loss}, "dpo", {"loss_type": [loss], "beta": 0.1}) for loss in DPO),
    ({"name": "dpo", "loss": "robust", **SMOOTHED}, "dpo", {"loss_type": ["robust"], "beta": 0.1, **SMOOTHED}),
    (
        {"name": "dpo", "beta": 0.3, "nll_weight": 0.2},
        "dpo",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2], "beta": 0.3},
    ),
    (
        {"name": "simpo", "beta": 2.5, "gamma": 1.0},
        "cpo",
        {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
    *(
        ({"name": "cpo", "loss": loss}, "cpo", {"loss_type": loss, "beta": 0.1, "cpo_alpha": 1.0})
        for loss in ("sigmoid", "hinge", "ipo")
    ),
    # TRL takes the cross entropy of the prompt too, so the odds ratio term alone is compared.
    ({"name": "orpo", "beta": 0.25}, "orpo", {"beta": 0.25}),
    (
        {"name": "kto", "beta": 0.2, "desirable_weight": 1.3},
        "kto",
        {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 1.0},
    ),
)  # fmt: skip
"""A section of the run file, the trainer of TRL and its keys."""


def _random_ids(rng: np.random.Generator, most: int) -> Ids:
    return [int(i) for i in rng.integers(3, VOCABULARY, size=int(rng.integers(2, most)))]


def _pairs() -> list[tuple[Ids, Ids, Ids]]:
    """Prompts with a chosen and a rejected answer."""
    rng = np.random.default_rng(11)
    return [(_random_ids(rng, 9), _random_ids(rng, 12), _random_ids(rng, 12)) for _ in range(PAIRS)]


def _marked() -> list[tuple[Ids, Ids, bool, Ids]]:
    """Prompts, answers, whether they are good, and the answer of the next example."""
    rng = np.random.default_rng(12)
    parts = [(_random_ids(rng, 9), _random_ids(rng, 12)) for _ in range(MARKED)]
    return [
        (prompt, answer, number % 3 != 0, parts[(number + 1) % MARKED][1])
        for number, (prompt, answer) in enumerate(parts)
    ]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with TRL and the packages of this one."""
    folder = tmp_path_factory.mktemp("trl")
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    install = [str(found), "-m", "pip", "install", "--quiet", "--no-deps", f"trl=={TRL}"]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode:
        pytest.skip(f"trl {TRL} cannot be installed: {done.stderr[-300:]}")
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    return found


@pytest.fixture(scope="module")
def losses_of_trl(python: Path, folder: Path) -> Sequence[float]:
    given = {
        "cases": [{"trainer": trainer, "keys": keys} for _, trainer, keys in CASES],
        "pairs": _pairs(),
        "marked": _marked(),
    }
    (folder / "cases.json").write_text(json.dumps(given))
    _run_worker(python, "trl_worker.py", folder)
    losses: Sequence[float] = json.loads((folder / "losses.json").read_text())
    return losses


def _run_worker(python: Path, name: str, folder: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = [str(python), str(Path(__file__).with_name(name)), str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models `policy` and `reference`."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        config = AutoConfig.for_model("llama", **CONFIGS["llama"])
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    return folder


def _row(texts: Sequence[tuple[Ids, Ids]], targets: Sequence[float]) -> Row:
    """One packed row of prompts with answers."""
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in texts])
    labels = [
        [IGNORE_INDEX] * (len(prompt) - 1) + answer + [IGNORE_INDEX] for prompt, answer in texts
    ]  # fmt: skip
    return Row(
        input_ids=np.array([i for prompt, answer in texts for i in (*prompt, *answer)], dtype=np.int32),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        labels=np.array([i for line in labels for i in line], dtype=np.int32),
        supervised=sum(len(answer) for _, answer in texts),
        documents=RowDocuments(lengths, np.arange(len(texts)), np.array(targets), lengths),
    )


def _batch(row: Row, documents_per_unit: int) -> tuple[MicroBatch, Mapping[str, int]]:
    length = len(row.input_ids) + 5
    plan = BatchPlan(
        global_batch_size=1,
        micro_batch_size=1,
        rank=0,
        dp=1,
        seed=0,
        shuffle=False,
        pad_token_id=0,
        row_len=length,
        documents_per_unit=documents_per_unit,
    )
    batch = make_batch([row], plan, Position(0, 0), (0,))
    return batch.micro[0], batch.counts


def _load(folder: Path) -> PreTrainedModel:
    lm: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lm.config._attn_implementation = BY_DOCUMENT
    return lm


class _Models:
    """The policy and its reference as the engine runs them, without DeepSpeed."""

    def __init__(self, folder: Path, objective: DocumentObjective) -> None:
        self._policy, self._reference = (TrainedModel(_load(folder / name)) for name in ("policy", "reference"))
        for model in (self._policy, self._reference):
            install_loss_head(model.lm, objective=objective)

    def log_ratios(self, micro: MicroBatch) -> torch.Tensor:
        return self._log_probs(self._policy, micro) - self._log_probs(self._reference, micro)

    def loss(self, micro: MicroBatch, numbers: StepNumbers) -> LossAndSums:
        examples = micro.examples
        assert examples is not None
        examples.reference.copy_(self._log_probs(self._reference, micro))
        out = self._policy(_rows(micro), numbers)
        assert isinstance(out, LossAndSums)
        return out

    def _log_probs(self, model: TrainedModel, micro: MicroBatch) -> torch.Tensor:
        with torch.no_grad():
            out = model(_rows(micro), wants_log_probs=True)
        assert isinstance(out, torch.Tensor)
        return out


def _rows(micro: MicroBatch) -> ForwardRows:
    return host_rows(micro, None)


def _loss(section: dict[str, Any], folder: Path) -> dict[str, float]:
    """Metrics of a section of the run file."""
    objective = make_objective(TypeAdapter(ObjectiveField).validate_python(section))
    assert isinstance(objective, DocumentObjective)
    models, z0 = _Models(folder, objective), 0.0
    if objective.needs_baseline:
        marked = _marked()
        row = _row(
            [(prompt, answer) for prompt, answer, _, _ in marked], [float(is_good) for _, _, is_good, _ in marked]
        )
        others, _ = _batch(_row([(prompt, other) for prompt, _, _, other in marked], [0.0] * MARKED), 1)
        z0 = objective.baseline(models.log_ratios(others).sum().item(), MARKED)
    else:
        row = _row(
            [text for prompt, *answers in _pairs() for text in ((prompt, a) for a in answers)], [0.0] * 2 * PAIRS
        )
    micro, counts = _batch(row, objective.documents_per_unit)
    weights = torch.tensor([term.weight / counts[term.unit] for term in objective.terms], dtype=torch.float64)
    out = models.loss(micro, StepNumbers(weights, torch.tensor(z0, dtype=torch.float64)))
    return objective.metrics(dict(zip(objective.sum_names, out.sums.tolist(), strict=True)), counts)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(map(str, keys.values())) for keys, _, _ in CASES])
def test_losses_equal_those_of_trl(number: int, folder: Path, losses_of_trl: Sequence[float]) -> None:
    section, trainer, _ = CASES[number]
    metrics = _loss(section, folder)
    loss = metrics["loss"] - (metrics["nll"] if trainer == "orpo" else 0.0)
    assert metrics.get("kl", 1.0) > 0, "z0 is not clamped"
    assert loss == pytest.approx(losses_of_trl[number], rel=2e-6)


GRPO: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {"loss_type": "dapo"}),
    ({"aggregation": "sequence", "dual_clip": 1.4}, {"loss_type": "grpo", "delta": 1.4}),
    ({"aggregation": "fixed", "fixed_length": 30}, {"loss_type": "dr_grpo", "max_completion_length": 30}),
    ({"ratio": "capped", "ratio_cap": 1.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    ({"kl_weight": 0.2}, {"loss_type": "dapo", "beta": 0.2}),
    (
        {"ratio": "sequence", "aggregation": "sequence", "clip_low": 0.03, "clip_high": 0.04},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    ),
    (
        {"ratio": "sequence", "clip_low": 0.03, "clip_high": 0.04},
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    ),
)
"""Keys of the section `grpo` and of TRL, where TRL's mean is that of the whole step."""


@pytest.fixture(scope="module")
def grpo_losses_of_trl(python: Path, folder: Path) -> Sequence[dict[str, Any]]:
    answers = [
        answer._asdict() | {"logp": logp.tolist()} for answer, logp in zip(grpo_answers(), logps(0.3), strict=True)
    ]
    (folder / "grpo_cases.json").write_text(json.dumps({"cases": [keys for _, keys in GRPO], "answers": answers}))
    _run_worker(python, "trl_grpo_worker.py", folder)
    losses: Sequence[dict[str, Any]] = json.loads((folder / "grpo_losses.json").read_text())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(GRPO)), ids=["-".join(map(str, keys.values())) for _, keys in GRPO])
def test_losses_of_sampled_answers_equal_those_of_trl(
    number: int, grpo_losses_of_trl: Sequence[dict[str, Any]]
) -> None:
    given, logp, wanted = grpo_answers(), logps(0.3), grpo_losses_of_trl[number]
    loss = grpo_loss(GrpoObjective(name="grpo", **GRPO[number][0]), given, logp).loss
    loss.backward()
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-12)
    for each, gradient in zip(logp, wanted["gradients"], strict=True):
        assert each.grad is not None
        assert each.grad.tolist() == pytest.approx(gradient, rel=1e-10, abs=1e-15)
