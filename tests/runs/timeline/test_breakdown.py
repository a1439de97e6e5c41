"""The breakdown of steps whose traces are written by hand, in microseconds."""

from typing import Any

import numpy as np
import pytest

from ds_finetune.runs.timeline.breakdown import KINDS, break_down, mark_waits, read_trace, seconds_by_kind

PHASES = {
    "step 7": (0, 1000),
    "data": (0, 100),
    "step": (100, 900),
    "forward": (120, 300),
    "backward": (300, 600),
    "optimizer": (700, 900),
    "offload": (850, 870),
    "checkpoint": (920, 950),
}
OTHER_RANK = {("0", 1): 540.0}
"""When the other rank came to the only collective."""


def _event(cat: str, name: str, begin: int, end: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 99, "tid": 7, "ts": begin, "dur": end - begin, "args": args}


def _phases() -> list[dict[str, Any]]:
    return [_event("user_annotation", name, *span) for name, span in PHASES.items()]


def _kinds(events: list[dict[str, Any]], *, is_gpu: bool) -> dict[str, float]:
    trace = read_trace({"traceEvents": [*_phases(), *events]}, 0, 0.0, is_gpu=is_gpu)
    mark_waits(trace, [trace.starts, OTHER_RANK])
    (step,) = break_down(trace)
    assert step["step"] == 7
    assert sum(step["categories"].values()) == pytest.approx(step["seconds"]) == pytest.approx(1e-3)
    return {kind: round(seconds * 1e6, 3) for kind, seconds in step["categories"].items() if seconds}


def test_a_host_computes_communicates_or_waits() -> None:
    # An all-reduce in backward, for which it waits from 500 on, and which the other rank begins at 540.
    calls = [_event("user_annotation", "all_reduce|0|1|4000", *span) for span in ((400, 410), (500, 590))]
    assert _kinds(calls, is_gpu=False) == {
        "compute": 180 + 200 + 180,
        "waiting": 10 + 40,
        "communication": 50,
        "data": 100,
        "offload": 20,
        "checkpoint": 30,
        "other": 190,
    }


def test_a_gpu_hides_communication_behind_kernels() -> None:
    about = {"Collective name": "allreduce", "Process Group Name": "0"}
    events = [
        _event("user_annotation", "all_reduce|0|1|2000", 310, 311),
        _event("kernel", "gemm", 200, 450),
        _event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 400, 600, **about),
        _event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 580, 720),
    ]
    assert _kinds(events, is_gpu=True) == {
        "compute": 250,
        "waiting": 90,
        "communication": 60,
        "data": 100,
        "offload": 120 + 20,
        "checkpoint": 30,
        "other": 330,
    }


def test_a_collective_names_the_rank_that_came_last() -> None:
    trace = read_trace(
        {"traceEvents": [_event("user_annotation", "all_reduce|0|1|4000", 400, 590)]}, 0, 0, is_gpu=False
    )
    mark_waits(trace, [trace.starts, OTHER_RANK, {("0", 1): 500.0}])
    (event,) = (each for each in trace.events if each["ph"] == "X")
    assert event["name"] == "all_reduce"
    assert event["args"] == {"group": "0", "number": 1, "bytes": 4000, "waited_us": 140, "last_rank": 1}


def test_every_moment_is_the_last_layer_that_covers_it() -> None:
    """Compared with a count of each microsecond."""
    random = np.random.default_rng(0)
    layers = [
        (0, KINDS[random.integers(len(KINDS))], *sorted(random.integers(-50, 350, 2).tolist())) for _ in range(60)
    ]
    expected = dict.fromkeys(KINDS, 0)
    for moment in range(300):
        covers = [kind for _, kind, begin, end in layers if begin <= moment < end]
        expected[covers[-1] if covers else "other"] += 1
    found = seconds_by_kind(0, 300, layers)
    assert {kind: round(seconds * 1e6, 6) for kind, seconds in found.items()} == expected
