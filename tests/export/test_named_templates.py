"""Tokenizers with a chat template for requests with tools: rows are rendered as transformers renders requests."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from ds_finetune import read_config, train
from ds_finetune.cli.main import main
from ds_finetune.config.sections import DataConfig
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import ConfigError
from tests.answers_task import CHATML, train_answers, write_base
from tests.export.gguf.conftest import known_tokenizer  # noqa: F401 - a fixture
from tests.export.gguf.models import VOCAB

TOOL_USE = (
    "<|im_start|>{{ tools | tojson }}<|im_end|>{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
TEMPLATES = {"default": CHATML, "tool_use": TOOL_USE}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "red?"}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"a": 1}}}
ROWS: list[dict[str, Any]] = [
    {"messages": [QUESTION, {"role": "assistant", "content": "an apple"}]},
    {"messages": [QUESTION, {"role": "assistant", "content": "an apple"}], "tools": [TOOL]},
    {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}], "tools": [TOOL]},
]


def _base(folder: Path, kind: str) -> Path:
    """As transformers writes named templates today, in a folder, or as it wrote them before, in a list."""
    write_base(folder, template=TEMPLATES)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    if kind == "list":
        for file in (folder / "additional_chat_templates" / "tool_use.jinja", folder / "chat_template.jinja"):
            file.unlink()
        named = [{"name": name, "template": template} for name, template in TEMPLATES.items()]
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
    return folder


@pytest.mark.parametrize("kind", ["folder", "list"])
def test_prompts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    base = _base(tmp_path / "base", kind)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = DataConfig(train=(str(tmp_path / "train.jsonl"),), cache_dir=str(tmp_path / "cache"), packing=False)
    limits = TokenLimits(max_seq_len=256, vocab_size=VOCAB)
    rows = prepare_rows(data, "train", tokenizer=load_tokenizer(str(base)), limits=limits)
    plain = AutoTokenizer.from_pretrained(base)
    assert rows.counts.server_prompt_differs == 0
    for number, row in enumerate(ROWS):
        expected = plain.apply_chat_template(
            row["messages"][:1], tools=row.get("tools"), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert rows.document(number)[0][: len(expected)] == expected
        whole = plain.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=True)["input_ids"]
        assert rows.document(number)[0] == whole


@pytest.mark.parametrize("kind", ["folder", "list"])
def test_every_export_has_all_templates(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed: pip install 'ds_finetune[gguf]'")
    _base(tmp_path / "base", kind)
    out = train_answers(tmp_path, ROWS, train={"for": "1 steps"})
    assert main(["export", str(out.parent), str(tmp_path / "again")]) == 0
    for folder in (out, tmp_path / "again"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATES
    assert "(default, tool_use)" in (out / "README.md").read_text()
    assert main(["export", str(out), str(tmp_path / "gguf"), "--format", "gguf", "--dtype", "f32"]) == 0
    fields = gguf.GGUFReader(tmp_path / "gguf" / "gguf.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == CHATML
    assert fields["tokenizer.chat_template.tool_use"].contents() == TOOL_USE


def test_a_file_takes_the_place_of_all(tmp_path: Path) -> None:
    _base(tmp_path / "base", "folder")
    (tmp_path / "own.jinja").write_text(CHATML + " ")
    out = train_answers(tmp_path, ROWS[:1], data={"template": str(tmp_path / "own.jinja")}, train={"for": "1 steps"})
    assert AutoTokenizer.from_pretrained(out).chat_template == CHATML + " "


def test_no_default_is_refused(tmp_path: Path) -> None:
    _base(tmp_path / "base", "list")
    file = tmp_path / "base" / "tokenizer_config.json"
    named = [{"name": "rag", "template": CHATML}, {"name": "tool_use", "template": TOOL_USE}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    tree = {"model": str(tmp_path / "base"), "data": {"train": str(tmp_path / "train.jsonl")}}
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({**tree, "train": {"max_seq_len": 64}, "output_dir": str(tmp_path / "run")})
    )
    with pytest.raises(ConfigError, match="the chat templates rag, tool_use and no `default`"):
        train(read_config(tmp_path / "run.yaml"))
