"""How gradients are summed over ranks: the keys of DeepSpeed, what is refused, and when ranks meet."""

from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.estimate.memory import RunMemory
from ds_finetune.plan.estimate.traced import without_activations
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.described import one_tensor


def config_of(stage: int, *, zero: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    sections = train.pop("sections", {})
    choices = {"zero_optimization": {"stage": stage} | (zero or {})} | train.pop("choices", {})
    tree = {
        "model": "m",
        "data": {"train": "a.jsonl"},
        "output_dir": "o",
        "train": {"global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16"} | train,
        "deepspeed": choices,
    }
    return RunConfig.model_validate(tree | sections)


def plan_of(stage: int, **given: Any) -> Plan:
    return make_plan(RunSettings.of(config_of(stage, **given)), world=World(0, 2, 0, 2, "torchrun"), device="cpu")


@pytest.mark.parametrize(
    ("stage", "precision", "dtype", "communication", "accumulation"),
    [
        (2, "bf16", "auto", None, None),
        (2, "bf16", "bf16", None, None),
        (2, "bf16", "fp32", "fp32", "fp32"),
        (3, "bf16", "fp32", "fp32", "fp32"),
        (0, "fp32", "fp32", None, None),
    ],
)
def test_the_dtype_becomes_two_keys_of_deepspeed(
    stage: int, precision: str, dtype: str, communication: str | None, accumulation: str | None
) -> None:
    tree = plan_of(stage, precision=precision, reduction_dtype=dtype).deepspeed_config
    assert tree.get("communication_data_type") == communication
    assert tree.get("data_types", {}).get("grad_accum_dtype") == accumulation


FP32, STEP = {"reduction_dtype": "fp32"}, {"reduction_every": "step"}


@pytest.mark.parametrize(
    ("stage", "given", "problem", "hint"),
    [
        (1, FP32, "reduction_dtype fp32 with train.precision bf16 and zero stage 1", "stage to 2 or 3"),
        (0, FP32, "reduction_dtype fp32 with train.precision bf16 and zero stage 0", "stage to 2 or 3"),
        (
            2,
            {**FP32, "choices": {"communication_data_type": "bf16"}},
            "communication_data_type 'bf16' contradicts train.reduction_dtype fp32, which sets 'fp32'",
            "leave communication_data_type or train.reduction_dtype out",
        ),
        (
            3,
            {**FP32, "choices": {"data_types": {"grad_accum_dtype": "bf16"}}},
            "grad_accum_dtype 'bf16' contradicts train.reduction_dtype fp32",
            "leave grad_accum_dtype or train.reduction_dtype out",
        ),
        (
            2,
            {**FP32, **STEP},
            "reduction_every step with train.reduction_dtype fp32 in bf16",
            "reduction_every or train.reduction_dtype out",
        ),
        (
            3,
            {**STEP, "choices": {"data_types": {"grad_accum_dtype": "fp32"}}},
            "reduction_every step with data_types.grad_accum_dtype fp32 in bf16",
            "leave train.reduction_every or data_types.grad_accum_dtype out",
        ),
        (
            2,
            {**STEP, "max_grad_norm": 0, "sections": {"optim": {"name": "Muon"}}},
            "reduction_every step with optim.name Muon is not tested",
            "use AdamW",
        ),
        (
            3,
            {**STEP, "zero": {"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}},
            "reduction_every step with offload to nvme is not tested",
            "offload to cpu",
        ),
    ],
)
def test_what_cannot_be_summed_so_is_refused(stage: int, given: dict[str, Any], problem: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(stage, **given)
    assert problem in refused.value.message
    assert hint in refused.value.hint


def test_ranks_meet_in_each_forward_unless_they_reduce_once() -> None:
    assert [plan_of(stage).meets_each_forward for stage in range(4)] == [False, False, True, True]
    assert [plan_of(stage, **STEP).meets_each_forward for stage in range(4)] == [False, False, False, True]
    assert [plan_of(stage, **STEP).reduces_once for stage in range(4)] == [False, False, True, True]
    # One forward is reduced once anyway.
    assert not plan_of(2, **STEP, micro_batch_size=4).reduces_once


@pytest.mark.parametrize(("stage", "own"), [(2, 2 * 500), (3, 2 * 500)])
def test_the_estimate_counts_what_each_choice_keeps(stage: int, own: int) -> None:
    def estimated(**train: Any) -> dict[str, int]:
        config = config_of(stage, **train)
        plan = make_plan(RunSettings.of(config), world=World(0, 2, 0, 2, "torchrun"), device="cpu")
        model = one_tensor(1000)
        return {row.name: row.num_bytes for row in RunMemory(plan, model, without_activations(model)).estimate().rows}

    plain = estimated()
    part = "gradients of this rank's part"
    assert plain[part] == own
    assert estimated(**FP32)[part] == 2 * own
    assert estimated(**STEP)["gradients until they are reduced"] == 2 * 1000
    assert "gradients until they are reduced" not in plain


@pytest.mark.parametrize(
    ("stage", "given", "when"),
    [
        (1, {}, "once a step"),
        (1, {"zero": {"overlap_comm": True}}, "once a step, beside the backward pass"),
        (2, {"zero": {"overlap_comm": True}}, "in each forward, beside the backward pass"),
        (
            2,
            {"zero": {"overlap_comm": True}, "reduction_every": "step"},
            "once a step, after the backward pass in spite of overlap_comm",
        ),
    ],
)
def test_the_plan_says_whether_sums_are_beside_the_backward_pass(stage: int, given: dict[str, Any], when: str) -> None:
    run, world = RunSettings.of(config_of(stage, **given)), World(0, 2, 0, 2, "torchrun")
    assert (
        dict(make_plan(run, world=world, device="cuda").decisions)["communication"]
        == f"gradients summed in bf16 {when}"
    )
