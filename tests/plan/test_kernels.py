"""What `model.kernels` is on a device: what `auto` takes and why, and what cannot run."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.plan import kernels
from ds_finetune.plan.forward import product_of_experts
from ds_finetune.plan.kernels import choose_kernels
from tests.checking import check, settings_of


@pytest.fixture(autouse=True)
def _nothing_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, *, liger: str = "", triton: bool = False, compiler: bool = True) -> None:
    monkeypatch.setattr(kernels, "installed_version", lambda _: liger)
    monkeypatch.setattr(kernels, "find_spec", lambda _: object() if triton else None)
    monkeypatch.setattr(shutil, "which", lambda _: "/a/compiler" if compiler else None)


@pytest.mark.parametrize(
    ("liger", "triton", "stage", "expected", "reason"),
    [
        ("0.8.5", True, 3, "liger", "auto: liger-kernel 0.8.5 is installed"),
        ("", True, 2, "compile", "auto: liger-kernel is not installed"),
        ("0.8.5", False, 2, "torch", "Liger's kernels need Triton: there is no triton, and torch.compile needs Triton"),
        ("", True, 3, "torch", "and torch.compile is not tested with ZeRO stage 3 (auto); pip install"),
        ("", False, 0, "torch", "liger-kernel is not installed, and torch.compile needs Triton"),
    ],
)
def test_auto_on_a_gpu(
    liger: str, triton: bool, stage: int, expected: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, liger=liger, triton=triton)
    chosen = choose_kernels("auto", device="cuda", stage=stage)
    assert chosen.name == expected
    assert reason in chosen.reason
    ((name, text),) = chosen.lines(family_of("llama"))
    assert (name, text.partition(":")[0]) == ("kernels", expected)
    assert reason in text


def test_auto_on_a_cpu_runs_single_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, liger="0.8.5", triton=True, compiler=True)
    assert choose_kernels("auto", device="cpu", stage=0).name == "torch"


@pytest.mark.parametrize(
    ("name", "device", "stage", "liger", "triton", "message"),
    [
        ("liger", "cuda", 0, "", True, "model.kernels liger: liger-kernel is not installed"),
        ("liger", "cuda", 0, "0.8.5", False, "model.kernels liger: Liger's kernels need Triton: there is no triton"),
        ("liger", "cpu", 0, "0.8.5", True, "model.kernels liger: its kernels need a GPU, and the device is cpu"),
        ("compile", "cuda", 3, "", True, "model.kernels compile: torch.compile is not tested with ZeRO stage 3"),
        (
            "compile",
            "cuda",
            2,
            "",
            False,
            "model.kernels compile: torch.compile needs Triton on a GPU: there is no triton",
        ),
        ("compile", "cpu", 2, "", False, "needs a C++ compiler on a CPU, and there is no g"),
    ],
)
def test_kernels_that_cannot_run_are_refused(
    name: str, device: str, stage: int, liger: str, triton: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, liger=liger, triton=triton, compiler=device != "cpu")
    with pytest.raises(ConfigError) as raised:
        choose_kernels(name, device=device, stage=stage)
    assert message in raised.value.message
    assert raised.value.hint


def _without(monkeypatch: pytest.MonkeyPatch, missing: str, tmp_path: Path) -> None:
    """A machine with Triton and Liger that lacks a C compiler or Python.h."""
    install(monkeypatch, liger="0.8.5", triton=True, compiler=missing != "compiler")
    if missing == "headers":
        monkeypatch.setattr(sysconfig, "get_paths", lambda *_: {"include": str(tmp_path)})


@pytest.mark.parametrize(
    ("missing", "text", "packages"),
    [
        ("compiler", "there is no C compiler (gcc or clang)", "install gcc (Debian)"),
        ("headers", "there is no {}/Python.h", "install python3-dev (Debian)"),
    ],
)
def test_triton_needs_a_c_compiler_and_the_headers_of_python(
    missing: str, text: str, packages: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _without(monkeypatch, missing, tmp_path)
    assert kernels.triton_problem() == (text.format(tmp_path), packages)
    for name in ("liger", "compile"):
        with pytest.raises(ConfigError, match=f"model.kernels {name}: .*Triton") as raised:
            choose_kernels(name, device="cuda", stage=0)
        assert raised.value.hint == packages
    chosen = choose_kernels("auto", device="cuda", stage=0)
    assert (chosen.name, packages in chosen.reason) == ("torch", True)
    ((_, line),) = chosen.lines(family_of("llama"))
    assert line.startswith(f"torch: Liger's kernels need Triton: {text.format(tmp_path)}")
    assert product_of_experts("bf16", (8, 0)) == product_of_experts("fp16", (9, 0)) == "loop"
    # Torch has a kernel of its own there.
    assert product_of_experts("bf16", (9, 0)) == "torch"


def test_the_compiler_is_the_one_that_triton_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda _: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, is_found in (("cc", False), ("clang", True), ("gcc", True)):
        (tmp_path / name).touch(0o755)
        assert (kernels.triton_problem()[0] == "") == is_found
    monkeypatch.setenv("CC", str(tmp_path / "absent"))
    assert f"no C compiler ({tmp_path / 'absent'})" in kernels.triton_problem()[0]


def test_kernels_that_can_run_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, liger="0.8.5", triton=True, compiler=True)
    for name, device, stage in (
        ("liger", "cuda", 3),
        ("compile", "cuda", 2),
        ("compile", "cpu", 2),
        ("torch", "cuda", 0),
    ):
        assert choose_kernels(name, device=device, stage=stage).name == name
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_kernels("liger", device="cpu", stage=0).name == "liger"


def test_families_without_such_operations_run_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, liger="0.8.5", triton=True)
    chosen = choose_kernels("auto", device="cuda", stage=0)
    nothing = "fused kernels compute nothing of {}"
    without = {name: nothing.format(name) for name, family in FAMILIES.items() if not family.fused}
    assert set(without) == {"bert", "roberta"}
    for name, why in (without | {"other": "fused kernels are not tested with other"}).items():
        assert chosen.of(family_of(name)) == "torch"
        assert list(chosen.lines(family_of(name))) == [("kernels", f"torch: {why}")]
    for name, is_refused in (("bert", True), ("llama", False)):
        tree = {"model": {"path": "m", "kernels": "liger"}, "data": {"train": "a.jsonl"}, "output_dir": "o"}
        run = settings_of(RunConfig.model_validate(tree), model_json={"model_type": name})
        if is_refused:
            with pytest.raises(
                ModelError, match=r"model\.kernels liger with model_type `bert` would replace no operation"
            ):
                check(run, "attention of the model")
        else:
            check(run, "attention of the model")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", "RMSNorm, rotary embedding and SwiGLU are one kernel each (auto"),
        ("qwen2_moe", "RMSNorm, rotary embedding and SwiGLU are one kernel each (auto"),
        ("gpt_oss", "and clamped SwiGLU is not"),
        ("deepseek_v4", "but for norms without weights and the clamps before SwiGLU"),
        ("modernbert", "rotary embedding is one kernel, and LayerNorm and GELU are not"),
    ],
)
def test_the_plan_says_what_keeps_its_own_operations(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, liger="0.8.5", triton=True)
    ((_, found),) = choose_kernels("auto", device="cuda", stage=0).lines(family_of(name))
    assert text in found


def test_torch_in_the_run_file_is_without_other_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert not choose_kernels("torch", device="cuda", stage=0).has_others
    # What `auto` makes of a machine without kernels leaves them to the hardware.
    chosen = choose_kernels("auto", device="cuda", stage=0)
    assert (chosen.name, chosen.has_others) == ("torch", True)
