"""Writes a DeepSeek-V3 of 29 M parameters without weights, and the texts and questions it is trained on.

python examples/router_policies/prepare.py TOKENIZER GSM8K OUT TEXT...

TOKENIZER is a folder with the DeepSeek-LLM vocabulary (102,400 tokens), GSM8K one with train.jsonl and test.jsonl, TEXT
files of plain text. OUT gets `model/` (config and tokenizer; nine tenths of the parameters are in embedding and head),
`texts.jsonl`, `train.jsonl` (the first 600 questions) and `test.jsonl` (the first 100).
"""

import json
import shutil
import sys
from pathlib import Path

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 102400,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "intermediate_size": 384,
    "moe_intermediate_size": 96,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "torch_dtype": "float32",
}
TRAIN_QUESTIONS, TEST_QUESTIONS = 600, 100
PARAGRAPH_LETTERS = 2000
"""Letters of a text at most, so that packed rows have several documents."""


def main(tokenizer: Path, gsm8k: Path, out: Path, texts: list[Path]) -> None:
    """Write everything."""
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, model / name)
    pieces = [piece for text in texts for piece in _pieces(text.read_text(encoding="utf-8"))]
    _write(out / "texts.jsonl", [{"text": piece} for piece in pieces])
    for split, number in (("train", TRAIN_QUESTIONS), ("test", TEST_QUESTIONS)):
        lines = (gsm8k / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:number]
        rows = [json.loads(line) for line in lines]
        _write(out / f"{split}.jsonl", [{"prompt": row["question"], "completion": row["answer"]} for row in rows])


def _pieces(text: str) -> list[str]:
    """Consecutive lines of at most `PARAGRAPH_LETTERS` letters together."""
    pieces = [""]
    for line in text.splitlines():
        if len(pieces[-1]) + len(line) > PARAGRAPH_LETTERS:
            pieces.append("")
        pieces[-1] += f"{line}\n"
    return [piece for piece in pieces if piece.strip()]


def _write(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), [Path(name) for name in sys.argv[4:]])
