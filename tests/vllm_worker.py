"""Run by the Python of vLLM's own environment as `vllm_worker.py FOLDER IN.json OUT.json DTYPE`: greedy tokens and
log-probabilities of prompts, on the CPU.
"""

import json
import os
import sys
from pathlib import Path

NEW_TOKENS = 8


class _Driver:
    """What vLLM 0.32 asks of a Triton for CPUs (triton_utils/importing.py:33-43)."""

    @staticmethod
    def is_active() -> bool:
        return True


def complete_vllm(*, is_quantised: bool) -> None:
    """What vLLM 0.32's CPU build is short of for DeepSeek-V4, whose model it computes in C++ of its own.

    Its tables of requests and its sampler are in Triton (v1/attention/ops/metadata.py:43): Triton's interpreter runs
    them. Two keys are missing in a table of None (cpu_mla.py:122). Kernels of FP8 and FP4 ask for AMX, and compute
    with AVX512-BF16 also.
    """
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import torch
    from triton import backends

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=_Driver)
    if is_quantised:
        torch.cpu._is_amx_tile_supported = lambda: True
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder

    build = Builder.build_tile_scheduler
    Builder.build_tile_scheduler = lambda self, tokens: {"c1a": None, "c2a": None} | build(self, tokens)


def main() -> None:
    """IN holds prompts as token ids; OUT gets `tokens` that follow each, and `logprobs` of its own tokens but the
    first.
    """
    folder, given, out, dtype = sys.argv[1:]
    config = json.loads((Path(folder) / "config.json").read_text())
    if config["model_type"] == "deepseek_v4":
        complete_vllm(is_quantised="quantization_config" in config)
    from vllm import LLM, SamplingParams

    prompts = json.loads(Path(given).read_text())
    length = max(64, NEW_TOKENS + max(map(len, prompts)))
    model = LLM(model=folder, dtype=dtype, enforce_eager=True, max_model_len=length, skip_tokenizer_init=True)
    settings = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, prompt_logprobs=0, ignore_eos=True, detokenize=False
    )
    answers = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], settings)
    found = [
        {
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [
                each[token].logprob for token, each in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
            ],
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
