"""Inexact options of DeepSpeed: allowed only by name, with one error for each that cannot work in a run."""

import itertools
from typing import Any, get_args

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.value_types import InexactName
from ds_finetune.errors import ConfigError
from ds_finetune.plan.inexact import OPTIONS, without_inexact
from ds_finetune.plan.plan import Plan
from tests.checking import check, settings_of
from tests.plan.test_plan import plan_of, zero

CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
SUPER = {"super_offload": True}
FP16 = {"precision": "fp16"}
ZENFLOW = {"select_strategy": "step", "select_interval": 8, "update_interval": 4}
NO_CHECKPOINT: dict[str, Any] = {"checkpoint": {"every": "never"}}
ONE_FORWARD: dict[str, Any] = {"train": {"global_batch_size": 4, "micro_batch_size": 2}}
ASKED: dict[InexactName, tuple[dict[str, Any], dict[str, Any]]] = {
    "quantized_weights": (zero(3, zero_quantized_weights=True), {}),
    "quantized_gradients": (zero(3, zero_quantized_gradients=True), {}),
    "hierarchical_partition": (zero(3, zero_hpz_partition_size=2), {"dp": 4}),
    "bf16_reduction": (
        zero(2) | {"communication_data_type": "bf16"},
        {"train": {"global_batch_size": 8, "precision": "fp32"}},
    ),
    "zenflow": (zero(2, offload_optimizer=CPU, zenflow=ZENFLOW), NO_CHECKPOINT | ONE_FORWARD),
    "superoffload": (zero(3, offload_optimizer=CPU | SUPER), NO_CHECKPOINT),
}
"""A DeepSpeed section that asks for each option, and what else the run needs."""


