"""Each patch refuses code without the feature that it changes, and restores what it changed."""

import re
import sys
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from packaging.requirements import Requirement
from torch import nn
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from ds_finetune.engine.ops import build_lock
from ds_finetune.engine.patches import (
    deepspeed_engine,
    deepspeed_gathering,
    deepspeed_init,
)
from ds_finetune.errors import DependencyError
from ds_finetune.foreign import (
    hub_access,
    torch_distributed,
    torch_nn,
    transformers_attention,
    transformers_models,
)
from ds_finetune.foreign.guard import TESTED, Foreign, replaced

MODEL = deepseek.DeepseekV3ForCausalLM


class Optimizer:
    """As much of DeepSpeed's optimizer of ZeRO 1 and 2 as reduction at the end touches."""

    def __init__(self) -> None:
        self._coalesce_grad_reduction = False
        self._hp_optimizer_states_linked = True
        self.optimizer = SimpleNamespace(state={1: 2}, param_groups=[{"step": 1}, {}])
        self.links = 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundary = is_boundary

    def initialize_optimizer_states(self) -> None: ...

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        self.links += not self._hp_optimizer_states_linked
        self._hp_optimizer_states_linked = True


class Engine(DeepSpeedEngine):
    """DeepSpeed's engine, not constructed, with its own code of gradient reduction."""

    def __init__(self, stage: int) -> None:
        nn.Module.__init__(self)
        self._is_gradient_accumulation_boundary, self.enable_backward_allreduce = None, True
        self.inside_no_sync_ctxt, self.pipeline_parallelism, self.optimizer = False, False, Optimizer()
        self.reduced: list[str] = []
        self.zero_optimization_stage = lambda: stage  # type: ignore[method-assign]
        self.managed_gradient_accumulation = lambda: True  # type: ignore[method-assign]

    def _flush_coalesced_reduction_zero12(self, optimizer: object) -> None:
        self.reduced.append("coalesced")

    def _flush_coalesced_reduction_zero3(self, optimizer: object) -> None:
        self.reduced.append("coalesced at stage 3")

    def allreduce_gradients(self) -> None:
        self.reduced.append("all")

    def flags(self) -> dict[str, Any]:
        plain = (bool, int, type(None))
        found = {name: value for name, value in vars(self).items() if isinstance(value, plain)}
        flush = [name for name in vars(self) if name.startswith("_flush_coalesced_reduction")]
        return found | {"coalesces": self.optimizer._coalesce_grad_reduction, "flush": flush}


def within(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


@pytest.mark.parametrize(
    ("stage", "how"), [(0, "all"), (1, "coalesced"), (2, "coalesced"), (3, "coalesced at stage 3")]
)
def test_gradients_are_reduced_once_at_the_end_and_the_next_step_is_the_optimizers(stage: int, how: str) -> None:
    engine = Engine(stage)
    with deepspeed_engine.gradients_reduced_at_end(engine, zero_stage=stage):
        assert engine.is_gradient_accumulation_boundary() is False
        assert not engine.reduced
    assert engine.reduced == [how]
    assert engine.flags() == Engine(stage).flags() | {"_is_gradient_accumulation_boundary": True}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_error_in_a_backward_reduces_nothing_and_restores_every_flag(stage: int) -> None:
    engine = Engine(stage)
    with (
        pytest.raises(ValueError, match="in a backward"),
        deepspeed_engine.gradients_reduced_at_end(engine, zero_stage=stage),
    ):
        raise ValueError("in a backward")
    assert not engine.reduced
    assert engine.flags() == Engine(stage).flags()
    with deepspeed_engine.gradients_reduced_at_end(engine, zero_stage=stage):
        pass
    assert len(engine.reduced) == 1


def test_the_constructors_step_is_undone() -> None:
    optimizer = Optimizer()
    deepspeed_engine.undo_constructor_step(optimizer)
    assert optimizer.optimizer.state == {}
    assert optimizer.optimizer.param_groups == [{"step": 0}, {}]


def test_states_are_linked_again() -> None:
    optimizer = Optimizer()
    deepspeed_engine.link_optimizer_states(optimizer)
    assert optimizer.links == 1


def fail_within(context: AbstractContextManager[Any], check: Callable[[], bool]) -> None:
    """An error inside `context`, in which `check` holds."""
    with context:
        assert check()
        raise ValueError("in between")


def test_layers_and_experts_of_a_model_are_replaced_while_it_is_built() -> None:
    whole, constructor = deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3Experts.__init__
    layers = transformers_models.replaced_layers(MODEL, lambda *_: 1)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="in between"):
        fail_within(layers, lambda: deepseek.DeepseekV3DecoderLayer(None, 0) == 1)
    assert deepseek.DeepseekV3DecoderLayer is whole
    experts = transformers_models.changed_experts(MODEL, "DeepseekV3Experts", lambda _: _, after=lambda _: None)
    with pytest.raises(ValueError, match="in between"):
        fail_within(experts, lambda: deepseek.DeepseekV3Experts.__init__ is not constructor)
    assert deepseek.DeepseekV3Experts.__init__ is constructor


