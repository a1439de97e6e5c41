"""Rows as TRL, axolotl, LLaMA-Factory, ms-swift, OpenRLHF and verl document them: the tokens of each, or the refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.objectives import ObjectiveField
from ds_finetune.config.sections import DataConfig
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.samples import LAYOUTS_OF, read_row
from ds_finetune.errors import ConfigError, DataError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' + m.content + eos_token }}"
    "{% else %}{{ '(S)' if m.role == 'system' else '<|user|>' }}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SYSTEM, ASKED, AGAIN = (
    {"role": role, "content": text} for role, text in (("system", "Sys"), ("user", "2+2?"), ("user", "Sure?"))
)
GOOD, BAD, YES, NO = ({"role": "assistant", "content": text} for text in ("4", "5", "Yes", "No"))
HUMAN, GPT = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}
DIALOGUE = [ASKED, GOOD, AGAIN, YES]
HH = "\n\nHuman: 2+2?\n\nAssistant: 4\n\nHuman: Sure?\n\nAssistant:"
ONE, ONE_BAD = "<|user|>2+2?<|assistant|>[4<|eos|>]", "<|user|>2+2?<|assistant|>[5<|eos|>]"
TWO = "<|user|>2+2?<|assistant|>[4<|eos|>]<|user|>Sure?<|assistant|>[Yes<|eos|>]"
LAST = "<|user|>2+2?<|assistant|>4<|eos|><|user|>Sure?<|assistant|>[Yes<|eos|>]"
LAST_NO = LAST.replace("Yes", "No")
PAIR, PAIR_OF_TURNS = [ONE, ONE_BAD], [LAST, LAST_NO]

SFT: dict[str, tuple[dict[str, Any], str]] = {
    "TRL messages": ({"messages": DIALOGUE}, TWO),
    "TRL prompt, completion": ({"prompt": "2+2?", "completion": "4"}, ONE),
    "TRL prompt, completion as messages": ({"prompt": [ASKED, GOOD, AGAIN], "completion": [YES]}, LAST),
    "axolotl chat_template": ({"messages": DIALOGUE, "system": "Sys"}, f"(S)Sys{TWO}"),
    "axolotl chat_template, train": ({"messages": [{**ASKED, "train": False}, {**GOOD, "train": False}, AGAIN, {**YES, "train": True}]}, LAST),
    "axolotl chat_template, training": ({"conversations": [HUMAN, {**GPT, "training": False}, AGAIN, YES]}, LAST),
    "axolotl chat_template, mask": ({"messages": [ASKED, {**GOOD, "mask": True}, AGAIN, {**YES, "mask": False}]}, LAST),
    "axolotl alpaca_chat.load_qa with columns": ({"question": "2+2?", "answer": "4", "columns": {"prompt": "question", "completion": "answer"}}, ONE),
    "axolotl alpaca_w_system.load_open_orca": ({"system_prompt": "Sys", "question": "2+2?", "response": "4"}, f"(S)Sys{ONE}"),
    "axolotl gpteacher": ({"instruction": "2+2?", "input": "", "response": "4"}, ONE),
    "LLaMA-Factory alpaca": ({"instruction": "2+2", "input": "?", "output": "4", "system": "Sys", "history": [["2+2?", "4"]]},
                             "(S)Sys<|user|>2+2?<|assistant|>[4<|eos|>]<|user|>2+2<|unk|>?<|assistant|>[4<|eos|>]"),
    "LLaMA-Factory sharegpt": ({"conversations": [HUMAN, GPT], "system": "Sys", "tools": ""}, f"(S)Sys{ONE}"),
    "LLaMA-Factory messages with parts": ({"messages": [{**turn, "content": [{"type": "text", "value": turn["content"]}], "loss_weight": weight} for turn, weight in zip(DIALOGUE, (0.0, 0.0, 0.0, 1.0), strict=True)]}, LAST),
    "ms-swift messages, loss": ({"messages": [ASKED, {**GOOD, "loss": False}, AGAIN, {**YES, "loss": True}]}, LAST),
    "ms-swift query, response, history": ({"system": "Sys", "query": "Sure?", "response": "Yes", "history": [["2+2?", "4"]]}, f"(S)Sys{TWO}"),
    "ms-swift query, response": ({"query": "2+2?", "response": "4"}, ONE),
    "ms-swift role bot": ({"messages": [ASKED, {"role": "bot", "content": "4"}]}, ONE),
    "OpenRLHF input, output with columns": ({"input": "2+2?", "output": "4", "columns": {"prompt": "input", "completion": "output"}}, ONE),
    "OpenRLHF input as messages with columns": ({"input": DIALOGUE, "columns": {"messages": "input"}}, TWO),
    "verl prompt, response": ({"prompt": "2+2?", "response": "4"}, ONE),
    "verl multi-turn": ({"messages": DIALOGUE, "tools": None}, TWO),
    "OpenAI weight": ({"messages": [ASKED, {**GOOD, "weight": 0}, AGAIN, {**YES, "weight": 1}]}, LAST),
    "dolly": ({"instruction": "2+2?", "context": "", "response": "4", "category": "open_qa"}, ONE),
    "HelpSteer": ({"prompt": "2+2?", "response": "4", "helpfulness": 4, "verbosity": 1}, ONE),
    "HH transcript as prompt": ({"prompt": HH, "completion": "Yes"}, TWO),
    "HH transcript with columns": ({"chosen": f"{HH} Yes", "rejected": f"{HH} No", "columns": {"messages": "chosen"}}, TWO),
}  # fmt: skip
"""Row, possibly with the `data.columns` that it needs, and its document with the supervised tokens in brackets."""

PAIRS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "TRL explicit prompt": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, PAIR),
    "TRL explicit prompt as messages": ({"prompt": DIALOGUE[:3], "chosen": [YES], "rejected": [NO]}, PAIR_OF_TURNS),
    "TRL implicit prompt": ({"chosen": DIALOGUE, "rejected": [*DIALOGUE[:3], NO]}, PAIR_OF_TURNS),
    "TRL with system": ({"system": "Sys", "prompt": "2+2?", "chosen": "4", "rejected": "5"}, [f"(S)Sys{side}" for side in PAIR]),
    "axolotl chat_template.default": ({"messages": DIALOGUE[:3], "chosen": YES, "rejected": NO}, PAIR_OF_TURNS),
    "axolotl chat_template.default, lists": ({"messages": DIALOGUE[:3], "chosen": [YES], "rejected": [NO]}, PAIR_OF_TURNS),
    "axolotl chat_template.default, texts": ({"messages": "2+2?", "chosen": "4", "rejected": "5"}, PAIR),
    "axolotl chat_template.argilla_chat": ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, PAIR),
    "axolotl chatml.intel": ({"system": "Sys", "question": "2+2?", "chosen": "4", "rejected": "5"}, [f"(S)Sys{side}" for side in PAIR]),
    "axolotl chatml.icr with columns": ({"system": "Sys", "input": "2+2?", "chosen": "4", "rejected": "5", "columns": {"prompt": "input"}}, [f"(S)Sys{side}" for side in PAIR]),
    "axolotl chatml.ultra": ({"prompt": "2+2?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, PAIR),
    "LLaMA-Factory alpaca": ({"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "5"}, PAIR),
    "LLaMA-Factory sharegpt": ({"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "5"}, "system": "Sys"}, [f"(S)Sys{side}" for side in PAIR]),
    "LLaMA-Factory chosen_messages": ({"chosen_messages": [{**turn, "loss_weight": 1.0} for turn in DIALOGUE], "rejected_messages": [*DIALOGUE[:3], NO]}, PAIR_OF_TURNS),
    "ms-swift rejected_response": ({"messages": DIALOGUE, "rejected_response": "No"}, PAIR_OF_TURNS),
    "ms-swift rejected_messages": ({"messages": DIALOGUE, "rejected_messages": [*DIALOGUE[:3], NO]}, PAIR_OF_TURNS),
    "OpenRLHF with a prompt key": ({"prompt": DIALOGUE[:3], "chosen": [YES], "rejected": [NO], "margin": 1.0}, PAIR_OF_TURNS),
    "OpenRLHF": ({"chosen": DIALOGUE, "rejected": [*DIALOGUE[:3], NO]}, PAIR_OF_TURNS),
    "verl": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, PAIR),
    "axolotl chosen_response with columns": ({"prompt": "2+2?", "chosen_response": "4", "rejected_response": "5", "columns": {"chosen": "chosen_response", "rejected": "rejected_response"}}, PAIR),
    "HH transcripts": ({"chosen": f"{HH} Yes", "rejected": f"{HH} No"}, PAIR_OF_TURNS),
    "HH transcript as prompt": ({"prompt": HH, "chosen": "Yes", "rejected": "No"}, PAIR_OF_TURNS),
    "messages that repeat the chosen side": ({"messages": [ASKED, GOOD], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, PAIR),
}  # fmt: skip

MARKED: dict[str, tuple[dict[str, Any], str]] = {
    "TRL unpaired": ({"prompt": "2+2?", "completion": "4", "label": True}, ONE),
    "TRL unpaired as messages": ({"prompt": DIALOGUE[:3], "completion": [YES], "label": True}, LAST),
    "axolotl kto": ({"system": "Sys", "prompt": "2+2?", "completion": "4", "label": True}, f"(S)Sys{ONE}"),
    "LLaMA-Factory sharegpt": ({"conversations": [HUMAN, GPT], "kto_tag": True, "system": "Sys"}, f"(S)Sys{ONE}"),
    "ms-swift messages": ({"messages": DIALOGUE, "label": True}, LAST),
    "ms-swift query, response": ({"query": "2+2?", "response": "4", "label": True}, ONE),
    "HH transcript as prompt": ({"prompt": HH, "completion": "Yes", "label": True}, LAST),
}


def kind_of(objective: str) -> RowKind:
    return RowKind.of(TypeAdapter(ObjectiveField).validate_python(objective))


def prepared(
    record: dict[str, Any], objective: str, tokenizer: PreTrainedTokenizerBase, folder: Path, **options: object
) -> PreparedRows:
    (folder / "template.jinja").write_text(TEMPLATE)
    columns = record.get("columns", {})
    row = {key: value for key, value in record.items() if key != "columns"}
    (folder / "rows.json").write_text(json.dumps([row, row]))
    given = {"train": str(folder / "rows.json"), "cache_dir": str(folder / "cache"), "columns": columns}
    config = DataConfig.model_validate({**given, "template": str(folder / "template.jinja"), **options})
    return prepare_rows(config, "train", tokenizer=tokenizer, limits=TokenLimits(256, 128), kind=kind_of(objective))


def assert_documents(rows: PreparedRows, expected: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """The documents are exactly these ids and this mask; each text is one token a character, brackets aside."""
    for number, text in enumerate(expected):
        ids: list[int] = []
        mask: list[bool] = []
        for piece in text.replace("]", "[").split("["):
            of_piece = tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            ids += of_piece
            mask += [f"[{piece}]" in text] * len(of_piece)
        bos = tokenizer.bos_token_id
        assert rows.document(number) == ([bos, *ids], [False, *mask]), tokenizer.decode(rows.document(number)[0])


@pytest.mark.parametrize("name", SFT)
def test_rows_of_dialogue(name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    record, expected = SFT[name]
    assert_documents(prepared(record, "sft", tokenizer, tmp_path), [expected], tokenizer)


@pytest.mark.parametrize("name", PAIRS)
def test_rows_of_pairs(name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    record, expected = PAIRS[name]
    assert_documents(prepared(record, "dpo", tokenizer, tmp_path), expected, tokenizer)


@pytest.mark.parametrize("name", MARKED)
def test_rows_of_marked_answers(name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    record, expected = MARKED[name]
    assert_documents(prepared(record, "kto", tokenizer, tmp_path), [expected], tokenizer)


@pytest.mark.parametrize(
    ("record", "objective", "said", "hint"),
    [
        ({"chosen": [GOOD], "rejected": [BAD]}, "dpo", "`chosen` and `rejected` are answers without a prompt", "give the prompt"),
        ({"messages": [SYSTEM, ASKED], "system": "Other", "rejected_response": "5"}, "dpo", "the last turn of `messages` has the role user", "end both"),
        ({"messages": [SYSTEM, ASKED, GOOD], "system": "Other", "rejected_response": "5"}, "dpo", "column `system` is 'Other', and the first turn is the system text 'Sys'", "once"),
        ({"prompt": [SYSTEM, ASKED], "completion": [GOOD], "system": "Other"}, "sft", "column `system` is 'Other'", "once"),
        ({"messages": [ASKED], "chosen": [SYSTEM, ASKED, GOOD], "rejected": [SYSTEM, ASKED, BAD]}, "dpo", "`chosen` begins with the turn", "only the answers"),
        ({"prompt": [ASKED, GOOD], "chosen": [YES], "rejected": [NO]}, "dpo", "the prompt ends with an assistant turn", "end the prompt with the user's turn"),
        ({"prompt": [ASKED, GOOD], "completion": [YES]}, "sft", "the prompt ends with an assistant turn", "end the prompt"),
        ({"prompt": HH + " Well", "completion": "Yes"}, "sft", "the prompt ends with an assistant turn", "end the prompt"),
        ({"prompt": "2+2?", "chosen": "4", "rejected": ["5", "6"]}, "dpo", "`rejected` is a list of 2 answers", "one row for each pair"),
        ({"input": "2+2?", "chosen": "4", "rejected": "5"}, "dpo", "`chosen` has no turns", "set data.columns: {prompt: input}"),
        ({"input": "2+2?", "chosen_response": "4", "rejected_response": "5"}, "dpo", "has columns", "set data.columns: {prompt: input, chosen: chosen_response, rejected: rejected_response}"),
        ({"question": "2+2?", "answer": "4"}, "sft", "fit no layout", "set data.columns: {prompt: question, completion: answer}"),
        ({"prompt": "2+2?", " completion": "4"}, "sft", "fit no layout", "remove the white space around the name of column ' completion'"),
        ({"Problem": "2+2?", "Solution": "4", "prompt_id": 3}, "sft", "fit no layout", "set data.columns: {prompt: Problem, completion: Solution}"),
        ({"prompt": "2+2?", "response": "4", "helpfulness": 4}, "dpo", "has columns", "such rows are for objective sft"),
        ({"messages": [ASKED, {**GOOD, "loss_scale": 0.5}]}, "sft", "has loss_scale 0.5", "weight 1"),
        ({"messages": [ASKED, {**GOOD, "train": "no"}]}, "sft", "has train 'no'", "weight 1"),
        ({"messages": [ASKED, {**GOOD, "train": True, "mask": True}]}, "sft", "which contradict each other", "keep one"),
        ({"messages": [ASKED, {**GOOD, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}]}, "sft", "has `train_detail`", "divide"),
        ({"messages": [{**ASKED, "train": True}, GOOD]}, "sft", "a user message has `train` True", "train_on: all"),
        ({"message_id": "1", "parent_id": None, "text": "Hi", "role": "prompter"}, "sft", "OpenAssistant", "for each path"),
        ({"message_id": "1", "parent_id": None, "text": "Hi", "role": "prompter"}, "pretrain", "OpenAssistant", "for each path"),
        ({"message_tree_id": "1", "prompt": {"text": "Hi", "replies": []}}, "sft", "OpenAssistant", "for each path"),
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, "sft", "is a preference row", "{completion: chosen}"),
        ({"chosen": DIALOGUE, "rejected": DIALOGUE}, "sft", "is a preference row", "{messages: chosen}"),
    ],
)  # fmt: skip
def test_rows_that_are_refused(record: dict[str, Any], objective: str, said: str, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        read_row(record, kind_of(objective), layout="auto", columns={}, where="rows.json item 7")
    assert caught.value.message.startswith("rows.json item 7")
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


def test_every_layout_can_be_named_in_a_run_file() -> None:
    for layout in {name for layouts in LAYOUTS_OF.values() for name in layouts}:
        assert DataConfig(train={"t.jsonl": 1}, layout=layout).layout == layout


def test_columns_without_effect_are_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    row = {"prompt": "2+2?", "completion": "4", "who": "Sys"}
    with pytest.raises(ConfigError, match=r"data.columns \{sytem: who\} has no effect") as caught:
        prepared({**row, "columns": {"sytem": "who"}}, "sft", tokenizer, tmp_path)
    assert "system" in (caught.value.hint or "")
    with pytest.raises(DataError, match=r"data.columns \{input: who\} has no effect on .*prompt_completion reads"):
        prepared({**row, "columns": {"input": "who"}}, "sft", tokenizer, tmp_path)
    with pytest.raises(DataError, match=r"data.columns \{system: whom\} has no effect: none of the 2 rows") as absent:
        prepared({**row, "columns": {"system": "whom"}}, "sft", tokenizer, tmp_path)
    assert "unread columns: who" in (absent.value.hint or "")
    rows = prepared({**row, "columns": {"system": "who"}}, "sft", tokenizer, tmp_path)
    assert_documents(rows, [f"(S)Sys{ONE}"], tokenizer)


def test_a_system_column_needs_a_template(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """A prompt without a chat template has no place for it, so the row is counted, not trained without it."""
    with pytest.raises(DataError, match="2 with a system text or history"):
        prepared({"prompt": "2+2?", "completion": "4", "system": "Sys"}, "sft", tokenizer, tmp_path, template="plain")
