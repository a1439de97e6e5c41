"""The tiny models all cells train."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_finetune.selftest.cells import TINY_MODELS, hf_config


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one tiny pre-trained-looking model of each family, in fp32."""
    folder = tmp_path_factory.mktemp("models")
    for family in TINY_MODELS:
        torch.manual_seed(11)
        AutoModelForCausalLM.from_config(hf_config(family)).float().save_pretrained(folder / family)
    return folder
