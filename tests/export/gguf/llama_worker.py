"""llama.cpp itself, from the wheel `xllamacpp`: reads requests from its input and writes what the server answers.

A process of its own, since llama.cpp ends the process where a file is not what it expects.
"""

import json
import sys
from pathlib import Path

from xllamacpp import CommonParams, Server, ggml_type, llama_flash_attn_type


def main() -> None:
    """Load the GGUF of the first argument, with the chat template of the third one if there is one, and write the
    answers to the list of requests on stdin to the second.
    """
    params = CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_gpu_layers, params.n_parallel = 512, 0, 1
    params.warmup = params.fit_params = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # The cache of keys and values is in f16 otherwise.
    params.cache_type_k = params.cache_type_v = ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if len(sys.argv) > 3:
        params.use_jinja, params.chat_template = True, sys.argv[3]
    server = Server(params)
    answers = [
        (server.handle_chat_completions if "messages" in request else server.handle_completions)(request)
        for request in json.load(sys.stdin)
    ]
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
