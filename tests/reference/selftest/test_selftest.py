"""`ds-finetune selftest`: says that a layout is right where it is, and by how much it is off where it is not."""

import math
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import ConfigError
from ds_finetune.export.verify import plain_transformers
from ds_finetune.families.table import FAMILIES
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.plan.mesh import Mesh
from ds_finetune.reference.selftest import run
from ds_finetune.reference.selftest.cells import TINY_MODELS, enlarged_config, hf_config
from ds_finetune.reference.selftest.compare import compare_steps
from ds_finetune.reference.selftest.reference_loop import Steps
from ds_finetune.reference.selftest.run import SelftestSize, _standard_cases, selftest
from tests.checking import check, settings_of
from tests.reference.selftest.faults import FAULTY
from tests.running import start, tiny_task

FOUR_BIT = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
COMMAND = [sys.executable, "-m", "ds_finetune", "selftest"]


def test_what_is_compared_in_fp32_is_not_computed_in_tf32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, and layouts would be called wrong."""

    def stop() -> NoReturn:
        raise ConfigError("far enough", hint="")

    for program in (
        lambda: selftest(None, SelftestSize(), say=print),
        lambda: (monkeypatch.setattr(sys, "argv", ["", "1", str(tmp_path), "{}"]), plain_transformers.main()),
    ):
        torch.set_float32_matmul_precision("high")
        monkeypatch.setattr(run, "choose_device", stop)
        with suppress(ConfigError):
            program()
        assert torch.get_float32_matmul_precision() == "highest"


def test_the_layout_of_a_run_is_checked_in_two_precisions(tmp_path: Path) -> None:
    run_file = tiny_task(
        tmp_path,
        parallel={"tp": 2},
        deepspeed={"zero_optimization": {"stage": 1}},
        train={"precision": "bf16", "tiled_mlp": True},
        optim={"name": "Adagrad"},
    )
    done = start([*COMMAND, str(run_file), "--nproc", "2"], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "ZeRO-1" in line]
    assert [line.split()[0] for line in lines] == ["equal", "equal"]
    assert [word for line in lines for word in line.split() if word in ("fp32", "bf16")] == ["fp32", "bf16"]
    assert all(name in lines[0] for name in ("loss", "gradient", "norm", "resume", "export"))
    assert "not compared: optim.name Adagrad" in done.stdout
    assert "2 of 2 layouts equal a plain loop on 2 ranks (cpu)" in done.stdout


@pytest.mark.parametrize(
    ("sections", "layout"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "dp 1 ZeRO-3 fp32"),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2}}, "train": {"max_seq_len": 66}, "data": {"packing": True}},
            "dp 1 ZeRO-2 fp32",
        ),
    ],
)
def test_a_run_of_one_process_is_checked_here(tmp_path: Path, sections: dict[str, Any], layout: str) -> None:
    """The first model of a process that transformers loads after zero.Init has uninitialised rotary frequencies,
    so the reference loop comes first.
    """
    done = start([*COMMAND, str(tiny_task(tmp_path, **sections))], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"equal  deepseek_v3 {layout}" in done.stdout


@pytest.mark.parametrize(
    "section",
    [
        "kto",
        "{name: distill, teacher: none, temperature: 2.0, label_weight: 0.3}",
        *(
            pytest.param(section, marks=pytest.mark.slow)
            for section in ("dpo", "classification", "{name: distill, scores: none}")
        ),
    ],
)
def test_a_run_is_checked_with_its_objective(tmp_path: Path, section: str) -> None:
    """Teachers and scores are those of tiny models too."""
    done = start([*COMMAND, str(tiny_task(tmp_path)), f"objective={section}"], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    name = section.removeprefix("{name: ").split(",")[0]
    assert f"equal  deepseek_v3 dp 1 ZeRO-2 fp32 {name}" in done.stdout


ADAPTERS = {"rank": 8, "alpha": 16}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        pytest.param(["lora.quantize=nf4", "deepspeed=zero3"], "dp 1 ZeRO-3 fp32", marks=FOUR_BIT),
        *(
            pytest.param(arguments, name, marks=pytest.mark.slow)
            for arguments, name in (
                (["lora.target_modules=[gate,experts,q_a_proj]"], "dp 1 ZeRO-2 fp32"),
                (["parallel.tp=2", "--nproc", "2"], "dp 1 x tp 2 ZeRO-2 fp32"),
                (["parallel.ep=2", "deepspeed=zero3", "--nproc", "2"], "dp 2 x ep 2 ZeRO-3 fp32"),
                (["objective={name: kto, reference: adapters_off}"], "dp 1 ZeRO-2 fp32 kto"),
                (["objective={name: dpo, reference: adapters_off}"], "dp 1 ZeRO-2 fp32 dpo"),
                (["objective=classification", "--nproc", "2"], "dp 2 ZeRO-2 fp32 classification"),
            )
        ),
        pytest.param(
            ["parallel.pp=2", "deepspeed=zero1", "lora.quantize=nf4", "--nproc", "2"],
            "dp 1 x pp 2 ZeRO-1 fp32",
            marks=[FOUR_BIT, pytest.mark.slow],
        ),
    ],
)
def test_a_run_with_adapters_is_checked(tmp_path: Path, arguments: list[str], name: str) -> None:
    done = start([*COMMAND, str(tiny_task(tmp_path, lora=ADAPTERS)), *arguments], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("equal"))
    assert line.startswith(f"equal  deepseek_v3 {name} LoRA ")
    assert all(f"{difference} " in line for difference in ("gradient", "export", "adapters"))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["mtp.detach=false"], "dp 1 ZeRO-2 fp32 MTP"),
        *(
            pytest.param(arguments, name, marks=pytest.mark.slow)
            for arguments, name in (
                (["deepspeed=zero3", "--steps", "5"], "dp 1 ZeRO-3 fp32 MTP"),
                (["deepspeed=zero1", "router={balance: 0.5}"], "dp 1 ZeRO-1 fp32 MTP"),
                (["router={train: false}"], "dp 1 ZeRO-2 fp32 MTP"),
                (["lora={rank: 8, alpha: 16, target_modules: [gate, eh_proj]}"], "dp 1 ZeRO-2 fp32 LoRA MTP"),
                (["lora={rank: 8, alpha: 16}", "parallel.tp=2", "--nproc", "2"], "dp 1 x tp 2 ZeRO-2 fp32 LoRA MTP"),
                (["parallel.pp=2", "deepspeed=zero1", "--nproc", "2"], "dp 1 x pp 2 ZeRO-1 fp32 MTP"),
            )
        ),
    ],
)
def test_a_run_with_multi_token_prediction_is_checked(tmp_path: Path, arguments: list[str], name: str) -> None:
    done = start([*COMMAND, str(tiny_task(tmp_path, mtp={"train": True})), *arguments], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("equal"))
    assert line.startswith(f"equal  deepseek_v3 {name} ")
    assert all(f"{difference} " in line for difference in ("gradient", "norm", "resume", "mtp"))
    assert "not compared" not in done.stdout


def test_the_standard_set_has_fp16_on_gpus_alone() -> None:
    names = {device: [case.name for case in _standard_cases(2, ("deepseek_v3",), device)] for device in ("cpu", "cuda")}
    assert [name for name in names["cuda"] if name not in names["cpu"]] == [
        "deepseek_v3 dp ZeRO-1 fp16",
        "deepseek_v3 dp ZeRO-3 fp16",
        "deepseek_v3 dp ZeRO-2 fp16 LoRA",
    ]


def test_not_a_number_is_not_equal() -> None:
    right = Steps([1.0, 1.0], [1.0, 1.0], {"a": torch.ones(2), "b": torch.ones(2)}, [[1]])
    assert compare_steps(right, right, Steps([1.0]), 0.0).is_equal
    assert not compare_steps(right, replace(right, norms=[1.0, math.nan]), Steps([1.0]), 0.0).is_equal
    assert not compare_steps(right, replace(right, losses=[1.0, math.nan]), Steps([1.0]), 0.0).is_equal
    assert not compare_steps(
        right, replace(right, gradients={"a": torch.ones(2), "b": torch.full((2,), math.nan)}), Steps([1.0]), 0.0
    ).is_equal
    assert not compare_steps(right, replace(right, answers=[[2]]), Steps([1.0]), 0.0).is_equal
    assert not compare_steps(right, right, Steps([1.1]), 0.0).is_equal


BROKEN_ENGINE = """
from ds_finetune.engine import engine
scaled = engine.scale_for_deepspeed
engine.scale_for_deepspeed = lambda loss, **given: 2 * scaled(loss, **given)
"""
BROKEN_SCALE = """
from ds_finetune.model.adapters import lora
adapt = lora._adapt
def _adapt(module, target, section, **rest):
    adapt(module, target, section, **rest)
    module.lora_scale *= 1.01
