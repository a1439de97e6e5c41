"""The order of layouts by their predicted and by their measured step time, on two CPU cores:
`python bench/layout_order.py [--rounds 5] [--hidden 256]`.

One small DeepSeek-V3 (4 layers, 8 experts, random weights, fp32), 8 rows of 512 tokens a step, in twelve layouts on one
rank and on two: ZeRO stages, sizes of micro-batches, recomputation, tensor, pipeline, sequence and expert parallelism,
and an optimizer in host memory. A rank has one thread. All ranks of all layouts are forks of this process; layouts
take a step by turns, of which the first two are not counted. Printed are the medians of wall time, the predicted
seconds and their parts, and Spearman's rank correlation. The rates of the machine are measured in the same rounds. The
exit code is 1 where the correlation is below 0.8.

Beside them runs what `plan --search` chooses for two ranks from rates measured before, among all layouts that it knows;
the last line compares it with the best of the measured ones.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import yaml

from ds_finetune.cli.demo import MODEL, write_tokenizer
from ds_finetune.cli.plan import run_file_text
from ds_finetune.config.schema import read_config
from ds_finetune.plan.estimate.accelerators import CpuRates, cpu_machine
from ds_finetune.plan.estimate.operations import RowShape
from ds_finetune.plan.estimate.step_time import TimeEstimate, estimate_time
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.search.machines import Request, target_of
from ds_finetune.plan.search.search_run import layout_text, search_layouts
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.bench.cpu_rates import measure_ranks
from ds_finetune.system.world import World

ROWS, TOKENS, LIMIT = 8, 512, 0.8
LAYERS = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYERS |= {"q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64}
LAYERS |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "vocab_size": 8192}
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "1 rank": {},
    "1 rank, micro-batch 1": {"micro": 1},
    "1 rank, recomputation": {"recomputes": True},
    "1 rank, optimizer in host memory": {"stage": 2, "offloads": True},
    "2 ranks, ZeRO-1": {"ranks": 2, "micro": 4},
    "2 ranks, ZeRO-2, micro-batch 1": {"ranks": 2, "stage": 2, "micro": 1},
    "2 ranks, ZeRO-3, micro-batch 1": {"ranks": 2, "stage": 3, "micro": 1},
    "2 ranks, ZeRO-3, recomputation": {"ranks": 2, "stage": 3, "micro": 4, "recomputes": True},
    "2 ranks, tp 2": {"ranks": 2, "parallel": {"tp": 2}},
    "2 ranks, pp 2, micro-batch 2": {"ranks": 2, "micro": 2, "parallel": {"pp": 2}},
    "2 ranks, sp 2": {"ranks": 2, "parallel": {"sp": 2}},
    "2 ranks, ep 2": {"ranks": 2, "micro": 4, "parallel": {"ep": 2}},
}

CHOSEN = "2 ranks, the search's choice"
"""Not among those whose order is compared, because it is chosen by the same estimate."""


def main() -> None:
    """Start the ranks of every layout, let layouts take steps by turns, and compare the orders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {layout: write_run(folder, layout, arguments.hidden) for layout in LAYOUTS}
        runs[CHOSEN] = write_chosen(folder, runs["1 rank"])
        seconds, rates = measure(runs, folder, arguments.rounds)
        sys.stdout.write(
            f"{json.dumps([seconds, [{ranks: asdict(each[ranks]) for ranks in each} for each in rates]])}\n"
        )
        predicted = {layout: predict(runs[layout], layout, rates) for layout in runs}
    report(seconds, predicted, rates)


def ranks_of(layout: str) -> int:
    """Ranks of a layout."""
    return 2 if layout == CHOSEN else int(LAYOUTS[layout].get("ranks", 1))


