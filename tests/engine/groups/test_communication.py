"""Bytes that a rank sends in a step, counted by hand from the sizes of tiny models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finetune.engine.groups.communication import StepCommunication, sent_bytes
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.reference.selftest.cells import PACKED_ROWS, ROW_LEN, hf_config
from tests.running import start, torchrun

TOKENS, HIDDEN, LAYERS, FP32, FORWARDS = PACKED_ROWS * ROW_LEN, 32, 2, 4, 2
ACTIVATIONS = TOKENS * HIDDEN * FP32
"""Bytes of the hidden states of all tokens of a step."""
COUNTS = 400
"""Bytes of sums of losses, counts and norms: a few numbers in fp64 each."""


def numbers(family: str) -> dict[str, int]:
    """Elements of each parameter."""
    return {name: param.numel() for name, param in build_meta_model(hf_config(family)).named_parameters()}


PARAMETERS = sum(numbers("llama").values())
NORMS = (2 * LAYERS + 1) * HIDDEN
GRADIENTS = FP32 * PARAMETERS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the worker wrote, all layouts of one launch."""
    folder = tmp_path_factory.mktemp("communication")
    torch.manual_seed(11)
    for family in ("llama", "deepseek_v3"):
        AutoModelForCausalLM.from_config(hf_config(family)).float().save_pretrained(folder / family)
    worker = Path(__file__).with_name("communication_worker.py")
    done = start(torchrun(str(worker), str(folder), str(folder / "found.json")))
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads((folder / "found.json").read_text()))


# An all-reduce over two ranks sends its tensor once, everything else half of the whole.
BY_HAND = {
    "dp, ZeRO-0": {"all_reduce": GRADIENTS},
    "dp, ZeRO-1": {"all_reduce": GRADIENTS, "all_gather": GRADIENTS / 2},
    # In every micro-batch.
    "dp, ZeRO-2": {"all_reduce": FORWARDS * GRADIENTS, "all_gather": GRADIENTS / 2},
    # Norms are persistent: gathered after the step and not in forwards, whose weights stay for the backward.
    "dp, ZeRO-3": {
        "reduce_scatter": FORWARDS * GRADIENTS / 2,
        "all_gather": (FORWARDS * (PARAMETERS - NORMS) + NORMS) * FP32 / 2,
    },
    # Queries, keys, values (half as many heads as queries) and outputs of half the tokens, in both passes.
    "sp 2, ZeRO-1": {
        "all_reduce": GRADIENTS,
        "all_gather": GRADIENTS / 2,
        "all_to_all": 2 * LAYERS * (ACTIVATIONS / 2) * 3 / 2,
    },
    "pp 2, ZeRO-1": {"all_reduce": 0, "send_recv": ACTIVATIONS},
}


@pytest.mark.parametrize("layout", BY_HAND)
@pytest.mark.parametrize("rank", [0, 1])
def test_bytes_are_those_counted_by_hand(found: dict[str, Any], layout: str, rank: int) -> None:
    sent = found[layout][rank]["bytes"]
    assert sent.keys() == BY_HAND[layout].keys() | {"all_reduce"}
    for kind, num_bytes in BY_HAND[layout].items():
        assert sent[kind] == pytest.approx(num_bytes, abs=COUNTS if kind == "all_reduce" else 0)


def test_tensor_parallel_ranks_sum_activations(found: dict[str, Any]) -> None:
    # The embedding's output; of each layer attention's and the MLP's output, and the gradients of their inputs.
    activations = (1 + 4 * LAYERS) * ACTIVATIONS
    for rank in found["tp 2, ZeRO-1"]:
        # Of the head for each supervised token: the gradient of its input, and maximum, sum, logit and choice.
        head = rank["supervised"] * (HIDDEN * FP32 + 3 * FP32 + 2 * 8)
        assert rank["bytes"].keys() == {"all_reduce"}
        assert rank["bytes"]["all_reduce"] == pytest.approx(activations + head, abs=8 * rank["supervised"] + COUNTS)


