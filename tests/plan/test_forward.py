"""Which kernels a forward gets, what is refused where the run file names one, and how many tokens have logits."""

from pathlib import Path
from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.plan import forward
from ds_finetune.plan.forward import (
    HeadWidths,
    attention_lines,
    experts_lines,
    head_chunk,
    head_line,
    head_widths,
    varlen_problem,
)
from ds_finetune.plan.model_tensors import DescribedModel, ModelTensors
from ds_finetune.plan.settings import RunSettings
from tests.checking import check, settings_of
from tests.running import start, tiny_task

V3 = {"model_type": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": None}
INSTEAD = "set model.attention: sdpa, which attends document by document there"


def _run(attention: str, **train: Any) -> RunConfig:
    model = {"path": "m", "attention": attention}
    return RunConfig.model_validate({"model": model, "data": {"train": "a.jsonl"}, "output_dir": "o", "train": train})


def _model(tree: dict[str, Any]) -> DescribedModel:
    return DescribedModel(tree, lambda: ModelTensors({}))


def _check(attention: str, tree: dict[str, Any], *, precision: str, longest: int = 4096) -> None:
    config = _run(attention, precision=precision, max_seq_len=longest)
    check(settings_of(config, model_json=tree), "attention of the model")


def test_widths_of_heads() -> None:
    assert head_widths(V3) == HeadWidths(192, 128)
    assert head_widths(LLAMA) == HeadWidths(128, 128)
    assert head_widths(LLAMA | {"head_dim": 80}).widest == 80


@pytest.mark.parametrize(
    ("tree", "precision", "capability", "problem"),
    [
        (V3, "bf16", (9, 0), ""),
        (V3, "fp16", (8, 0), ""),
        (LLAMA | {"head_dim": 256}, "bf16", (8, 9), ""),
        (LLAMA | {"head_dim": 257}, "bf16", (9, 0), "heads of 257 columns, and the kernel takes at most 256"),
        (V3, "fp32", (9, 0), "train.precision fp32, and the kernel computes in bf16 and fp16"),
        (V3, "fp16", (7, 5), "compute capability 7.5, and the kernel needs 8.0"),
        (LLAMA | {"head_dim": 200}, "bf16", (9, 0), ""),
        (
            LLAMA | {"head_dim": 200},
            "bf16",
            (8, 6),
            "heads of 200 columns, and the kernel has no backward pass for 193 to 224 on 8.6",
        ),
        (LLAMA | {"model_type": "gpt_oss"}, "bf16", (9, 0), "its attention has sinks, which the kernel does not know"),
        (
            {"model_type": "bloom"},
            "bf16",
            (9, 0),
            "transformers' own attention is used for model types outside the table",
        ),
    ],
)
def test_where_the_kernel_fits(tree: dict[str, Any], precision: str, capability: tuple[int, int], problem: str) -> None:
    assert varlen_problem(tree, precision=precision, capability=capability) == problem


@pytest.mark.parametrize(
    ("tree", "precision", "message"),
    [
        (LLAMA | {"head_dim": 320}, "bf16", "heads of 320 columns, and the kernel takes at most 256"),
        (V3, "fp32", "train.precision fp32, and the kernel computes in bf16 and fp16"),
        (V3 | {"attention_dropout": 0.1}, "bf16", "dropout 0.1 of its attention, which the kernel does not have"),
        (
            V3 | {"model_type": "deepseek_v32", "index_topk": 2048},
            "bf16",
            "documents of 4096 tokens, whose queries attend to the 2048 that an indexer chooses",
        ),
    ],
)
def test_a_kernel_by_name_that_does_not_fit_is_refused(tree: dict[str, Any], precision: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        _check("varlen", tree, precision=precision)
    assert caught.value.message == f"model.attention varlen with model_type `{tree['model_type']}`: {message}"
    assert caught.value.hint == INSTEAD
    _check("sdpa", tree, precision=precision)


def test_a_kernel_by_name_is_taken_where_it_fits() -> None:
    _check("varlen", V3, precision="bf16")
    _check("varlen", V3 | {"model_type": "deepseek_v32", "index_topk": 2048}, precision="bf16", longest=2048)
    check(RunSettings.of(_run("varlen"), device="cuda"), "ranks")


def test_a_kernel_of_gpus_on_a_cpu() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.attention varlen on device cpu: its kernel runs only on GPUs"
    ) as caught:
        check(RunSettings.of(_run("varlen"), device="cpu"), "ranks")
    assert caught.value.hint == "set model.attention: sdpa, which attends document by document on CPUs"


@pytest.mark.parametrize(
    ("attention", "device", "precision", "text"),
    [
        ("sdpa", "cuda", "bf16", "one call for all documents"),
        ("varlen", "cuda", "fp16", "one call for all documents"),
        ("by_document", "cuda", "bf16", "a call for each document"),
        (
            "sdpa",
            "cuda",
            "fp32",
            "a call for each document: train.precision fp32, and the kernel computes in bf16 and fp16",
        ),
    ],
)
def test_the_decision_is_printed(attention: str, device: str, precision: str, text: str) -> None:
    assert attention_lines(attention, _model(V3), device=device, precision=precision) == [("attention", text)]


def test_nothing_is_decided_elsewhere() -> None:
    assert attention_lines("sdpa", _model(V3), device="cpu", precision="bf16") == []
    assert attention_lines("eager", _model(V3), device="cuda", precision="bf16") == []
    assert attention_lines("sdpa", _model({"model_type": "bloom"}), device="cuda", precision="bf16") == []


def test_attention_to_compressed_tokens_is_no_call_for_each_document() -> None:
    ((_, text),) = attention_lines("sdpa", _model({"model_type": "deepseek_v4"}), device="cuda", precision="bf16")
    assert text == "queries of all documents, some at a time, by products of matrices"


def test_every_family_tells_the_widths_of_its_heads() -> None:
    from transformers import AutoConfig

    for name, family in FAMILIES.items():
        if family.tiny_models is not None:
            tree = AutoConfig.for_model(family.built_as or name, **family.tiny_models.config).to_dict()
            assert head_widths(tree).widest > 0, name


def test_commands_refuse_before_they_start(tmp_path: Path) -> None:
    run_file = str(tiny_task(tmp_path, model={"attention": "varlen"}))
    planned = start(["ds-finetune", "plan", run_file, "--dry-run", "--gpus", "1"])
    assert planned.returncode == 2
    assert "train.precision fp32, and the kernel computes in bf16 and fp16" in planned.stderr
    assert "set model.attention: sdpa" in planned.stderr
    planned = start(["ds-finetune", "plan", run_file, "--dry-run", "--gpus", "1", "train.precision=bf16"])
    assert planned.returncode == 0, planned.stderr
    assert "one call for all documents" in planned.stdout
    trained = start(["ds-finetune", "train", run_file, "train.precision=bf16"])
    assert trained.returncode == 2
    assert "model.attention varlen on device cpu: its kernel runs only on GPUs" in trained.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("vocabulary", "precision", "device", "tokens"),
    [
        (129_280, "bf16", "cuda", 2048),
        (129_280, "fp32", "cuda", 4096),
        (32_000, "bf16", "cuda", 8192),
        (1_000_000, "bf16", "cuda", 1024),
        (129_280, "bf16", "cpu", 1024),
    ],
)
def test_a_gpu_takes_the_thousands_of_tokens_whose_logits_fit_two_gib(
    vocabulary: int, precision: str, device: str, tokens: int
) -> None:
    assert head_chunk(vocabulary, precision=precision, device=device) == tokens


