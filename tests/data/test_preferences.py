"""Preference data and marked answers: layouts, splitting by turns, lengths, and the counts of dropped rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.objectives import DpoObjective, KtoObjective, RewardObjective, SftObjective
from ds_finetune.config.sections import DataConfig
from ds_finetune.data.batches import BatchPlan, Position, make_batch
from ds_finetune.data.documents import Counts, NamedCounts
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.samples import read_row
from ds_finetune.data.stream import open_stream, streaming_batches
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import DataError
from ds_finetune.objectives.labels import IGNORE_INDEX

PAIRS, MARKED = RowKind.of(RewardObjective(name="reward")), RowKind.of(KtoObjective(name="kto"))
ASKED, GOOD, BAD = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "5"},
)
SYSTEM = {"role": "system", "content": "Count."}
HH = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 2+2?\n\nAssistant:"


def rows_of(
    records: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    kind: RowKind = PAIRS,
    max_seq_len: int = 64,
    **options: object,
) -> PreparedRows:
    path = folder / "rows.json"
    path.write_text(json.dumps(records))
    given = {"train": str(path), "cache_dir": str(folder / "cache"), "max_dropped_ratio": 1, "max_truncated_ratio": 1}
    config = DataConfig.model_validate({**given, **options})
    return prepare_rows(config, "train", tokenizer=tokenizer, limits=TokenLimits(max_seq_len, 128), kind=kind)


def shown(rows: PreparedRows, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Each document as text, with what is supervised in brackets."""
    texts = []
    for number in range(rows.counts.documents):
        ids, mask = rows.document(number)
        start = mask.index(True)
        assert all(mask[start:])
        texts.append(f"{tokenizer.decode(ids[:start])}[{tokenizer.decode(ids[start:])}]")
    return texts


