"""Started by the tests as `torchrun --nproc-per-node N encoder_worker.py MODELS_DIR OUT_DIR CELLS.json`: some optimizer
steps of encoders on labelled texts, in each cell.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ds_finetune.data.batches import Batch, BatchPlan, eval_batches, training_batches
from ds_finetune.data.prepared_rows import Row, RowDocuments
from ds_finetune.engine.engine import Engine
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.plan.plan import Plan
from ds_finetune.reference.selftest.compare import batch_plan, first_moments
from tests.parity.serving import Launched, serve

STEPS, LR, BETAS = 3, 1e-3, (0.9, 0.95)
ROW_LEN, LABELS, TEXTS = 36, 3, 14
"""Fourteen texts are no multiple of three ranks, nor of their micro-batches."""


@dataclass(frozen=True)
class EncoderCell:
    """The settings of one way to take the optimizer steps."""

    model: str
    stage: int
    accumulation: int
    packing: bool
    checkpointing: bool = False

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        return "-".join(f"{key}={value}" for key, value in asdict(self).items())


@dataclass(frozen=True)
class Text:
    """Token ids of a pair of texts, the first token of the second one, and the class."""

    ids: np.ndarray
    second: int
    target: int


def texts() -> list[Text]:
    """Texts of 2 to 30 tokens."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(2, 31, size=TEXTS)
    return [
        Text(rng.integers(5, 90, size=length).astype(np.int32), int(rng.integers(1, length)), int(rng.integers(LABELS)))
        for length in lengths
    ]


def rows(*, packing: bool) -> list[Row]:
    """One text a row, or as many of the next ones as fit."""
    bins: list[list[int]] = []
    for number, text in enumerate(texts()):
        used = sum(len(texts()[other].ids) for other in bins[-1]) if bins else ROW_LEN
        if not packing or used + len(text.ids) > ROW_LEN:
            bins.append([])
        bins[-1].append(number)
    return [_row(numbers) for numbers in bins]


def _row(numbers: list[int]) -> Row:
    some = [texts()[number] for number in numbers]
    ids = np.concatenate([text.ids for text in some])
    documents = RowDocuments(
        lengths=np.array([len(text.ids) for text in some], dtype=np.int64),
        numbers=np.array(numbers, dtype=np.int64),
        targets=np.array([text.target for text in some], dtype=np.float64),
        second=np.array([text.second for text in some], dtype=np.int64),
    )
    positions = np.concatenate([np.arange(len(text.ids)) for text in some]).astype(np.int32)
    return Row(ids, positions, np.full(len(ids), IGNORE_INDEX, dtype=np.int32), 0, documents)


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """Losses, norms, gradients of the first step, and scores of the texts after the last step."""
    cell, ranks = EncoderCell(**tree), launched.world.world_size
    every, share = rows(packing=cell.packing), ranks * cell.accumulation
    size = -(-len(every) // share)
    run_file = {
        "model": str(launched.models / cell.model),
        "objective": {"name": "classification", "num_labels": LABELS},
        "data": {"train": "none.jsonl", "packing": cell.packing, "shuffle": False},
        "deepspeed": {"zero_optimization": {"stage": cell.stage, "stage3_param_persistence_threshold": 40}},
        "train": {
            "for": "1 steps",
            "global_batch_size": size * share,
            "micro_batch_size": size,
            "max_seq_len": ROW_LEN,
            "precision": "fp32",
            "max_grad_norm": 0.0,
            "activation_checkpointing": "full" if cell.checkpointing else "none",
        },
        "optim": {"name": "AdamW", "lr": LR, "betas": list(BETAS), "weight_decay": 0.0},
        "output_dir": str(launched.out),
    }
    with launched.engine(run_file) as engine:
        return f"{cell.name}-world={ranks}", _take_steps(engine, engine.plan, every)


def _take_steps(engine: Engine, plan: Plan, every: list[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        result = engine.step(_batch(every, plan), lr=LR)
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
        if step == 0:
            found["gradients"] = {name: moment / (1 - BETAS[0]) for name, moment in first_moments(engine).items()}
    scores = engine.evaluate(eval_batches(every, _batch_plan(plan)))
    assert scores is not None
    return found | {"metrics": dict(scores.metrics)}


def _batch(every: list[Row], plan: Plan) -> Batch:
    return next(iter(training_batches(every, _batch_plan(plan), start_step=0, total_rows=len(every))))


def _batch_plan(plan: Plan) -> BatchPlan:
    row_len = ROW_LEN if plan.data.packing else None
    return replace(batch_plan(plan), pad_token_id=1, row_len=row_len, documents_per_unit=1, separates_padding=True)


if __name__ == "__main__":
    serve(run)
