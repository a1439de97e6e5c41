"""Conversions equal what transformers writes, in memory that does not grow with the model, or are refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from ds_finetune.errors import ExportError
from ds_finetune.export import convert
from ds_finetune.export.convert import Blocks, Conversion
from ds_finetune.export.safetensors_folder import FolderParts
from ds_finetune.export.source import TensorSource, fit_source, read_model_spec
from ds_finetune.families.table import family_of
from ds_finetune.model.weights.names import hub_pieces
from tests.json_files import read_json
from tests.model.tiny import CONFIGS
from tests.model.weights.test_weights import published
from tests.running import start

_BIASES = ("e_score_correction_bias", "expert_bias")
"""Last parts of the names of router biases, in transformers and in published checkpoints."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def in_memory(tensors: dict[str, torch.Tensor]) -> TensorSource:
    """A source over a dictionary of tensors."""

    def read(name: str, start: int, numel: int) -> torch.Tensor:
        flat = tensors[name].reshape(-1)[start : start + numel]
        assert len(flat) == numel
        return flat

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return TensorSource(shapes, {name for name in tensors if name.endswith("e_score_correction_bias")}, read)


def convert_source(
    source: TensorSource, out: Path, parts: FolderParts, *, max_shard_bytes: int, workers: int
) -> Blocks:
    return Conversion(source, parts, workers).write(out, max_shard_bytes=max_shard_bytes)


def source_of(model: PreTrainedModel, **changed: torch.Tensor) -> TensorSource:
    """The model's tensors once each, in another order than its own."""
    state = {
        name: tensor
        for name, tensor in sorted(model.state_dict().items())
        if name not in (model.all_tied_weights_keys or {})
    }
    return in_memory(state | {name.replace("__", "."): tensor for name, tensor in changed.items()})


def parts_of(folder: Path, dtype: torch.dtype) -> FolderParts:
    config = read_json(folder / "config.json")
    return FolderParts(family=family_of(config["model_type"]), config=config, architecture="X", dtype=dtype, files=())


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.fixture
def llama(tmp_path: Path) -> PreTrainedModel:
    return published("llama", tmp_path / "base")


