"""Answers of an export end where training ended them, in every program that reads the export."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from ds_finetune import read_config, train
from ds_finetune.cli.main import main
from ds_finetune.data.prompt_format import trained_ends
from ds_finetune.data.sample_tokens import TemplateSettings
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.evaluation.dry_rewards import try_rewards
from ds_finetune.plan.settings import RunSettings
from ds_finetune.serving.in_process import ChatSession, ask
from tests.answers_task import ANSWERS, CHATML, END, EOS, START, chats, plain_answers, train_answers, write_base
from tests.conftest import ROOT
from tests.export.gguf.conftest import known_tokenizer  # noqa: F401 - a fixture
from tests.running import metrics
from tests.sums_task import EOS as SUMS_EOS
from tests.sums_task import PAD, sums_task

QUESTIONS = list(ANSWERS)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base ends texts with `</s>` and has no template; rows are rendered with ChatML by its name."""
    folder = tmp_path_factory.mktemp("chatml")
    write_base(folder / "base")
    return train_answers(folder, chats(), data={"template": "chatml"})


def _ends(folder: Path) -> list[str]:
    """The tokens at which plain transformers ends an answer of a folder."""
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    return AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(ends if isinstance(ends, list) else [ends])


def test_transformers_and_the_program_answer_exactly_and_stop(export: Path) -> None:
    asked = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    assert [each["answer"] for each in plain_answers(export, asked)] == [f"{ANSWERS[q]}{END}" for q in QUESTIONS]
    assert ask(export, QUESTIONS) == [ANSWERS[question] for question in QUESTIONS]
    session = ChatSession(export, max_new_tokens=40)
    assert "".join(session.reply(QUESTIONS[0])) == ANSWERS[QUESTIONS[0]]


def test_ends_of_a_template_by_name_stand_in_generation_config(export: Path) -> None:
    assert _ends(export) == [END, EOS]


def test_onnx_answers_exactly_and_stops(export: Path, tmp_path: Path) -> None:
    for name in ("onnx", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed (pip install 'ds_finetune[onnx]')")
    assert main(["export", str(export), str(tmp_path / "onnx"), "--format", "onnx"]) == 0
    assert ask(tmp_path / "onnx", QUESTIONS) == [ANSWERS[question] for question in QUESTIONS]
    named = json.loads((tmp_path / "onnx" / "genai_config.json").read_text())["model"]["eos_token_id"]
    assert AutoTokenizer.from_pretrained(export).convert_ids_to_tokens(named) == [END, EOS]


def test_a_gguf_names_both_ends(export: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed: pip install 'ds_finetune[gguf]'")
    assert main(["export", str(export), str(tmp_path / "out"), "--format", "gguf", "--dtype", "f32"]) == 0
    fields = gguf.GGUFReader(tmp_path / "out" / "out.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    ends = [tokens[fields[f"tokenizer.ggml.{name}_token_id"].contents()] for name in ("eos", "eot")]
    assert ends == [EOS, END]
    lines = (tmp_path / "out" / "Modelfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("PARAMETER")] == [
        f'PARAMETER stop "{token}"' for token in (END, EOS)
    ]


def test_llama_cpp_answers_exactly_and_stops(export: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    assert main(["export", str(export), str(tmp_path / "out"), "--format", "gguf", "--dtype", "f32"]) == 0
    worker = ROOT / "tests" / "export" / "gguf" / "llama_worker.py"
    command = [sys.executable, str(worker), str(tmp_path / "out" / "out.gguf"), str(tmp_path / "answers.json")]
    asked = [
        {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0}
        for question in QUESTIONS
    ]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    found = [(each["choices"][0]["message"]["content"], each["choices"][0]["finish_reason"]) for each in answers]
    assert found == [(ANSWERS[question], "stop") for question in QUESTIONS]


def test_every_way_from_adapters_to_weights_keeps_the_ends(tmp_path: Path) -> None:
    """The run's export, that of its checkpoint with and without --base, and that of its adapter, with a vocabulary that
    grew for the tokens of the template.
    """
    write_base(tmp_path / "base")
    (tmp_path / "chatml.jinja").write_text(CHATML)
    data = {"template": str(tmp_path / "chatml.jinja")}
    out = train_answers(tmp_path, chats(), data=data, lora={"rank": 4}, train={"for": "2 steps"})
    run, base = out.parent, str(tmp_path / "base")
    assert main(["export", str(run), str(tmp_path / "merged")]) == 0
    assert main(["export", str(run), str(tmp_path / "with_base"), "--base", base]) == 0
    assert main(["export", str(run / "adapter"), str(tmp_path / "of_adapter"), "--base", base]) == 0
    for folder in (out, *(tmp_path / name for name in ("merged", "with_base", "of_adapter"))):
        assert set(_ends(folder)) == {END, EOS}, folder
        assert AutoTokenizer.from_pretrained(folder).chat_template == CHATML, folder
    assert set(_ends(run / "adapter")) == {END, EOS}
    shutil.rmtree(run)
    whole = train_answers(tmp_path, chats(), data=data, train={"for": "2 steps"})
    assert main(["export", str(whole.parent), str(tmp_path / "whole"), "--base", base]) == 0
    assert set(_ends(tmp_path / "whole")) == {END, EOS}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # The next turn's header, GLM's kind of end, also behind a call.
        (
            "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<a>' }}{{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
            "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
            [START],
        ),
        # Calls end otherwise than texts.
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
            "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_start|>"
            "{% else %}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
            [END, START],
        ),
        # A token behind each call may be followed by another call.
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ c.function.name }}{{ c.function.arguments | tojson }}<|im_start|>{% endfor %}"
            "{% if not m.tool_calls %}<|im_end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}",
            [END],
        ),
    ],
    ids=["next header", "calls", "each call"],
)
def test_ends_are_those_that_the_template_trains(template: str, expected: list[str], tmp_path: Path) -> None:
    write_base(tmp_path / "base", template=template)
    tokenizer = load_tokenizer(str(tmp_path / "base"))
    ends = trained_ends(tokenizer, TemplateSettings(template, "assistant", "keep"))
    assert tokenizer.convert_ids_to_tokens(list(ends)) == expected


def test_rollouts_end_at_what_generation_config_names(tmp_path: Path) -> None:
    """config.json and the tokenizer name another token than the one that ends this model's answers."""
    run_file = sums_task(tmp_path, train={"for": "1 steps"})
    model = tmp_path / "model"
    for name, key, value in (
        ("tokenizer_config.json", "eos_token", "<pad>"),
        ("config.json", "eos_token_id", PAD),
        ("generation_config.json", "eos_token_id", [PAD, SUMS_EOS]),
    ):
        tree = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(tree | {key: value}))
    config = read_config(run_file)
    train(config)
    (record,) = (each for each in metrics(tmp_path) if "rollout/reward" in each)
    assert record["rollout/cut"] < 0.5
    assert record["rollout/reward"] > 0
    (_, sampled) = try_rewards(RunSettings.of(config), records=2, samples=8)
    assert {answer.finish for answer in sampled.answers} == {"stop"}
