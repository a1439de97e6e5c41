"""The search lists the first layouts of its order that fit, and says what is missing where nothing does."""

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.cli.main import main
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.model.build.planned_model import model_of_run
from ds_finetune.plan.estimate.memory import RunMemory
from ds_finetune.plan.estimate.traced import without_activations
from ds_finetune.plan.search import search as search_module
from ds_finetune.plan.search.candidates import ACTIVATIONS, OFFLOADS, Candidates, Layout, Ranks
from ds_finetune.plan.search.fitting import Budget
from ds_finetune.plan.search.machines import Request, target_of
from ds_finetune.plan.search.search import LISTED, MOST_TRIED, Search, search_layouts
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import hf_config
from tests.conftest import ROOT
from tests.planning import all_layouts, few_bytes

PLENTY = 2**50
TIES = ("ep", "tp", "sp", "pp")


def _search(tmp_path: Path, name: str, *, ranks: int, per_node: int) -> Search:
    hf_config(name).save_pretrained(tmp_path)
    tree: dict[str, Any] = {"model": str(tmp_path), "data": {"train": "t.jsonl"}, "output_dir": "o"}
    tree["train"] = {"for": "1 steps", "global_batch_size": 8, "max_seq_len": 64, "precision": "bf16"}
    config = RunConfig.model_validate(tree)
    legal = Candidates(RunSettings.of(config), model_of_run(RunSettings.of(config)), Ranks(ranks, per_node, "cuda"))
    return Search(legal, Budget(PLENTY, PLENTY), few_bytes(legal.model))


def _order(layout: Layout) -> tuple[object, ...]:
    """The order of the documentation, without micro-batch and recomputation."""
    sizes = layout.parallel
    extent = sizes.tp * sizes.pp * sizes.sp * sizes.ep
    offload = (list(OFFLOADS).index(layout.offload), layout.activations.activation_offload)
    ties = [getattr(sizes, axis) for axis in TIES]
    return (*offload, len(sizes.axes), layout.zero_stage, extent, *(-size for size in ties))


