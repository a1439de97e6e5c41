"""The exported folder: published names, shards, config, and nothing incomplete."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ds_finetune.config.units import parse_bytes
from ds_finetune.errors import ExportError
from ds_finetune.export.safetensors_folder import FolderParts, write_folder
from ds_finetune.families.table import family_of
from ds_finetune.model.weights.names import hub_pieces
from tests.export.cells import types_of
from tests.json_files import read_json
from tests.model.tiny import CONFIGS
from tests.model.weights.test_weights import published
from tests.rounding import rounding_of_outputs


def tensors_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What an engine yields: parameters once, and persistent buffers."""
    yield from ((name, param.detach()) for name, param in model.named_parameters())
    kept = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def specs_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors_of(model)}


def parts_of(folder: Path, family: str) -> FolderParts:
    return FolderParts(
        family=family_of(family),
        config=read_json(folder / "config.json"),
        architecture="X",
        dtype=torch.float32,
        files=(),
        texts={"a.txt": "b"},
    )


@pytest.mark.parametrize("shard", ["1KB", "40KB", "5GB"])
@pytest.mark.parametrize("family", types_of("export/test_safetensors_folder.py"))
def test_folder_equals_what_transformers_writes(family: str, shard: str, tmp_path: Path) -> None:
    model = published(family, tmp_path / "base")
    out = tmp_path / "out"
    write_folder(
        tensors_of(model),
        specs_of(model),
        out,
        parts_of(tmp_path / "base", family),
        max_shard_bytes=parse_bytes(shard, name="export.max_shard_size"),
    )
    wanted = load_file(tmp_path / "base" / "model.safetensors")
    found = {key: tensor for file in out.glob("*.safetensors") for key, tensor in load_file(file).items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    again, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    ids = torch.arange(3, 20)[None]
    # The weights have the same bits; products may depend on where they lie in memory.
    wanted_logits = model(ids).logits
    difference = (again.eval()(ids).logits - wanted_logits).abs().max()
    assert difference <= rounding_of_outputs(model.config, wanted_logits, tokens=ids.shape[1])
    assert (out / "a.txt").read_text() == "b"
    assert not (tmp_path / "out.ds_finetune-partial").exists()


def test_the_schema_of_the_config_is_kept(tmp_path: Path) -> None:
    model = published("deepseek_v3", tmp_path / "base")
    parts = parts_of(tmp_path / "base", "deepseek_v3")
    given = {"model_type": "deepseek_v3", "rope_theta": 1e4, "quantization_config": {"x": 1}, "topk_method": "greedy"}
    given["scoring_func"] = None
    parts = FolderParts(**{**parts.__dict__, "config": given, "dtype": torch.bfloat16})
    write_folder(tensors_of(model), specs_of(model), tmp_path / "out", parts, max_shard_bytes=10**9)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "deepseek_v3",
        "rope_theta": 1e4,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "topk_method": "greedy",
        "architectures": ["X"],
        "torch_dtype": "bfloat16",
        "scoring_func": "sigmoid",
    }


def test_a_failure_leaves_the_older_export_whole(tmp_path: Path) -> None:
    model = published("llama", tmp_path / "base")
    parts = parts_of(tmp_path / "base", "llama")
    write_folder(tensors_of(model), specs_of(model), tmp_path / "out", parts, max_shard_bytes=10**9)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(tensors_of(model))
        yield "empty", torch.zeros(0)

    specs = dict([next(iter(specs_of(model).items())), ("empty", torch.empty(4, device="meta"))])
    with pytest.raises(ExportError, match=r"tensor `empty` has shape \(0,\)"):
        write_folder(failing(), specs, tmp_path / "out", parts, max_shard_bytes=10**9)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_other_ranks_consume_tensors_and_write_nothing(tmp_path: Path) -> None:
    drained = iter([("a", None), ("b", None)])
    write_folder(drained, {}, tmp_path / "out", parts_of(_config(tmp_path), "llama"), max_shard_bytes=1)
    assert list(drained) == []
    assert not (tmp_path / "out").exists()


def _config(folder: Path) -> Path:
    AutoConfig.for_model("llama", **CONFIGS["llama"]).save_pretrained(folder / "base")
    return folder / "base"


def test_pieces_cover_a_tensor_once() -> None:
    shape = (4, 6, 5)
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        seen = torch.zeros(shape)
        pieces = hub_pieces(name, shape, family_of("deepseek_v3"))
        for piece in pieces:
            assert seen[piece.index].shape == piece.shape
            seen[piece.index] += 1
        assert torch.equal(seen, torch.ones(shape))
        assert len({piece.key for piece in pieces}) == len(pieces)
    assert [piece.key for piece in hub_pieces("model.layers.1.mlp.experts.down_proj", shape, family_of("llama"))] == [
        "model.layers.1.mlp.experts.down_proj"
    ]
