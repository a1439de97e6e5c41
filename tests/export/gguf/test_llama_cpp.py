"""llama.cpp itself computes what plain transformers computes. It needs the wheel `xllamacpp`: pip install xllamacpp."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ds_finetune
from ds_finetune.data.tokenizer_files import load_tokenizer
from tests.conftest import ROOT
from tests.export.cells import names_of, types_of
from tests.export.gguf.models import MODELS, TEXTS, greedy, save

pytest.importorskip("gguf", reason="the gguf extra is not installed: pip install 'ds_finetune[gguf]'")
pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")

from ds_finetune.export.gguf import llama_tokenizer

WORKER = ROOT / "tests" / "export" / "gguf" / "llama_worker.py"
TOKENS = 36
TOLERANCES = {"f32": 1e-4, "f16": 5e-2}
"""Largest difference of log-probabilities of the five best tokens of a position."""
FLIPPED_SHARE = {"f32": 0.0, "f16": 0.1}
"""Share of positions that may be beyond it."""
ASKED = {"n_predict": TOKENS, "temperature": 0, "n_probs": 5, "ignore_eos": True, "cache_prompt": False}
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big "
    "red ball. She wanted to play with it, but it was too high. Lily's mom said, \"Lily, let's go to the park.\" Lily was "
    "sad and didn't know what to do. She said, \"I want to play with your ball, but I can't find it.\""
)


def answers(folder: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What llama.cpp's server answers to completions."""
    out = folder / "answers.json"
    command = [sys.executable, str(WORKER), str(next(folder.glob("*.gguf"))), str(out)]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    read: list[dict[str, Any]] = json.loads(out.read_text())
    out.unlink()
    return read


def chosen(answer: dict[str, Any]) -> tuple[list[int], list[dict[int, float]]]:
    """Tokens of an answer, and log-probabilities by token at each of them."""
    content = answer["choices"][0]["logprobs"]["content"]
    return [each["id"] for each in content], [
        {top["id"]: top["logprob"] for top in each["top_logprobs"]} for each in content
    ]


def test_its_server_starts_with_no_template_that_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path / "hub")
    ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="gguf", dtype="f32")
    file = str(next((tmp_path / "out").glob("*.gguf")))

    def starts(text: str) -> bool:
        template = "{% for message in messages %}{{ message.content }}{% endfor %}" + text
        command = [sys.executable, str(WORKER), file, str(tmp_path / "answers.json"), template]
        return (
            subprocess.run(
                command,
                input=json.dumps([ASKED | {"prompt": [1], "n_predict": 1}]),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            ).returncode
            == 0
        )

    lacking = [f"{{{{ 'a' | {name} }}}}" for name in llama_tokenizer._FILTERS.split()]
    lacking += [f"{{% if 2 is {name}(2) %}}{{% endif %}}" for name in llama_tokenizer._TESTS.split()]
    lacking += [f"{{% set made = {name}('a') %}}" for name in llama_tokenizer._FUNCTIONS.split()]
    lacking += [
        "{% block a %}{% endblock %}",
        "{% include 'a' %}",
        "{% with a = 1 %}{% endwith %}",
        "{{ 2 ** 3 }}",
        "{{ 7 // 2 }}",
    ]
    assert [text for text in lacking if starts(text)] == []
    known = "{{ messages | selectattr('role', 'equalto', 'user') | list | count }}{% generation %}{{ 'a' | d('b') }}{% endgeneration %}"
    assert starts(known)


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize(
    "name", names_of(types_of("export/gguf/test_llama_cpp.py"), {name: kind for name, (kind, _) in MODELS.items()})
)
def test_tokens_equal_those_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    """Three prompts and 36 greedy tokens each, and one token after each prefix of a text."""
    model = save(name, tmp_path / "hub").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hub")
    ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="gguf", dtype=kind)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    starts = [prompts[0][:count] for count in range(1, len(prompts[0]))]
    requests = [ASKED | {"prompt": ids} for ids in prompts]
    requests += [ASKED | {"prompt": ids, "n_predict": 1} for ids in starts]
    gaps: list[float] = []
    for asked, answer in zip(requests, answers(tmp_path / "out", requests), strict=True):
        ids, logs = greedy(model, asked["prompt"], asked["n_predict"])
        tokens, tops = chosen(answer)
        same = next((n for n, (ours, its) in enumerate(zip(ids, tokens, strict=True)) if ours != its), len(ids) - 1)
        if tokens != ids:
            # f16 rounds what goes into a product: another token of a near tie, or another expert, which counts as beyond.
            assert kind == "f16"
        gaps += [
            max(abs(logs[n, token].item() - log) for token, log in top.items() if log > -20)
            for n, top in enumerate(tops[: same + 1])
        ]
    beyond = sum(gap > TOLERANCES[kind] for gap in gaps)
    assert beyond <= FLIPPED_SHARE[kind] * len(gaps), sorted(gaps)[-20:]


def test_perplexity_of_q8_0(shared_data: Path, tmp_path: Path) -> None:
    """A Llama of 260,000 parameters that was trained on stories, with a tokenizer of SentencePiece's kind."""
    hub = shared_data / "models" / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(hub).eval()
    ds_finetune.export_model(hub, tmp_path / "out", format="gguf", dtype="q8_0")
    ids = load_tokenizer(str(hub))(STORY)["input_ids"]
    asked = ASKED | {"n_predict": 1, "n_probs": model.config.vocab_size, "logit_bias": []}
    requests = [asked | {"prompt": ids[:count]} for count in range(1, len(ids))]
    text = ASKED | {"prompt": STORY, "n_predict": 1}
    *scored, whole = answers(tmp_path / "out", [*requests, text])
    assert whole["usage"]["prompt_tokens"] == len(ids)
    loss = -sum(chosen(answer)[1][0][token] for answer, token in zip(scored, ids[1:], strict=True)) / len(requests)
    with torch.no_grad():
        plain = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    assert abs(math.exp(loss - plain) - 1) < 1e-3, (loss, plain)
