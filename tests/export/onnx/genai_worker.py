"""ONNX Runtime GenAI, from the wheel `onnxruntime-genai`: a folder and a number of tokens; prompts come from stdin.

A process of its own, since it brings an ONNX Runtime of its own version.
"""

import json
import sys

import numpy as np
import onnxruntime_genai


def main() -> None:
    """Print the tokens that follow each prompt greedily."""
    model, count, answers = onnxruntime_genai.Model(sys.argv[1]), int(sys.argv[2]), []
    for prompt in json.load(sys.stdin):
        params, end = onnxruntime_genai.GeneratorParams(model), len(prompt) + count
        params.set_search_options(max_length=end, min_length=end, do_sample=False)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(np.array(prompt, dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        answers.append([int(token) for token in generator.get_sequence(0)][len(prompt) :])
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