lora._adapt = _adapt
"""
BROKEN_FIRST_FACTOR = """
from torch.nn import functional
from ds_finetune.model.adapters.lora import _LowRankLinear
def _low_rank(self, hidden):
    return functional.linear(functional.linear(hidden, self.lora_A.detach()), self.lora_B) * self.lora_scale + 0 * (
        self.lora_A.sum()
    )
_LowRankLinear._low_rank = _low_rank
"""
BROKEN_EXPORT = """
from ds_finetune.reference.selftest import compare
from ds_finetune.model.adapters.lora import factors_of
compare.factors_of = lambda adapters, scale: factors_of(adapters, 1.5 * scale)
"""
BROKEN_REFERENCE = """
from ds_finetune.objectives import preferences
preferences.log_ratios = lambda documents: documents.logp
"""
BROKEN_BALANCE = """
from ds_finetune.features.routers import BalanceLoss
loss = BalanceLoss.loss
BalanceLoss.loss = lambda balance, rows, hidden, weights: loss(balance, rows, hidden, weights / 2)
"""
BROKEN_MTP = """
from ds_finetune.features.mtp import MtpLoss
init = MtpLoss.__init__
MtpLoss.__init__ = lambda mtp, lm, arguments, *, weight, detach: init(mtp, lm, arguments, weight=1.0, detach=detach)
"""
BROKEN_TEMPERATURE = """
from ds_finetune.model.loss import soft_targets
Mix = soft_targets.Mix
from ds_finetune.features import teacher
from tests.checking import check, settings_of
teacher.Mix = lambda temperature, label_weight: Mix(1.0, label_weight)
"""
DISTILLED = {"name": "distill", "teacher": "none", "temperature": 2.0}


def with_fault(objective: str) -> str:
    """A fault in the objective's class, as in tests/reference/selftest/test_plain_losses.py."""
    return f"from tests.reference.selftest.faults import plant\nplant({objective!r})\n"