def test_zero_init_leaves_arange_and_restores_it_after_an_error() -> None:
    arange = torch.arange
    with pytest.raises(DependencyError, match="takes no `of_a_later_version`"):
        within(deepspeed_init.zero_init({}, of_a_later_version=1))
    assert torch.arange is arange


def missing(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Make `owner` lack `name`, as a version does that has removed it."""
    if isinstance(owner, type) and name not in vars(owner):
        raise AssertionError(f"{owner} inherits {name}")
    monkeypatch.delattr(owner, name)


def without(instance: Any, name: str) -> Any:
    delattr(instance, name)
    return instance


def no_parameters() -> None:
    """A function of another version."""


def partitioned_by_another_version() -> nn.Module:
    """A module whose parameter is partitioned and has no second copy."""
    module = nn.Linear(1, 1)
    module.weight.ds_id = 0  # type: ignore[assignment]
    return module


GUARDS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], Any]]] = {
    "accumulation boundary": (
        lambda _: None,
        lambda: within(
            deepspeed_engine.gradients_reduced_at_end(
                without(Engine(1), "_is_gradient_accumulation_boundary"), zero_stage=1
            )
        ),
    ),
    "all-reduce in backward": (
        lambda _: None,
        lambda: within(
            deepspeed_engine.gradients_reduced_at_end(without(Engine(0), "enable_backward_allreduce"), zero_stage=0)
        ),
    ),
    "coalesced reduction": (
        lambda patch: patch.setattr(DeepSpeedEngine, "coalesce_grad_reduction", no_parameters),
        lambda: within(deepspeed_engine.gradients_reduced_at_end(Engine(1), zero_stage=1)),
    ),
    "constructor step": (
        lambda patch: missing(patch, Optimizer, "initialize_optimizer_states"),
        lambda: deepspeed_engine.undo_constructor_step(Optimizer()),
    ),
    "linked states": (
        lambda patch: missing(patch, Optimizer, "_lazy_init_hp_params_optimizer_state"),
        lambda: deepspeed_engine.link_optimizer_states(Optimizer()),
    ),
    "norm of experts": (lambda _: None, lambda: deepspeed_engine.count_whole_experts_once(Optimizer())),
    "expert groups": (
        lambda patch: missing(patch, groups, "_EXPERT_DATA_PARALLEL_GROUP_RANKS"),
        lambda: deepspeed_init.register_expert_groups("a", parts=(None, []), same_shard=(None, [])),
    ),
    "expert groups, after": (
        lambda patch: missing(patch, groups, "_EXPERT_PARALLEL_GROUP"),
        lambda: deepspeed_init.unregister_expert_groups("a"),
    ),
    "model parallel unit": (
        lambda patch: missing(patch, groups, "mpu"),
        deepspeed_init.forget_model_parallel_unit,
    ),
    "all groups": (lambda patch: missing(patch, groups, "mesh_device"), deepspeed_init.forget_groups),
    "shared-memory op": (
        lambda patch: patch.setattr(sys.modules["deepspeed.comm.torch"], "build_shm_op", no_parameters),
        lambda: within(deepspeed_init.without_shared_memory_op()),
    ),
    "whole weights": (lambda _: None, lambda: within(deepspeed_gathering.full_weights(Optimizer(), nn.Module()))),
    "second copies": (lambda _: None, lambda: deepspeed_init.forget_second_copies(partitioned_by_another_version())),
    "ZenFlow's matrices": (
        lambda patch: patch.setattr(
            "deepspeed.runtime.zenflow.zenflow_stage_1_and_2.ZenFlowZeroOptimizer._update_model_bit16_weights",
            no_parameters,
        ),
        lambda: within(deepspeed_init.zenflow_keeps_matrices()),
    ),
    "zero.Init": (
        lambda patch: patch.setattr(deepspeed.zero.Init, "__init__", no_parameters),
        lambda: within(deepspeed_init.zero_init({})),
    ),
    "default timeout": (
        lambda patch: missing(patch, dist.distributed_c10d, "_get_default_timeout"),
        lambda: within(torch_distributed.default_timeout(timedelta(1))),
    ),
    "collectives": (
        lambda patch: missing(patch, dist.ProcessGroup, "allreduce"),
        lambda: within(torch_distributed.spans_of_collectives(["barrier", "allreduce"], no_parameters, nullcontext)),
    ),
    "build lock": (
        lambda patch: missing(patch, FileBaton, "release"),
        lambda: within(build_lock.reported_lock(print)),
    ),
    "linear modules": (
        lambda patch: patch.setattr(nn.Linear, "__init__", no_parameters),
        lambda: within(torch_nn.linears_without_memory()),
    ),
    "layers": (
        lambda patch: missing(patch, deepseek, "DeepseekV3DecoderLayer"),
        lambda: within(transformers_models.replaced_layers(MODEL, lambda *_: None)),  # type: ignore[arg-type]
    ),
    "layers of no class": (
        lambda patch: patch.setattr(MODEL, "_no_split_modules", []),
        lambda: within(transformers_models.replaced_layers(MODEL, lambda *_: None)),  # type: ignore[arg-type]
    ),
    "experts": (
        lambda patch: missing(patch, deepseek, "DeepseekV3Experts"),
        lambda: within(
            transformers_models.changed_experts(MODEL, "DeepseekV3Experts", lambda _: _, after=lambda _: None)
        ),
    ),
    "fp32 tensors": (lambda _: None, lambda: transformers_models.keep_in_fp32(nn.Module(), ["bias"])),  # type: ignore[arg-type]
    "attention": (
        lambda patch: patch.setattr(transformers_attention, "flash_attention_mask", no_parameters),
        lambda: transformers_attention.register_attention("a", no_parameters),
    ),
    "search for documents": (
        lambda patch: missing(patch, masking_utils, "find_packed_sequence_indices"),
        lambda: within(transformers_attention.without_search_for_documents()),
    ),
    "4-bit linear modules": (lambda _: None, lambda: torch_nn.without_cpu_packing(nn.Module())),
    "datasets offline": (
        lambda patch: patch.delattr("datasets.config.HF_HUB_OFFLINE"),
        lambda: within(hub_access.offline()),
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_patch_refuses_code_without_what_it_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, patch = GUARDS[name]
    change(monkeypatch)
    with pytest.raises(DependencyError, match=r"ds-finetune's patch is written for \w+ [\d.]+ \(") as caught:
        patch()
    assert re.fullmatch(r"pip install \w+==[\d.]+ \(constraints.txt lists all tested versions\)", caught.value.hint)


def test_a_refused_wrap_of_collectives_has_replaced_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = dist.ProcessGroup.barrier
    monkeypatch.delattr(dist.Work, "wait")
    with pytest.raises(DependencyError):
        within(torch_distributed.spans_of_collectives(["barrier"], no_parameters, nullcontext))
    assert dist.ProcessGroup.barrier is barrier


def test_what_was_replaced_is_restored_as_it_was() -> None:
    class Base:
        value = 1

    class Derived(Base): ...

    for owner in (Derived, Derived()):
        with pytest.raises(ValueError, match="in between"):
            fail_within(replaced(owner, "value", 2), lambda owner=owner: owner.value == 2)
        assert "value" not in vars(owner)
        assert owner.value == 1
    baton = cpp_extension.FileBaton
    with build_lock.reported_lock(print):
        assert cpp_extension.FileBaton is not baton
    assert cpp_extension.FileBaton is baton


def test_attention_is_registered_with_its_mask() -> None:
    transformers_attention.register_attention("of a test", no_parameters)
    assert AttentionInterface()["of a test"] is no_parameters
    assert "of a test" in AttentionMaskInterface()


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    lines = Path(__file__).parents[2].joinpath("constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    assert {name: pinned[name] for name in TESTED} == TESTED


def test_a_source_guard_looks_at_the_text() -> None:
    foreign = Foreign("torch", "nowhere")
    foreign.source(no_parameters, "another version")
    with pytest.raises(DependencyError, match="`no_parameters` no longer contains `a line`"):
        foreign.source(no_parameters, "a line")


def test_the_tested_versions_are_allowed_by_the_project() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    tested = dict(line.split("==") for line in (root / "constraints.txt").read_text().splitlines())
    names = {name.lower().replace("_", "-"): version for name, version in tested.items()}
    wanted = [Requirement(line) for line in [*project["dependencies"], *extras]]
    refused = [
        str(each)
        for each in wanted
        if (version := names.get(each.name.lower().replace("_", "-"))) and version not in each.specifier
    ]
    assert not refused
    assert {each.name for each in wanted} >= set(TESTED)
