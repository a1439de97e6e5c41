"""Every family in fp32 and bf16 from training to what serves it: checkpoint, export, plain transformers, ONNX Runtime,
vLLM.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ds_finetune.cli.main import main
from ds_finetune.export.verify.record import UNVERIFIED, ExportRecord
from ds_finetune.families.table import FAMILIES as ROWS
from tests.conftest import ROOT
from tests.export.cells import types_of
from tests.running import metrics, start, tiny_task
from tests.vllm_worker import NEW_TOKENS

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
_DENSE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_DENSE |= {
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
_DENSE |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "norm_topk_prob": True}
_MLA = _DENSE | {
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_MLA |= {
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_theta": 10000.0,
}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 64, "index_topk": 256}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "deepseek_v3": _MLA
    | {"n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_scaling": YARN},
    "kimi_k2": _MLA | {"n_group": 1, "topk_group": 1, "rope_scaling": YARN},
    "glm4_moe_lite": _MLA | {"n_group": 1, "topk_group": 1, "rope_scaling": YARN},
    "glm4_moe": _DENSE
    | {key: _MLA[key] for key in ("moe_intermediate_size", "n_shared_experts", "n_routed_experts")}
    | {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    | {"head_dim": 64, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    "deepseek_v2": _MLA | {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "rope_scaling": YARN},
    "qwen2": _DENSE | {"tie_word_embeddings": True},
    "qwen3": _DENSE | {"head_dim": 64},
    "qwen3_moe": _DENSE | _EXPERTS | {"head_dim": 64, "moe_intermediate_size": 64, "num_experts": 8},
    "mixtral": _DENSE | _EXPERTS | {"intermediate_size": 64, "num_local_experts": 8},
    # vLLM 0.32 leaves out `norm_topk_prob` (models/olmoe.py:100), which is false in published models.
    "olmoe": _DENSE | _EXPERTS | {"intermediate_size": 64, "num_experts": 8, "norm_topk_prob": False},
    "llama": _DENSE | {"num_key_value_heads": 1},
    "gpt_oss": _DENSE
    | {"head_dim": 64, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16},
    "deepseek_v32": _MLA | {"n_group": 2, "topk_group": 1, "rope_scaling": YARN} | _INDEXER,
    "glm_moe_dsa": _MLA | {"n_group": 1, "topk_group": 1} | _INDEXER,
}
"""Heads of 64, latents of 512 + 64: vLLM 0.32 has no others of such models on CPUs, and its default rotary embeddings
of MLA are wrong there.
"""
PROMPTS = [[0, 5, 30, 90, 17, 3, 88, 41], [7, 7, 2, 90, 12]]
_ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module", params=[(family, precision) for family in FAMILIES for precision in DTYPES], ids="-".join
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """Family, precision and the folder of a run of three steps, whose export is verified, and `out`, exported from its
    checkpoint.
    """
    family, precision = request.param
    folder = tmp_path_factory.mktemp(f"{family}-{precision}")
    sections = {
        "train": {"precision": precision},
        "checkpoint": {"every": "3 steps"},
        "export": {"verify": True},
        "optim": {"lr": 1e-2},
    }
    # Beside a qwen2 config transformers would take another tokenizer class, which a run refuses.
    run_file = tiny_task(folder, model={"tokenizer": str(folder / "tokenizer")}, **sections)
    shutil.copytree(folder / "model", folder / "tokenizer", ignore=shutil.ignore_patterns("config.json"))
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": family} | FAMILIES[family]))
    done = start([sys.executable, "ds_finetune/train.py", str(run_file)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert main(["export", str(folder / "run"), str(folder / "out"), "--dtype", precision]) == 0
    return family, precision, folder


def _plain(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()  # type: ignore[no-any-return]


def _logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt]), use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def _greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def test_plain_transformers_gives_the_logits_of_the_engine(run: tuple[str, str, Path]) -> None:
    family, precision, folder = run
    assert metrics(folder)[-1]["step"] == 3
    record = ExportRecord.read(folder / "out")
    assert record.logits is not None
    models = [_plain(place, DTYPES[precision]) for place in (folder / "run" / "export", folder / "out")]
    found = [_logits(models[1], list(prompt)).numpy() for prompt in record.prompts]
    rows = np.concatenate(found)
    assert record.stride == 1
    logits = np.asarray(record.logits)
    gaps = np.abs(rows - logits.reshape(rows.shape)).max(-1) / np.abs(logits).max()
    # In bf16 a token whose experts are nearly tied may be sent to others; verification leaves out as many.
    gap = gaps.max() if precision == "fp32" else np.quantile(gaps, 0.9)
    assert gap <= (1e-5 if precision == "fp32" else 2e-2), gap
    for prompt in PROMPTS:
        assert torch.equal(_logits(models[0], prompt), _logits(models[1], prompt))
    for place in (folder / "run" / "export", folder / "out"):
        assert not (place / UNVERIFIED).exists()
    assert AutoConfig.from_pretrained(folder / "out").model_type == family


def test_onnx_runtime_decodes_what_generate_does(run: tuple[str, str, Path]) -> None:
    for name in ("onnx", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed (pip install 'ds_finetune[onnx]')")
    from ds_finetune.export.load import load_exported

    family, _, folder = run
    if ROWS[family].onnx is None:
        pytest.skip(f"{family} is not exported to ONNX")
    assert main(["export", str(folder / "out"), str(folder / "onnx"), "--format", "onnx"]) == 0
    ours, plain = load_exported(folder / "onnx"), _plain(folder / "out", torch.float32)
    for prompt in PROMPTS:
        assert _greedy(ours, prompt, 24) == _greedy(plain, prompt, 24)


def vllm_python() -> str:
    """The Python of an environment with vLLM; skips without it."""
    python = os.environ.get("DS_FINETUNE_VLLM")
    if not python:
        pytest.skip(
            "DS_FINETUNE_VLLM does not name the Python of an environment with vllm-cpu; scripts/vllm_venv.sh makes one (3.5 GB)"
        )
    return python


def vllm_answers(folder: Path, name: str, prompts: list[list[int]], dtype: str) -> list[dict[str, Any]]:
    """What vLLM gives for `prompts` with the model folder/name on the CPU; skips without it."""
    python = vllm_python()
    (folder / "prompts.json").write_text(json.dumps(prompts))
    worker = str(Path(__file__).with_name("vllm_worker.py"))
    environ = {
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
    } | _ON_A_CPU
    files = [str(folder / each) for each in (name, "prompts.json", "answers.json")]
    command = [python, worker, *files, dtype]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads((folder / "answers.json").read_text())
    return answers


def test_vllm_decodes_what_generate_does(run: tuple[str, str, Path]) -> None:
    """On a CPU in fp32; log-probabilities of the prompt's own tokens too."""
    family, precision, folder = run
    vllm_python()
    if family not in types_of("test_round_trip.py"):
        pytest.skip(f"{family} was not tried with vLLM on a CPU")
    if precision != "fp32":
        pytest.skip("vLLM rounds elsewhere than transformers in bf16; fp32 alone is compared")
    answers = vllm_answers(folder, "out", PROMPTS, "float32")
    plain = _plain(folder / "out", torch.float32)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer["tokens"] == _greedy(plain, prompt, NEW_TOKENS), family
        own = _logits(plain, prompt).log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(answer["logprobs"], own.numpy(), atol=1e-4)