def write_chosen(folder: Path, run_file: Path) -> Path:
    """The run file with the layout that the search finds best for two ranks, with a thread each; all are printed."""
    config, target = read_config(run_file), target_of(Request("cpu", gpus=2), precision="fp32")
    machine = cpu_machine(measured_rates()[2], ranks=2, memory_bytes=psutil.virtual_memory().total)
    target = replace(target, machine=machine)
    result = search_layouts(RunSettings.of(config), target)
    for found in result.proposals:
        sys.stdout.write(f"searched: {found.time.seconds:.3f} s {layout_text(found.candidate)}\n")
    file = folder / "chosen.yaml"
    file.write_text(run_file_text(run_file, config, result, target, overrides=()))
    return file


def measured_rates() -> dict[int, CpuRates]:
    """The rates of one rank and of two, with a thread each."""
    return {ranks: measure_ranks(ranks, precision="fp32", threads=1) for ranks in (1, 2)}


def write_run(folder: Path, layout: str, hidden: int) -> Path:
    """The run file of a layout, beside the model and rows of all."""
    made = LAYOUTS[layout]
    if not (folder / "model").exists():
        (folder / "model").mkdir()
        write_tokenizer(folder / "model")
        widths = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "moe_intermediate_size": hidden}
        (folder / "model" / "config.json").write_text(json.dumps(MODEL | LAYERS | widths))
        draw = random.Random(7)
        with (folder / "rows.jsonl").open("w") as lines:
            for _ in range(ROWS * 40):
                text = "".join(draw.choice("abcdefgh ") for _ in range(TOKENS - 12))
                lines.write(json.dumps({"prompt": "go", "completion": text}) + "\n")
    zero: dict[str, Any] = {"stage": made.get("stage", 1)}
    zero |= {"offload_optimizer": {"device": "cpu"}} if made.get("offloads") else {}
    run = {
        "model": {"path": str(folder / "model"), "weights": "random"},
        "data": {"train": str(folder / "rows.jsonl"), "packing": True, "cache_dir": str(folder / "cache")},
        "deepspeed": {"zero_optimization": zero},
        "parallel": made.get("parallel", {}),
        "train": {
            "for": "30 steps",
            "global_batch_size": ROWS,
            "micro_batch_size": made.get("micro", ROWS),
            "max_seq_len": TOKENS,
            "precision": "fp32",
            "activation_checkpointing": "full" if made.get("recomputes") else "none",
        },
        "output_dir": str(folder / "run"),
    }
    file = folder / f"{list(LAYOUTS).index(layout)}.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


def measure(
    runs: Mapping[str, Path], folder: Path, rounds: int
) -> tuple[dict[str, list[float]], list[dict[int, CpuRates]]]:
    """Wall seconds of the counted steps of each layout, and the machine's rates in the same rounds."""
    # Imported once, before anything is forked.
    import torch

    import ds_finetune.engine.start_engine
    import ds_finetune.trainer.prepare  # noqa: F401

    torch.set_num_threads(1)
    started = multiprocessing.get_context("fork")
    pipes: dict[str, list[Connection]] = {}
    processes = []
    for number, (layout, file) in enumerate(runs.items()):
        ranks = ranks_of(layout)
        pipes[layout] = []
        for rank in range(ranks):
            ours, theirs = started.Pipe()
            world = World(rank, ranks, rank, ranks, "bench", master_port=29_700 + number)
            processes.append(started.Process(target=serve_steps, args=(file, world, theirs, folder)))
            processes[-1].start()
            pipes[layout].append(ours)
        # One layout at a time, so that rows are prepared once.
        answer(pipes[layout])
        sys.stdout.write(f"started {layout}\n")
        sys.stdout.flush()
    seconds: dict[str, list[float]] = {layout: [] for layout in runs}
    rates = []
    for turn in range(rounds + 2):
        for layout, found in seconds.items():
            for pipe in pipes[layout]:
                pipe.send("step")
            took = max(answer(pipes[layout]))
            # ZeRO-3 learns in the first step in which order parameters are used.
            if turn > 1:
                found.append(took)
        if turn > 1:
            rates.append(measured_rates())
    for process in processes:
        process.kill()
        process.join()
    return seconds, rates


def answer(pipes: list[Connection]) -> list[float]:
    """What each rank sends next; SystemExit where one has ended."""
    try:
        return [pipe.recv() for pipe in pipes]
    except EOFError:
        raise SystemExit("a rank ended") from None


