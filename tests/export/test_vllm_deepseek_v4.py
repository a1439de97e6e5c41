"""vLLM's own code for DeepSeek-V4 on CPUs computes what plain transformers does with the same exported folder."""

import fnmatch
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ds_finetune import read_config, train
from ds_finetune.cli.main import main
from ds_finetune.model.experts import spread_ids
from tests.export.cells import types_of
from tests.model.fp4_folder import publish_v4
from tests.running import tiny_task
from tests.test_round_trip import vllm_answers, vllm_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's kernels of DeepSeek-V4 for CPUs need AVX512-BF16"
    ),
]

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "max_position_embeddings": 4096,
    "sliding_window": 128,
    "num_hash_layers": 2,
    "compress_ratios": [0, 4, 128, 4],
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "swiglu_limit": 10.0,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""vLLM 0.32 has kernels for heads of 448 + 64 and indexer heads of 128, 512 entries, and 6 of 64 experts."""
LIMIT = 0.08
"""Nats between log-probabilities of vLLM and of transformers in fp32, on average: vLLM has keys in FP8 and computes in
bf16.
"""


@pytest.fixture(autouse=True)
def _with_vllm() -> None:
    vllm_python()


def _prepare(lm: PreTrainedModel) -> None:
    """No two values of a tensor are alike, and experts whose scores are nearly tied are rare."""
    spread_ids(lm, SIZES["n_routed_experts"])
    with torch.no_grad():
        for name, tensor in lm.state_dict().items():
            if name.endswith(("sinks", "e_score_correction_bias")):
                tensor.normal_()
            elif name.endswith(("position_bias", ".base", "hc_base")):
                tensor.normal_(std=2.0)
            elif "norm" in name:
                tensor.uniform_(0.3, 1.7)
            elif name.endswith("scale"):
                tensor.uniform_(0.5, 1.5)


def _trained(folder: Path) -> Path:
    """The export in bf16 of a run of all weights."""
    learning = {"model": {"weights": "load"}, "optim": {"lr": 2e-3}, "data": {"packing": True}}
    run_file = tiny_task(folder, **learning, train={"precision": "bf16", "for": "24 steps", "max_seq_len": 192})
    torch.manual_seed(5)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v4", **SIZES))
    _prepare(lm)
    lm.save_pretrained(folder / "model")
    train(read_config(run_file))
    return folder / "run" / "export"


def _as_published(folder: Path) -> Path:
    """The export in FP8 and FP4 of a run of adapters on a folder that is published so."""
    v4 = publish_v4(folder / "published", _prepare, **SIZES)
    run_file = tiny_task(
        folder,
        model={"path": str(v4), "weights": "load"},
        train={"precision": "bf16", "for": "2 steps", "max_seq_len": 192},
        data={"packing": True},
        lora={"rank": 4, "target_modules": ["q_a_proj", "o_b_proj"]},
    )
    for file in (folder / "model").glob("token*"):
        shutil.copyfile(file, v4 / file.name)
    train(read_config(run_file))
    assert main(["export", str(folder / "run"), str(folder / "out"), "--dtype", "fp8"]) == 0
    return folder / "out"


def _prompts(folder: Path) -> list[list[int]]:
    """Prompts of four rows, and 300 tokens: more than two windows, and two entries of 128."""
    encode = AutoTokenizer.from_pretrained(folder / "model").encode
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return [*(encode(row["prompt"]) for row in rows[:4]), encode("".join(map(str, rows)))[:300]]


def _log_probs(lm: PreTrainedModel, prompts: list[list[int]]) -> torch.Tensor:
    """Of the tokens of each prompt but the first."""
    found = []
    for prompt in prompts:
        with torch.no_grad():
            logs = lm(torch.tensor([prompt]), use_cache=False).logits[0].float().log_softmax(-1)
        found.append(logs[range(len(prompt) - 1), prompt[1:]])
    return torch.cat(found)


def _served(answers: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([log for answer in answers for log in answer["logprobs"]])


def _kinds(lm: PreTrainedModel) -> Iterator[str]:
    """Each kind of tensor, while all of that kind have the other sign; of tables of experts, while rows are moved."""
    tensors = lm.state_dict()
    for kind in dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in tensors):
        kept = {name: tensors[name].clone() for name in fnmatch.filter(tensors, kind)}
        for name, old in kept.items():
            tensors[name].copy_(-old if old.is_floating_point() else old.roll(1, 0))
        yield kind
        for name, old in kept.items():
            tensors[name].copy_(old)


def _expect_same(lm: PreTrainedModel, prompts: list[list[int]], answers: list[dict[str, Any]]) -> None:
    """Log-probabilities of the prompts, unless any kind of tensor is wrong; and on average no token is much more probable
    than the one that vLLM chose: the difference of a single one can be several times the mean. An indexer leaves
    nothing out of as few entries as there are.
    """
    served = _served(answers)
    apart = (_log_probs(lm, prompts) - served).abs().mean()
    assert apart <= LIMIT
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = lm(torch.tensor([prompt + answer["tokens"]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits[range(len(answer["tokens"])), answer["tokens"]]
        assert (logits.amax(-1) - chosen).mean() <= 2 * LIMIT
    for kind in _kinds(lm):
        assert ".indexer." in kind or (_log_probs(lm, prompts) - served).abs().mean() > 1.2 * apart, kind


@pytest.mark.parametrize("model_type", types_of("export/test_vllm_deepseek_v4.py"))
def test_a_trained_export_answers(model_type: str, tmp_path: Path) -> None:
    """Indexers choose 512 of 750 entries of 3,000 tokens, and vLLM's choose the same: with other ones the tokens from
    the 2,049th on differ by more.
    """
    out = _trained(tmp_path)
    assert json.loads((out / "config.json").read_text())["model_type"] == model_type
    prompts, long = _prompts(tmp_path), torch.randint(2, SIZES["vocab_size"], (3000,)).tolist()
    *answers, last = vllm_answers(tmp_path, "run/export", [*prompts, long], "bfloat16")
    lm = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    _expect_same(lm, prompts, answers)

    def gap() -> torch.Tensor:
        return (_log_probs(lm, [long]) - _served([last])).abs()[4 * SIZES["index_topk"] :].mean()

    chosen = gap()
    assert chosen <= LIMIT
    for kind in _kinds(lm):
        assert ".indexer." not in kind or gap() > 1.1 * chosen, kind


def test_an_export_in_fp8_and_fp4_answers(tmp_path: Path) -> None:
    """As it is published; vLLM computes with the bytes, and transformers with their values in fp32."""
    out = _as_published(tmp_path)
    prompts = _prompts(tmp_path)
    answers = vllm_answers(tmp_path, "out", prompts, "bfloat16")
    assert main(["export", "--no-verify", str(out), str(tmp_path / "plain"), "--dtype", "bf16"]) == 0
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32, attn_implementation="eager")
    _expect_same(lm, prompts, answers)
