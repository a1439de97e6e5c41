"""The snippet of every kind of model card is run by plain transformers and peft."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ds_finetune.config.sections import LoraConfig
from ds_finetune.export.adapter import AdapterBase, write_adapter
from ds_finetune.export.from_checkpoint import export_checkpoint
from ds_finetune.families.table import family_of
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.foreign.auto_models import AutoModelForCausalLM
from ds_finetune.model.adapters.lora import factors_of
from ds_finetune.model.weights.names import is_adapter
from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.report.model_card import write_model_card
from tests.conftest import ROOT
from tests.export.classifiers import BOS, EOS, PAD, classifier, write_tokenizer
from tests.lora_twin import adapted
from tests.model.tiny import CONFIGS
from tests.runs.report.made_runs import make_run

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "language model": ("llama", "sft", False),
    "adapter": ("llama", "sft", True),
    "classifier": ("qwen2", "classification", False),
    "adapter of a classifier": ("llama", "classification", True),
    "encoder": ("bert", "classification", False),
    "reward model": ("llama", "reward", False),
    "adapter of a reward model": ("llama", "reward", True),
    "Kimi K2": ("kimi_k2", "dpo", False),
    "adapter of Kimi K2": ("kimi_k2", "sft", True),
    "classifier of Kimi K2": ("kimi_k2", "classification", False),
    "adapter of a classifier of Kimi K2": ("kimi_k2", "classification", True),
}
"""Family, objective and whether the folder holds an adapter."""
_RUN_SNIPPETS = """
import json, re, sys, traceback
from pathlib import Path

found = {}
for folder in sys.argv[2:]:
    snippet = re.search(r"```python\\n(.*?)```", Path(folder, "README.md").read_text(), re.S)[1]
    names = {"print": lambda *texts: found[folder].append(repr(texts))}
    found[folder] = []
    try:
        exec(snippet.replace("PATH_OR_ID_OF_THIS_FOLDER", folder), names)
        found[folder].append(type(names["model"]).__name__)
    except Exception:
        found[folder].append(snippet + traceback.format_exc())
Path(sys.argv[1]).write_text(json.dumps(found))
"""


def _model(family: str, objective: str) -> PreTrainedModel:
    changes: dict[str, Any] = {"num_labels": 1, "id2label": {0: "reward"}} if objective == "reward" else {}
    if family == "kimi_k2":
        changes |= {"rope_scaling": YARN, "rope_theta": 1e4, "max_position_embeddings": 256}
    if objective in ("classification", "reward"):
        return classifier(family, **changes)
    changes |= {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **CONFIGS[family] | changes))


def _make(folder: Path, family: str, objective: str, *, with_adapter: bool) -> Path:
    """An exported folder with its card; the base of an adapter is a language model."""
    model = _model(family, objective)
    base = model
    if with_adapter:
        base = AutoModelForCausalLM.from_config(model.config)
    base.save_pretrained(folder / "base")
    write_tokenizer(folder / "base", adds_eos=objective != "sft")
    export_checkpoint(folder / "base", folder / "export", dtype="fp32", max_shard_bytes=10**9, base=None)
    if with_adapter:
        _write_adapter(model, folder, objective)
    run = RunFolder.read(make_run(folder / "run", objective={"name": objective}))
    card = write_model_card(run, folder / ("adapter" if with_adapter else "export"))
    assert card is not None
    return card.parent


def _write_adapter(model: PreTrainedModel, folder: Path, objective: str) -> None:
    lora = LoraConfig(rank=8)
    has_head = objective != "sft"
    # Those of a run hold the files of its tokenizer, others do not.
    has_files = not has_head and model.config.model_type == "llama"
    base = AdapterBase(
        files=tuple((folder / "base").glob("tokenizer*.json")) if has_files else (),
        texts={"generation_config.json": '{"eos_token_id": [1, 2]}'} if has_files else {},
        name=str(folder / "base"),
        digest="",
        family=family_of(model.config.model_type),
        trained={"score.weight": model.score.weight.detach()} if has_head else {},
        classifier_config=model.config.to_dict() | {"architectures": [type(model).__name__]} if has_head else {},
    )
    tensors = {name: param.detach() for name, param in adapted(model, lora).named_parameters() if is_adapter(name)}
    write_adapter(factors_of(tensors, lora.scale), lora, folder / "adapter", base)


def test_the_snippet_of_every_card_runs(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    folders = {}
    for number, (kind, (family, objective, with_adapter)) in enumerate(KINDS.items()):
        folders[kind] = str(_make(tmp_path / str(number), family, objective, with_adapter=with_adapter))
    command = [sys.executable, "-c", _RUN_SNIPPETS, str(tmp_path / "found.json"), *folders.values()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    for kind, folder in folders.items():
        _, objective, with_adapter = KINDS[kind]
        *printed, model = found[folder]
        assert len(model) < 100, f"{kind}: {model}"
        is_scorer = objective in ("classification", "reward")
        expected = "" if is_scorer and with_adapter else "score" if is_scorer else "generated_text"
        assert expected in "".join(printed), kind
        assert bool(printed) is bool(expected), kind


def test_a_type_of_newer_transformers_is_loaded_by_its_own_name_there(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text(json.dumps({"model_type": "exaone"}))
    card = write_model_card(RunFolder.read(make_run(tmp_path / "run")), tmp_path / "export")
    assert card
    text = card.read_text()
    assert (
        "# Older releases of transformers than 5.24.0 do not know this model.\nfrom transformers import pipeline"
        in text
    )
    assert "model_type=" not in text


@pytest.mark.parametrize(
    ("tokenizer_config", "is_new"),
    [
        ({"tokenizer_class": "TokenizersBackend"}, True),
        ({"tokenizer_class": "LlamaTokenizerFast"}, False),
        # transformers 4.57: 'list' object has no attribute 'keys'
        ({"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": ["<x>"]}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": {"image_token": "<x>"}}, False),
    ],
)
def test_a_tokenizer_that_transformers_4_does_not_read_is_named(
    tokenizer_config: dict[str, object], is_new: bool, tmp_path: Path
) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    card = write_model_card(RunFolder.read(make_run(tmp_path / "run")), tmp_path / "export")
    assert card
    assert ("needs transformers 5" in card.read_text()) == is_new
