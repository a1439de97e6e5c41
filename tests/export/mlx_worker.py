"""mlx_lm: a folder and a number of tokens; prompts come from stdin. It runs in an environment of its own."""

import json
import sys

import mlx.core as mx
from mlx_lm import load


def main() -> None:
    """Print the tokens that follow each prompt greedily, without the end of sequence, which is 1."""
    model, _ = load(sys.argv[1])
    answers = []
    for prompt in json.load(sys.stdin):
        ids = list(prompt)
        for _ in range(int(sys.argv[2])):
            logits = model(mx.array([ids]))[0, -1].astype(mx.float32)
            logits[1] = -mx.inf
            ids.append(int(mx.argmax(logits)))
        answers.append(ids[len(prompt) :])
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