@contextmanager
def _served_by_vllm(folder: Path, python: str) -> Iterator[int]:
    """The port of `ds-finetune serve` over `folder`/out, which has to end well."""
    (folder / "bin").mkdir()
    # The server's environment is its own, whatever this one finds its packages by; and the command of vllm-cpu 0.32
    # ends before it starts,
    # because it looks for a package named vllm: what it would start is started.
    server = f'{python} -m vllm.entrypoints.openai.api_server --model "$@"'
    (folder / "bin" / "vllm").write_text(f'#!/bin/sh\nunset PYTHONPATH\ntest "$1" = serve && shift\nexec {server}\n')
    (folder / "bin" / "vllm").chmod(0o755)
    environ = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)} | _ON_A_CPU
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "ds_finetune",
        "serve",
        str(folder / "out"),
        "--engine",
        "vllm",
        "--port",
        str(port),
        "--ready-seconds",
        "500",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as started:
        assert started.stdout is not None
        lines = []
        for line in started.stdout:
            lines.append(line)
            if line.startswith(("ready: ", "error: ")):
                break
        try:
            assert lines[-1].endswith("by vllm; Ctrl-C ends it\n"), "".join(lines)[-3000:]
            yield port
        finally:
            started.send_signal(signal.SIGTERM)
            rest = started.stdout.read()
        assert started.wait(60) == 0
    assert rest.endswith("stopped\n")


def test_vllm_serves_it(run: tuple[str, str, Path]) -> None:
    """`ds-finetune serve --engine vllm`, asked with the official client, and ended."""
    family, precision, folder = run
    python = vllm_python()
    openai = pytest.importorskip("openai", reason="openai is not installed (pip install 'ds_finetune[serve]')")
    if (family, precision) != ("llama", "fp32"):
        pytest.skip("one model is served")
    with _served_by_vllm(folder, python) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120, max_retries=0)
        asked = {"model": str(folder / "out"), "prompt": PROMPTS[0], "max_tokens": NEW_TOKENS, "temperature": 0}
        found = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
        pieces = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        assert "".join(piece.choices[0].text for piece in pieces) == found
    wanted = _greedy(_plain(folder / "out", torch.float32), PROMPTS[0], NEW_TOKENS)
    assert found == AutoTokenizer.from_pretrained(folder / "out").decode(wanted, skip_special_tokens=True)
