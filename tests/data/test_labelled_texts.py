"""Labelled texts: their tokens for decoders and encoders, classes, and the targets of bad labels."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertTokenizerFast, PreTrainedTokenizerBase

from ds_finetune.config.objectives import ClassificationObjective
from ds_finetune.config.sections import DataConfig
from ds_finetune.data.batches import BatchPlan, eval_batches, training_batches
from ds_finetune.data.classes import find_classes
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.row_report import row_notes
from ds_finetune.data.stream import open_stream, streaming_batches
from ds_finetune.data.tokenizer_files import is_encoder_tokenizer, load_tokenizer
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.trainer.run_dir import _write


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """BERT's special tokens around a token per character, loaded from its files."""
    folder = tmp_path_factory.mktemp("encoder")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: number for number, token in enumerate([*special, *"abcdefghijklmnopqrstuvwxyz "])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=core, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **names
    ).save_pretrained(folder)
    return load_tokenizer(str(folder))


def kind_of(**options: Any) -> RowKind:
    return RowKind.of(ClassificationObjective(name="classification", **options))


def rows_of(
    records: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    kind: RowKind | None = None,
    max_seq_len: int = 32,
    purpose: str = "train",
    **options: object,
) -> PreparedRows:
    path = folder / f"{purpose}.json"
    path.write_text(json.dumps(records))
    given = {"train": str(path), "eval": str(path), "cache_dir": str(folder / "cache"), **options}
    limits = TokenLimits(max_seq_len, 128)
    config = DataConfig.model_validate({**given, "max_truncated_ratio": 1})
    return prepare_rows(config, purpose, tokenizer=tokenizer, limits=limits, kind=kind or kind_of())


def documents_of(rows: PreparedRows) -> list[list[int]]:
    return [rows.document(number)[0] for number in range(rows.counts.documents)]