def test_the_plan_states_their_memory() -> None:
    line = head_line(129_280, precision="bf16", device="cuda")
    assert line == ("head", "logits of 2,048 supervised tokens at a time, 1.48 GiB")


TORCHS = "torch's, in bf16 on compute capability 9.x and 10.x"
LOOP = "a product for each expert, whose numbers of rows the host reads first"


@pytest.mark.parametrize(
    ("precision", "capability", "with_triton", "without"),
    [
        ("bf16", (9, 0), "torch's kernel for all experts", None),
        ("bf16", (10, 3), "torch's kernel for all experts", None),
        ("bf16", (8, 0), f"a Triton kernel for all experts, in bf16 on compute capability 8.0 ({TORCHS})", LOOP),
        ("bf16", (12, 0), f"a Triton kernel for all experts, in bf16 on compute capability 12.0 ({TORCHS})", LOOP),
        ("fp16", (9, 0), f"a Triton kernel for all experts, in fp16 on compute capability 9.0 ({TORCHS})", LOOP),
        (
            "bf16",
            (7, 5),
            f"{LOOP}, by transformers' loop: no kernel for all experts is here in bf16 on compute capability 7.5 "
            f"({TORCHS})",
            None,
        ),
        (
            "fp32",
            (9, 0),
            f"{LOOP}: no kernel for all experts is here in fp32 on compute capability 9.0 ({TORCHS})",
            None,
        ),
        (
            "bf16",
            None,
            f"one kernel for all: {TORCHS}; else Triton's, in bf16 and fp16 from 8.0 on; {LOOP} on others",
            None,
        ),
    ],
)
def test_the_line_names_the_implementation(
    precision: str,
    capability: tuple[int, int] | None,
    with_triton: str,
    without: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where Triton cannot compile the line says so, and begins with `without` where that is given."""
    for has_triton, expected in ((True, with_triton), (False, without or with_triton)):
        problem = ("", "") if has_triton else ("there is no C compiler", "install gcc")
        monkeypatch.setattr(forward, "triton_problem", lambda problem=problem: problem)
        family = family_of("deepseek_v3")
        ((name, text),) = experts_lines(family, device="cuda", precision=precision, capability=capability)
        assert name == "experts"
        if not has_triton and capability is not None:
            assert text.startswith(expected.partition("(")[0].partition("; else")[0])
            assert text == with_triton or "; not Triton's: there is no C compiler" in text
        else:
            assert text == expected


@pytest.mark.parametrize(("capability", "begin"), [(None, "one kernel for all: "), ((8, 9), LOOP)])
def test_the_run_file_switches_tritons_product_off(
    capability: tuple[int, int] | None, begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "triton_problem", lambda: ("", ""))
    given = {"device": "cuda", "precision": "bf16", "capability": capability}
    ((_, text),) = experts_lines(family_of("deepseek_v3"), **given, has_triton=False)
    assert text.startswith(begin)
    assert "not Triton's: model.kernels is torch" in text


@pytest.mark.parametrize(("kind", "device"), [("deepseek_v3", "cpu"), ("llama", "cuda"), ("some_other", "cuda")])
def test_without_known_experts_or_a_gpu_there_is_no_line(kind: str, device: str) -> None:
    assert experts_lines(family_of(kind), device=device, precision="bf16") == []
