"""llama.cpp itself computes what plain transformers computes. It needs the wheel `xllamacpp`: pip install xllamacpp."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import ds_finetune
from tests.conftest import ROOT
from tests.export.gguf.models import MODELS, TEXTS, greedy, save

pytest.importorskip("gguf", reason="the gguf extra is not installed: pip install 'ds_finetune[gguf]'")
pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")

WORKER = ROOT / "tests" / "export" / "gguf" / "llama_worker.py"
TOKENS = 36
TOLERANCES = {"f32": 1e-2, "f16": 5e-2}
"""Largest difference of log-probabilities."""


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


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_those_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "hub").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hub")
    ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="gguf", quantise=kind)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    starts = [prompts[0][:count] for count in range(1, len(prompts[0]))]
    greedily = {"n_predict": TOKENS, "temperature": 0, "n_probs": 5, "ignore_eos": True, "cache_prompt": False}
    requests = [
        *({**greedily, "prompt": ids} for ids in prompts),
        *({**greedily, "prompt": ids, "n_predict": 1} for ids in starts),
    ]
    worst = 0.0
    for asked, answer in zip(requests, answers(tmp_path / "out", requests), strict=True):
        ids, logs = greedy(model, asked["prompt"], asked["n_predict"])
        tokens, tops = chosen(answer)
        assert tokens == ids
        worst = max(
            worst,
            *(
                abs(logs[n, token].item() - log)
                for n, top in enumerate(tops)
                for token, log in top.items()
                if log > -20
            ),
        )
    assert worst < TOLERANCES[kind]
