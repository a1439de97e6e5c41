"""Measures what CPU ranks of this machine reach: `python -m ds_finetune.reference.bench.cpu_rates RANK RANKS PRECISION
FOLDER`.

A process for each rank, all at once, as ranks of a run are; about a second beside the import of torch. Products, causal
attention, copies, small operators and collectives are timed, and the medians kept in the user's cache folder.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ds_finetune.errors import RunError
from ds_finetune.plan.estimate.accelerators import CpuRates, Machine, cpu_machine, rates_file

if TYPE_CHECKING:
    import torch

_SECONDS = 0.08
"""Time of a measurement."""
_LIMIT_SECONDS = 120
"""Time of all measurements; the machine may be busy."""
_ROWS, _COLUMNS, _EXPERT_ROWS, _VOCABULARY = 1024, 512, 128, 4096
_HEADS, _TOKENS, _WIDTH = 8, 512, 64
_COPIED, _SENT = 1 << 25, 1 << 22
"""Bytes."""
_NO_LINK = 1e12
"""Bytes a second of a rank that has no other to send to."""


def this_cpu_machine(ranks: int, *, precision: str, threads: int | None = None) -> Machine:
    """This machine as `ranks` CPU ranks with `threads` each, an equal part of its cores by default; measured once and
    then read from the user's cache folder. Rates of a busy machine are measured again, and the less disturbed ones
    kept. RunError where a rank of the measurement fails.
    """
    number = threads or max(1, (os.cpu_count() or 1) // ranks)
    file = rates_file(ranks, precision=precision, threads=number)
    rates = CpuRates.read(file)
    if rates is None and ranks > (os.cpu_count() or 1):
        raise RunError(
            f"{ranks} CPU ranks cannot be measured on the {os.cpu_count()} processors of this machine",
            hint="plan for as many ranks as it has processors at most, or name another machine by --gpu",
        )
    if rates is None or rates.is_disturbed:
        again = measure_ranks(ranks, precision=precision, threads=number)
        rates = again if rates is None else min(rates, again, key=lambda each: each.others)
        rates.write(file)
    return cpu_machine(rates, ranks=ranks, memory_bytes=psutil.virtual_memory().total)


def measure_ranks(ranks: int, *, precision: str, threads: int) -> CpuRates:
    """The medians over `ranks` processes that measure at the same time."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    began, before, own_before = time.perf_counter(), _busy_seconds(), _children_seconds()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "ds_finetune.reference.bench.cpu_rates",
                    str(rank),
                    str(ranks),
                    precision,
                    folder,
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        try:
            texts = [process.communicate(timeout=_LIMIT_SECONDS) for process in started]
        except subprocess.TimeoutExpired:
            raise RunError(
                f"measuring {ranks} CPU ranks was not done in {_LIMIT_SECONDS} s",
                hint="try again when the machine is less busy, or name another machine by --gpu",
            ) from None
        finally:
            for process in started:
                process.kill()
    for rank, process in enumerate(started):
        if process.returncode:
            raise RunError(
                f"measuring rank {rank} of {ranks} CPU ranks ended with exit code {process.returncode}: "
                f"{(texts[rank][1].splitlines() or ['no output'])[-1]}",
                hint="name the machine that the run is planned for by --gpu",
            )
    found = [json.loads(out.splitlines()[-1]) for out, _ in texts]
    others = _busy_seconds() - before - (_children_seconds() - own_before)
    share = max(0.0, others) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    names = [each.name for each in fields(CpuRates) if each.name != "others"]
    return CpuRates(**{name: statistics.median(rank[name] for rank in found) for name in names}, others=share)


def _busy_seconds() -> float:
    """Seconds that this machine's processors were busy since its start, also for other guests of its host."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _children_seconds() -> float:
    """Processor time of this process's children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    """Measure as one rank, and print the rates."""
    rank, ranks, precision, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    sys.stdout.write(f"{json.dumps(_measure(rank, ranks, precision, folder))}\n")


def _measure(rank: int, ranks: int, precision: str, folder: Path) -> dict[str, float]:
    """All rates but the share of other processes, which the parent knows."""
    import torch
    import torch.distributed as dist

    torch.set_grad_enabled(False)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=ranks)
    weight = torch.randn(_COLUMNS, _ROWS, dtype=dtype)
    rows = torch.randn(_ROWS, _COLUMNS, dtype=dtype)
    query, key, value = torch.randn(3, 1, _HEADS, _TOKENS, _WIDTH, dtype=dtype).unbind()
    query.requires_grad_()
    source, copied = torch.zeros(2, _COPIED // 4).unbind()
    small = torch.zeros(8, requires_grad=True)

    @torch.enable_grad()
    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    @torch.enable_grad()
    def run_small() -> None:
        value = small
        for _ in range(20):
            value = value * 1.5
        value.sum().backward()

    sent, message = torch.zeros(_SENT // 4), torch.zeros(8)
    rates = dict(
        matmul=2 * _ROWS * _COLUMNS * _ROWS / _seconds(lambda: torch.mm(rows, weight)),
        head=6 * _ROWS * _COLUMNS * _VOCABULARY / _seconds(_products(dtype, _ROWS, _VOCABULARY, adds_up=True)),
        grouped=6 * _EXPERT_ROWS * _COLUMNS * _ROWS / _seconds(_products(dtype, _EXPERT_ROWS, _ROWS, adds_up=False)),
        # Half of the pairs, of two products forward and five backward.
        attention=7 * _HEADS * _TOKENS**2 * _WIDTH / _seconds(attend),
        memory=2 * _COPIED / _seconds(lambda: copied.copy_(source)),
        new_memory=2 * _COPIED / _seconds(lambda: source + 1.0),
        # A forward is one kernel, and a backward counts as two.
        kernel_seconds=_seconds(run_small) / 60,
        link=_SENT * 2 * (ranks - 1) / ranks / _repeat(lambda: dist.all_reduce(sent)) if ranks > 1 else _NO_LINK,
        message_seconds=_repeat(lambda: dist.all_reduce(message)) if ranks > 1 else 0.0,
    )
    if ranks > 1:
        dist.destroy_process_group()
    return rates


def _products(dtype: "torch.dtype", num_rows: int, outputs: int, *, adds_up: bool) -> Callable[[], None]:
    """The product of rows with a matrix, and the gradients of both, as the model computes them for an expert; for a
    chunk of the head's logits it `adds_up` that of the matrix.
    """
    import torch

    rows, weight = torch.randn(num_rows, _COLUMNS, dtype=dtype), torch.randn(outputs, _COLUMNS, dtype=dtype)
    found, d_rows = torch.empty(num_rows, outputs, dtype=dtype), torch.empty_like(rows)
    d_weight = torch.zeros_like(weight)

    def work() -> None:
        torch.mm(rows, weight.T, out=found)
        torch.mm(found, weight, out=d_rows)
        if adds_up:
            torch.addmm(d_weight, found.T, rows, out=d_weight)
        else:
            torch.mm(found.T, rows, out=d_weight)

    return work


def _seconds(work: Callable[[], object]) -> float:
    """Median seconds of some work, after a first time that is not counted."""
    work()
    found: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(found) < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _repeat(collective: Callable[[], object], times: int = 15) -> float:
    """Median seconds of a collective, which all ranks call equally often."""
    collective()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        collective()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Ending torch in order takes a fifth of a second.
    os._exit(0)
