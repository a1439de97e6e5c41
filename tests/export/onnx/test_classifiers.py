"""ONNX Runtime scores texts as plain transformers does, alone and in padded batches; other classifiers are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ds_finetune.cli.main import main
from ds_finetune.errors import ExportError
from ds_finetune.export.formats import ExportOptions
from ds_finetune.export.onnx.folder import write
from ds_finetune.export.output_folder import RECORD
from tests.export.cells import names_of, types_of
from tests.export.classifiers import CLASSES, EOS, PAD, classifier, write_tokenizer

for package in ("onnx", "onnxruntime"):
    pytest.importorskip(package, reason=f"{package} is not installed (pip install 'ds_finetune[onnx]')")

import onnxruntime  # noqa: E402 - after the skip

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "deepseek_v3": ("deepseek_v3", {}),
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "modernbert first": ("modernbert", {"classifier_pooling": "cls"}),
    "modernbert mean": ("modernbert", {"classifier_pooling": "mean", "attention_bias": True, "norm_bias": True}),
}


def rows(*lengths: int, side: str = "right") -> dict[str, torch.Tensor]:
    """Texts of these lengths that end with EOS, padded."""
    draw = np.random.default_rng(1)
    longest = max(lengths)
    ids, mask = np.full((len(lengths), longest), PAD), np.zeros((len(lengths), longest), dtype=np.int64)
    types = np.zeros_like(mask)
    for row, length in enumerate(lengths):
        at = slice(0, length) if side == "right" else slice(longest - length, longest)
        ids[row, at] = [*draw.integers(4, 90, length - 1), EOS]
        mask[row, at], types[row, at] = 1, np.arange(length) > length // 2
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask),
        "token_type_ids": torch.from_numpy(types),
    }


def plain(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    names = [*inputs] if model.config.model_type == "bert" else ["input_ids", "attention_mask"]
    with torch.no_grad():
        return model(**{name: inputs[name] for name in names}).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind", names_of(types_of("export/onnx/test_classifiers.py"), {name: kind for name, (kind, _) in KINDS.items()})
)
def test_onnx_runtime_scores_as_transformers(kind: str, tmp_path: Path) -> None:
    family, changes = KINDS[kind]
    model = classifier(family, **changes)
    model.save_pretrained(tmp_path / "model")
    result = write(tmp_path / "model", tmp_path / "onnx", ExportOptions(dtype="fp32"))
    assert f"against transformers: {10 if hasattr(model, 'score') else 8} texts" in result.lines()[1]
    session = onnxruntime.InferenceSession(
        str(tmp_path / "onnx" / "onnx/model.onnx"), providers=["CPUExecutionProvider"]
    )
    names = [entry.name for entry in session.get_inputs()]
    assert names == ["input_ids", "attention_mask", *(["token_type_ids"] if family == "bert" else [])]
    # An encoder would score the padding there.
    left = [rows(9, 21, side="left")] if hasattr(model, "score") else []
    for inputs in (rows(1), rows(40), rows(3, 17, 40), *left):
        (found,) = session.run(["logits"], {name: inputs[name].numpy() for name in names})
        assert found.shape == (len(inputs["input_ids"]), 3)
        torch.testing.assert_close(torch.from_numpy(found), plain(model, inputs), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v3", "bert", "modernbert"])
def test_half_precision_is_within_its_tolerance(family: str, tmp_path: Path) -> None:
    classifier(family).save_pretrained(tmp_path / "model")
    write(tmp_path / "model", tmp_path / "onnx", ExportOptions(dtype="fp16", with_cache=False))
    result = json.loads((tmp_path / "onnx" / RECORD).read_text())
    assert result["beyond"] <= result["allowed_share"] * result["positions"]


def test_a_folder_is_checked_again_and_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classifier("llama").save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", adds_eos=True)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "onnx"), "--format", "onnx"]) == 0
    assert main(["export", "--check", str(tmp_path / "onnx")]) == 0
    assert "against transformers: 10 texts, largest difference" in capsys.readouterr().out
    answers = []
    for folder in ("model", "onnx"):
        assert main(["ask", str(tmp_path / folder), "charge twice"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert all(name in answers[0] for name in CLASSES.values())
    file = tmp_path / "onnx" / "onnx/model.onnx"
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
    assert main(["export", "--check", str(tmp_path / "onnx")]) == 1
    assert main(["chat", str(tmp_path / "onnx")]) == 2


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("bert", {"hidden_act": "relu"}, "model_type `bert` do not support hidden_act `relu`"),
        (
            "modernbert",
            {"classifier_activation": "silu"},
            "model_type `modernbert` do not support classifier_activation `silu`",
        ),
        ("llama", {"hidden_act": "gelu"}, "do not support hidden_act `gelu`"),
    ],
)
def test_what_has_no_graph_is_refused(family: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    classifier(family, **changes).save_pretrained(tmp_path / "model")
    with pytest.raises(ExportError, match=said):
        write(tmp_path / "model", tmp_path / "onnx", ExportOptions(dtype="fp32"))


def test_a_classifier_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    classifier("bert").save_pretrained(tmp_path / "model")
    tree = json.loads((tmp_path / "model" / "config.json").read_text())
    tree |= {"model_type": "gemma", "architectures": ["GemmaForSequenceClassification"], "head_dim": 8}
    (tmp_path / "model" / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ExportError, match="models of type `gemma` cannot be exported to ONNX") as refused:
        write(tmp_path / "model", tmp_path / "onnx", ExportOptions(dtype="fp32"))
    assert "of classifiers also for bert, modernbert, roberta" in refused.value.hint
