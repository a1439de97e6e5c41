"""Write texts that a language model has sampled itself, to measure what it forgets when it is trained further.

    python examples/sample_stories.py MODEL OUT.jsonl NUMBER SEED

Each text begins with the model's first token and ends where the model begins or ends a text, or at its longest. A model
without its training data at hand can so be compared with itself: the loss on these texts is its own entropy at first.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS_AT_ONCE = 50


def sample_texts(folder: str, number: int, seed: int) -> list[str]:
    """Texts that the model in `folder` samples at temperature 1."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts: list[str] = []
    while len(texts) < number:
        first = torch.full((TEXTS_AT_ONCE, 1), model.config.bos_token_id)
        ids = model.generate(
            first,
            attention_mask=torch.ones_like(first),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_length=model.config.max_position_embeddings,
            eos_token_id=[model.config.bos_token_id, model.config.eos_token_id],
            pad_token_id=model.config.eos_token_id,
        )
        texts += [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    return [text for text in texts if text][:number]


if __name__ == "__main__":
    model_folder, out, amount, seed_text = sys.argv[1:]
    lines = [json.dumps({"text": text}) for text in sample_texts(model_folder, int(amount), int(seed_text))]
    Path(out).write_text("\n".join(lines) + "\n", encoding="utf-8")
