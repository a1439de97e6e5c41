"""Which layers pipeline ranks hold, the order of their turns, and settings that are refused."""

import itertools
from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.configs import DENSE
from ds_finetune.plan.batch import PipelineTurn, idle_fraction, interleaved_turns, num_forwards_in_flight
from ds_finetune.plan.layer_stages import stages_of
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.checking import check, settings_of
from tests.described import described_tree

SIZES = [(pp, vpp, times * pp) for pp in (2, 3, 4, 8) for vpp in (1, 2, 3) for times in (1, 2, 3)]
FORWARD_TIME, BACKWARD_TIME = 1, 2
EIGHT_LAYERS = described_tree({"model_type": "llama", **DENSE, "num_hidden_layers": 8}).tensors


def _source(turn: PipelineTurn, rank: int, *, pp: int, vpp: int) -> tuple[int, PipelineTurn] | None:
    """The rank and the turn that give what a turn needs; None at the ends of the model."""
    if turn.is_forward:
        before = turn.chunk * pp + rank - 1
        return None if before < 0 else (before % pp, turn._replace(chunk=before // pp))
    after = turn.chunk * pp + rank + 1
    return None if after == pp * vpp else (after % pp, turn._replace(chunk=after // pp))


def _ends(pp: int, vpp: int, micro_batches: int) -> list[dict[PipelineTurn, int]]:
    """When each turn of each rank ends, where messages take no time and a rank only waits for what it receives."""
    turns = [interleaved_turns(pp=pp, vpp=vpp, micro_batches=micro_batches, rank=rank) for rank in range(pp)]
    ends: list[dict[PipelineTurn, int]] = [{} for _ in range(pp)]
    while any(len(ends[rank]) < len(turns[rank]) for rank in range(pp)):
        done = 0
        for rank, mine in enumerate(turns):
            for turn in mine[len(ends[rank]) :]:
                source = _source(turn, rank, pp=pp, vpp=vpp)
                if source is not None and source[1] not in ends[source[0]]:
                    break
                begins = max(
                    max(ends[rank].values(), default=0), ends[source[0]][source[1]] if source is not None else 0
                )
                if not turn.is_forward:
                    own = turn._replace(is_forward=True)
                    assert own in ends[rank], "a backward before its forward"
                ends[rank][turn] = begins + (FORWARD_TIME if turn.is_forward else BACKWARD_TIME)
                done += 1
        assert done, "every rank waits for another one"
    return ends


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), SIZES)
def test_ranks_wait_as_long_as_the_formula_says(pp: int, vpp: int, micro_batches: int) -> None:
    ends = _ends(pp, vpp, micro_batches)
    busy = vpp * micro_batches * (FORWARD_TIME + BACKWARD_TIME)
    whole = max(max(each.values()) for each in ends)
    assert 1 - busy / whole == pytest.approx(idle_fraction(pp=pp, vpp=vpp, micro_batches=micro_batches))


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), SIZES)
def test_messages_of_a_link_are_received_in_the_order_in_which_they_are_sent(
    pp: int, vpp: int, micro_batches: int
) -> None:
    turns = [interleaved_turns(pp=pp, vpp=vpp, micro_batches=micro_batches, rank=rank) for rank in range(pp)]
    places = [{turn: place for place, turn in enumerate(mine)} for mine in turns]
    for rank, is_forward in itertools.product(range(pp), (True, False)):
        assert len(turns[rank]) == len(set(turns[rank])) == 2 * vpp * micro_batches
        sources = [_source(turn, rank, pp=pp, vpp=vpp) for turn in turns[rank] if turn.is_forward == is_forward]
        sent = [places[source[0]][source[1]] for source in sources if source is not None]
        assert sent == sorted(sent)


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), SIZES)
def test_a_rank_holds_as_many_forwards_as_the_plan_says(pp: int, vpp: int, micro_batches: int) -> None:
    for rank in range(pp):
        sizes = {"pp": pp, "vpp": vpp, "micro_batches": micro_batches, "rank": rank}
        held = itertools.accumulate(1 if turn.is_forward else -1 for turn in interleaved_turns(**sizes))
        assert max(held) == num_forwards_in_flight(**sizes)