@pytest.mark.parametrize("max_bytes", [3000, 10**9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", CONFIGS)
def test_equals_what_transformers_writes(
    family: str, dtype: str, max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "CHUNK_NUMEL", 97)
    base, out = tmp_path / "base", tmp_path / "out"
    model = published(family, base)
    AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[dtype]).save_pretrained(tmp_path / "theirs")
    source = fit_source(source_of(model), read_model_spec(base), label="it")
    convert_source(source, out, parts_of(base, DTYPES[dtype]), max_shard_bytes=max_bytes, workers=3)
    wanted, found = read_all(tmp_path / "theirs"), read_all(out)
    if dtype == "fp16":
        # transformers 5.23 keeps some more in fp32 in models that it loads in fp16, e.g. gpt_oss/modeling_gpt_oss.py:389.
        wanted = {key: tensor if key.endswith(_BIASES) else tensor.half() for key, tensor in wanted.items()}
    # transformers 5.23 casts the bias of MiniMax M2 with the rest; router biases stay in fp32 here in every type.
    biases = {key: bias for key, bias in read_all(base).items() if key.endswith(_BIASES)}
    wanted |= {key: bias.float() for key, bias in biases.items()}
    # transformers 5.24 keeps routers in fp32, and neither published checkpoints nor releases before it do.
    wanted = {
        key: tensor.to(DTYPES[dtype]) if key.endswith(".mlp.gate.weight") else tensor for key, tensor in wanted.items()
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype for key, tensor in wanted.items())
    assert (len(list(out.glob("*.safetensors"))) > 1) == (max_bytes < 10**6)
    assert json.loads((out / "config.json").read_text())["dtype"] == str(DTYPES[dtype]).removeprefix("torch.")
    assert not (tmp_path / "out.ds_finetune-partial").exists()


def test_names_of_published_checkpoints_are_accepted(tmp_path: Path) -> None:
    """transformers 4 has one matrix for each expert."""
    model = published("deepseek_v3", tmp_path / "base")
    split = {
        p.key: t[p.index]
        for name, t in model.state_dict().items()
        for p in hub_pieces(name, tuple(t.shape), family_of("deepseek_v3"))
    }
    source = fit_source(in_memory(split), read_model_spec(tmp_path / "base"), label="it")
    convert_source(
        source, tmp_path / "out", parts_of(tmp_path / "base", torch.float32), max_shard_bytes=10**9, workers=1
    )
    wanted, found = read_all(tmp_path / "base"), read_all(tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_the_spec_is_the_models_class(llama: PreTrainedModel, tmp_path: Path) -> None:
    spec = read_model_spec(tmp_path / "base")
    assert (spec.architecture, spec.model_type, spec.tied) == ("LlamaForCausalLM", "llama", {})
    assert spec.shapes == {name: tuple(tensor.shape) for name, tensor in llama.state_dict().items()}
    published("qwen2", tmp_path / "tied")
    tied = read_model_spec(tmp_path / "tied")
    assert tied.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in tied.shapes


@pytest.mark.parametrize(
    ("tree", "said"), [({"model_type": "none"}, "none"), ({"model_type": "vit"}, "Unrecognized"), ({}, "model_type")]
)
def test_a_config_without_a_causal_lm(tree: dict[str, str], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ExportError, match=said) as caught:
        read_model_spec(tmp_path)
    assert f"cannot build a model from {tmp_path}/config.json: " in caught.value.message


def test_what_does_not_fit_is_listed(llama: PreTrainedModel, tmp_path: Path) -> None:
    source = source_of(llama, model__norm__weight=torch.zeros(31), adapter=torch.zeros(2))
    source = replace(source, shapes={key: shape for key, shape in source.shapes.items() if key != "lm_head.weight"})
    with pytest.raises(ExportError) as caught:
        fit_source(source, read_model_spec(tmp_path / "base"), label="run/step-3")
    assert caught.value.message == (
        "run/step-3 does not fit LlamaForCausalLM: 1 missing: lm_head.weight; 1 unexpected: adapter; "
        "1 of another shape: model.norm.weight: model (32,), checkpoint (31,)"
    )


def test_a_tied_head_is_left_out_where_it_is_the_same_and_refused_where_not(tmp_path: Path) -> None:
    model = published("qwen2", tmp_path / "base")
    spec = read_model_spec(tmp_path / "base")
    head = model.get_input_embeddings().weight.detach()
    assert "lm_head.weight" not in fit_source(source_of(model, lm_head__weight=head.clone()), spec, label="it").shapes
    for other in (head + 1, head[:-1]):
        with pytest.raises(ExportError, match=r"it: `lm_head.weight` differs from `model.embed_tokens.weight`"):
            fit_source(source_of(model, lm_head__weight=other), spec, label="it")


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (float("nan"), "bf16", r"tensor `model.norm.weight` holds NaN or infinity in the source"),
        (float("-inf"), "fp32", r"tensor `model.norm.weight` holds NaN or infinity in the source"),
        (1e5, "fp16", r"tensor `model.norm.weight` holds NaN or infinity as float16"),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_nan_ends_the_export_and_the_older_one_stays(
    value: float, dtype: str, said: str, workers: int, llama: PreTrainedModel, tmp_path: Path
) -> None:
    out, parts = tmp_path / "out", parts_of(tmp_path / "base", DTYPES[dtype])
    convert_source(source_of(llama), out, parts, max_shard_bytes=10**9, workers=workers)
    before = (out / "model.safetensors").read_bytes()
    weight = torch.ones(32)
    weight[5] = value
    with pytest.raises(ExportError, match=said):
        convert_source(source_of(llama, model__norm__weight=weight), out, parts, max_shard_bytes=10**9, workers=workers)
    assert (out / "model.safetensors").read_bytes() == before


def test_after_an_error_nothing_more_is_read(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "CHUNK_NUMEL", 8)
    reads: list[str] = []

    source = source_of(llama)

    def read(name: str, start: int, numel: int) -> torch.Tensor:
        reads.append(name)
        if len(reads) == 4:
            raise OSError(5, "disk")
        return source.read(name, start, numel)

    with pytest.raises(OSError, match="disk"):
        convert_source(
            replace(source, read=read),
            tmp_path / "out",
            parts_of(tmp_path / "base", torch.bfloat16),
            max_shard_bytes=10**9,
            workers=2,
        )
    assert len(reads) < 10
    assert not (tmp_path / "out").exists()


MEASURE = """
import sys, torch
from pathlib import Path
from ds_finetune.export import convert
from ds_finetune.export.safetensors_folder import FolderParts, write_folder
from ds_finetune.export.readers.deepspeed_native import read_deepspeed_checkpoint
from ds_finetune.families.table import family_of

convert.CHUNK_NUMEL = 2**18
SIDE = 1024
folder = Path(sys.argv[1])
parts = FolderParts(family=family_of("llama"), config={}, architecture="X", dtype=torch.bfloat16, files=())


def checkpoint(place, count):
    shapes = {f"t{i}": torch.Size((SIDE, SIDE)) for i in range(count)}
    place.mkdir()
    model = {"module": {}, "buffer_names": [], "dp_world_size": 1, "param_shapes": [shapes], "shared_params": {}}
    torch.save(model, place / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    zero = {"partition_count": 1, "fp32_flat_groups": [torch.rand(count * SIDE * SIDE)]}
    torch.save({"optimizer_state_dict": zero}, place / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def stream(place):
    convert.Conversion(read_deepspeed_checkpoint(place), parts, 2).write(place / "out", max_shard_bytes=5 * 10**9)


def live(place, count):
    specs = {f"t{i}": torch.empty(SIDE, SIDE, device="meta") for i in range(count)}
    write_folder(((name, torch.rand(SIDE, SIDE)) for name in specs), specs, place / "out", parts, max_shard_bytes=5 * 10**9)


def status(key):
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)).split()[1]) * 1024


def growth(work, *arguments):
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    work(*arguments)
    return status("VmHWM") - before


for name, count in (("warm", 1), ("full", 20)):
    checkpoint(folder / name, count)
    (folder / f"live-{name}").mkdir()
stream(folder / "warm")
live(folder / "live-warm", 1)
print(growth(stream, folder / "full"), growth(live, folder / "live-full", 20), (folder / "full" / "out" / "model.safetensors").stat().st_size)
"""


def test_memory_does_not_grow_with_the_model_or_the_file(tmp_path: Path) -> None:
    """80 MiB of fp32 in one file: converted by two threads in chunks of 1 MiB, and exported live from tensors of 4 MiB."""
    # Freed blocks return to the system at once, so that the resident set is what is held.
    done = start([sys.executable, "-c", MEASURE, str(tmp_path)], {"MALLOC_MMAP_THRESHOLD_": "65536"})
    assert done.returncode == 0, done.stderr
    converted, live, size = map(int, done.stdout.split())
    mib = 2**20
    assert size > 40 * mib
    assert converted < 2 * 2 * mib
    assert live < 1.5 * 4 * mib


def test_the_callers_threads_stay_as_they_were(llama: PreTrainedModel, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        convert_source(
            source_of(llama),
            tmp_path / "out",
            parts_of(tmp_path / "base", torch.bfloat16),
            max_shard_bytes=10**9,
            workers=1,
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
