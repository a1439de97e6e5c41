"""Model types that transformers does not know are read, built and written under their own names."""

import ast
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig as PlainAutoConfig
from transformers import AutoModelForCausalLM as PlainAutoModel

from ds_finetune.families.table import BUILT_AS
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.foreign.auto_models import AutoModelForCausalLM, AutoModelForSequenceClassification
from ds_finetune.reference.selftest.cells import hf_config
from tests.conftest import ROOT

AUTO_CLASSES = {"AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoTokenizer"}
_OF_ITS_OWN = {"auto_configs.py", "auto_models.py", "plain_transformers.py", "transformers_model_types.py"}
"""The files that make these classes know the types, and the one that runs without this package."""


@pytest.mark.parametrize("name", BUILT_AS)
def test_a_folder_is_read_and_written_under_its_own_name(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(name))
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == name
    assert any(".experts.0.gate_proj" in key for key in load_file(tmp_path / "model.safetensors"))
    read, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(tensor, read.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert AutoModelForSequenceClassification.from_config(hf_config(name)).config.model_type == name


def test_every_module_takes_these_classes_from_here() -> None:
    """A class of plain transformers would know such types only where another module had been imported before."""
    assert PlainAutoConfig is AutoConfig
    assert PlainAutoModel is AutoModelForCausalLM
    for path in (ROOT / "ds_finetune").rglob("*.py"):
        if path.name in _OF_ITS_OWN:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                assert not AUTO_CLASSES & {alias.name for alias in node.names}, path
