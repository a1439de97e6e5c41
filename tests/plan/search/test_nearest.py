"""The largest micro-batch that fits, and the changes of a run file with which a run fits."""

import pytest

from ds_finetune.cli.demo import MODEL
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.units import GIB
from ds_finetune.plan.estimate.memory import RunMemory
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.search.fitting import (
    SPARE,
    chosen_recomputation,
    fits,
    fitting_changes,
    largest_micro_batch,
)
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.described import described_tree
from tests.planning import traces_of

_WIDE = described_tree(MODEL | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8})
_LARGE = described_tree(MODEL | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32})
_TRACES, _TRACES_OF_LARGE = traces_of(_WIDE), traces_of(_LARGE)
_RANKS = 4


def _config(rows: int = 24, **train: object) -> RunConfig:
    given = {"global_batch_size": 96, "micro_batch_size": rows, "max_seq_len": 512, "activation_checkpointing": "none"}
    # Where torch brings Triton, `auto` would keep as much with recomputation as without.
    tree = {
        "model": {"path": "m", "kernels": "torch"},
        "data": {"train": "t"},
        "output_dir": "o",
        "deepspeed": {"zero_optimization": {"stage": 1}},
    }
    return RunConfig.model_validate(tree | {"train": given | train})


def _plan(config: RunConfig) -> Plan:
    return make_plan(RunSettings.of(config), world=World(0, _RANKS, 0, _RANKS, "a test"), device="cuda")


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 8, 12, 24])
def test_the_largest_micro_batch_is_the_largest_divisor_that_leaves_enough_free(rows: int) -> None:
    config = _config()
    plan = _plan(config)
    exact = RunMemory(plan, _WIDE, _TRACES).bytes_of(rows)
    needed = _config(rows)
    assert exact == RunMemory(_plan(needed), _WIDE, _TRACES).estimate().device_bytes
    budget = round(exact / (1 - SPARE)) + 1
    sizes = [
        size for size in (1, 2, 3, 4, 6, 8, 12, 24) if fits(RunMemory(plan, _WIDE, _TRACES).bytes_of(size), budget)
    ]
    assert rows in sizes
    assert largest_micro_batch(RunMemory(plan, _WIDE, _TRACES), budget=budget) == max(sizes)


def test_every_change_that_is_named_fits() -> None:
    config = _config()
    plan = _plan(config)
    budget = round(0.7 * RunMemory(plan, _WIDE, _TRACES).estimate().device_bytes)
    changes = {
        change.text: change.device_bytes for change in fitting_changes(RunMemory(plan, _WIDE, _TRACES), budget=budget)
    }
    assert {"train.micro_batch_size 12", "train.activation_checkpointing full"} <= changes.keys()
    assert all(fits(num_bytes, budget) for num_bytes in changes.values())
    recomputed = _config(activation_checkpointing="full")
    expected = RunMemory(_plan(recomputed), _WIDE, _TRACES).estimate().device_bytes
    assert changes["train.activation_checkpointing full"] == expected


def test_no_change_is_named_where_none_is_enough() -> None:
    plan = _plan(_config(rows=1, max_seq_len=4096))
    whole = RunMemory(plan, _LARGE, _TRACES_OF_LARGE).estimate().device_bytes
    assert not fitting_changes(RunMemory(plan, _LARGE, _TRACES_OF_LARGE), budget=whole // 20)


@pytest.mark.parametrize(("spare", "chosen"), [(1, "selective"), (-1, "full")])
def test_recomputation_is_selective_where_that_fits(spare: int, chosen: str) -> None:
    plan = _plan(_config(activation_checkpointing="auto"))
    assert plan.activation_checkpointing == "full"
    need = (
        RunMemory(_plan(_config(activation_checkpointing="selective")), _LARGE, _TRACES_OF_LARGE)
        .estimate()
        .device_bytes
    )
    assert need > RunMemory(plan, _LARGE, _TRACES_OF_LARGE).estimate().device_bytes
    found, reason = chosen_recomputation(
        RunMemory(plan, _LARGE, _TRACES_OF_LARGE), budget=round(need / (1 - SPARE)) + spare
    )
    assert found == chosen
    assert f"{need / GIB:.1f} of " in reason


def test_recomputation_is_full_where_the_memory_is_not_known() -> None:
    plan = _plan(_config(activation_checkpointing="auto"))
    assert chosen_recomputation(RunMemory(plan, _WIDE, _TRACES), budget=None) == (
        "full",
        "the memory of the GPU is not known; selective where it fits",
    )
    on_cpus = make_plan(RunSettings.of(_config(activation_checkpointing="auto")), world=plan.world, device="cpu")
    assert chosen_recomputation(RunMemory(on_cpus, _WIDE, _TRACES), budget=2**60) == ("full", "on CPUs")
