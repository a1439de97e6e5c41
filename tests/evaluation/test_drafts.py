"""Predictions of a folder's multi-token prediction layer equal those of transformers' own module."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from ds_finetune.evaluation.model_scores import Document, Scores, load_drafter, score_documents
from tests.parity.mtp_cells import PlainMtp, write_mtp_model


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    write_mtp_model(getattr(request, "param", "deepseek_v3"), tmp_path / "model")
    return tmp_path / "model"


def _documents() -> list[Document]:
    rng = np.random.default_rng(5)
    every = [rng.integers(3, 90, size=length).tolist() for length in (9, 2, 17, 5, 12)]
    return [Document(ids, [place >= 3 for place in range(len(ids))], ids[:3], ids[3:]) for ids in every]


def _score(folder: Path) -> Scores:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return score_documents(model, _documents(), batch_tokens=40, drafter=load_drafter(folder, model))


def _plain(folder: Path, head: torch.Tensor | None = None) -> np.ndarray:
    model, rows = PlainMtp(folder).eval(), []
    for document in _documents():
        ids = torch.tensor(document.ids)
        with torch.no_grad():
            _, logits = model.logits(ids) if head is None else (None, model.mtp_states(ids) @ head.T)
            choices = model.main(input_ids=ids[None]).logits[0].argmax(-1)
        scores, targets, accepted = logits[1:-1], ids[3:], choices[2:-1]
        loss = cross_entropy(scores, targets, reduction="sum").item() if len(targets) else 0.0
        drafts = scores.argmax(-1)
        rows.append((loss, len(targets), int((drafts == targets).sum()), int((drafts == accepted).sum())))
    return np.array(rows)


@pytest.mark.parametrize("folder", ["deepseek_v3", "deepseek_v32_sparse", "glm_moe_dsa_sparse"], indirect=True)
def test_predictions_are_those_of_transformers(folder: Path) -> None:
    found = _score(folder)
    wanted = _plain(folder)
    assert found.drafts == pytest.approx(wanted, abs=1e-4)
    metrics = found.metrics(np.ones((1, len(found))))
    assert metrics["mtp_loss"][0] == pytest.approx(wanted[:, 0].sum() / wanted[:, 1].sum())
    assert metrics["mtp_accuracy"][0] == pytest.approx(wanted[:, 2].sum() / wanted[:, 1].sum())


def test_drafts_are_accepted_where_the_model_chooses_them(folder: Path) -> None:
    """A head that prefers few tokens, so that some drafts agree by chance."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for key in ("lm_head.weight", "model.layers.2.shared_head.head.weight"):
        tensors[key][:2] *= 30
    save_file(tensors, file, metadata={"format": "pt"})
    found, wanted = _score(folder), _plain(folder)
    assert found.drafts is not None
    assert found.drafts[:, 1:].tolist() == wanted[:, 1:].tolist()
    accepted, predicted = wanted[:, 3].sum(), wanted[:, 1].sum()
    assert 0 < accepted < predicted
    assert found.metrics(np.ones((1, len(found))))["mtp_acceptance"][0] == pytest.approx(accepted / predicted)


def test_a_head_of_its_own_is_used(folder: Path) -> None:
    file, key = folder / "model.safetensors", "model.layers.2.shared_head.head.weight"
    tensors = load_file(file)
    tensors[key] += 0.1 * torch.randn_like(tensors[key])
    save_file(tensors, file, metadata={"format": "pt"})
    assert _score(folder).drafts == pytest.approx(_plain(folder, tensors[key]), abs=1e-4)


def test_a_folder_without_the_layer_has_no_drafts(folder: Path) -> None:
    config = folder / "config.json"
    tree = json.loads(config.read_text())
    config.write_text(json.dumps(tree | {"num_nextn_predict_layers": 0}))
    found = _score(folder)
    assert found.drafts is None
    assert "mtp_loss" not in found.metrics(np.ones((1, len(found))))
