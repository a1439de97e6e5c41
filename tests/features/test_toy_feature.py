"""A feature that a package outside `ds_finetune` adds: it trains as a plain loop does, and its name is checked."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ds_finetune.config.schema import read_config
from ds_finetune.errors import ConfigError
from ds_finetune.features import table
from ds_finetune.features.feature import Feature
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import samples
from ds_finetune.reference.selftest.reference_loop import adamw
from ds_finetune.system.world import World
from tests.features.toy_feature import SETTINGS, ToyFeature
from tests.planning import model_of
from tests.running import start, tiny_task, torchrun


def test_two_steps_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    done = start(torchrun(str(Path(__file__).with_name("toy_worker.py")), str(tmp_path)))
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    expected = _plain_steps(tmp_path / "model", max_grad_norm=found["limit"])
    for step, plain in zip(found["steps"], expected, strict=True):
        assert step == pytest.approx(plain, rel=1e-5)
    assert found["steps"][0][0] != pytest.approx(found["steps"][1][0], rel=1e-3)


def _plain_steps(folder: Path, *, max_grad_norm: float) -> list[tuple[float, float, float]]:
    """Loss, toy loss and norm of two steps of transformers and torch, one unpadded sample per forward."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    lm.get_input_embeddings().register_forward_hook(lambda _, __, embedded: embedded * SETTINGS["scale"])
    rows = [(torch.from_numpy(ids).long(), torch.from_numpy(labels).long()) for ids, labels in samples()]
    tokens = sum(len(ids) for ids, _ in rows)
    supervised = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in rows)
    optimizer, steps = adamw(lm), []
    for _ in range(2):
        loss = toy = 0.0
        for ids, labels in rows:
            hidden = lm.base_model(input_ids=ids[None], use_cache=False).last_hidden_state
            of_labels = functional.cross_entropy(lm.lm_head(hidden)[0], labels, reduction="sum") / supervised
            of_toy = hidden.square().mean(-1).sum() / tokens
            (of_labels + SETTINGS["weight"] * of_toy).backward()
            loss, toy = loss + of_labels.item(), toy + of_toy.item()
        norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss, toy, float(norm)))
    return steps


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No feature of another package is registered, and none of those that a test registers stays."""
    monkeypatch.setattr(table, "FEATURES", table.FEATURES[: table._BUILT_IN])
    monkeypatch.setattr(table, "_load_entry_points", table._load_entry_points.__wrapped__)


def _features(folder: Path, **settings: dict[str, float]) -> list[Feature]:
    config = read_config(tiny_task(folder, features=settings))
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "test"), device="cpu")
    return list(table.features_of(model_of(config), plan))


@pytest.mark.usefixtures("known")
def test_an_installed_package_adds_a_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "toy-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[ds_finetune.features]\ntoy = tests.features.toy_feature:ToyFeature\n")
    monkeypatch.syspath_prepend(package.parent)
    *_, toy = _features(tmp_path, toy=SETTINGS)
    assert toy.lines() == [("toy", "embedding times 1.5")]


@pytest.mark.usefixtures("known")
def test_settings_of_an_unknown_feature_are_refused(tmp_path: Path) -> None:
    table.register_feature(ToyFeature)
    assert not any(isinstance(feature, ToyFeature) for feature in _features(tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)features\.tyo has settings {'scale': 2}.*registered features: toy"):
        _features(tmp_path, tyo={"scale": 2})
