"""`train.precision: auto`: what it is on which device, what is printed, and that all ranks have the same."""

import json
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_finetune.cli.main import main
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.config.sections import TrainConfig
from ds_finetune.engine.devices import bf16_support
from ds_finetune.engine.groups.default_group import JoinedRanks
from ds_finetune.errors import ConfigError
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.precision import Bf16Support, cpu_support, with_precision
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.run import _cases_of_run
from ds_finetune.system.world import World
from ds_finetune.trainer.prepare import check_same_precision
from ds_finetune.trainer.resolve import resolve, resolve_here
from ds_finetune.trainer.teach import teach
from tests.running import metrics, start, tiny_task

ONE, SECOND_OF_TWO = World(0, 1, 0, 1, "test"), World(1, 2, 1, 2, "test")
OLD_CPU = Bf16Support("this CPU (neither AMX nor AVX512-BF16)", is_native=False)


def _gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


@pytest.mark.parametrize(
    ("flags", "text", "chosen"),
    [
        ("fma avx2", "neither AMX nor AVX512-BF16", "fp32"),
        ("avx2 avx512f avx512_bf16", "AVX512-BF16", "bf16"),
        ("avx512_bf16 amx_bf16 amx_tile", "AMX and AVX512-BF16", "bf16"),
    ],
)
def test_a_cpu_takes_bf16_where_it_has_instructions_for_it(tmp_path: Path, flags: str, text: str, chosen: str) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"model name : x\nflags\t\t: {flags}\nbugs :\n")
    train, (line,) = with_precision(TrainConfig(), device="cpu", support=cpu_support(file))
    assert train.precision == chosen
    computes = "computes" if chosen == "bf16" else "does not compute"
    assert line == f"train.precision auto is {chosen}: this CPU ({text}) {computes} matrix products in bf16"
    assert not cpu_support(tmp_path / "none").is_native


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_gpu_from_ampere_on_takes_bf16(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    _gpu(monkeypatch, "NVIDIA A100", capability)
    support = bf16_support("cuda", SECOND_OF_TWO)
    train, (line,) = with_precision(TrainConfig(), device="cuda", support=support)
    assert train.precision == "bf16"
    dotted = ".".join(map(str, capability))
    assert (
        line
        == f"train.precision auto is bf16: NVIDIA A100 (compute capability {dotted}) computes matrix products in bf16"
    )


def test_an_older_gpu_asks_for_a_choice_and_says_what_bf16_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, "Tesla V100", (7, 0))
    support = bf16_support("cuda", ONE)
    with pytest.raises(ConfigError) as caught:
        with_precision(TrainConfig(), device="cuda", support=support)
    v100 = "Tesla V100 (compute capability 7.0)"
    assert caught.value.message == f"train.precision auto: {v100} does not compute matrix products in bf16"
    assert caught.value.hint == "set train.precision to fp16 or fp32"
    train, (line,) = with_precision(TrainConfig(precision="bf16"), device="cuda", support=support)
    assert train.precision == "bf16"
    assert line == (
        f"train.precision bf16: {v100} only emulates matrix products in bf16; fp16 and fp32 are much faster"
    )
    for precision in ("fp16", "fp32"):
        given = TrainConfig(precision=precision)
        assert with_precision(given, device="cuda", support=support) == (given, ())


def test_every_gpu_of_rocm_has_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, "AMD", (6, 0))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    support = bf16_support("cuda", ONE)
    assert support is not None
    assert support.is_native


