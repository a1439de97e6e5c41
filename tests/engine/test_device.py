"""What an engine gives to collectives lies on its device: steps, evaluations and gathering in every layout, on a GPU
and under NCCL that are imagined. Attention takes all documents of a forward at once, as it does on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import eval_batches, training_batches
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object, all_gather_scalar, all_reduce_max
from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.rank_model import build_rank_model, start_teacher
from ds_finetune.engine.sampling.answers import SamplingLimits
from ds_finetune.features import routers
from ds_finetune.features.feature import RankParts
from ds_finetune.features.table import features_of
from ds_finetune.model.attention import kernels
from ds_finetune.model.loss.token_loss import HeadGroups, TrainedModel
from ds_finetune.model.parallel.expert import ExpertParallelGroup
from ds_finetune.model.parallel.pipeline import PipelineGroup
from ds_finetune.model.parallel.sequence import SequenceParallelGroup
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell, enlarged_config, hf_config, rows, run_tree
from ds_finetune.reference.selftest.compare import batch_plan
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import plan_model
from tests.device_checks import DEVICE, CpuTensor, ImaginaryGroup, OnDevice, on_device
from tests.model.plain_varlen import plain_varlen_attn
from tests.parity import objective_cells

LAYOUTS = {
    "tp 2": (2, {"tp": 2}),
    "sp 2": (2, {"sp": 2}),
    "ep 2": (2, {"ep": 2}),
    "tp 2 x ep 2": (4, {"tp": 2, "ep": 2}),
    "sp 2 x ep 2": (2, {"sp": 2, "ep": 2}),
    "pp 2": (2, {"pp": 2}),
}


class _Ranks:
    """DeepSpeed's engine as far as a step at ZeRO stage 0 needs it, without its reductions, which are not this
    program's.
    """

    def __init__(self, module: TrainedModel) -> None:
        self.module, self.device = module, DEVICE
        self.optimizer = SimpleNamespace(param_groups=[])
        self._is_gradient_accumulation_boundary, self.enable_backward_allreduce = None, True

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        pass

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._is_gradient_accumulation_boundary = is_boundary

    def allreduce_gradients(self) -> None:
        pass


def _groups(plan: Plan) -> Groups:
    mesh = plan.mesh

    def group(kind: Any, size: int, place: int) -> Any:
        return kind(ImaginaryGroup(size, place), size, place) if size > 1 else None

    stage = group(PipelineGroup, mesh.pp, mesh.coordinate("pp"))
    if stage is not None:
        stage.embedding_group = ImaginaryGroup(2 * mesh.dp)
    return Groups(
        stage=stage,
        sequence=group(SequenceParallelGroup, mesh.sp, mesh.coordinate("sp")),
        tensor=group(TensorParallelGroup, mesh.tp, mesh.coordinate("tp")),
        experts=group(ExpertParallelGroup, mesh.ep, mesh.expert_index),
        mpu=None,
        same_experts=ImaginaryGroup(mesh.dp * mesh.sp // mesh.ep),  # type: ignore[arg-type]
    )


@contextmanager
def engine_on_device(
    layout: str, rank: int = 0, *, family: str = "deepseek_v3_deep", objective: str = "sft"
) -> Iterator[tuple[Engine, list[str]]]:
    """The engine of a rank of a layout, as on a GPU, and the names of the collectives and attentions it has called."""
    world_size, sizes = LAYOUTS[layout]
    cell = Cell(family, 0, 2, packing=True, balances="deepseek_v3" in family, **sizes)
    tree = run_tree(cell, Path("model"), Path("out"), dp=world_size // cell.sharing)
    tree |= {
        "model": {"path": "model", "weights": "random", "kernels": "torch", "loss": "chunked"},
        "objective": objective,
    }
    config = RunConfig.model_validate(tree)
    plan = make_plan(RunSettings.of(config), world=World(rank, world_size, rank, world_size, "test"), device="cuda")
    with on_device(world_size, rank=rank) as calls, pytest.MonkeyPatch.context() as checks:
        groups = _groups(plan)
        enlarged = enlarged_config(hf_config(family), config.parallel)
        model = plan_model(enlarged, RunSettings.of(config))
        features = features_of(model, plan)
        lm, _, in_fp32 = build_rank_model(plan, model, groups, features, loads_weights=True)
        trained = TrainedModel(lm, groups.sequence, groups.stage)
        trained.packs_documents, trained.in_fp32 = True, in_fp32

        def attend(*args: Any, **options: Any) -> torch.Tensor:
            calls.append("varlen_attn")
            return plain_varlen_attn(*args, **options)

        checks.setattr(kernels, "varlen_attn", attend)
        parts = RankParts(
            HeadGroups(groups.tensor, groups.sequence, groups.stage),
            DEVICE,
            partial(start_teacher, plan, model, groups),
        )
        losses = (feature.extra_loss(trained, parts) for feature in features)
        trained.extras = tuple(loss for loss in losses if loss is not None)
        engine = Engine(_Ranks(trained), plan, groups, model.objective)
        # Imagined ranks all have this rank's tokens and layers, whatever they share.
        checks.setattr(routers, "check_each_counted", lambda *_, **__: None)
        checks.setattr("ds_finetune.engine.engine.check_counts", lambda *_: None)
        assert all(isinstance(param, OnDevice) for param in engine.lm.parameters())
        yield engine, calls


EVEN = [(layout, place % 2) for place, layout in enumerate(LAYOUTS)]
"""Each layout on one of two ranks."""
ODD = [(layout, 1 - rank) for layout, rank in EVEN]


def _by_default(chosen: list[tuple[str, int]], others: list[tuple[str, int]]) -> pytest.MarkDecorator:
    """Of kinds of steps and ranks, a pair each of every layout; the other ranks are behind the marker."""
    more = [pytest.param(*pair, marks=pytest.mark.slow) for pair in others]
    return pytest.mark.parametrize(("layout", "rank"), [*chosen, *more])


@_by_default(EVEN, ODD)
def test_a_step_and_an_evaluation(layout: str, rank: int) -> None:
    every = rows(packing=True)
    with engine_on_device(layout, rank) as (engine, calls):
        batch = next(iter(training_batches(every, batch_plan(engine.plan), start_step=0, total_rows=len(every))))
        result = engine.step(batch, lr=1e-3)
        held_out = engine.evaluate(islice(eval_batches(every, batch_plan(engine.plan)), 1))
        engine.generate([[5, 6, 7]], SamplingLimits(2, (1,)))
        list(engine.logits([[5, 6, 7]]))
    assert not result.skipped
    assert held_out is not None
    assert calls.count("all_reduce") > 3
    assert calls.count("varlen_attn") > 3


@_by_default(ODD, EVEN)
def test_a_step_on_pairs_and_their_log_probabilities(layout: str, rank: int) -> None:
    every = objective_cells.rows(2, packing=True)
    with engine_on_device(layout, rank, objective="dpo") as (engine, _):
        plan = replace(batch_plan(engine.plan), documents_per_unit=2)
        batch = next(iter(training_batches(every, plan, start_step=0, total_rows=len(every))))
        result = engine.step(batch, lr=1e-3)
        engine.evaluate([batch])
        numbers, logps = engine.document_log_probs([batch])
    assert not result.skipped
    assert len(numbers) == len(logps)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_tensors_come_to_the_cpu_of_rank_zero(layout: str, rank: int) -> None:
    with engine_on_device(layout, rank) as (engine, calls):
        specs = engine.tensor_specs()
        found = dict(engine.tensors())
    assert found.keys() == specs.keys()
    if rank:
        assert all(tensor is None for tensor in found.values())
        return
    for name, tensor in found.items():
        assert tensor is not None
        assert tensor.device.type == "cpu"
        assert tensor.shape == specs[name].shape, name
    assert {"gather", "recv"} & {*calls} or layout == "sp 2"


def test_parts_of_experts_join_in_their_places() -> None:
    """Every rank has what this one has: of a tensor of experts and heads each part is there as often as ranks share it
    out.
    """
    with engine_on_device("tp 2 x ep 2") as (engine, _):
        name = "model.layers.1.mlp.experts.down_proj"
        part = dict(engine.lm.named_parameters())[name].detach()
        whole = engine.gather_shards(name, part)
        own = part.held
    assert whole.device.type == "cpu"
    assert torch.equal(whole, own.repeat(2, 1, 2))


def test_moments_of_an_offloaded_optimizer_are_joined() -> None:
    """As reference/selftest/compare.py reads them."""
    with engine_on_device("tp 2 x ep 2") as (engine, _):
        params = {
            name: param for name, param in engine.lm.named_parameters() if "experts" in name or "q_b_proj" in name
        }
        for name, param in params.items():
            assert engine.gather_shards(name, torch.ones(param.shape)).device.type == "cpu"


def test_values_that_ranks_exchange() -> None:
    """Of signals, saves and choices of a checkpoint."""
    with on_device(3, rank=1):
        assert all_reduce_max(1.0, 2.0) == [1.0, 2.0]
        assert all_gather_scalar(2.0) == [0.0, 6.0, 0.0]
        assert all_gather_object("a") == ["a"] * 3


def test_a_tensor_on_the_cpu_is_refused() -> None:
    with on_device(2):
        dist.all_reduce(torch.ones(2, device="cuda"))
        for call in (
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.gather(torch.ones(2, device="cuda").cpu(), [torch.ones(2, device="cuda")]),
        ):
            with pytest.raises(CpuTensor, match=r"was given torch.float32 \(2,\)"):
                call()
        with pytest.raises(AssertionError, match=r"torch.distributed.reduce_scatter is not imitated"):
            dist.reduce_scatter(torch.ones(1), [torch.ones(1)])


def test_tensors_compute_and_differentiate_there() -> None:
    with on_device():
        weight = torch.nn.Parameter(torch.arange(6.0, device="cuda").view(2, 3))
        loss = (torch.ones(4, 2, device="cuda") @ weight).square().sum()
        loss.backward()
        assert weight.grad is not None
        assert isinstance(weight.grad, OnDevice)
        assert weight.grad.tolist() == [[24.0, 40.0, 56.0]] * 2
        assert loss.item() == 4 * (3**2 + 5**2 + 7**2)
        assert weight.detach().cpu().device.type == "cpu"
