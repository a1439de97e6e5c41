"""An ONNX folder as a model of transformers: `generate` gives what the plain model gives.

Sampled, padded, with beams, with a cache and without.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from ds_finetune.errors import ExportError
from tests.export.onnx.test_onnx import FAMILIES, fresh, rows, saved

pytest.importorskip("onnx", reason="the onnx extra is not installed: pip install 'ds_finetune[onnx]'")
pytest.importorskip("onnxruntime", reason="the onnx extra is not installed: pip install 'ds_finetune[onnx]'")

from ds_finetune.export import formats, load
from ds_finetune.export.formats import ExportOptions
from ds_finetune.export.onnx import folder as onnx_folder
from ds_finetune.export.onnx.runtime import OnnxCausalLM

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "temperature": 1.3, "top_p": 0.8, "top_k": 0},
    "beams": {"do_sample": False, "num_beams": 3},
}


def _generated(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, settings: dict[str, Any]
) -> list[list[int]]:
    torch.manual_seed(8)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=12, eos_token_id=None, pad_token_id=0, **settings)
    return out.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("with_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generates_what_plain_transformers_does(family: str, with_cache: bool, tmp_path: Path) -> None:
    plain = fresh(family)
    onnx_folder.write(
        saved(tmp_path / "hub", plain), tmp_path / "out", ExportOptions(dtype="fp32", with_cache=with_cache)
    )
    shutil.rmtree(tmp_path / "hub")
    model = load.load_exported(tmp_path / "out")
    assert isinstance(model, OnnxCausalLM)
    assert model.generation_config.use_cache == with_cache
    assert not list(model.parameters())
    ids, mask = rows(0, 4, 2, length=9)
    for name, settings in SETTINGS.items():
        assert _generated(model, ids, mask, settings) == _generated(plain, ids, mask, settings), name


def test_half_precision_with_a_cache(tmp_path: Path) -> None:
    plain = fresh("deepseek_v3")
    onnx_folder.write(saved(tmp_path / "hub", plain), tmp_path / "out", ExportOptions(dtype="fp16"))
    model = OnnxCausalLM.from_pretrained(tmp_path / "out")
    ids, _ = rows(0, 0, length=10)
    cache = DynamicCache(config=plain.config)
    first = model(ids[:, :7], past_key_values=cache).logits
    assert cache.get_seq_length() == 7
    assert {states.dtype for layer in cache.layers for states in (layer.keys, layer.values)} == {torch.float16}
    found = torch.cat([first, model(ids[:, 7:], past_key_values=cache).logits], dim=1)
    with torch.no_grad():
        wanted = plain(ids).logits
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 2e-2 * wanted.abs().max()


def test_folders_without_a_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExportError, match=r"holds no config\.json"):
        load.load_exported(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.onnx").write_bytes(b"")
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match="the ONNX export needs onnx and onnxruntime"):
        load.load_exported(tmp_path)
