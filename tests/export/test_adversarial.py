"""Every kind of export from every kind of broken model or folder ends in one clear error and exit code 2.

No file is left that was not there before.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds_finetune.cli.main import main
from ds_finetune.config.sections import LoraConfig
from ds_finetune.errors import OutputError
from ds_finetune.export.adapter import AdapterBase, write_adapter
from ds_finetune.export.file_record import write_file_record
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora import Factors
from ds_finetune.model.weights.load import weights_digest
from tests.conftest import ROOT
from tests.model.fp8_folder import V3, master, publish
from tests.running import files_of_at_most, start

CONFIG: dict[str, Any] = {key: value for key, value in V3.items() if key != "quantization_config"} | {
    "num_nextn_predict_layers": 0
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WAYS = {
    "safetensors": ["{model}", "{out}", "--no-verify"],
    "fp8": ["{model}", "{out}", "--no-verify", "--dtype", "fp8"],
    "merge": ["{adapter}", "{out}", "--no-verify", "--base", "{model}"],
    "merge to onnx": ["{adapter}", "{out}", "--format", "onnx", "--base", "{model}"],
    "onnx": ["{model}", "{out}", "--format", "onnx"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, a DeepSeek-V3 in three files, and `adapter`, trained on its weights."""
    root = tmp_path_factory.mktemp("made")
    tensors = {key: tensor for key, tensor in master().items() if "layers.2." not in key}
    model = publish(root / "model", tensors, config=CONFIG)
    factors = {
        key: Factors(torch.randn(4, tensors[key].shape[1]), torch.randn(tensors[key].shape[0], 4), 0.5)
        for key in ("model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight")
    }
    lora = LoraConfig(rank=4, alpha=2, target_modules=("o_proj", "kv_a_proj_with_mqa"))
    write_adapter(
        factors,
        lora,
        root / "adapter",
        AdapterBase(name=str(model), digest=weights_digest(model), family=family_of("deepseek_v3")),
    )
    return root


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may break."""
    return Path(shutil.copytree(made, tmp_path / "place"))


def contents(root: Path) -> dict[str, str]:
    """Every path below `root` with a digest of what it holds."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(root.rglob("*"))
    }


def arguments(way: str, place: Path) -> list[str]:
    if "onnx" in way:
        pytest.importorskip("onnx", reason="the onnx extra is not installed: pip install 'ds_finetune[onnx]'")
        pytest.importorskip("onnxruntime", reason="the onnx extra is not installed: pip install 'ds_finetune[onnx]'")
    names = {name: str(place / name) for name in ("model", "adapter", "out")}
    return ["export", *(part.format(**names) for part in WAYS[way])]


