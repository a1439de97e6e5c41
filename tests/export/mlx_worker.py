"""mlx_lm's greedy tokens and log-probabilities. It gets a folder and a number of tokens as arguments, and prompts from
stdin, and runs in an environment of its own.
"""

import json
import sys

import mlx.core as mx
from mlx_lm import load


def main() -> None:
    """Print the tokens that follow each prompt greedily, without the end of sequence, which is 1, and the
    log-probabilities of all tokens at each of these positions.
    """
    model, _ = load(sys.argv[1])
    answers, log_probs = [], []
    for prompt in json.load(sys.stdin):
        ids = list(prompt)
        for _ in range(int(sys.argv[2])):
            logits = model(mx.array([ids]))[0, -1].astype(mx.float32)
            log_probs.append((logits - mx.logsumexp(logits)).tolist())
            logits[1] = -mx.inf
            ids.append(int(mx.argmax(logits)))
        answers.append(ids[len(prompt) :])
    sys.stdout.write(json.dumps([answers, log_probs]))


if __name__ == "__main__":
    main()
