"""How much ranks wait for the one with the costliest rows: in the order of rows, and divided by cost.

    torchrun --nproc-per-node 2 bench/balance.py --model MODEL --rows gsm8k/train.jsonl --tokenizer TOKENIZER

Two kinds of documents: the rows of a file (`question` and `answer`, of which the answer is supervised), and a long tail
(log-normal lengths of median 400 tokens and sigma 1.2, half of each document supervised). Both are packed. Without
`--rows` there is the long tail alone.

The first table is arithmetic: FLOPs of each rank's rows over the steps of an epoch, of a model with the config.json of
MODEL, as the mean over steps of (slowest rank / mean rank) - 1. `step` counts ranks that meet at the end of a step
(ZeRO-0 and 1), `forward` such that meet in each forward (ZeRO-2 and 3, experts of other ranks). The last column is what
no division of whole rows can go below: with equally many rows on each rank, one has the costliest row beside the
cheapest ones, and the n-th forward of all ranks takes as long as the costliest row in it.

The second is measured on two ranks: the CPU seconds of each rank's thread in the steps of a small DeepSeek-V3, with the
same rows in order and divided, by turns. Waiting in a collective takes no CPU time.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.small_v3 import SMALL_V3
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import Batch, BatchPlan, divide_rows, training_batches
from ds_finetune.data.documents import Documents, TokenisedDocument
from ds_finetune.data.prepared_rows import PreparedRows, pack
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_scalar
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.model.build.meta_model import described
from ds_finetune.model.build.skeleton import read_hf_config
from ds_finetune.plan.model_shape import RowCost
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import plan_model

Lengths = list[tuple[int, int]]
"""Tokens of each document, and the supervised ones at its end."""
ROUNDS, STEPS, MEASURED_LEN = 3, 2, 2048
LEAST_STEPS = 3
"""An epoch of fewer steps says little about a step."""


def main() -> None:
    """Print the tables on rank zero."""
    given = _arguments()
    world = World.from_environment(os.environ)
    kinds = {"long tail": _long_tail()}
    if given.rows is not None:
        kinds["file"] = _file_lengths(given.rows, given.tokenizer)
    if world.rank == 0:
        _print_arithmetic(kinds, described(read_hf_config(given.model)))
    with process_group(world, choose_device()):
        for name, documents in kinds.items():
            _measure(name, documents, world)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="JSON lines with `question` and `answer`")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json")
    parser.add_argument("--model", type=Path, required=True, help="folder with the config.json of the arithmetic")
    return parser.parse_args()


def _file_lengths(file: Path, tokenizer: Path) -> Lengths:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    reader = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    questions, answers = (
        [len(found.ids) for found in reader.encode_batch([row[key] for row in rows])] for key in ("question", "answer")
    )
    return [(question + answer, answer) for question, answer in zip(questions, answers, strict=True)]


def _long_tail(number: int = 16000) -> Lengths:
    lengths = np.random.default_rng(0).lognormal(np.log(400), 1.2, size=number).astype(int).clip(8, 32768)
    return [(length, length // 2) for length in lengths.tolist()]


def _rows(documents: Lengths, row_len: int) -> PreparedRows:
    """The documents, cut to `row_len` and packed; all tokens are 3."""
    cut = [(min(length, row_len), min(supervised, row_len - 1)) for length, supervised in documents]
    kept = Documents.of(
        [
            TokenisedDocument([3] * length, [False] * (length - supervised) + [True] * supervised)
            for length, supervised in cut
        ]
    )
    bins = pack(np.diff(kept.offsets), row_len)
    return PreparedRows(kept, np.concatenate(bins), np.concatenate([[0], np.cumsum([*map(len, bins)])]), kept.counts)


class Division(NamedTuple):
    """Ranks, the forwards of a step on each, with one row each, and whether ranks wait for each other in every one."""

    dp: int
    forwards: int
    meets_each_forward: bool


def _print_arithmetic(kinds: dict[str, Lengths], model: DescribedModel) -> None:
    _say("| documents | tokens of a row | ranks | rows of a rank | meet each | in order | divided | least |")
    _say("| --- | --- | --- | --- | --- | --- | --- | --- |")
    cost = RowCost.of(model, "full")
    for (name, documents), row_len in itertools.product(kinds.items(), (2048, 8192, 32768)):
        rows = _rows(documents, row_len)
        costs = np.array([cost.of_row(*rows.sizes(number), row_len=row_len) for number in range(len(rows))])
        costs = costs[np.random.default_rng(1).permutation(len(costs))]
        for dp, forwards, meets in itertools.product((2, 8, 32), (4, 8), (False, True)):
            division = Division(dp, forwards, meets)
            if len(costs) >= LEAST_STEPS * dp * forwards:
                before, after = (_waiting(costs, division, divide) for divide in (_in_order, _divided))
                when, least = "forward" if meets else "step", _least_waiting(costs, division)
                _say(f"| {name} | {row_len} | {dp} | {forwards} | {when} | {before:.2%} | {after:.2%} | {least:.2%} |")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _in_order(costs: NDArray[np.float64], division: Division) -> list[list[int]]:
    shares: list[list[int]] = np.arange(len(costs)).reshape(division.dp, -1).tolist()
    return shares


def _divided(costs: NDArray[np.float64], division: Division) -> list[list[int]]:
    return divide_rows(costs, division.dp, division.forwards, meets_each_forward=division.meets_each_forward)


def _waiting(
    costs: NDArray[np.float64], division: Division, divide: Callable[[NDArray[np.float64], Division], list[list[int]]]
) -> float:
    found = []
    for of_step in _steps(costs, division):
        sums = np.array([of_step[share] for share in divide(of_step, division)])
        slowest = sums.max(0).sum() if division.meets_each_forward else sums.sum(1).max()
        found.append(slowest / sums.sum(1).mean() - 1)
    return statistics.fmean(found)


def _least_waiting(costs: NDArray[np.float64], division: Division) -> float:
    """A lower bound of the waiting with a row in each forward."""
    found = []
    for of_step in _steps(costs, division):
        descending = np.sort(of_step)[::-1]
        slowest = (
            descending[:: division.dp].sum()
            if division.meets_each_forward
            else descending[0] + descending[len(descending) - division.forwards + 1 :].sum()
        )
        found.append(max(slowest / (of_step.sum() / division.dp) - 1, 0.0))
    return statistics.fmean(found)


def _steps(costs: NDArray[np.float64], division: Division) -> list[NDArray[np.float64]]:
    size = division.dp * division.forwards
    return [costs[first : first + size] for first in range(0, len(costs) - size + 1, size)]


def _measure(name: str, documents: Lengths, world: World) -> None:
    rows = _rows(documents, MEASURED_LEN)
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("deepseek_v3", **SMALL_V3).save_pretrained(folder)
        config = _config(folder)
        plan = make_plan(RunSettings.of(config), world=world, device=choose_device())
        cost = RowCost.of(described(read_hf_config(folder)), "none")
        in_order = BatchPlan(8, 1, world.rank, world.world_size, 0, shuffle=True, pad_token_id=0, row_len=MEASURED_LEN)
        divided = replace(in_order, row_cost=lambda number: cost.of_row(*rows.sizes(number), row_len=MEASURED_LEN))
        with start_engine(plan, plan_model(read_hf_config(folder), RunSettings.of(config))) as engine:
            found: dict[str, list[float]] = {"in order": [], "divided": []}
            _step(engine, next(_batches(rows, in_order)))
            for _, (order, shares) in itertools.product(range(ROUNDS), zip(found, (in_order, divided), strict=True)):
                for batch in _batches(rows, shares):
                    seconds = all_gather_scalar(_step(engine, batch))
                    found[order].append(max(seconds) / statistics.fmean(seconds) - 1)
    if world.rank == 0:
        for order, waited in found.items():
            _say(f"measured, {name}, {order}: the mean rank waits {statistics.fmean(waited):.2%} of its own time")


def _config(folder: str) -> RunConfig:
    train = {"for": "1 steps", "global_batch_size": 8, "micro_batch_size": 1, "max_seq_len": MEASURED_LEN}
    train |= {"precision": "fp32", "activation_checkpointing": "none"}
    return RunConfig.model_validate(
        {
            "model": {"path": folder, "weights": "random"},
            "data": {"train": "none.jsonl"},
            "train": train,
            "deepspeed": {"zero_optimization": {"stage": 1}},
            "output_dir": folder,
        }
    )


def _batches(rows: PreparedRows, plan: BatchPlan) -> Iterator[Batch]:
    return training_batches(rows, plan, start_step=0, total_rows=STEPS * plan.global_batch_size)


def _step(engine: Engine, batch: Batch) -> float:
    """CPU seconds of this rank's thread in a step."""
    began = time.thread_time()
    engine.step(batch, lr=1e-4)
    return time.thread_time() - began


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