@pytest.mark.parametrize(
    ("name", "ranks", "per_node"),
    [
        ("qwen3_moe", 2, 1),
        pytest.param("deepseek_v3_deep", 4, 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 4, 4, marks=pytest.mark.slow),
        pytest.param("llama_deep", 8, 4, marks=pytest.mark.slow),
    ],
)
def test_the_first_layouts_that_fit_are_found(name: str, ranks: int, per_node: int, tmp_path: Path) -> None:
    """Beside a comparison of the memory of every legal layout."""
    search = _search(tmp_path, name, ranks=ranks, per_node=per_node)
    model = search.candidates.model
    every = [
        (RunMemory(found.plan, model, search.traces).estimate(), found.layout)
        for found in all_layouts(search.candidates)
    ]
    for found, (memory, layout) in zip(all_layouts(search.candidates), every, strict=True):
        states = RunMemory(found.plan.with_recomputation("full"), model, without_activations(model)).estimate()
        assert 0 < states.device_bytes <= memory.device_bytes, layout
        assert states.host_bytes <= memory.host_bytes, layout
    needs = sorted(memory.device_bytes for memory, _ in every)
    nothing = Search(search.candidates, Budget(needs[0] // 2, PLENTY), search.traces).run()
    assert not nothing.proposals
    assert nothing.nearest is not None
    of_hosts = sorted(memory.host_bytes for memory, _ in every)
    for share, of_host in ((0.0, 1), (0.02, 1), (0.2, 1), (0.7, 1), (1.0, 1), (0.05, 0.2), (0.2, 0.6)):
        device, host = (n[int(s * (len(n) - 1))] / 0.92 for n, s in ((needs, share), (of_hosts, of_host)))
        budget = Budget(int(device), int(host))
        result = Search(search.candidates, budget, search.traces).run()
        groups: dict[tuple[object, ...], list[Layout]] = {}
        for memory, layout in sorted(every, key=lambda each: _order(each[1])):
            fits_without = any(
                key[:2] == (layout.parallel, layout.zero_stage) and key[2:] != _host(layout) for key in groups
            )
            if not budget.excess(memory) and not fits_without:
                groups.setdefault((layout.parallel, layout.zero_stage, *_host(layout)), []).append(layout)
        expected = [min(layouts, key=_within_group) for layouts in groups.values()][:LISTED]
        assert [found.layout for found in result.proposals] == expected, share
        assert result.num_tried <= MOST_TRIED


def _host(layout: Layout) -> tuple[object, ...]:
    return layout.offload, layout.activations.activation_offload


def _within_group(layout: Layout) -> tuple[int, int]:
    return ACTIVATIONS.index(layout.activations), -layout.micro_batch_size


def test_the_order_is_that_of_the_documentation(tmp_path: Path) -> None:
    found = [first.layout for first in _search(tmp_path, "deepseek_v3_deep", ranks=4, per_node=4)._groups()]
    assert len({layout.parallel.axes for layout in found}) > 4
    assert {_host(layout) for layout in found} == {
        (offload, inputs) for offload in OFFLOADS for inputs in (False, True)
    }
    assert all(_order(one) < _order(other) for one, other in pairwise(found))


def test_a_search_ends_after_a_number_of_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "MOST_TRIED", 3)
    result = _search(tmp_path, "qwen3_moe", ranks=4, per_node=4).run()
    assert (len(result.proposals), result.num_tried, result.is_cut_off) == (3, 3, True)


RUNS = {
    "deepseek_v3": "deepseek-ai--DeepSeek-V3",
    "deepseek_v2_lite": "deepseek-ai--DeepSeek-V2-Lite",
    "r1_distill_qwen_7b": "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B",
}


def test_few_layouts_of_256_gpus_are_estimated(shared_data: Path) -> None:
    model = str(shared_data / "configs" / RUNS["deepseek_v3"])
    file = ROOT / "ds_configs" / "runs" / "deepseek_v3.yaml"
    keys = [f"model={model}", "parallel={}", "train.global_batch_size=512"]
    run = RunSettings.of(read_config(file, keys))
    described = model_of_run(run)
    result = search_layouts(run, target_of(Request("h100-80g", 256)), described, few_bytes(described))
    assert len(result.proposals) == LISTED
    assert LISTED <= result.num_tried < 20 < result.num_compared


def _file(tmp_path: Path, shared_data: Path, name: str) -> str:
    text = (ROOT / "ds_configs" / "runs" / f"{name}.yaml").read_text()
    lines = [
        f"model: {shared_data / 'configs' / RUNS[name]}" if line.startswith("model:") else line
        for line in text.splitlines()
    ]
    file = tmp_path / "run.yaml"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def test_the_command_prints_overrides_that_it_accepts(
    tmp_path: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, where = _file(tmp_path, shared_data, "deepseek_v2_lite"), ["--gpus", "8", "--gpu", "h100-80g"]
    assert main(["plan", source, *where, "--search", "optim.lr=2e-5"]) == 0
    shown = capsys.readouterr().out
    for text in ("the first layouts that fit 8 x h100-80g\n  1  dp 8", "No speed is predicted"):
        assert text in shown
    assert main(["plan", source, *where, "--search", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]
    assert shlex.join(first["overrides"]) in " ".join(shown.split())
    assert main(["plan", source, *where, "--json", *first["overrides"]]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["fits"] is True
    assert planned["parallel"] == first["parallel"]
    assert planned["micro_batch_size"] == first["train"]["micro_batch_size"]


@pytest.mark.parametrize(
    ("name", "options", "messages"),
    [
        (
            "deepseek_v2_lite",
            "--gpus 1 --gpu l4-24g --host-memory 30GB",
            (
                "fits 1 x l4-24g: ",
                "so a rank lacks ",
                "take more GPUs or hosts with more memory",
            ),
        ),
        ("r1_distill_qwen_7b", "--gpus 8192 --gpu h100-80g", ("uses 8192 ranks", "use 8064 ranks")),
        ("deepseek_v2_lite", "--gpus 8", ("--search for 8 GPUs is impossible: the memory of a GPU is not known",)),
        ("deepseek_v2_lite", "", ("--search for 1 GPU is impossible: this machine has no GPU",)),
        ("deepseek_v2_lite", "--gpus 8 --gpu tpu", ("GPU `tpu` is not in the table",)),
        ("deepseek_v2_lite", "--gpus 8 --gpu h100-80g --tensors", ("--search and --tensors cannot be combined",)),
        ("deepseek_v2_lite", "--gpus 8 --gpu h100-80g train.max_seq_len=1000000", ("positions of",)),
        ("deepseek_v2_lite", "--gpus 8 --gpu h100-80g inexact=[zenflow]", ("zenflow cannot work with experts",)),
    ],
)
def test_a_search_without_a_result_says_what_is_missing(
    name: str,
    options: str,
    messages: tuple[str, ...],
    tmp_path: Path,
    shared_data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", _file(tmp_path, shared_data, name), "--search", *options.split()]) == 2
    printed = capsys.readouterr().err
    assert all(text in printed for text in (*messages, "hint: ")), printed
