"""Rows of Parquet files and of `datasets.Dataset` have the tokens of the same rows as JSONL."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset
from pyarrow import parquet
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.objectives import ObjectiveField
from ds_finetune.config.sections import DataConfig
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.trainer.run_dir import _write

ASK, SAY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


TOOLS = [tool("weather", city={"type": "string", "enum": ["Rome"]}), tool("add", a={"type": "number", "default": 2})]
CALLS = [call("weather", city="Rome"), call("add", a=2, of={"unit": "m"}), call("now")]
CHATS = [
    *({"messages": [ASK, each, {"role": "tool", "content": "4"}, SAY], "tools": TOOLS[: n + 1]} for n, each in enumerate(CALLS)),
    {"prompt": "2+2?", "completion": "4"},
]  # fmt: skip
PAIRS = [
    {"prompt": [ASK], "chosen": [call("add", a=2)], "rejected": [call("weather", city="Rome")], "tools": TOOLS},
    {"prompt": [ASK], "chosen": [SAY], "rejected": [{"role": "assistant", "content": "5"}], "margin": 1.0},
]
PROMPTS = [
    {"prompt": [ASK], "answer": "4", "tests": [{"input": "2", "output": "4"}, {"call": {"name": "f"}}]},
    {
        "prompt": [ASK, CALLS[0], {"role": "tool", "content": "4"}],
        "reward_model": {"ground_truth": "4"},
        "tools": TOOLS,
    },
    {"prompt": [ASK], "answer": "5", "reward_model": {"style": "rule"}},
]
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ 'assistant' if "
    "m.role == 'assistant' else 'user' }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def prepared(path: str, objective: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreparedRows:
    (folder / "template.jinja").write_text(TEMPLATE)
    given = {"train": path, "cache_dir": str(folder / "cache"), "template": str(folder / "template.jinja")}
    kind = RowKind.of(TypeAdapter(ObjectiveField).validate_python(objective))
    limits = TokenLimits(2048, 128)
    return prepare_rows(DataConfig.model_validate(given), "train", tokenizer=tokenizer, limits=limits, kind=kind)


@pytest.mark.parametrize(
    ("objective", "rows"), [("sft", CHATS), ("dpo", PAIRS), ("grpo", PROMPTS)], ids=["chats", "pairs", "prompts"]
)
def test_arrow_rows_have_the_tokens_of_jsonl(
    objective: str, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    assert table.to_pylist() != rows, "Arrow adds no null to these rows"
    parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = _write(Dataset(table), "train", tmp_path / "run")
    paths = [str(tmp_path / "rows.jsonl"), str(tmp_path / "rows.parquet"), written]
    jsonl, *others = (prepared(path, objective, tokenizer, tmp_path) for path in paths)
    assert not jsonl.counts.dropped.entries
    texts = [tokenizer.decode(jsonl.document(number)[0]) for number in range(jsonl.counts.documents)]
    assert not any("null" in text or "None" in text for text in texts)
    for rows_of in others:
        documents = range(rows_of.counts.documents)
        assert [rows_of.document(n) for n in documents] == [jsonl.document(n) for n in documents]
        if objective == "grpo":
            assert [rows_of.record(n) for n in documents] == [jsonl.record(n) for n in documents]
    if objective == "grpo":
        assert [jsonl.record(n).get("answer") for n in range(3)] == ["4", "4", "5"]
        assert jsonl.record(0)["tests"] == PROMPTS[0]["tests"]