@pytest.mark.parametrize(
    ("pp", "vpp", "given", "message", "hint"),
    [
        (
            2,
            3,
            [],
            "parallel.pp 2 x parallel.vpp 3 = 6 chunks are more than the 4 layers of the model",
            "set parallel.vpp to at most 2",
        ),
        (
            2,
            2,
            [2, 2],
            "parallel.pp_layers [2, 2] does not divide 4 layers over 2 x 2 chunks",
            "name 4 numbers of at least 1 whose sum is 4, or leave parallel.pp_layers out",
        ),
    ],
)
def test_chunks_that_do_not_share_out_the_layers_are_refused(
    pp: int, vpp: int, given: list[int], message: str, hint: str
) -> None:
    model = DENSE | {"model_type": "llama", "num_hidden_layers": 4}
    sizes = "sizes of the model"
    fitting = _config(parallel={"pp": 2, "vpp": 2, "pp_layers": [1, 1, 1, 1]})
    check(settings_of(fitting, mesh=Mesh(0, 1, pp=2), model_json=model), sizes)
    config = _config(parallel={"pp": pp, "vpp": vpp, "pp_layers": given})
    with pytest.raises(ConfigError) as caught:
        check(settings_of(config, mesh=Mesh(0, 1, pp=pp), model_json=model), sizes)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def _config(**sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": "m",
        "data": {"train": "t.jsonl"},
        "deepspeed": {"zero_optimization": {"stage": 1}},
        "output_dir": "o",
    }
    tree |= {
        "parallel": {"pp": 2, "vpp": 2},
        "train": {"for": "1 steps", "global_batch_size": 4, "micro_batch_size": 1},
    }
    return RunConfig.model_validate(tree | sections)


@pytest.mark.parametrize(
    ("sections", "message", "hint"),
    [
        (
            {"parallel": {"vpp": 2}},
            "parallel.vpp 2 with parallel.pp 1, which has no pipeline stages to interleave",
            "set parallel.pp, or leave parallel.vpp out",
        ),
        (
            {"train": {"for": "1 steps", "global_batch_size": 6, "micro_batch_size": 2}},
            "parallel.vpp 2 computes micro-batches in groups of parallel.pp 2, and a step has 3: "
            "train.global_batch_size 6 / (micro_batch_size 2 x dp 1)",
            "set train.global_batch_size to 4 or 8, or parallel.vpp to 1",
        ),
        (
            {"train": {"for": "1 steps", "global_batch_size": 3, "micro_batch_size": "auto"}},
            "parallel.vpp 2 computes micro-batches in groups of parallel.pp 2, and a step has 3: "
            "train.global_batch_size 3 / (micro_batch_size 1 x dp 1)",
            "set train.global_batch_size to 2 or 4, or parallel.vpp to 1",
        ),
        ({"indexer": {"train": True}}, "parallel.vpp 2 with indexer.train true is not tested", "set parallel.vpp: 1"),
    ],
)
def test_settings_that_do_not_go_with_several_chunks_are_refused(
    sections: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(RunSettings.of(_config(**sections)), world=World(0, 2, 0, 2, "torchrun"), device="cpu")
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("parallel", "line"),
    [
        ({"pp": 2}, "layers 0-3, 4-7; each waits 20% of a step = (2 - 1) / (4 + 2 - 1)"),
        ({"pp": 2, "vpp": 2}, "layers 0-1 and 4-5, 2-3 and 6-7; each waits 11% of a step = (2 - 1) / (2 x 4 + 2 - 1)"),
    ],
)
def test_the_plan_says_how_long_ranks_wait(parallel: dict[str, int], line: str) -> None:
    config = _config(parallel=parallel)
    plan = make_plan(RunSettings.of(config), world=World(0, 2, 0, 2, "torchrun"), device="cpu")
    assert plan.stage_lines(stages_of(EIGHT_LAYERS, config.parallel)) == [("stages", line)]
    assert plan.stage_lines((None,)) == []
