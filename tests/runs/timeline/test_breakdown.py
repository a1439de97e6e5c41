"""The breakdown of steps whose times are written by hand, in nanoseconds."""

from typing import Any

import pytest

from ds_finetune.runs.timeline.breakdown import StepTimes, Waits, break_down, collective_rows, device_spans, host_spans
from ds_finetune.runs.timeline.clock import HostClock
from ds_finetune.runs.timeline.device_trace import read_trace
from ds_finetune.runs.timeline.recorder import Communication, Meeting, PhaseSpan, Recorder

MEETING = Meeting("0", (0, 1), 1)
PHASES = [
    PhaseSpan("data", 0, 100, 0),
    PhaseSpan("forward", 120, 300, 1),
    PhaseSpan("backward", 300, 600, 1),
    PhaseSpan("optimizer", 700, 900, 1),
    PhaseSpan("offload", 850, 870, 2),
    PhaseSpan("step", 100, 900, 0),
    PhaseSpan("checkpoint", 920, 950, 0),
]


def _recorder() -> Recorder:
    recorder = Recorder(HostClock())
    recorder.phases = list(PHASES)
    return recorder


def _rows(times: StepTimes) -> dict[str, dict[str, float]]:
    rows = {phase: {name: value * 1e9 for name, value in row.items() if value} for phase, row in times.table.items()}
    return {phase: row for phase, row in rows.items() if row}


def test_a_host_computes_communicates_or_waits() -> None:
    recorder = _recorder()
    # An all-reduce in backward, for which it waits from 500 on, and which the other rank begins at 540.
    recorder.communications = [Communication("all_reduce", MEETING, 4000, 400, 590)]
    recorder.blocked = [(400, 410), (500, 590)]
    waits = Waits({MEETING: (540, 1)})

    times = break_down(7, (0, 1000), host_spans(recorder, waits))

    assert _rows(times) == {
        "data": pytest.approx({"data": 100}),
        "forward": pytest.approx({"compute": 180}),
        "backward": pytest.approx({"compute": 200, "waiting": 50, "communication": 50}),
        "optimizer": pytest.approx({"compute": 180, "offload": 20}),
        "step": pytest.approx({"other": 120}),
        "checkpoint": pytest.approx({"checkpoint": 30}),
        "after the step": pytest.approx({"other": 70}),
    }
    assert sum(sum(row.values()) for row in times.table.values()) == pytest.approx(times.seconds)
    assert (times.communicating * 1e9, times.hidden * 1e9) == pytest.approx((190, 90))


def test_exposed_communication_is_a_part_of_all_of_it() -> None:
    """A call that blocks the rank returns after its collective has ended."""
    recorder = _recorder()
    recorder.communications = [Communication("all_reduce", MEETING, 4000, 400, 590)]
    recorder.blocked = [(400, 598)]
    times = break_down(7, (0, 1000), host_spans(recorder, Waits({MEETING: (540, 1)})))
    exposed = times.of_category("communication") + times.of_category("waiting")
    assert (times.communicating * 1e9, times.hidden * 1e9) == pytest.approx((198, 0))
    assert exposed == pytest.approx(times.communicating - times.hidden)


def _event(cat: str, name: str, begin: int, end: int, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "tid": 7,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": args,
    }


NCCL = {
    "Collective name": "allreduce",
    "In msg nelems": 1000,
    "dtype": "BFloat16",
    "Process Group Name": "0",
    "correlation": 2,
}
"""Arguments of a kernel of NCCL as torch 2.13 writes them."""


def test_a_gpu_hides_communication_behind_kernels_launched_in_any_phase() -> None:
    events = [
        _event("cuda_runtime", "cudaLaunchKernel", 130, 131, correlation=1),
        _event("cuda_runtime", "cudaLaunchKernel", 310, 311, correlation=2),
        _event("cuda_runtime", "cudaMemcpyAsync", 710, 711, correlation=3),
        _event("kernel", "gemm", 200, 450, correlation=1),
        _event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 400, 600, **NCCL),
        _event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 580, 720, correlation=3),
    ]
    tree = {"traceEvents": events, "distributedInfo": {"pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}}
    trace = read_trace(tree)
    (made,) = trace.communications
    assert (made.kind, made.meeting, made.num_bytes, made.span) == ("allreduce", MEETING, 2000, (400, 600))
    waits = Waits({MEETING: (500, 1)})

    times = break_down(1, (0, 1000), device_spans(_recorder(), trace, waits))

    assert _rows(times) == {
        "data": pytest.approx({"data": 100}),
        "forward": pytest.approx({"compute": 250, "other": 80}),
        "backward": pytest.approx({"waiting": 50, "communication": 100}),
        "optimizer": pytest.approx({"offload": 120, "other": 180}),
        "step": pytest.approx({"other": 20}),
        "checkpoint": pytest.approx({"checkpoint": 30}),
        "after the step": pytest.approx({"other": 70}),
    }
    assert (times.communicating * 1e9, times.hidden * 1e9) == pytest.approx((200, 50))
    made.phase = "backward"
    (row,) = collective_rows([made], waits, steps=1)
    assert (row["calls"], row["bytes"], row["seconds"] * 1e9, row["waiting_seconds"] * 1e9) == pytest.approx(
        (1, 2000, 200, 100)
    )