def refused(deepspeed: dict[str, Any], *, inexact: object = (), **sections: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan_of(deepspeed, inexact=inexact, **sections)
    return caught.value


def test_each_name_has_an_option() -> None:
    names = list(get_args(InexactName))
    assert names == [option.name for option in OPTIONS] == list(ASKED)


@pytest.mark.parametrize("name", ASKED)
def test_an_option_is_allowed_by_its_name_alone(name: InexactName) -> None:
    deepspeed, sections = ASKED[name]
    plan: Plan = plan_of(deepspeed, inexact=[name], **sections)
    (line,) = plan.notes
    option = next(option for option in OPTIONS if option.name == name)
    assert line.startswith("inexact: ")
    assert option.changes in line
    assert ("inexact", name) in plan.decisions
    error = refused(deepspeed, **sections)
    assert "cannot equal a reference loop: " + option.changes in error.message
    assert f"add `inexact: [{name}]` to the run file" in error.hint


@pytest.mark.parametrize("name", ASKED)
def test_a_name_without_effect_is_refused(name: InexactName) -> None:
    error = refused(zero(2), inexact=name, train={"global_batch_size": 8, "precision": "fp32"})
    assert f"inexact names {name}, which has no effect" in error.message
    assert "ask for it in `deepspeed`" in error.hint


@pytest.mark.parametrize(
    ("name", "change", "sections", "message", "hint"),
    [
        ("quantized_weights", {"stage": 2}, {}, "cannot work with zero stage 2", "stage to 3"),
        ("quantized_weights", {}, {"device": "cpu"}, "cannot work with device cpu", "only as CUDA kernels"),
        ("quantized_gradients", {}, {"device": "cpu"}, "cannot work with device cpu", "only as CUDA kernels"),
        ("quantized_gradients", {}, {"dp": 1}, "cannot work with 1 rank", "several ranks"),
        ("quantized_gradients", {"reduce_scatter": False}, {}, "reduce_scatter false", "leave reduce_scatter out"),
        ("hierarchical_partition", {"stage": 2}, {}, "cannot work with zero stage 2", "stage to 3"),
        (
            "hierarchical_partition",
            {"zero_hpz_partition_size": 3},
            {},
            "4 ranks, which do not form several groups of 3",
            "set zero_hpz_partition_size to 2",
        ),
        (
            "hierarchical_partition",
            {"zero_hpz_partition_size": 4},
            {},
            "4 ranks, which do not form",
            "set zero_hpz_partition_size to 2",
        ),
        ("hierarchical_partition", {}, {"dp": 2}, "2 ranks, which do not form", "at least 4 ranks"),
        ("zenflow", {"stage": 3}, {}, "cannot work with zero stage 3", "1 or 2"),
        ("zenflow", {"offload_optimizer": {}}, {}, "offload_optimizer.device none", "device: cpu"),
        ("zenflow", {}, {"optim": {"name": "SGD"}}, "optim.name SGD", "AdamW"),
        (
            "zenflow",
            {},
            {"checkpoint": {}},
            "checkpoint.every 500 steps or 15 minutes, because DeepSpeed keeps",
            "every: never",
        ),
        ("zenflow", {"zenflow": {}}, {}, "zenflow.select_strategy auto", "step"),
        ("zenflow", {"zenflow": ZENFLOW | {"update_interval": "auto"}}, {}, "zenflow.update_interval auto", "number"),
        ("zenflow", {"zenflow": ZENFLOW | {"overlap_step": True}}, {}, "zenflow.overlap_step true", "leave"),
        (
            "zenflow",
            {},
            {"train": {"global_batch_size": 8, "micro_batch_size": 2}},
            "train.global_batch_size 8 in 2 forwards of train.micro_batch_size 2",
            "train.micro_batch_size: 4, or train.global_batch_size: 4",
        ),
        ("superoffload", {"stage": 2}, {}, "cannot work with zero stage 2", "stage to 3"),
        ("superoffload", {}, {"device": "cpu"}, "cannot work with device cpu", "refuses every other accelerator"),
        *(
            (name, change, sections, "cannot work with " + other, hint)
            for name in (
                "quantized_weights",
                "quantized_gradients",
                "hierarchical_partition",
                "zenflow",
                "superoffload",
            )
            for change, sections, other, hint in (
                ({}, {"parallel": {"sp": 2}}, "parallel dp", "set tp, pp, sp and ep to 1"),
                ({}, {"lora": {}}, "lora", "all weights"),
                ({"stage": 0}, {}, "zero stage 0", "set zero_optimization.stage to"),
            )
        ),
        *(
            (name, {"offload_param": NVME}, {}, "cannot work with offload to nvme", "offload to cpu")
            for name in ("quantized_weights", "quantized_gradients", "hierarchical_partition")
        ),
        ("quantized_weights", {}, {"dp": 1}, "cannot work with 1 rank", "several ranks"),
        ("bf16_reduction", {}, {"dp": 1}, "cannot work with 1 rank", "several ranks"),
        ("bf16_reduction", {"stage": 0}, {}, "cannot work with zero stage 0", "stage to 1, 2 or 3"),
        ("zenflow", {}, {"train": ONE_FORWARD["train"] | FP16}, "cannot work with train.precision fp16", ": bf16"),
        ("zenflow", {"zenflow": ZENFLOW | {"select_interval": "auto"}}, {}, "zenflow.select_interval auto", "number"),
        ("superoffload", {"offload_optimizer": SUPER | NVME}, {}, "offload_optimizer.device nvme", "device: cpu"),
        ("superoffload", {}, {"optim": {"name": "SGD"}}, "cannot work with optim.name SGD", "use AdamW"),
        ("superoffload", {}, {"train": {"global_batch_size": 8} | FP16}, "with train.precision fp16", ": bf16"),
        ("superoffload", {}, {"checkpoint": {}}, "checkpoint.every 500 steps or 15 minutes", "every: never"),
    ],
)
def test_a_run_in_which_an_option_cannot_work_is_refused(
    name: InexactName, change: dict[str, Any], sections: dict[str, Any], message: str, hint: str
) -> None:
    deepspeed, needed = ASKED[name]
    section = {"zero_optimization": deepspeed["zero_optimization"] | change}
    error = refused(deepspeed | section, inexact=name, **(needed | sections))
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("deepspeed", "precision", "message"),
    [
        (zero(2) | {"bf16": {"bf16_master_weights_and_grads": True}}, "bf16", "small updates are lost"),
        (zero(2) | {"bf16": {"bf16_optimizer_states": True}}, "bf16", "keeps the moments in bf16"),
        (zero(3, zero_quantized_nontrainable_weights=True), "bf16", "stores frozen weights in 8 bits"),
        (zero(2) | {"fp16": {"fp16_master_weights_and_grads": True}}, "fp16", "small updates are lost"),
        (zero(2) | {"data_types": {"grad_accum_dtype": "fp16"}}, "bf16", "data_types.grad_accum_dtype fp16 with"),
        (zero(2) | {"communication_data_type": "fp16"}, "bf16", "communication_data_type fp16 with"),
        (zero(2) | {"data_types": {"grad_accum_dtype": "bf16"}}, "fp32", "rounds the sum of gradients"),
    ],
)
def test_other_inexact_options_have_no_name(deepspeed: dict[str, Any], precision: str, message: str) -> None:
    error = refused(deepspeed, train={"global_batch_size": 8, "precision": precision})
    assert message in error.message
    assert "no name of `inexact` allows it" in error.message
    assert "leave" in error.hint


