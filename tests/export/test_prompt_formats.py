"""What a model without a chat template is trained to read is what every program sends to its export."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ds_finetune
from ds_finetune.cli.main import main
from ds_finetune.data.prompt_format import PlainFormat
from ds_finetune.data.tokenizer_files import PROBES, load_tokenizer
from ds_finetune.serving.in_process import ChatSession, ask
from tests.answers_task import ANSWERS, EOS, plain_answers, train_answers, write_base
from tests.conftest import ROOT
from tests.export.gguf.conftest import known_tokenizer  # noqa: F401 - a fixture
from tests.export.gguf.modelfiles import render_go

QUESTIONS, SEPARATOR = list(ANSWERS), " ->"
ROWS = [{"prompt": question, "completion": answer} for question, answer in ANSWERS.items()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base has no template, and tokenizer_config.json says `add_bos_token`, which transformers does not read."""
    folder = tmp_path_factory.mktemp("plain")
    write_base(folder / "base", config={"add_bos_token": True})
    return train_answers(folder, ROWS, data={"separator": SEPARATOR}).parent


@pytest.fixture
def export(trained: Path) -> Path:
    return trained / "export"


def _trained_ids(folder: Path, prompt: str) -> list[int]:
    """BOS and the ids of a text, by the `tokenizers` library alone."""
    core = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    return [core.token_to_id("<s>"), *core.encode(prompt, add_special_tokens=False).ids]


def test_transformers_sends_what_was_trained_and_answers_exactly(export: Path) -> None:
    asked = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    found = plain_answers(export, [*asked, {"text": f"{QUESTIONS[0]}{SEPARATOR}"}])
    expected = [*QUESTIONS, QUESTIONS[0]]
    assert [each["prompt"] for each in found] == [_trained_ids(export, f"{q}{SEPARATOR}") for q in expected]
    assert [each["answer"] for each in found] == [f"{ANSWERS[question]}{EOS}" for question in expected]


