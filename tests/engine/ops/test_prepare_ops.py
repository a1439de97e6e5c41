"""Operators are compiled before training; FusedAdam alone has a substitute, on all ranks at once and visibly."""

import json
from typing import Any

import pytest
import torch

from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.ops import deepspeed_ops
from ds_finetune.engine.ops.deepspeed_ops import build_ops, cores_of_rank, use_cores
from ds_finetune.errors import ConfigError
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World

NO_NVCC = ("DeepSpeed's fused_adam cannot be built: CUDA_HOME does not exist", "install the CUDA toolkit")
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def _plan(deepspeed: dict[str, Any] | None = None, *, device: str = "cuda", ranks: int = 2) -> Plan:
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "deepspeed": deepspeed}
    return make_plan(
        RunSettings.of(RunConfig.model_validate(tree)), world=World(0, ranks, 0, ranks, "torchrun"), device=device
    )


def _say(_: str) -> None:
    """Nothing is printed here."""


def _build(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, here: tuple[str, str], there: dict[str, tuple[str, str]]
) -> Plan:
    """Rank 0 finds `here` when it builds, rank 1 has found `there`."""
    monkeypatch.setattr(deepspeed_ops, "_build_problem", lambda name, say: here)
    return build_ops(plan, lambda mine: [mine, json.dumps(there)], _say)


@pytest.mark.parametrize(("here", "there", "rank"), [(NO_NVCC, ("", ""), 0), (("", ""), NO_NVCC, 1)])
def test_all_ranks_take_torchs_adam_where_one_cannot_build_the_other(
    monkeypatch: pytest.MonkeyPatch, here: tuple[str, str], there: tuple[str, str], rank: int
) -> None:
    built = _build(monkeypatch, _plan(), here, {"fused_adam": there})
    assert built.deepspeed_config["optimizer"]["params"]["torch_adam"] is True
    assert not built.needs_fused_adam
    assert built.notes[-1].endswith(f"On rank {rank}: {NO_NVCC[0]}")


def test_deepspeeds_adam_is_kept_where_it_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan()
    assert _build(monkeypatch, plan, ("", ""), {"fused_adam": ("", "")}) is plan


def test_a_user_who_wants_deepspeeds_adam_gets_it_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan({"optimizer": {"params": {"torch_adam": False}}})
    with pytest.raises(ConfigError, match="rank 0: DeepSpeed's fused_adam cannot be built: CUDA_HOME does not exist"):
        _build(monkeypatch, plan, NO_NVCC, {"fused_adam": ("", "")})


def test_an_offloaded_optimizer_that_cannot_be_built_ends_the_run_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = (
        "DeepSpeed's cpu_adam cannot be built: Installed CUDA version 12.8 does not match",
        "install another toolkit",
    )
    with pytest.raises(ConfigError) as caught:
        _build(monkeypatch, _plan(OFFLOADED), ("", ""), {"cpu_adam": wrong})
    assert caught.value.message == f"rank 1: {wrong[0]}"
    assert caught.value.hint == wrong[1]


def test_without_nvcc_the_real_builder_is_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """On a machine with a driver and pip alone."""
    from deepspeed.ops.op_builder import FusedAdamBuilder
    from deepspeed.ops.op_builder.builder import MissingCUDAException

    def load(self: object, verbose: bool = True) -> None:
        raise MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)")

    monkeypatch.setattr(FusedAdamBuilder, "load", load)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    deepspeed_ops._build_problem.cache_clear()
    built = build_ops(_plan(), lambda mine: [mine], _say)
    deepspeed_ops._build_problem.cache_clear()
    assert built.notes[-1].endswith(
        "fused_adam cannot be built: CUDA_HOME does not exist, unable to compile CUDA op(s)"
    )


@pytest.mark.parametrize(
    ("environ", "deepspeed", "threads"),
    [
        ({}, OFFLOADED, 4),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, OFFLOADED, 4),
        ({"OMP_NUM_THREADS": "1"}, OFFLOADED, None),
        ({"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "x"}, OFFLOADED, None),
        ({"OMP_NUM_THREADS": "4"}, OFFLOADED, None),
        ({}, None, None),
    ],
)
def test_an_offloaded_optimizer_has_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], deepspeed: dict[str, Any] | None, threads: int | None
) -> None:
    """torchrun's one thread is not the user's choice."""
    monkeypatch.setattr(deepspeed_ops.os, "sched_getaffinity", lambda _: set(range(8)))
    given, before = environ.get("OMP_NUM_THREADS"), torch.get_num_threads()
    try:
        plan = use_cores(_plan(deepspeed), environ)
        assert environ.get("OMP_NUM_THREADS") == (given if threads is None else str(threads))
        assert torch.get_num_threads() == (before if threads is None else threads)
    finally:
        torch.set_num_threads(before)
    said = [note for note in plan.notes if "OMP_NUM_THREADS" in note]
    assert len(said) == (threads is not None)
    assert all(note.startswith(f"OMP_NUM_THREADS is 4 (it was {given or 'not set'})") for note in said)


@pytest.mark.parametrize(
    ("launcher", "available", "total", "cores"),
    [
        ("torchrun", 8, 8, 2),
        ("deepspeed", 3, 8, 1),
        ("srun", 8, 32, 8),
        ("srun", 32, 32, 8),
        ("mpirun", 1, 32, 1),
        ("torchrun", 2, 2, 1),
    ],
)
def test_cores_that_a_scheduler_has_given_a_rank_are_all_its_own(
    launcher: str, available: int, total: int, cores: int
) -> None:
    assert cores_of_rank(World(0, 8, 0, 4, launcher), available=available, total=total) == cores
