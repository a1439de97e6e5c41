"""The tiny models all cells train."""

from pathlib import Path

import pytest

from ds_finetune.reference.selftest.cells import TINY_MODELS, hf_config
from ds_finetune.reference.selftest.compare import write_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one tiny pre-trained-looking model of each family, in fp32."""
    folder = tmp_path_factory.mktemp("models")
    for family in TINY_MODELS:
        write_model(hf_config(family), folder / family)
    return folder