def test_the_program_asks_so_and_says_so(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(export, QUESTIONS) == [ANSWERS[question] for question in QUESTIONS]
    session = ChatSession(export, max_new_tokens=40)
    assert "".join(session.reply(QUESTIONS[1])) == ANSWERS[QUESTIONS[1]]
    card = (export / "README.md").read_text()
    assert repr(f"<s>TEXT{SEPARATOR}") in card
    assert "begins a text with `<s>`" in card
    assert f"ends at `{EOS}`" in card
    assert (
        main(
            [
                "train",
                str(export.parents[1] / "run.yaml"),
                "train.for=1 steps",
                "checkpoint.resume=never",
                f"output_dir={export.parents[1] / 'other'}",
            ]
        )
        == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert f"ask {export.parents[1] / 'other' / 'export'} TEXT, which sends '<s>TEXT{SEPARATOR}'" in said


def test_eval_scores_the_prompts_that_were_trained(export: Path) -> None:
    """The loss of a plain loop over ids that the tokenizer makes of each prompt and its completion."""
    rows = export.parents[1] / "train.jsonl"
    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)

    def loss(separator: str) -> float:
        total, count = 0.0, 0
        for question, answer in ANSWERS.items():
            prompt = _trained_ids(export, f"{question}{separator}")
            ids = [*prompt, *tokenizer(f"{answer}{EOS}", add_special_tokens=False)["input_ids"]]
            with torch.no_grad():
                logs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            total -= sum(logs[at - 1, ids[at]].item() for at in range(len(prompt), len(ids)))
            count += len(ids) - len(prompt)
        return total / count

    trained = ds_finetune.evaluate(export, rows).metrics["loss"].value
    other = ds_finetune.evaluate(export, rows, separator="\n").metrics["loss"].value
    assert trained == pytest.approx(loss(SEPARATOR), rel=1e-5)
    assert other == pytest.approx(loss("\n"), rel=1e-5)
    assert other > 2 * trained


@pytest.fixture
def llama_file(export: Path, tmp_path: Path) -> Path:
    assert main(["export", str(export), str(tmp_path / "out"), "--format", "gguf", "--dtype", "f32"]) == 0
    return tmp_path / "out" / "out.gguf"


def test_llama_cpp_sends_what_was_trained_and_answers_exactly(llama_file: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    worker, out = ROOT / "tests" / "export" / "gguf" / "llama_worker.py", llama_file.with_name("answers.json")
    settings = {"max_tokens": 40, "temperature": 0}
    asked: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": question}], **settings} for question in QUESTIONS
    ]
    asked.append({"prompt": f"{QUESTIONS[0]}{SEPARATOR}", **settings})
    command = [sys.executable, str(worker), str(llama_file), str(out)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *chats, plain = (each["choices"][0] for each in json.loads(out.read_text()))
    assert [each["message"]["content"] for each in chats] == list(ANSWERS.values())
    assert plain["text"] == ANSWERS[QUESTIONS[0]]


def test_the_modelfile_of_ollama_writes_what_was_trained(llama_file: Path) -> None:
    """Ollama's tokenizer adds BOS, by the key of the GGUF."""
    template = (llama_file.parent / "Modelfile").read_text().splitlines()[1]
    go = template.removeprefix('TEMPLATE """').removesuffix('"""')
    assert render_go(go, [{"role": "user", "content": "red fruit?"}]) == f"red fruit?{SEPARATOR}"


def test_genai_begins_and_ends_as_trained(export: Path, tmp_path: Path) -> None:
    og = pytest.importorskip("onnxruntime_genai", reason="it is not installed: pip install onnxruntime-genai")
    assert main(["export", str(export), str(tmp_path / "onnx"), "--format", "onnx"]) == 0
    tokenizer = og.Tokenizer(og.Model(str(tmp_path / "onnx")))
    tokenizer.update_options(add_special_tokens="true")
    for question in QUESTIONS:
        assert tokenizer.encode(f"{question}{SEPARATOR}").tolist() == _trained_ids(export, f"{question}{SEPARATOR}")
    assert ask(tmp_path / "onnx", QUESTIONS) == list(ANSWERS.values())


def test_a_tokenizer_that_begins_otherwise_is_not_verified(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((export / "verification.json").read_text())
    assert record["texts"] == list(PROBES.values())
    assert {ids[0] for ids in [*record["text_ids"], *record["chat_ids"]]} == {0}
    changed = tmp_path / "changed"
    subprocess.run(["cp", "-r", str(export), str(changed)], check=True)
    assert main(["export", "--check", str(changed)]) == 0
    tree = json.loads((changed / "tokenizer.json").read_text())
    (changed / "tokenizer.json").write_text(json.dumps(tree | {"post_processor": None}))
    template = changed / "chat_template.jinja"
    template.write_text(template.read_text().replace(json.dumps(SEPARATOR), '"\\n"'))
    assert main(["export", "--check", str(changed)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    # Two of the texts end with white space, and get no separator.
    for count, kind in ((7, "texts"), (5, "prompts in the chat template")):
        assert f"other ids than the run for {count} of 7 {kind}" in said


INSTRUCTION = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nName a fruit.\n\n### Response:\n"
)
"""The prompts of Stanford's Alpaca, as its train.py writes them."""
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response "
    "that appropriately completes the request.\n\n### Instruction:\nName it.\n\n### Input:\nred\n\n### Response:\n"
)


@pytest.mark.parametrize(
    ("rows", "asked", "expected"),
    [
        ([{"instruction": "Name a fruit.", "output": "an apple"}], "Name a fruit.", INSTRUCTION),
        (
            [{"instruction": "Name it.", "input": "red", "output": "an apple"}],
            "Name it.\n\n### Input:\nred",
            WITH_INPUT,
        ),
        # White space that is there already is no place for a separator.
        ([{"prompt": "Q: red?\nA:", "completion": " an apple"}], "Q: red?\nA:", "Q: red?\nA:"),
        ([{"prompt": "Q: red?\nA: ", "completion": "an apple"}], "Q: red?\nA: ", "Q: red?\nA: "),
        ([{"prompt": "red?", "completion": "an apple"}], "red?", "red?\n"),
    ],
    ids=["alpaca", "input", "joined", "space", "separator"],
)
def test_each_layout_has_the_template_of_its_prompts(
    rows: list[dict[str, str]], asked: str, expected: str, tmp_path: Path
) -> None:
    """Also where the tokenizer has a chat template, and rows are trained without it."""
    write_base(tmp_path / "base", template="{{ messages[0].content }}")
    out = train_answers(tmp_path, rows, data={"template": "plain"}, train={"for": "1 steps"}, export={"verify": False})
    tokenizer = AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": asked}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
    dialogue = [*messages, {"role": "assistant", "content": "a"}, *messages]
    assert tokenizer.apply_chat_template(dialogue, tokenize=False) == f"{expected}a{EOS}{expected}"


def test_texts_of_any_kind_are_literals_of_the_template(tmp_path: Path) -> None:
    write_base(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for separator in ('"', "\\n", "{{ content }} #} %}", "é\t\U0001f642", "$mark", ""):
        plain = PlainFormat("separator", separator)
        template = plain.template(has_bos=False)
        assert PlainFormat.of(template) == plain
        messages = [{"role": "user", "content": "x"}]
        assert tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False) == f"x{separator}"


@pytest.mark.parametrize(
    ("rule", "adds", "first"),
    [("always", "eos", ["<s>"]), ("never", "bos", []), ("auto", "eos", []), ("auto", "bos", ["<s>"])],
)
def test_texts_begin_as_they_were_trained(rule: str, adds: str, first: list[str], tmp_path: Path) -> None:
    """Continued pre-training by `objective.bos`, on tokenizers that add a token themselves."""
    base = write_base(tmp_path / "base", config={"add_bos_token": adds == "bos"})
    if adds == "eos":
        tree = json.loads((base / "tokenizer.json").read_text())
        end = {"id": EOS, "ids": [1], "tokens": [EOS]}
        parts = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": EOS, "type_id": 0}}]
        pair = [*parts, {"Sequence": {"id": "B", "type_id": 0}}]
        processor = {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": {EOS: end}}
        (base / "tokenizer.json").write_text(json.dumps(tree | {"post_processor": processor}))
    objective = {"name": "pretrain", "bos": rule}
    out = train_answers(tmp_path, [{"text": "red fruit"}], objective=objective, train={"for": "1 steps"})
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("red fruit")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [*first, *tokenizer.tokenize("red fruit")]
    assert not (out / "UNVERIFIED").exists()
    assert load_tokenizer(str(out))("red fruit")["input_ids"] == ids