def serve_steps(run_file: Path, world: World, pipe: Connection, folder: Path) -> None:
    """As one rank of a layout, take an optimizer step for each message, and answer with its seconds."""
    from ds_finetune.engine.devices import choose_device
    from ds_finetune.engine.groups.default_group import process_group
    from ds_finetune.engine.start_engine import start_engine
    from ds_finetune.trainer.batches import run_batches
    from ds_finetune.trainer.prepare import read_run
    from ds_finetune.trainer.resolve import resolve

    with (folder / f"{run_file.stem}-{world.rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    config = read_config(run_file)
    world.set_environment(os.environ)
    resolved = resolve(config, world=world, device=choose_device())
    with process_group(world, resolved.plan.device):
        run = read_run(resolved)
        with start_engine(run.plan, run.inputs.model) as engine:
            pipe.send(0.0)
            for batch in run_batches(run):
                pipe.recv()
                began = time.perf_counter()
                engine.step(batch, lr=1e-4)
                pipe.send(time.perf_counter() - began)


def predict(run_file: Path, layout: str, rates: list[dict[int, CpuRates]]) -> TimeEstimate:
    """The time of a step of a layout by the medians of the machine's rates."""
    config, ranks = read_config(run_file), ranks_of(layout)
    usual = CpuRates(
        **{
            each.name: statistics.median(getattr(found[ranks], each.name) for found in rates)
            for each in fields(CpuRates)
        }
    )
    machine = cpu_machine(usual, ranks=ranks, memory_bytes=psutil.virtual_memory().total)
    plan = make_plan(RunSettings.of(config), world=World(0, ranks, 0, ranks, "bench"), device="cpu")
    model = json.loads((Path(config.model.path) / "config.json").read_text())
    return estimate_time(plan, model, machine=machine, rows=RowShape.full(TOKENS))


def spearman(first: list[float], second: list[float]) -> float:
    """The rank correlation of two lists without ties."""
    places = [[sorted(values).index(value) for value in values] for values in (first, second)]
    squares = sum((a - b) ** 2 for a, b in zip(*places, strict=True))
    number = len(first)
    return 1 - 6 * squares / (number * (number**2 - 1))


def report(
    seconds: Mapping[str, list[float]], predicted: Mapping[str, TimeEstimate], rates: list[dict[int, CpuRates]]
) -> None:
    """Print the table, the parts of each prediction, and the correlation."""
    medians = {layout: statistics.median(found) for layout, found in seconds.items()}
    for number in (1, 2):
        for each in fields(CpuRates):
            values = " ".join(f"{getattr(found[number], each.name):.3g}" for found in rates)
            sys.stdout.write(f"{number} rank{'s' * (number > 1)}, {each.name}: {values}\n")
    sys.stdout.write(f"{'layout':38} measured  predicted  ratio  rounds\n")
    for layout in sorted(medians, key=medians.__getitem__):
        measured, expected = medians[layout], predicted[layout].seconds
        rounds = " ".join(f"{each:.2f}" for each in seconds[layout])
        sys.stdout.write(f"{layout:38} {measured:8.3f}  {expected:9.3f}  {expected / measured:5.2f}  {rounds}\n")
    for layout, estimate in predicted.items():
        parts = {name: round(part, 3) for name, part in estimate.parts.items() if part >= 0.001}
        sys.stdout.write(f"{layout}: {json.dumps(parts)}\n")
    found_order = spearman([medians[each] for each in LAYOUTS], [predicted[each].seconds for each in LAYOUTS])
    sys.stdout.write(f"rank correlation {found_order:.3f} of {len(LAYOUTS)} layouts\n")
    best = min((layout for layout in LAYOUTS if ranks_of(layout) > 1), key=medians.__getitem__)
    sys.stdout.write(
        f"{CHOSEN}: {medians[CHOSEN]:.3f} s, {medians[CHOSEN] / medians[best]:.2f} of the best of the others, {best}\n"
    )
    raise SystemExit(found_order < LIMIT)


if __name__ == "__main__":
    main()