def test_gradients_of_bf16_are_reduced_in_bf16_without_a_name() -> None:
    assert plan_of(zero(2) | {"communication_data_type": "bf16"}).notes == ()
    error = refused(zero(2) | {"communication_data_type": "bf16"}, inexact="bf16_reduction")
    assert "train.precision bf16 are reduced in 16 bits anyway" in error.message


def test_gradients_of_fp32_need_the_name_with_every_layout_and_by_every_key() -> None:
    fp32 = {"global_batch_size": 8, "precision": "fp32"}
    by_key = {"deepspeed": zero(2) | {"communication_data_type": "bf16"}, "train": fp32}
    by_dtype = {"deepspeed": zero(2), "train": fp32 | {"reduction_dtype": "bf16"}}
    for given, axis in itertools.product((by_key, by_dtype), ("sp", "tp", "ep")):
        error = refused(**given, parallel={axis: 2})
        assert "communication_data_type bf16 cannot equal a reference loop" in error.message
        assert plan_of(**given, parallel={axis: 2}, inexact="bf16_reduction").notes[0].startswith("inexact: ")
    # DeepSpeed reads this key only with its own sequence parallelism.
    error = refused(zero(2) | {"seq_parallel_communication_data_type": "bf16"}, parallel={"sp": 2})
    assert "seq_parallel_communication_data_type" in error.message
    assert "train.reduction_dtype" in error.message + error.hint


def test_zenflow_is_refused_for_experts() -> None:
    run = {"model": "m", "data": {"train": "a.jsonl"}, "output_dir": "o", "train": {"precision": "bf16"}}
    with_zenflow, plain = (RunConfig.model_validate(run | {"inexact": names}) for names in (["zenflow"], []))
    experts = {"model_type": "deepseek_v3", "hidden_size": 32, "moe_intermediate_size": 32}
    check(settings_of(with_zenflow, model_json={"model_type": "llama"}), "experts of the model")
    check(settings_of(plain, model_json=experts), "experts of the model")
    with pytest.raises(ConfigError, match="cannot work with experts, which model_type deepseek_v3 has"):
        check(settings_of(with_zenflow, model_json=experts), "experts of the model")


@pytest.mark.parametrize("name", ASKED)
def test_options_can_be_taken_out_of_a_configuration(name: InexactName) -> None:
    deepspeed, sections = ASKED[name]
    assert plan_of(without_inexact(deepspeed), **sections).notes == ()