def refused(way: str, place: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with exit code 2 and one error that contains `said` and a hint, and leaves `place` as it was."""
    before = contents(place)
    assert main(arguments(way, place)) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("error:") == printed.count("hint:") == 1
    assert "Traceback" not in printed
    assert contents(place) == before


def _shard(model: Path, of: str = EMBEDDING) -> Path:
    return model / json.loads((model / "model.safetensors.index.json").read_text())["weight_map"][of]


def _index(model: Path, name: str) -> None:
    index = model / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    tree["weight_map"][EMBEDDING] = name
    index.write_text(json.dumps(tree))


def _cut(model: Path) -> None:
    _shard(model).write_bytes(_shard(model).read_bytes()[:-100])


def _cut_header(model: Path) -> None:
    _shard(model).write_bytes(_shard(model).read_bytes()[:50])


def _outside(model: Path) -> None:
    shutil.copyfile(_shard(model), model.parent / "secret.safetensors")
    _index(model, "../secret.safetensors")


def _elsewhere(model: Path) -> None:
    shutil.copyfile(_shard(model), model.parent / "secret.safetensors")
    _index(model, str(model.parent / "secret.safetensors"))


def _change(model: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    file = _shard(model, key)
    tensors = load_file(file)
    save_file(tensors | {key: change(tensors[key]).contiguous()}, file, metadata={"format": "pt"})


def _grow(model: Path) -> None:
    for key in (EMBEDDING, HEAD):
        _change(model, key, lambda tensor: torch.cat([tensor, torch.zeros(4, tensor.shape[1], dtype=tensor.dtype)]))


def _config(model: Path, **values: Any) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | values))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a shard is missing": (lambda m: _shard(m).unlink(), "names 1 files that are not there: model-0000"),
    "a shard is cut short": (_cut, "is not a complete safetensors file: its tensors end at byte"),
    "a shard ends in its header": (_cut_header, "is not a complete safetensors file"),
    "the index names a file above": (_outside, "names files outside its folder: ../secret.safetensors"),
    "the index names an absolute file": (_elsewhere, "/secret.safetensors"),
    "a weight holds integers": (
        lambda m: _change(m, EMBEDDING, lambda t: t.int()),
        f"has 1 tensors of dtypes that are not for weights: `{EMBEDDING}` is torch.int32",
    ),
    "a weight is FP8 of another kind": (
        lambda m: _change(m, EMBEDDING, lambda t: t.to(torch.float8_e5m2)),
        f"has 1 tensors of dtypes that are not for weights: `{EMBEDDING}` is torch.float8_e5m2",
    ),
    "a head that the config ties is another": (
        lambda m: _config(m, tie_word_embeddings=True),
        f"`{HEAD}` differs from `{EMBEDDING}`, but config.json ties both",
    ),
    "the vocabulary has grown": (_grow, "2 of another shape: lm_head.weight: model (96, 160), checkpoint (100, 160)"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_model(broken: str, way: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, said = BROKEN[broken]
    damage(place / "model")
    if way.startswith("merge"):
        # The digest covers only some weights, so it may miss the damage; here the adapter has none, like peft's
        # own.
        _forget_digest(place / "adapter")
    refused(way, place, said, capsys)


def _forget_digest(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt"})


@pytest.mark.parametrize("way", ["merge", "merge to onnx"])
def test_an_adapter_of_another_base(way: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A base of the same shapes with other weights."""
    _change(place / "model", EMBEDDING, lambda tensor: tensor + 1)
    refused(way, place, "was trained from weights with digest", capsys)


@pytest.mark.parametrize("way", WAYS)
def test_an_output_that_exists(way: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "out").mkdir()
    (place / "out" / "mine").write_text("x")
    refused(way, place, "is not empty: mine", capsys)
    shutil.rmtree(place / "out")
    (place / "out").write_text("a file")
    refused(way, place, "is not empty: it is a file", capsys)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kib", [1, 300])
def test_a_disk_that_takes_no_more(kib: int, way: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with files_of_at_most(kib * 2**10):
        refused(way, place, "cannot be written: File too large", capsys)


def test_an_adapter_on_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """As a run writes it at its end; the older adapter stays."""
    factors = {"model.layers.0.self_attn.o_proj.weight": Factors(torch.ones(4, 300), torch.ones(300, 4), 0.5)}
    lora, family = LoraConfig(rank=4, alpha=2, target_modules=("o_proj",)), family_of("deepseek_v3")
    write_adapter(factors, lora, tmp_path / "adapter", AdapterBase(name="x", digest="", family=family))
    before = contents(tmp_path)
    with (
        files_of_at_most(2**10),
        pytest.raises(OutputError, match=r"adapter` cannot be written: .*File too large"),
    ):
        write_adapter(factors, lora, tmp_path / "adapter", AdapterBase(name="y", digest="", family=family))
    assert contents(tmp_path) == before


def test_a_record_on_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    with files_of_at_most(2**10), pytest.raises(OutputError, match=r"cannot be written: File too large"):
        write_file_record(tmp_path, {"format": "onnx 3", "tokens": [0] * 1000})


@pytest.mark.parametrize("kind", ["onnx", "compressed-tensors", "safetensors"])
def test_an_index_without_metadata(kind: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers cannot load it; what reads it without transformers is as usual."""
    index = place / "model" / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    del tree["metadata"]
    index.write_text(json.dumps(tree))
    code, said = main(["export", f"{place}/model", f"{place}/out", "--format", kind]), capsys.readouterr().err
    assert (place / "out").exists() == (code == 0)
    assert ("index.json has no `metadata`" in said) == (kind in ("onnx", "compressed-tensors"))
    assert said.count("error:") == (code == 2)
    assert (code == 0) == (kind == "safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_nearly_enough", [False, True])
def test_a_disk_that_is_full(is_nearly_enough: bool, way: str, place: Path) -> None:
    """A file system for the test: far too small, or a page smaller than what is written."""
    assert main(arguments(way, place)) == 0
    size = sum(file.stat().st_size for file in (place / "out").iterdir())
    shutil.rmtree(place / "out")
    small = place.parent / "small"
    small.mkdir()
    command = [part.replace(f"{place}/out", f"{small}/out") for part in arguments(way, place)]
    script = (
        'mount -t tmpfs -o size="$0" none "$1" || exit 77; small="$1"; shift; "$@"; code=$?; ls -A "$small"; exit $code'
    )
    room = str(size - 4096 if is_nearly_enough else 65536)
    before = contents(place)
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
    done = start(
        ["unshare", "--mount", "bash", "-c", script, room, str(small), sys.executable, "-m", "ds_finetune", *command],
        path,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no file system may be made here: {done.stderr.strip()}")
    assert done.returncode == 2, done.stderr
    assert "No space left on device" in done.stderr or "the disk has " in done.stderr
    assert done.stderr.count("error:") == done.stderr.count("hint:") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert contents(place) == before