LAYOUTS = {
    "standard": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    "conversational": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "implicit prompt": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "UltraFeedback": {
        "prompt": "2+2?",
        "prompt_id": "f00",
        "chosen": [ASKED, GOOD],
        "rejected": [ASKED, BAD],
        "messages": [ASKED, GOOD],
        "score_chosen": 8.0,
        "score_rejected": 2.0,
    },
    "HH-RLHF": {"chosen": "\n\nHuman: 2+2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5"},
    "LLaMA-Factory sharegpt": {
        "conversations": [{"from": "human", "value": "2+2?"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "5"},
    },
    "ms-swift response": {"messages": [ASKED, GOOD], "rejected_response": "5"},
    "ms-swift response as messages": {"messages": [ASKED, GOOD], "rejected_response": [BAD]},
    "ms-swift messages": {"messages": [ASKED, GOOD], "rejected_messages": [ASKED, BAD]},
    "OpenRLHF": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "margin": 1.5},
    "OpenRLHF without prompt": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "margin": 1.5},
    "Nectar": {
        "prompt": "\n\nHuman: 2+2?\n\nAssistant: ",
        "answers": [
            {"answer": "3", "model": "b", "rank": 2.0},
            {"answer": "4", "model": "a", "rank": 1.0},
            {"answer": "5", "model": "c", "rank": 3.0},
            {"answer": "6", "model": "d", "rank": 3.0},
        ],
        "turns": 1,
    },
    "ranked answers to a text": {"prompt": "2+2?", "answers": [{"answer": "5", "rank": 7}, {"answer": "4", "rank": 0}]},
    "ranked answers to turns": {"prompt": [ASKED], "answers": [{"answer": "5", "rank": 7}, {"answer": "4", "rank": 0}]},
    "Orca": {"system": "", "question": "2+2?", "chosen": "4", "rejected": "5"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_pairs_give_the_same_documents(
    name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = rows_of([LAYOUTS[name]], tokenizer, tmp_path)
    prompt = "<|bos|><|user|>2+2?<|assistant|>"
    assert shown(rows, tokenizer) == [f"{prompt}[4<|eos|>]", f"{prompt}[5<|eos|>]"]
    documents = rows[0].documents
    assert documents is not None
    assert documents.numbers.tolist() == [0, 1]
    assert documents.lengths.sum() == len(rows[0].input_ids)
    assert documents.targets.tolist() == [LAYOUTS[name].get("margin", 0.0)] * 2


def test_equal_ranks_make_no_pair(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tied = {"prompt": "2+2?", "answers": [{"answer": "4", "rank": 1}, {"answer": "5", "rank": 1}]}
    rows = rows_of([tied, {**tied, "answers": tied["answers"][:1]}, LAYOUTS["Nectar"]], tokenizer, tmp_path)
    assert rows.num_units == 1
    assert {name: number for name, (number, _) in rows.counts.dropped.entries.items()} == {"equal_sides": 2}
    assert list(rows.counts.unread.entries) == ["turns"]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([], r"column `answers` is list \[\]"),
        ("4", "column `answers` is str '4'"),
        (["4", "5"], "answer 1 of `answers` has the rank None"),
        ([{"answer": "4", "rank": 1}, {"answer": "5", "rank": "2"}], "answer 2 of `answers` has the rank '2'"),
        ([{"answer": "4", "rank": 1}, {"text": "5", "rank": 2}], "answer 2 of `answers`"),
    ],
)
def test_ranked_lists_that_do_not_fit_are_refused(
    answers: object, said: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=said) as caught:
        rows_of([{"prompt": "2+2?", "answers": answers}], tokenizer, tmp_path)
    assert caught.value.hint


def test_alpaca_pairs_have_the_prompt_of_alpaca(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    record = {"instruction": "Add", "input": "2+2", "chosen": "4", "rejected": "5"}
    plain = rows_of([record], tokenizer, tmp_path, template="plain", max_seq_len=1024)
    chosen, rejected = shown(plain, tokenizer)
    assert chosen.partition("[")[0].endswith("Response:<|unk|>")
    assert chosen.endswith("[4<|eos|>]")
    assert rejected == chosen.replace("[4", "[5")


def test_hh_dialogues_are_split_at_the_last_answer(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Also where both answers begin alike, where one is empty, and where one is the beginning of the other."""
    records = [
        {"chosen": HH + a, "rejected": HH + b} for a, b in ((" It is 4", " It is 5"), (" 4", ""), (" 4 x", " 4"))
    ]
    turns = "<|bos|><|user|>Hi<|assistant|>Hello<|eos|><|user|>2+2?<|assistant|>"
    answers = ["It is 4", "It is 5", "4", "", "4 x", "4"]
    assert shown(rows_of(records, tokenizer, tmp_path, max_seq_len=256), tokenizer) == [
        f"{turns}[{answer}<|eos|>]" for answer in answers
    ]
    plain = rows_of(records, tokenizer, tmp_path, max_seq_len=256, template="plain")
    prompts = [text.partition("[")[0] for text in shown(plain, tokenizer)]
    assert prompts == [HH.replace("\n", "<|unk|>")] * 6
    assert not plain.counts.dropped.rows


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"chosen": [ASKED, GOOD], "rejected": [{"role": "user", "content": "3+3?"}, BAD]}, "turn 1 of `rejected`"),
        ({"chosen": [ASKED, GOOD], "rejected": [SYSTEM, ASKED, BAD]}, "turn 1 of `rejected`"),
        ({"chosen": [ASKED, GOOD], "rejected": [BAD]}, "turn 1 of `rejected` is the answer"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED]}, "the last turn of `rejected` has the role user"),
        ({"chosen": "yes", "rejected": "yes and no"}, "`chosen` has no turns"),
        ({"chosen": HH + " a\n\nHuman: b", "rejected": HH + " c"}, "`chosen` has no turns that end with an answer"),
        ({"chosen": HH + " 4", "rejected": HH.replace(": Hi", ":Hi") + " 5"}, "differ in white space"),
        ({"prompt": "p", "chosen": [], "rejected": [BAD]}, "the last turn of `chosen` has the role user"),
        ({"conversations": "2+2?", "chosen": GOOD, "rejected": BAD}, "`conversations` is str"),
        ({"messages": None, "rejected_response": "5"}, "`messages` is null"),
        ({"messages": [], "rejected_response": "5"}, "`messages` is list []"),
        ({"messages": [ASKED, GOOD], "rejected_messages": [BAD]}, "turn 1 of `rejected_messages` is the answer"),
        ({"conversations": [ASKED], "chosen": [], "rejected": BAD}, "the last turn of `chosen` has the role user"),
        ({"conversations": [ASKED], "chosen": 4, "rejected": BAD}, "column `chosen` is int 4"),
        ({"prompt": "p", "chosen": None, "rejected": "x"}, "column `chosen` is null"),
        ({"prompt": "other", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "`chosen` begins with the turn"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": float("nan")}, "column `margin` is float nan"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "images": ["x.png"]}, "media in column `images`"),
    ],
)
def test_rows_that_are_no_pair_are_refused_by_name(record: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        read_row(record, PAIRS, layout="auto", columns={}, where="rows.json item 7")
    assert said in caught.value.message
    assert "rows.json item 7" in caught.value.message
    assert caught.value.hint


def test_a_margin_belongs_to_reward_models_alone(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    record = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "margin": 2}
    kind = RowKind.of(DpoObjective(name="dpo"))
    rows = rows_of([record], tokenizer, tmp_path, kind=kind)
    assert rows.documents.targets.tolist() == [0, 0]
    assert rows.counts.unread.entries["margin"][0] == 1


def test_equal_empty_and_long_sides_follow_the_rules(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """A character is a token; the template adds 4, so a pair that just fits into 40 has texts of 32 together."""

    def pair(prompt: int, chosen: str, rejected: str) -> dict[str, str]:
        return {"prompt": "p" * prompt, "chosen": chosen, "rejected": rejected}

    records = [
        pair(6, "same", "same"),
        pair(6, "", "a"),
        pair(6, "a" * 10, "b" * 10),
        pair(6, "a" * 30, "b" * 5),
        pair(6, "a" * 20, "b" * 20),
        pair(20, "a", "b"),
        pair(6, "a" * 30, "a" * 40),
    ]
    rows = rows_of(records, tokenizer, tmp_path, max_seq_len=40, packing=False)
    texts = [text.partition("[")[2] for text in shown(rows, tokenizer)]
    assert texts == [
        "<|eos|>]",
        "a<|eos|>]",
        "a" * 10 + "<|eos|>]",
        "b" * 10 + "<|eos|>]",
        "a" * 16 + "]",
        "b" * 5 + "<|eos|>]",
        "a" * 11 + "]",
        "b" * 11 + "]",
    ]
    assert {name: number for name, (number, _) in rows.counts.dropped.entries.items()} == {
        "equal_sides": 2,
        "no_answer_left": 1,
    }
    assert rows.counts.truncated == 2
    assert rows.counts.truncated_tokens == 15 + 2 * 10
    assert rows.counts.read == rows.num_units + rows.counts.dropped.rows == 7
    assert max(len(rows[number].input_ids) for number in range(len(rows))) <= 40
    dropped = rows_of(records, tokenizer, tmp_path, max_seq_len=40, long_rows="drop")
    assert dropped.counts.too_long_dropped == 4
    assert dropped.num_units == 2


def test_sides_that_a_template_opens_differently_are_dropped(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """As R1's does: its prompt for generation begins the reasoning, which one answer has and the other has not."""
    template = tmp_path / "reasoning.jinja"
    template.write_text(str(tokenizer.chat_template).replace("{{ '<|assistant|>' }}", "{{ '<|assistant|>(' }}"))
    records = [{"prompt": "2+2?", "chosen": "(sum) 4", "rejected": answer} for answer in ("(sum) 5", "5")]
    rows = rows_of(records, tokenizer, tmp_path, template=str(template))
    assert shown(rows, tokenizer) == [f"<|bos|><|user|>2+2?<|assistant|>([sum) {answer}<|eos|>]" for answer in "45"]
    assert {name: number for name, (number, _) in rows.counts.dropped.entries.items()} == {"prompts": 1}


def test_packing_keeps_the_sides_of_a_pair_together(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    records = [
        {"prompt": "p", "chosen": "a" * int(draw.integers(1, 30)), "rejected": "b" * int(draw.integers(1, 30))}
        for _ in range(200)
    ]
    rows = rows_of(records, tokenizer, tmp_path, max_seq_len=128)
    found: list[int] = []
    for row in (rows[number] for number in range(len(rows))):
        documents = row.documents
        assert documents is not None
        assert len(row.input_ids) == documents.lengths.sum() <= 128
        assert (documents.numbers[::2] % 2 == 0).all()
        assert (documents.numbers[1::2] == documents.numbers[::2] + 1).all()
        found += documents.numbers.tolist()
        firsts = np.cumsum(documents.lengths) - documents.lengths
        assert (row.position_ids[firsts] == 0).all()
        assert (row.labels[firsts[1:] - 1] == IGNORE_INDEX).all()
        assert row.supervised == (row.labels != IGNORE_INDEX).sum()
    assert sorted(found) == list(range(400))
    assert rows.counts.tokens == sum(len(rows[number].input_ids) for number in range(len(rows)))
    assert rows.fill_ratio(128) > 0.9
    every = [rows[number] for number in range(len(rows))]
    position = Position(0, 0)
    plan = BatchPlan(len(rows), len(rows), 0, 1, 0, shuffle=False, pad_token_id=0, row_len=128, documents_per_unit=2)
    assert rows.count_units(range(len(rows)), 2) == make_batch(every, plan, position, ()).counts


def test_no_token_is_lost_and_all_rows_are_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Random pairs against the rule itself: a common limit for both sides, so that they fit into a row together."""
    draw, limit = np.random.default_rng(1), 41
    sizes = [tuple(int(n) for n in draw.integers(0, 40, size=3)) for _ in range(300)]
    records = [{"prompt": "p" * p, "chosen": "a" * a, "rejected": "ab"[b % 2] * b} for p, a, b in sizes]
    rows = rows_of(records, tokenizer, tmp_path, max_seq_len=limit, packing=False)
    expected, lost, reasons = [], 0, {"no_answer_left": 0, "equal_sides": 0}
    for record in records:
        prompt = [*tokenizer("<|bos|><|user|>" + record["prompt"] + "<|assistant|>")["input_ids"]]
        sides = [[*prompt, *tokenizer(record[key] + "<|eos|>")["input_ids"]] for key in ("chosen", "rejected")]
        shorter = min(map(len, sides))
        end = limit if sum(map(len, sides)) <= limit else max(limit // 2, limit - shorter)
        cut = [side[:end] for side in sides]
        if min(map(len, cut)) <= len(prompt):
            reasons["no_answer_left"] += 1
        elif cut[0] == cut[1]:
            reasons["equal_sides"] += 1
        else:
            expected += cut
            lost += sum(map(len, sides)) - sum(map(len, cut))
    assert [rows.document(number)[0] for number in range(rows.counts.documents)] == expected
    assert {name: number for name, (number, _) in rows.counts.dropped.entries.items()} == reasons
    assert rows.counts.truncated_tokens == lost
    assert rows.counts.tokens == sum(map(len, expected))
    assert rows.num_units + rows.counts.dropped.rows == rows.counts.read == 300
    assert min(*reasons.values(), rows.counts.truncated, rows.num_units) > 10


def test_sources_with_weights_have_rows_of_whole_pairs(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.json" for name in "ab"]
    for path, number in zip(paths, (30, 10), strict=True):
        pairs = [{"prompt": path.stem * (n % 9), "chosen": "1" * (n % 5 + 1), "rejected": "2"} for n in range(number)]
        path.write_text(json.dumps(pairs))
    given = {"train": {str(paths[0]): 3, str(paths[1]): 1}, "cache_dir": str(tmp_path / "cache")}
    config, limits = DataConfig.model_validate(given), TokenLimits(64, 128)
    rows = prepare_rows(config, "train", tokenizer=tokenizer, limits=limits, kind=PAIRS)
    assert rows.mixture is not None
    first_of_b = rows.mixture.sizes[0]
    assert sum(rows.tokens_of_sources) == rows.num_tokens
    for number in range(len(rows)):
        documents = rows[number].documents
        assert documents is not None
        assert {n < 60 for n in documents.numbers.tolist()} == {number < first_of_b}


def test_a_stream_has_whole_pairs(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "p" * n, "chosen": "a", "rejected": "b"} for n in range(20)]))
    config = DataConfig.model_validate({"train": str(path), "streaming": True})
    rows = open_stream(config, "train", tokenizer=tokenizer, limits=TokenLimits(64, 128), kind=PAIRS)
    plan = BatchPlan(2, 1, 0, 1, 0, shuffle=True, pad_token_id=2, row_len=64, documents_per_unit=2)
    batches = list(streaming_batches(rows, plan, steps=4))
    assert sum(batch.counts["pairs"] for batch in batches) >= 12
    for batch in batches:
        assert batch.counts["chosen_tokens"] == 2 * batch.counts["pairs"]
        assert batch.counts["supervised_tokens"] == 4 * batch.counts["pairs"]
    dialogue = open_stream(
        config.model_copy(update={"columns": {"completion": "chosen"}}),
        "train",
        tokenizer=tokenizer,
        limits=TokenLimits(64, 128),
    )
    assert dialogue.fingerprint() != rows.fingerprint()


def test_generation_answers_the_prompts_of_chosen_and_good_answers(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    pairs = rows_of([LAYOUTS["standard"], {"prompt": "p", "chosen": "x", "rejected": "y"}], tokenizer, tmp_path)
    marks = [{"prompt": "p", "completion": answer, "label": answer == "good"} for answer in ("bad", "good", "good")]
    marked = rows_of(marks, tokenizer, tmp_path, kind=MARKED)
    for rows, expected in ((pairs, ["4<|eos|>", "x<|eos|>"]), (marked, ["good<|eos|>"] * 2)):
        assert [tokenizer.decode(answer) for _, answer in rows.prompts_and_answers(5)] == expected
    assert tokenizer.decode(pairs.prompts_and_answers(1)[0][0]) == "<|bos|><|user|>2+2?<|assistant|>"


MARKED_ROWS = {
    "messages": {"messages": [ASKED, GOOD], "label": True},
    "conversations": {
        "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
        "kto_tag": True,
    },
    "TRL": {"prompt": "2+2?", "completion": "4", "label": 1},
    "TRL conversational": {"prompt": [ASKED], "completion": [GOOD], "label": True},
}


@pytest.mark.parametrize("name", MARKED_ROWS)
def test_layouts_of_marked_answers(name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    label = next(key for key in ("label", "kto_tag") if key in MARKED_ROWS[name])
    records = [MARKED_ROWS[name], {**MARKED_ROWS[name], label: False}]
    rows = rows_of(records, tokenizer, tmp_path, kind=MARKED)
    assert shown(rows, tokenizer) == ["<|bos|><|user|>2+2?<|assistant|>[4<|eos|>]"] * 2
    assert rows.documents.targets.tolist() == [1, 0]
    assert not rows.counts.unread.entries


@pytest.mark.parametrize(("good", "bad"), [("1", "0"), ("True", "False"), ("true", "FALSE")])
def test_labels_of_a_csv_file_mark_answers(
    good: str, bad: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text(f"prompt,completion,label\n2+2?,4,{good}\n2+2?,5,{bad}\n")
    config = DataConfig.model_validate({"train": str(tmp_path / "rows.csv"), "cache_dir": str(tmp_path / "cache")})
    rows = prepare_rows(config, "train", tokenizer=tokenizer, limits=TokenLimits(64, 128), kind=MARKED)
    assert rows.documents.targets.tolist() == [1, 0]


@pytest.mark.parametrize("label", ["yes", "2", "", -1, 2, 1.0, None, float("nan")])
def test_a_mark_that_is_none_is_refused(label: object) -> None:
    with pytest.raises(DataError, match=r"row 3: column `kto_tag` is (null|\w+ .*), which is no label of an answer"):
        read_row({"messages": [ASKED, GOOD], "kto_tag": label}, MARKED, layout="auto", columns={}, where="row 3")


@pytest.mark.parametrize(
    ("record", "kind", "hint"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, MARKED, "objective dpo, simpo, cpo, orpo, reward"),
        ({"messages": [ASKED, GOOD], "label": True}, PAIRS, "objective kto"),
        ({"messages": [ASKED, GOOD]}, PAIRS, "objective sft, distill"),
        ({"sentence1": "a", "sentence2": "b", "label": 0}, PAIRS, "objective classification"),
        ({"a": 1}, PAIRS, "name them under data.columns"),
    ],
)
def test_rows_of_another_objective_name_it(record: dict[str, Any], kind: RowKind, hint: str) -> None:
    with pytest.raises(DataError, match="row 1 has columns") as caught:
        read_row(record, kind, layout="auto", columns={}, where="row 1")
    assert hint in (caught.value.hint or "")


def test_pairs_are_refused_in_supervised_fine_tuning() -> None:
    with pytest.raises(DataError, match="row 1 is a preference row"):
        read_row(LAYOUTS["standard"], RowKind.of(SftObjective()), layout="auto", columns={}, where="row 1")


def test_the_published_pairs_and_marks(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "deepseek-llm"))
    limits = TokenLimits(16_384, 102_400)
    folder = shared_data / "instruct"

    def prepared(name: str, kind: RowKind) -> PreparedRows:
        config = DataConfig.model_validate({"train": str(folder / name), "cache_dir": str(tmp_path)})
        return prepare_rows(config, "train", tokenizer=tokenizer, limits=limits, kind=kind)

    pairs = prepared("dpo_en_demo.json", PAIRS)
    assert pairs.counts == Counts(
        read=300,
        documents=600,
        tokens=pairs.num_tokens,
        supervised=pairs.counts.supervised,
        server_prompt_differs=pairs.counts.server_prompt_differs,
        noted=NamedCounts({"conversion": (2, f"{folder / 'dpo_en_demo.json'} item 16")}),
    )
    for number in range(0, 600, 2):
        (chosen, is_chosen), (rejected, is_rejected) = pairs.document(number), pairs.document(number + 1)
        start = is_chosen.index(True)
        assert start == is_rejected.index(True)
        assert chosen[:start] == rejected[:start]
        assert chosen[-1] == rejected[-1] == tokenizer.eos_token_id
    marked = prepared("kto_en_demo.json", MARKED)
    assert np.bincount(marked.documents.targets.astype(int)).tolist() == [150, 150]
