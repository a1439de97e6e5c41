"""The logits an engine gives of prompts are plain transformers', on every rank of every layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finetune.reference.selftest.cells import hf_config
from tests.engine.logits_worker import LAYOUTS, PROMPTS
from tests.running import start, torchrun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks wrote, and the plain model's logits."""
    folder = tmp_path_factory.mktemp("logits")
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(hf_config("deepseek_v3")).float().eval()
    model.save_pretrained(folder / "model")
    with torch.no_grad():
        np.save(
            folder / "plain.npy", torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]).numpy()
        )
    done = start(torchrun(str(Path(__file__).with_name("logits_worker.py")), str(folder / "model"), str(folder)))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_plain_transformers(folder: Path, layout: str) -> None:
    wanted = np.load(folder / "plain.npy")
    for rank in (0, 1):
        found = np.load(folder / f"{layout}-{rank}.npy")
        assert found.dtype == np.float32
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