@pytest.mark.parametrize(
    ("fault", "sections", "text"),
    [
        # The losses of the first step and the export are right, and without clipping Adam would hide it for long.
        (BROKEN_ENGINE, {}, "norm 1 (limit 1e-04)"),
        (BROKEN_MTP, {"mtp": {"train": True, "weight": 0.5}}, "norm 1 (limit 1e-04)"),
        (BROKEN_SCALE, {"lora": ADAPTERS}, "gradient 0.01 (limit 1e-04)"),
        # Without the reference, the first gradients of DPO differ by how far the answers are from it.
        (BROKEN_REFERENCE, {"objective": {"name": "dpo"}}, "(limit 1e-05)"),
        *(
            pytest.param(with_fault(name), {"objective": section}, "(limit 1e-04)", marks=pytest.mark.slow)
            for name, section in FAULTY.items()
        ),
        pytest.param(BROKEN_TEMPERATURE, {"objective": DISTILLED}, "(limit 1e-05)", marks=pytest.mark.slow),
        pytest.param(BROKEN_BALANCE, {"router": {"balance": 0.5}}, "(limit 1e-04)", marks=pytest.mark.slow),
        pytest.param(BROKEN_FIRST_FACTOR, {"lora": ADAPTERS}, "adapters 1 (limit 2e-03)", marks=pytest.mark.slow),
        pytest.param(BROKEN_EXPORT, {"lora": ADAPTERS}, "(limit 1e-05)", marks=pytest.mark.slow),
    ],
    ids=["engine", "mtp", "scale", "reference", *FAULTY, "temperature", "balance", "factor", "export"],
)
def test_a_fault_is_found(tmp_path: Path, fault: str, sections: dict[str, Any], text: str) -> None:
    script = tmp_path / "broken.py"
    script.write_text(f"import sys\nfrom ds_finetune.cli.main import main\n{fault}\nsys.exit(main(sys.argv[1:]))\n")
    run_file = tiny_task(tmp_path, deepspeed={"zero_optimization": {"stage": 2}}, **sections)
    done = start([sys.executable, str(script), "selftest", str(run_file)], timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("WRONG"))
    assert text in line
    assert "error: 1 of 1 layouts differ from the reference loop" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["RUN", "parallel.tp=3", "--nproc", "2"], "2 ranks are not a multiple of parallel tp 3 = 3"),
        (["RUN", "parallel.pp=2", "--nproc", "2"], "parallel dp 1 x pp 2 with zero stage 2 is not tested"),
        (["RUN", "lora.target_modules=[.*layers.20.*]"], "selftest uses a tiny deepseek_v3 of 2 layers"),
        (["--hostfile", "nowhere"], "hostfile `nowhere` does not exist"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path, arguments: list[str], text: str) -> None:
    run_file = str(tiny_task(tmp_path, deepspeed={"zero_optimization": {"stage": 2}}))
    done = start([*COMMAND, *(run_file if word == "RUN" else word for word in arguments)], timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert text in done.stderr


RUN = RunConfig.model_validate({"model": "m", "data": {"train": "t"}, "output_dir": "o"})


@pytest.mark.parametrize(
    "family", sorted(name for name, tree in TINY_MODELS.items() if FAMILIES[tree["model_type"]].parallel_axes)
)
def test_tiny_models_grow_with_the_sizes(family: str) -> None:
    axes = FAMILIES[TINY_MODELS[family]["model_type"]].parallel_axes
    most = {axis: size for axis, size in {"tp": 8, "sp": 4, "pp": 3}.items() if axis in axes}
    config = enlarged_config(hf_config(family), ParallelConfig(**most))
    for names in ({"pp", "tp"}, {"sp", "tp"}):
        sizes = {axis: size for axis, size in most.items() if axis in names}
        run = settings_of(RUN, mesh=Mesh(0, 1, **sizes), model_json=config.to_dict())
        check(run, "sizes of the model")
    build_skeleton(config, attention="sdpa", dtype=torch.float32, device="meta")


@pytest.mark.slow
def test_the_standard_set_takes_two_minutes_at_most() -> None:
    done = start([*COMMAND, "--nproc", "2"], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_steps_of_every_layout_and_family(ranks: int) -> None:
    families = ",".join(name for name, family in FAMILIES.items() if family.tiny_models)
    done = start([*COMMAND, "--nproc", str(ranks), "--steps", "10", "--families", families], timeout=4800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"layouts equal a plain loop on {ranks} ranks" in done.stdout