def test_expert_parallel_ranks_exchange_chosen_rows(found: dict[str, Any]) -> None:
    config, params = hf_config("deepseek_v3"), numbers("deepseek_v3")
    shared = FP32 * sum(number for name, number in params.items() if ".mlp.experts." not in name)
    # All rows of this rank's half of the tokens are for the other: there and back, in both passes, and with a weight
    # there; and their counts.
    rows = 4 * (ACTIVATIONS / 2) * config.num_experts_per_tok * (1 + 1 / (2 * HIDDEN))
    counts = FORWARDS * config.n_routed_experts * 8 / 2
    for rank in found["ep 2, ZeRO-1"]:
        sent = rank["bytes"]
        assert sent["all_to_all"] == rows + counts
        assert sent["all_gather"] == shared / 2
        assert sent["all_reduce"] == pytest.approx(shared, abs=COUNTS)


def test_selective_recomputation_sends_no_row_again(found: dict[str, Any]) -> None:
    for kept, once in zip(found["selective"], found["ep 2, ZeRO-1"], strict=True):
        assert kept["bytes"]["all_to_all"] == once["bytes"]["all_to_all"]


@pytest.mark.parametrize("layers", ["whole", "checkpointed"])
def test_shared_experts_beside_the_exchange_change_no_bit(found: dict[str, Any], layers: str) -> None:
    overlapped, apart = (dict(found[f"{layers}, {how}"]) for how in ("overlapped", "apart"))
    assert overlapped.pop("calls") == ["shared_experts.down_proj", "experts"]
    assert apart.pop("calls") == ["experts", "shared_experts.down_proj"]
    assert overlapped == apart


def test_collectives_have_a_time_on_cpus(found: dict[str, Any]) -> None:
    for layout in (*BY_HAND, "tp 2, ZeRO-1", "ep 2, ZeRO-1"):
        for rank in found[layout]:
            assert rank["seconds"].keys() >= rank["bytes"].keys(), layout
            assert min(rank["seconds"].values()) > 0, layout


def test_metrics_have_mebibytes_and_shares() -> None:
    made = StepCommunication({"all_reduce": 3 * 2**20, "send_recv": 2**20}, {"all_reduce": 0.5, "send_recv": 0.25})
    assert made.metrics(step_seconds=2.0) == {
        "comm/total_mib": 4,
        "comm/all_reduce_mib": 3,
        "comm/send_recv_mib": 1,
        "comm/total_share": 0.375,
        "comm/all_reduce_share": 0.25,
        "comm/send_recv_share": 0.125,
    }
    assert [name for name in StepCommunication({"reduce": 1}, None).metrics(step_seconds=1.0) if "share" in name] == []


@pytest.mark.parametrize(
    ("name", "args", "num_bytes"),
    [
        ("allreduce", ([torch.zeros(8)],), 2 * 32 * 3 / 4),
        ("_reduce_scatter_base", (torch.zeros(2), torch.zeros(8)), 32 * 3 / 4),
        ("_allgather_base", (torch.zeros(8), torch.zeros(2)), 32 * 3 / 4),
        ("allgather", ([[torch.zeros(2)] * 4], [torch.zeros(2)]), 32 * 3 / 4),
        ("alltoall_base", (torch.zeros(8), torch.zeros(8), [], []), 32 * 3 / 4),
        # Rank 1 keeps three of eight rows.
        ("alltoall_base", (torch.zeros(9), torch.zeros(8), [9, 0, 0, 0], [2, 3, 0, 3]), 32 * 5 / 8),
        ("alltoall_base", (torch.zeros(0), torch.zeros(0), [0] * 4, [0] * 4), 0),
        ("alltoall", ([], [torch.zeros(1), torch.zeros(5), torch.zeros(2), torch.zeros(0)]), 12),
        ("broadcast", ([torch.zeros(8)],), 32 * 3 / 4),
        ("reduce", ([torch.zeros(8)],), 32 * 3 / 4),
        ("send", ([torch.zeros(8)], 0, 0), 32),
        ("recv", ([torch.zeros(8)], 0, 0), 0),
        ("barrier", (None,), 0),
    ],
)
def test_bytes_of_a_call_of_the_second_of_four_ranks(name: str, args: tuple[Any, ...], num_bytes: float) -> None:
    assert sent_bytes(name, args, size=4, group_rank=1) == num_bytes
