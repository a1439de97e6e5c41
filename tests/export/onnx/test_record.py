"""Verifying an ONNX folder finds and names every changed byte, and finds a graph that computes something else."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_finetune.cli.main import main
from ds_finetune.export import file_record
from ds_finetune.export.formats import ExportOptions
from ds_finetune.export.output_folder import RECORD
from ds_finetune.export.verify.record import UNVERIFIED
from tests.export.onnx.test_onnx import fresh, saved
from tests.json_files import change_json

onnx = pytest.importorskip("onnx", reason="the onnx extra is not installed: pip install 'ds_finetune[onnx]'")
pytest.importorskip("onnxruntime", reason="the onnx extra is not installed: pip install 'ds_finetune[onnx]'")

from ds_finetune.export.onnx import comparison as onnx_comparison  # noqa: E402 - they need onnx
from ds_finetune.export.onnx import folder as onnx_folder  # noqa: E402 - they need onnx
from ds_finetune.export.onnx import record as onnx_record  # noqa: E402 - they need onnx

KINDS: dict[str, tuple[str, ExportOptions, dict[str, Any]]] = {
    "llama": ("llama", ExportOptions(dtype="fp32", with_cache=False), {}),
    "v3": ("deepseek_v3", ExportOptions(dtype="fp32"), {}),
    "fp16": ("deepseek_v3", ExportOptions(dtype="fp16"), {}),
    "wide": ("qwen2", ExportOptions(dtype="fp32"), {"vocab_size": 3000}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports by kind; the weights of `v3` are in the file beside its graph."""
    root = tmp_path_factory.mktemp("made")
    for name, (family, how, sizes) in KINDS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(onnx_folder, "INLINE_BYTES", 4096 if name == "v3" else 2**28)
            onnx_folder.write(saved(root / f"{name}-hub", fresh(family, **sizes)), root / name, how)
    return root


def _reference(folder: Path) -> onnx_comparison.Reference:
    return onnx_record.reference_of(file_record.read_file_record(folder, onnx_record.FORMAT)[1])


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "v3", tmp_path / "v3"))


@pytest.mark.parametrize("name", KINDS)
def test_a_right_folder_is_verified_again_and_without_the_source(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(made / name, tmp_path / "moved"))
    (out / UNVERIFIED).write_text("not checked yet\n")
    (out / "README.md").write_text("mine")
    monkeypatch.setattr(onnx_comparison, "make_reference", None)
    assert main(["export", "--check", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"verified: {out}" in said
    assert "files, each with the bytes that were written" in said
    assert "not of the export: README.md" in said
    assert f"ONNX Runtime on the CPU against transformers: {99 if name == 'llama' else 151} positions" in said
    assert not (out / UNVERIFIED).exists()


def test_every_row_of_the_head_is_compared_somewhere(made: Path) -> None:
    reference = _reference(made / "wide")
    case = max(reference.cases, key=lambda case: len(case.logits))
    assert case.stride == 3
    kept = case.logits != 0
    assert kept.any(axis=0).all()
    assert kept.sum(axis=1).tolist() == [1000] * int(case.mask.sum())
    (whole,) = (each for each in onnx_comparison.make_reference(made / "wide-hub").cases if each.name == case.name)
    assert np.array_equal(case.logits[kept], whole.logits[kept])
    assert case.largest == np.abs(whole.logits).max()


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def _place_of(folder: Path, name: str) -> int:
    """The first byte of a weight in the file beside the graph."""
    for tensor in onnx.load(folder / "onnx/model.onnx", load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.name == name:
            return int(place["offset"])
    raise KeyError(name)


def test_a_change_of_any_byte_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = sorted(name for name in paths if name != RECORD)
    assert {"onnx/model.onnx", "onnx/model.onnx_data", "config.json"} <= {*files}
    generator = torch.Generator().manual_seed(1)
    for name in files:
        size = (folder / name).stat().st_size
        for place in {0, size - 1, int(torch.randint(size, (1,), generator=generator))}:
            _flip(folder / name, place)
            assert main(["export", "--check", str(folder)]) == 1
            assert f"{name} holds other bytes than were written, within bytes" in (folder / UNVERIFIED).read_text()
            _flip(folder / name, place)
    capsys.readouterr()
    assert main(["export", "--check", str(folder)]) == 0
    assert not (folder / UNVERIFIED).exists()


def test_a_changed_weight_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        tensor.name
        for tensor in onnx.load(folder / "onnx/model.onnx", load_external_data=False).graph.initializer
        if tensor.external_data
    ]
    name = names[len(names) // 2]
    monkeypatch.setattr(file_record, "_SEGMENT_BYTES", 4096)
    reference = _reference(folder)
    onnx_record.write_record(folder, reference, {})
    place = _place_of(folder, name)
    _flip(folder / "onnx/model.onnx_data", place + 5)
    result = onnx_folder.verify(folder, None)
    said = f"onnx/model.onnx_data holds other bytes than were written, within bytes {place:,} to {place + 4095:,}, in {name}"
    assert result.problems == (said,)


def _shorten(folder: Path) -> None:
    whole = (folder / "onnx/model.onnx_data").read_bytes()
    (folder / "onnx/model.onnx_data").write_bytes(whole[:-1])


def _another_graph(folder: Path) -> None:
    """Change one operator of the graph, and write a record that says it was exported so."""
    model = onnx.load(folder / "onnx/model.onnx", load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "Softmax":
            node.op_type = "LogSoftmax"
            break
    (folder / "onnx/model.onnx").write_bytes(model.SerializeToString())
    reference = _reference(folder)
    onnx_record.write_record(folder, reference, {})


WRONG: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "cut short": (_shorten, 1, "onnx/model.onnx_data holds other bytes than were written"),
    "weights gone": (
        lambda f: (f / "onnx/model.onnx_data").unlink(),
        1,
        "onnx/model.onnx_data was written and is missing",
    ),
    "graph gone": (lambda f: (f / "onnx/model.onnx").unlink(), 1, "onnx/model.onnx was written and is missing"),
    "another graph": (_another_graph, 1, "positions are beyond it"),
    "no record": (lambda f: (f / RECORD).unlink(), 2, f"has no file {RECORD}"),
    "a record that was changed": (
        lambda f: change_json(f / RECORD, {"dtype": "fp16"}),
        2,
        "its own digest differs: it was changed",
    ),
    "an older record": (
        lambda f: (f / RECORD).write_text('{"format": "onnx 0"}'),
        2,
        "its format is onnx 0, not onnx 3",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folder_is_found(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, code, said = WRONG[name]
    change(folder)
    assert main(["export", "--check", str(folder)]) == code
    printed = " ".join(capsys.readouterr().err.split())
    assert said in printed
    if code == 1:
        assert said in (folder / UNVERIFIED).read_text()


def test_options_that_are_not_valid_for_onnx(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--check", str(folder), "--base", str(folder)]) == 2
    assert f"--base {folder} is not valid with `{folder}`" in " ".join(capsys.readouterr().err.split())
    assert main(["export", str(folder), "out", "--format", "onnx", "--no-verify"]) == 2
    assert "--no-verify is not valid with --format onnx" in capsys.readouterr().err
