"""Run by the Python of vLLM's own environment as `vllm_worker.py FOLDER IN.json OUT.json DTYPE`: greedy tokens and
log-probabilities of prompts, on the CPU.
"""

import json
import sys
from pathlib import Path

NEW_TOKENS = 8


def main() -> None:
    """IN holds prompts as token ids; OUT gets `tokens` that follow each, and `logprobs` of its own tokens but the
    first.
    """
    from vllm import LLM, SamplingParams

    folder, given, out, dtype = sys.argv[1:]
    prompts = json.loads(Path(given).read_text())
    model = LLM(model=folder, dtype=dtype, enforce_eager=True, max_model_len=64, skip_tokenizer_init=True)
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
