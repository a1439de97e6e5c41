"""Rows of prompts in the layouts of other programs, and of supervised fine-tuning, as the model and the rewards see them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.sections import DataConfig
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.errors import ConfigError, DataError

KIND = RowKind("prompts", "grpo")
USER = [{"role": "user", "content": "2+2"}]
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "4"}


def rows_of(
    folder: Path,
    rows: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    limits: tuple[int, int] = (64, 16),
    **data: Any,
) -> PreparedRows:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig.model_validate(
        {"train": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache"), "workers": 1, **data}
    )
    size = max(tokenizer.get_vocab().values()) + 1
    return prepare_rows(
        config, "train", tokenizer=tokenizer, limits=TokenLimits(limits[0], size, answer_tokens=limits[1]), kind=KIND
    )


LAYOUTS = [
    # program, row, reference answer
    ("trl", {"prompt": "2+2", "solution": "4"}, "4"),
    ("trl_messages", {"prompt": USER, "ground_truth": "4"}, None),
    ("ms_swift", {"messages": USER, "solution": "<answer>4</answer>"}, "<answer>4</answer>"),
    ("axolotl", {"prompt": USER, "answer": "4"}, "4"),
    ("openrlhf", {"input": "2+2", "label": "4"}, "4"),
    ("openrlhf_messages", {"input": USER, "label": 4}, 4),
    (
        "verl",
        {
            "data_source": "sums", "prompt": USER, "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 7},
        },
        "4",
    ),
    ("gsm8k", {"question": "2+2", "answer": "2 + 2 = 4\n#### 4"}, "2 + 2 = 4\n#### 4"),
    ("math", {"problem": "2+2", "solution": r"\boxed{4}", "level": 1}, r"\boxed{4}"),
    ("sft_prompt", {"prompt": "2+2", "completion": "4"}, "4"),
    ("sft_turns", {"prompt": USER, "completion": [ANSWER]}, "4"),
    ("sft_messages", {"messages": [*USER, ANSWER]}, "4"),
    ("sharegpt", {"conversations": [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}]}, "4"),
    ("alpaca", {"instruction": "2+2", "output": "4"}, "4"),
    ("alpaca_prompt", {"instruction": "2+2"}, None),
    ("both", {"messages": [*USER, ANSWER], "answer": "four"}, "four"),
    ("preferences", {"prompt": "2+2", "chosen": "4", "rejected": "5"}, None),
    ("tests", {"prompt": "2+2", "tests": ["assert True"], "n": None}, None),
]  # fmt: skip


@pytest.mark.parametrize(("row", "answer"), [each[1:] for each in LAYOUTS], ids=[name for name, *_ in LAYOUTS])
def test_layouts(row: dict[str, Any], answer: object, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = rows_of(tmp_path, [row, row], tokenizer)
    expected = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    for number in range(2):
        assert rows.prompt_ids(number) == expected
        given = {name: value for name, value in row.items() if value is not None}
        assert rows.record(number) == given | ({} if answer is None else {"answer": answer})
        assert rows.where(number).endswith(f"rows.jsonl line {number + 1}")
    assert len(rows) == rows.num_units == 2
    assert rows.counts.unread.entries == {}
    assert rows[0].supervised == 0


def test_systems_and_several_turns(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    turns = [*USER, ANSWER, {"role": "user", "content": "and 3+3?"}]
    rows = [
        {"prompt": "2+2", "system": "Be brief."},
        {"messages": [SYSTEM, *USER, ANSWER]},
        {"messages": turns},
        {"prompt": turns, "answer": "6"},
        {"prompt": "and 3+3?", "history": [["2+2", "4"]]},
    ]
    prepared = rows_of(tmp_path, rows, chat_tokenizer, limits=(256, 16))
    wanted = [[SYSTEM, *USER], [SYSTEM, *USER], turns, turns, turns]
    for number, messages in enumerate(wanted):
        expected = chat_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert prepared.prompt_ids(number) == expected, number


def test_prompts_without_a_template_are_those_of_fine_tuning(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": "2+2", "completion": "4"}
    prompts = rows_of(tmp_path, [row, {"prompt": "2+2 "}], tokenizer, template="plain")
    config = DataConfig.model_validate(
        {
            "train": str(tmp_path / "rows.jsonl"),
            "template": "plain",
            "cache_dir": str(tmp_path / "other"),
            "bad_rows": "drop",
            "max_dropped_ratio": 1,
        }
    )
    tuned = prepare_rows(config, "train", tokenizer=tokenizer, limits=TokenLimits(64, 128))
    assert prompts.prompt_ids(0) == tuned.prompts_and_answers(1)[0][0]
    assert tokenizer.decode(prompts.prompt_ids(1)).endswith("2+2 ")
    with pytest.raises(DataError, match="is a conversation and the tokenizer has no chat template"):
        rows_of(tmp_path, [{"messages": USER}], tokenizer, template="plain")


def test_prompts_are_one_a_row_and_kept_in_the_cache(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    given = [{"prompt": f"{n}+{n}", "answer": 2 * n, "text": "ü\n☃", "share": 0.1} for n in range(2100)]
    rows = rows_of(tmp_path, given, tokenizer, packing=True)
    assert len(rows) == 2100
    again = rows_of(tmp_path, given, tokenizer, packing=True)
    assert [again.record(number) for number in range(2100)] == given
    assert again.where(2099).endswith("line 2100")
    assert again.fingerprint() == rows.fingerprint()
    other = [{**row, "answer": 0} for row in given]
    (tmp_path / "other").mkdir()
    assert rows_of(tmp_path / "other", other, tokenizer).fingerprint() != rows.fingerprint()
    (tmp_path / "moved").mkdir()
    assert rows_of(tmp_path / "moved", given, tokenizer).fingerprint() == rows.fingerprint()


def test_a_longer_prompt_is_an_error_or_dropped_and_never_cut(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": "1+1"}, {"prompt": "x" * 46}, {"prompt": "x" * 45}]
    with pytest.raises(DataError) as raised:
        rows_of(tmp_path, [*rows, *[{"prompt": "x" * length} for length in (50, 48)] * 20], tokenizer)
    first, hint = str(raised.value).splitlines()
    assert first.startswith("41 of 43 prompts are longer than train.max_seq_len less rollout.max_new_tokens, the ")
    assert first.endswith("rows.jsonl line 4")
    assert "the longest by 5 tokens: " in first
    assert "raise train.max_seq_len by 5, or set data.long_rows: drop" in hint
    kept = rows_of(tmp_path, rows, tokenizer, long_rows="drop", max_dropped_ratio=0.5)
    assert [len(kept.prompt_ids(number)) for number in range(2)] == [6, 48]
    assert kept.where(1).endswith("line 3")
    with pytest.raises(DataError, match=r"1 of 3 rows .* are dropped"):
        rows_of(tmp_path, rows, tokenizer, long_rows="drop")
    for choice in ("truncate", "split"):
        with pytest.raises(ConfigError, match=f"(?s)long_rows.*{choice}|{choice}.*prompts"):
            rows_of(tmp_path, rows, tokenizer, long_rows=choice)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [*USER, ANSWER]}, "`prompt` ends with an assistant turn"),
        ({"text": "2+2"}, "has columns text, which fit no layout"),
        ({"prompt": 7}, "column `prompt` is int 7, not text"),
        ({"prompt": []}, "`prompt` is list []"),
        ({"messages": []}, "`messages` is list []"),
        ({"prompt": "x", "image": "a.png"}, "has media"),
    ],
)
def test_rows_that_are_no_prompts(
    row: dict[str, Any], message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError) as wrong:
        rows_of(tmp_path, [row], tokenizer)
    assert message in str(wrong.value)


def test_named_columns(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = rows_of(tmp_path, [{"q": "2+2", "a": "4"}], tokenizer, columns={"prompt": "q", "answer": "a"})
    assert rows.record(0) == {"q": "2+2", "a": "4", "answer": "4"}
    with pytest.raises(ConfigError, match="no layout reads it"):
        rows_of(tmp_path, [{"q": "2+2"}], tokenizer, columns={"prompt": "q", "chosen": "a"})