@pytest.mark.parametrize(
    "begin",
    [
        lambda config: resolve_here(config, SECOND_OF_TWO),
        lambda config: check_same_precision(config.train, JoinedRanks(SECOND_OF_TWO, dist.HashStore())),
        lambda config: teach(RunSettings.of(config), "a teacher", Path("out"), top_k=1, say=print),
        lambda config: _cases_of_run(RunSettings.of(config), SECOND_OF_TWO, "cuda"),
    ],
    ids=["train", "beside other ranks", "teach", "selftest"],
)
def test_every_start_asks_about_its_own_gpu(
    begin: Callable[[RunConfig], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first GPU of this host is newer than that of this rank."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["NVIDIA A100", "Tesla V100"].__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(8, 0), (7, 0)].__getitem__)
    for module in ("resolve", "prepare", "teach"):
        monkeypatch.setattr(f"ds_finetune.trainer.{module}.choose_device", lambda: "cuda")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = read_config(tiny_task(tmp_path, train={"precision": "auto"}))
    with pytest.raises(ConfigError, match=r"train.precision auto: Tesla V100 \(compute capability 7.0\)"):
        begin(config)


@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize("sections", [{}, {"lora": {}}, {"lora": {"quantize": "nf4"}}, {"parallel": {"tp": 2}}])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_hints_lead_to_a_precision_that_a_gpu_trains_in(has_bf16: bool, sections: dict[str, Any], stage: int) -> None:
    """From every precision, one of those that the hint of a refusal names is accepted."""
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o"} | sections
    tree |= {"deepspeed": {"zero_optimization": {"stage": stage}}}
    if stage == 0 and "parallel" in sections:
        tree["train"] = {"max_grad_norm": 0.0}

    def hint_for(precision: str) -> str:
        train = {"global_batch_size": 8, "precision": precision, **tree.get("train", {})}
        try:
            run = RunSettings.of(RunConfig.model_validate(tree | {"train": train}))
            chosen, _ = with_precision(run.train, device="cuda", support=Bf16Support("a GPU", is_native=has_bf16))
            make_plan(replace(run, train=chosen), world=World(0, 2, 0, 2, "test"), device="cuda")
        except ConfigError as error:
            return error.hint
        return ""

    hints = {precision: hint_for(precision) for precision in ("auto", "bf16", "fp16", "fp32")}
    accepted = {precision for precision, hint in hints.items() if not hint}
    assert accepted
    named = {precision: set(re.findall("bf16|fp16|fp32", hint)) for precision, hint in hints.items() if hint}
    assert all(others & accepted for others in named.values()), hints
    if "lora" in sections and stage:
        assert accepted == ({"auto"} if has_bf16 else set()) | {"bf16", "fp16", "fp32"}


def _run_file(folder: Path, model: Path) -> Path:
    file = folder / "run.yaml"
    file.write_text(
        f"model: {model}\ndata: {{train: missing.jsonl}}\noutput_dir: o\n"
        "train: {for: 1 steps, global_batch_size: 8, max_seq_len: 512}\n"
    )
    return file


def test_a_plan_decides_by_the_accelerator_that_it_is_made_for(
    tmp_path: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(_run_file(tmp_path, shared_data / "configs" / "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B"))
    assert main(["plan", file, "--gpus", "1", "--gpu", "h100-80g"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "(its weights, bf16)" in shown
    assert "train.precision auto is bf16: h100-80g computes matrix products in bf16" in shown
    assert main(["plan", file, "--gpus", "8", "--gpu", "v100-32g"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "train.precision auto: v100-32g does not compute matrix products in bf16" in shown
    assert "set train.precision to fp16 or fp32" in shown
    assert main(["plan", file, "--gpus", "8", "--gpu", "v100-32g", "train.precision=fp16"]) == 0


def test_overrides_of_a_search_leave_the_precision_as_it_is(
    tmp_path: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(_run_file(tmp_path, shared_data / "configs" / "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B"))
    assert main(["plan", file, "--gpus", "8", "--gpu", "h100-80g", "--search", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert layouts
    assert not [text for layout in layouts for text in layout["overrides"] if "precision" in text]


def test_a_resolved_run_has_one_precision(tmp_path: Path) -> None:
    """Whatever reads the run file later finds what was chosen; a plan without more knowledge assumes a new GPU."""
    config = RunConfig.model_validate({"model": "m", "data": {"train": "t"}, "output_dir": "o"})
    assert make_plan(RunSettings.of(config), world=ONE, device="cuda").precision == "bf16"
    task = tiny_task(tmp_path, train={"precision": "auto"})
    resolved = resolve(read_config(task), world=ONE, device="cpu", bf16=OLD_CPU)
    assert (resolved.plan.precision, resolved.config.train.precision) == ("fp32", "fp32")
    assert not resolved.plan.deepspeed_config["bf16"]["enabled"]
    assert resolved.plan.notes[0].startswith("train.precision auto is fp32: this CPU (neither")


def test_ranks_whose_devices_differ_are_told_both() -> None:
    config = RunConfig.model_validate({"model": "m", "data": {"train": "t"}, "output_dir": "o"})
    store = dist.HashStore()
    mine = "bf16" if cpu_support().is_native else "fp32"
    other = "fp32" if mine == "bf16" else "bf16"
    key, reason = "train.precision auto", f"train.precision auto is {other}: another CPU"
    store.set("precision/1", json.dumps(["b", {key: [other, reason]}]))
    with pytest.raises(ConfigError) as caught:
        check_same_precision(config.train, JoinedRanks(World(0, 2, 0, 2, "test"), store))
    assert caught.value.message.startswith(f"ranks differ in {key}: {mine} (train.precision auto is {mine}: this CPU (")
    assert f") on rank 0 ({socket.gethostname()}) and {other}" in caught.value.message
    assert caught.value.message.endswith(f"{other} ({reason}) on rank 1 (b)")
    store.set("precision/1", json.dumps(["b", {key: [mine, "another CPU"]}]))
    check_same_precision(config.train, JoinedRanks(World(0, 2, 0, 2, "test"), store))


def test_a_checkpoint_records_what_was_chosen(tmp_path: Path) -> None:
    """A resume compares it, so that a run goes on in the same precision or says that it does not."""
    run_file = tiny_task(tmp_path, train={"precision": "auto", "for": "2 steps"}, export={"at_end": False})
    done = start(["ds-finetune", "train", str(run_file)])
    assert done.returncode == 0, done.stdout + done.stderr
    chosen = "bf16" if cpu_support().is_native else "fp32"
    assert f"train.precision auto is {chosen}: this CPU (" in done.stdout
    assert f"precision: {chosen}\n" in (tmp_path / "run" / "config.yaml").read_text()
    other = "fp32" if chosen == "bf16" else "bf16"
    done = start(["ds-finetune", "train", str(run_file), f"train.precision={other}", "train.for=3 steps"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"train\.precision.*{chosen}.*{other}", done.stdout), done.stdout
    assert len(metrics(tmp_path)) == 3