def test_a_decoder_reads_one_text_that_ends_in_eos(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    records = [
        {"text": "good", "label": 1},
        {"text": "a", "text_pair": "b", "label": 0},
        {"text": "x" * 40, "label": 0},
        {"text": "", "label": 1},
    ]
    rows = rows_of(records, tokenizer, tmp_path, separator=" / ", packing=False)
    eos = tokenizer.eos_token_id
    expected = [[*tokenizer(text)["input_ids"], eos] for text in ("good", "a / b", "x" * 31, "")]
    assert documents_of(rows) == expected
    assert rows.documents.targets.tolist() == [1, 0, 0, 1]
    assert rows.counts.truncated == 1
    assert rows.counts.truncated_tokens == 40 + 1 - 32
    assert rows.counts.supervised == 0
    for number in range(len(rows)):
        assert rows[number].supervised == 0
        assert (rows[number].labels == IGNORE_INDEX).all()
        documents = rows[number].documents
        assert documents is not None
        assert documents.second.tolist() == documents.lengths.tolist()
    assert "classes 2 (0 50.0%, 1 50.0%)" in rows.summary()


def test_an_encoder_gets_what_its_tokenizer_gives(encoder: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    assert is_encoder_tokenizer(encoder)
    assert encoder.eos_token_id is None
    texts = [("good", None), ("abc", "de"), ("x" * 40, "y" * 4), ("z" * 40, None), ("", "")]
    records = [{"text": first, "text_pair": second, "label": n % 2} for n, (first, second) in enumerate(texts)]
    before = encoder.backend_tokenizer.to_str()
    rows = rows_of(records, encoder, tmp_path, packing=False)
    assert encoder.backend_tokenizer.to_str() == before
    for number, (first, second) in enumerate(texts):
        pair = [first] if second is None else [first, second]
        expected = encoder(*pair, truncation=True, max_length=32, return_token_type_ids=True)
        encoder.backend_tokenizer.no_truncation()
        row = rows[number]
        assert row.input_ids.tolist() == expected["input_ids"]
        assert row.documents is not None
        types = row.position_ids >= np.repeat(row.documents.second, row.documents.lengths)
        assert types.astype(int).tolist() == expected["token_type_ids"]
    assert rows.counts.truncated == 2


def test_berts_own_tokenizer_class_is_an_encoders(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    assert is_encoder_tokenizer(tokenizer)


@pytest.mark.parametrize(
    "names",
    [("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence")],
)
def test_columns_of_glue(names: tuple[str, str], tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    records = [{names[0]: "a", names[1]: "b", "label": label, "idx": 1} for label in (0, 1)]
    rows = rows_of(records, tokenizer, tmp_path)
    assert [tokenizer.decode(ids) for ids in documents_of(rows)] == ["a<|unk|>b<|eos|>"] * 2
    assert list(rows.counts.unread.entries) == ["idx"]


def test_named_classes_are_numbered_by_name_and_kept_for_held_out_rows(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    records = [{"text": "x", "label": name} for name in ("c", "a", "b", "a")]
    rows = rows_of(records, tokenizer, tmp_path)
    assert rows.kind.labels == ("a", "b", "c")
    assert rows.num_labels == 3
    assert rows.documents.targets.tolist() == [2, 0, 1, 0]
    held_out = rows_of([{"text": "y", "label": "c"}], tokenizer, tmp_path, kind=rows.kind, purpose="eval")
    assert held_out.documents.targets.tolist() == [2]
    with pytest.raises(DataError, match=r"eval\.json item 1: column `label` is str 'd'"):
        rows_of([{"text": "y", "label": "d"}], tokenizer, tmp_path, kind=rows.kind, purpose="eval")


CLASSES = ["world", "sports", "art"]


@pytest.mark.parametrize("kind", ["parquet", "rows"])
def test_a_class_label_is_mapped_by_name(kind: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    def written(texts: list[str], numbers: list[int], names: list[str]) -> str:
        features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        dataset = Dataset.from_dict({"text": texts, "label": numbers}, features=features)
        if kind == "rows":
            return _write(dataset, "train", tmp_path / "run")
        path = tmp_path / f"{'-'.join(names)}-{numbers}.parquet"
        dataset.to_parquet(path)
        return str(path)

    def prepared(path: str, kind: RowKind, purpose: str = "train") -> PreparedRows:
        given = {"train": path, "eval": path, "cache_dir": str(tmp_path / "cache")}
        config, limits = DataConfig.model_validate(given), TokenLimits(32, 128)
        return prepare_rows(config, purpose, tokenizer=tokenizer, limits=limits, kind=kind)

    fresh = prepared(written(["a", "b"], [1, 0], CLASSES), kind_of())
    assert fresh.kind.labels == tuple(CLASSES)
    assert fresh.documents.targets.tolist() == [1, 0]
    # A model's head, or the names of the run, decide the number of a class.
    other = written(["a", "b", "c"], [0, 1, 2], ["art", "sports", "world"])
    assert prepared(other, fresh.kind, "eval").documents.targets.tolist() == [2, 1, 0]
    assert prepared(other, kind_of(labels=CLASSES)).documents.targets.tolist() == [2, 1, 0]
    unknown = written(["a", "b"], [0, 1], ["art", "games"])
    with pytest.raises(DataError, match=r"row 2: column `label` is str 'games', which is no class"):
        prepared(unknown, fresh.kind, "eval")
    with pytest.raises(DataError, match=r"column `label` is (-1|the number -1)"):
        prepared(written(["a", "b"], [-1, 1], CLASSES), kind_of())


@pytest.mark.parametrize(
    ("kind", "names", "expected"),
    [
        (RowKind(name="marked"), ["good", "bad"], "column `label` is str 'good', which is no label of an answer"),
        (RowKind(name="marked"), ["1", "0"], [1, 0]),
        (kind_of(num_labels=1), ["5", "2.5"], [5, 2.5]),
        (kind_of(num_labels=1), ["low", "high"], "column `label` is str 'low', not a finite number"),
        (RowKind(name="prompts"), ["yes", "no"], ["yes", "no"]),
    ],
)
def test_a_class_label_means_its_name_in_every_objective(
    kind: RowKind, names: list[str], expected: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    columns: dict[str, Any] = {name: ["a", "b"] for name in ("text", "prompt", "completion")} | {"label": [0, 1]}
    unused = {"marked": ["text"], "prompts": ["text", "completion"], "labelled": ["prompt", "completion"]}[kind.name]
    dataset = Dataset.from_dict(columns).remove_columns(unused).cast_column("label", ClassLabel(names=names))
    dataset.to_parquet(tmp_path / "rows.parquet")
    given = {"train": str(tmp_path / "rows.parquet"), "cache_dir": str(tmp_path / "cache"), "template": "plain"}
    config = DataConfig.model_validate(given)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            prepare_rows(config, "train", tokenizer=tokenizer, limits=TokenLimits(32, 128), kind=kind)
        return
    documents = prepare_rows(config, "train", tokenizer=tokenizer, limits=TokenLimits(32, 128), kind=kind).documents
    if kind.name == "prompts":
        rows = [json.loads(line) for line in documents.records.tobytes().decode().splitlines()]
        assert [row["label"] for row in rows] == [row["answer"] for row in rows] == expected
    else:
        assert documents.targets.tolist() == expected


def test_labels_of_the_objective_give_the_order(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    records = [{"text": "x", "label": name} for name in ("yes", "no", 0)]
    rows = rows_of(records, tokenizer, tmp_path, kind=kind_of(labels=["yes", "no"]))
    assert rows.documents.targets.tolist() == [0, 1, 0]
    with pytest.raises(ConfigError, match=r"num_labels is 3, and objective\.labels names 2"):
        kind_of(labels=["yes", "no"], num_labels=3)
    for labels, said in ((["yes"], "objective.labels names one class: yes"), (["a", "a"], "has a name twice: a, a")):
        with pytest.raises(ConfigError, match=re.escape(said)):
            kind_of(labels=labels)


def test_a_stream_reads_no_labels_before_the_run(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "x", "label": number % 3} for number in range(20)]))
    config, limits = DataConfig.model_validate({"train": str(path), "streaming": True}), TokenLimits(32, 128)
    with pytest.raises(ConfigError, match="reads no row before the run"):
        find_classes(config, kind_of())
    rows = open_stream(config, "train", tokenizer=tokenizer, limits=limits, kind=kind_of(num_labels=3))
    plan = BatchPlan(4, 2, 0, 1, 0, shuffle=False, pad_token_id=2, row_len=None, documents_per_unit=1)
    (batch,) = streaming_batches(rows, plan, steps=1)
    assert batch.counts["examples"] == 4
    assert [micro.examples.targets.tolist() for micro in batch.micro if micro.examples] == [[0, 1], [2, 0]]
    with pytest.raises(DataError, match="item 3: column `label` is 2, and the classes are 0 to 1"):
        open_stream(config, "train", tokenizer=tokenizer, limits=limits, kind=kind_of(num_labels=2))


def test_classes_in_csv_are_texts_of_numbers(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("Quality,a\n1,x\n0,y\n")
    config = DataConfig.model_validate(
        {
            "train": str(tmp_path / "rows.csv"),
            "cache_dir": str(tmp_path / "cache"),
            "columns": {"text": "a", "label": "Quality"},
        }
    )
    kind = find_classes(config, kind_of())
    assert (kind.num_labels, kind.labels, kind.has_known_classes) == (2, (), True)
    rows = prepare_rows(config, "train", tokenizer=tokenizer, limits=TokenLimits(32, 128), kind=kind_of())
    assert rows.documents.targets.tolist() == [1, 0]
    assert rows.kind == kind


def test_an_empty_text_is_noted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = rows_of(
        [{"text": text, "label": 1 - n % 2} for n, text in enumerate(("x", " ", "y"))],
        tokenizer,
        tmp_path,
        kind=kind_of(),
    )
    (note,) = [note for note in row_notes(rows.counts) if "have an empty text" in note]
    assert note.startswith("1 of 3 rows")


def test_one_label_is_regression(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    records = [{"text": "x", "label": label} for label in (3.5, 2, "0.25")]
    rows = rows_of(records, tokenizer, tmp_path, kind=kind_of(num_labels=1))
    assert rows.documents.targets.tolist() == [3.5, 2, 0.25]
    assert rows.num_labels == 1
    assert "labels from 0.25 to 3.5" in rows.summary()


@pytest.mark.parametrize(
    ("labels", "options", "said"),
    [
        ([0, None], {}, "item 2: column `label` is null, which is no class"),
        ([0, 0.5], {}, "item 2: column `label` is float 0.5, which is no class"),
        ([1, 0, "a"], {}, r"item 1: column `label` is the number 1, and .* item 3 has the name 'a'"),
        ([0, -1], {}, "item 2: column `label` is -1, and the classes are 0 to 0"),
        ([0, 2], {}, "item 2: column `label` is 2, and no row has the class 1"),
        ([1, 2], {}, "item 2: column `label` is 2, and no row has the class 0"),
        ([0, 0], {}, "column `label` is 0 in all rows, the first of which is .* item 1"),
        (["a", "a"], {}, r"column `label` has only the class 'a' \(first row: .* item 1\)"),
        (["a", " a", "b"], {}, r"item 2: column `label` is ' a', and .* item 1 has 'a', which differs only in white"),
        (["Yes", "no", "yes"], {}, r"item 3: column `label` is 'yes', and .* item 1 has 'Yes', which differs only in"),
        ([0, 3], {"num_labels": 2}, "item 2: column `label` is 3, and the classes are 0 to 1"),
        (
            ["a", "b", "c"],
            {"num_labels": 2},
            "objective.num_labels is 2, and column `label` has 3 classes: 'a' in .* item 1",
        ),
        (["a", "d"], {"labels": ["a", "b"]}, "item 2: column `label` is str 'd', which is no class"),
        ([0, 2], {"labels": ["a", "b"]}, "item 2: column `label` is 2, and the classes are 0 to 1"),
        ([0.5, float("nan")], {"num_labels": 1}, "item 2: column `label` is float nan, not a finite number"),
        ([0.5, None], {"num_labels": 1}, "item 2: column `label` is null, not a finite number"),
        ([0.5, "high"], {"num_labels": 1}, "item 2: column `label` is str 'high', not a finite number"),
        ([0.5, True], {"num_labels": 1}, "item 2: column `label` is bool True, not a finite number"),
    ],
)
def test_labels_that_do_not_fit_are_refused_by_row_and_column(
    labels: list[object], options: dict[str, Any], said: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    records = [{"text": "x", "label": label} for label in labels]
    with pytest.raises(DataError, match=said) as caught:
        rows_of(records, tokenizer, tmp_path, kind=kind_of(**options))
    assert caught.value.hint


def test_seven_examples_on_three_ranks_are_those_of_one(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Three ranks see 9 places, of which 2 are empty rows that have no example."""
    records = [{"text": "x" * (number + 1), "label": number % 3} for number in range(7)]
    rows = rows_of(records, tokenizer, tmp_path, packing=False)

    def plan(rank: int, dp: int) -> BatchPlan:
        return BatchPlan(
            9, 3 if dp == 1 else 1, rank, dp, 0, shuffle=True, pad_token_id=2, row_len=None, documents_per_unit=1
        )

    def examples(rank: int, dp: int) -> list[tuple[int, float, int]]:
        (batch,) = training_batches(rows, plan(rank, dp), start_step=0, total_rows=7)
        found = []
        for micro in batch.micro:
            assert micro.examples is not None
            lengths = (micro.examples.ends - micro.examples.starts + 1).tolist()
            found += list(zip(micro.examples.numbers.tolist(), micro.examples.targets.tolist(), lengths, strict=True))
        assert batch.counts["examples"] == batch.counts["documents"] == len(found)
        assert batch.counts["supervised_tokens"] == batch.counts["pairs"] == 0
        return found

    alone = examples(0, 1)
    assert len(alone) == 7
    assert [example for rank in range(3) for example in examples(rank, 3)] == alone
    assert sum(batch.counts["examples"] for rank in range(3) for batch in eval_batches(rows, plan(rank, 3))) == 7


def test_mrpc(shared_data: Path, tmp_path: Path) -> None:
    """The file has no quotes in the sense of CSV, so its lines are read as they are."""
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "deepseek-llm"))
    header, *lines = (shared_data / "mrpc" / "msr_paraphrase_train.txt").read_text(encoding="utf-8-sig").splitlines()
    records = [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]
    path = tmp_path / "train.json"
    path.write_text(json.dumps(records))
    columns = {"text": "#1 String", "text_pair": "#2 String", "label": "Quality"}
    config = DataConfig.model_validate({"train": str(path), "cache_dir": str(tmp_path / "cache"), "columns": columns})
    rows = prepare_rows(config, "train", tokenizer=tokenizer, limits=TokenLimits(256, 102_400), kind=kind_of())
    assert rows.counts.read == rows.counts.documents == rows.num_units == 4076
    assert int(rows.documents.targets.sum()) == 2753
    assert rows.fill_ratio(256) > 0.97
