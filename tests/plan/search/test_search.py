"""The search finds what a comparison of all layouts finds, with few plans, and says what is missing where nothing fits."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.cli.main import main
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.errors import ConfigError
from ds_finetune.plan.config_json import read_config_json
from ds_finetune.plan.estimate.accelerators import accelerator, machine_of
from ds_finetune.plan.estimate.memory import estimate_memory, least_bytes_of_stages
from ds_finetune.plan.estimate.operations import RowShape
from ds_finetune.plan.estimate.step_time import estimate_time, least_seconds
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.search import candidates
from ds_finetune.plan.search.candidates import Candidates, Ranks
from ds_finetune.plan.search.fitting import Budget
from ds_finetune.plan.search.machines import Request, target_of
from ds_finetune.plan.search.search import LISTED, Search
from ds_finetune.plan.search.search_run import search_layouts
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import hf_config
from tests.conftest import ROOT
from tests.planning import all_layouts, layout_of

PLENTY = 2**50


def _search(tmp_path: Path, name: str, *, ranks: int, per_node: int) -> Search:
    hf_config(name).save_pretrained(tmp_path)
    tree: dict[str, Any] = {"model": str(tmp_path), "data": {"train": "t.jsonl"}, "output_dir": "o"}
    tree["train"] = {"for": "1 steps", "global_batch_size": 8, "max_seq_len": 64, "precision": "bf16"}
    config = RunConfig.model_validate(tree)
    legal = Candidates(RunSettings.of(config), read_config_json(str(tmp_path)), Ranks(ranks, per_node, "cuda"))
    machine = machine_of(accelerator("h100-80g"), gpus_per_node=per_node)
    return Search(legal, machine, Budget(PLENTY, PLENTY), RowShape.full(64))


@pytest.mark.parametrize(
    ("name", "ranks", "per_node"),
    [
        ("qwen3_moe", 2, 1),
        pytest.param("deepseek_v3_deep", 4, 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 4, 4, marks=pytest.mark.slow),
        pytest.param("llama_deep", 8, 4, marks=pytest.mark.slow),
    ],
)
def test_nothing_better_is_missed(name: str, ranks: int, per_node: int, tmp_path: Path) -> None:
    search = _search(tmp_path, name, ranks=ranks, per_node=per_node)
    model = search.candidates.model
    every = [
        (
            estimate_memory(found.plan, model),
            estimate_time(found.plan, model, machine=search.machine, rows=search.rows).seconds,
            found.layout,
        )
        for found in all_layouts(search.candidates)
    ]
    for found, (memory, seconds, layout) in zip(all_layouts(search.candidates), every, strict=True):
        states = least_bytes_of_stages(found.plan, model)
        assert 0 < states.device <= memory.device_bytes, layout
        assert states.host <= memory.host_bytes, layout
        bound = least_seconds(found.plan, model, machine=search.machine, rows=search.rows)
        forwards = found.plan.batch.gradient_accumulation_steps
        assert 0 < bound.seconds(vpp=layout.vpp, num_turns=layout.vpp * forwards) <= seconds * (1 + 1e-9), layout
    needs = sorted(memory.device_bytes for memory, _, _ in every)
    small = Budget(needs[0] // 2, PLENTY)
    misfits = replace(search, budget=small).run().misfits
    assert small.excess(misfits[0].memory) == min(small.excess(memory) for memory, _, _ in every)
    for share in (0.0, 0.02, 0.2, 0.7, 1.0):
        budget = Budget(int(needs[int(share * (len(needs) - 1))] / 0.92), PLENTY)
        result = replace(search, budget=budget).run()
        groups: dict[tuple[object, ...], float] = {}
        for memory, seconds, layout in every:
            group = (layout.sizes, layout.zero_stage, layout.offload)
            if not budget.excess(memory):
                groups[group] = min(seconds, groups.get(group, seconds))
        expected = sorted(groups.values())[:LISTED]
        assert [found.time.seconds for found in result.proposals] == pytest.approx(expected), (share, len(groups))
        assert all(misfit.seconds <= expected[0] and budget.problem(misfit.memory) for misfit in result.misfits)


RUNS = {
    "deepseek_v3": "deepseek-ai--DeepSeek-V3",
    "deepseek_v2_lite": "deepseek-ai--DeepSeek-V2-Lite",
    "r1_distill_qwen_7b": "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B",
}


def _run_of(name: str, shared_data: Path) -> RunConfig:
    model = str(shared_data / "configs" / RUNS[name])
    return read_config(ROOT / "ds_configs" / "runs" / f"{name}.yaml", [f"model={model}"])


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """The plans that a search makes, each of which takes one or two milliseconds of it: at most as many as were made of
    the largest run here. Seconds are those of a machine.
    """
    made: list[Plan] = []

    def make(*given: Any, **options: Any) -> Plan:
        made.append(make_plan(*given, **options))
        return made[-1]

    monkeypatch.setattr(candidates, "make_plan", make)
    yield made
    assert len(made) < 6500


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 8, 64, 512, 2048, 4096])
@pytest.mark.parametrize("name", RUNS)
def test_a_search_makes_few_plans(name: str, gpus: int, shared_data: Path, plans: list[Plan]) -> None:
    config, target = _run_of(name, shared_data), target_of(Request("h100-80g", gpus, gpus_per_node=min(8, gpus)))
    try:
        search_layouts(RunSettings.of(config), target)
    except ConfigError as refused:
        assert refused.message.startswith("no layout"), refused.message  # noqa: PT017
    assert plans


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gpus"), [("Qwen--Qwen3-235B-A22B", 64), ("deepseek-ai--DeepSeek-V3.2", 960)])
def test_a_batch_with_many_divisors_takes_as_few(name: str, gpus: int, shared_data: Path, plans: list[Plan]) -> None:
    tree: dict[str, Any] = {"model": str(shared_data / "configs" / name), "data": {"train": "t.jsonl"}}
    tree["train"] = {"for": "1 steps", "global_batch_size": 960, "max_seq_len": 4096, "precision": "bf16"}
    config = RunConfig.model_validate(tree | {"output_dir": "o"})
    search_layouts(RunSettings.of(config), target_of(Request("h100-80g", gpus, gpus_per_node=8)))
    assert plans


def _file(tmp_path: Path, shared_data: Path, name: str) -> str:
    text = (ROOT / "ds_configs" / "runs" / f"{name}.yaml").read_text()
    lines = [
        f"model: {shared_data / 'configs' / RUNS[name]}" if line.startswith("model:") else line
        for line in text.splitlines()
    ]
    file = tmp_path / "run.yaml"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def test_the_command_writes_a_run_file_that_it_accepts(
    tmp_path: Path, shared_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    source, best = _file(tmp_path, shared_data, "deepseek_v2_lite"), str(tmp_path / "best.yaml")
    where = ["--gpus", "8", "--gpu", "h100-80g"]
    assert main(["plan", source, *where, "--search", "--write", best, "optim.lr=2e-5"]) == 0
    shown = capsys.readouterr().out
    for text in ("best of ", "the fastest", " x the", "of host memory", f"written: {best}"):
        assert text in shown
    written = read_config(best)
    assert written.optim.lr == 2e-5
    assert Path(best).read_text().count("# Planned on 8 GPUs of 80 GB") == 1
    assert f"# The rest is {source} with these choices; its comments were written for other ones.\n" in (
        Path(best).read_text()
    )
    assert main(["plan", best, *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert main(["plan", source, *where, "--search", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]
    assert written.parallel.model_dump(mode="json") == first["parallel"]
    assert layout_of(written).micro_batch_size == first["train"]["micro_batch_size"]
    assert main(["plan", source, *where, "--search", "--write", best]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "messages"),
    [
        (
            "deepseek_v2_lite",
            "--gpus 1 --gpu l4-24g --host-memory 30GB",
            ("fits 1 rank: ", "GiB of a rank are missing", "any of these fits: "),
        ),
        ("r1_distill_qwen_7b", "--gpus 8192 --gpu h100-80g", ("uses 8192 ranks", "use 8064 ranks")),
        ("deepseek_v2_lite", "--gpus 8", ("no accelerator is named",)),
        ("deepseek_v2_lite", "--gpus 8 --gpu tpu", ("accelerator `tpu` is not known",)),
        ("deepseek_v2_lite", "--gpus 8 --gpu h100-80g --tensors", ("--search with --tensors",)),
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
