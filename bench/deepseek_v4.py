"""A small DeepSeek-V4, with all kinds of layers and a vocabulary of 102,400 tokens:

    python bench/deepseek_v4.py attention
    python bench/deepseek_v4.py speed
    python bench/deepseek_v4.py gsm8k FOLDER --rows gsm8k/train.jsonl --tokenizer TOKENIZER_FOLDER [--steps 60]

`attention` measures forward and backward of one attention layer of each kind for one document of 4,096 to 65,536
tokens: seconds and MiB of tensors for backward, and MiB of peak memory, each in a process of its own. `speed` compares
forward and backward of the model over a packed row of 2,048 tokens with transformers' eager model on the same
documents, each in a forward of its own and all padded to the longest: tokens a second. `gsm8k` trains it and a
DeepSeek-V3 of the same sizes with ZeRO-3 on two ranks, prints both losses, and lets plain transformers answer with the
export.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.attention.indexed_attention import expect_documents
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.model.weights.load import initialise_weights

ROOT = Path(__file__).parents[1]
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "vocab_size": 102400,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "max_position_embeddings": 131072,
}
V4 = SIZES | {
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "sliding_window": 128,
    "num_hash_layers": 1,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "compress_ratios": [0, 4, 128, 4, 128],
    "swiglu_limit": 10.0,
}
V3 = SIZES | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
}
KINDS = {"window": 0, "every 4": 1, "every 128": 2}
"""Layers of V4 by how many tokens an entry of theirs holds."""
Parts = tuple[torch.Tensor, ...]
DOCUMENTS = (40, 130, 210, 95, 310, 260, 180, 75, 150, 220, 120, 258)
"""Tokens of the documents of a packed row of 2,048, about those of GSM8K."""


def say(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def model(tokens: int) -> TrainedModel:
    """The small V4 with random weights, for documents of up to `tokens`."""
    lm = build_skeleton(AutoConfig.for_model(**V4), attention="sdpa", dtype=torch.float32, device="cpu")
    initialise_weights(lm, seed=1)
    expect_documents(lm, longest=tokens)
    return TrainedModel(lm)


def attend(layer: int, tokens: int) -> tuple[float, float, float]:
    """Seconds of forward and backward, MiB kept for backward, and MiB of peak memory above that before."""
    torch.set_num_threads(1)
    lm = model(tokens).lm.model
    hidden = torch.randn(1, tokens, SIZES["hidden_size"], requires_grad=True)
    positions = torch.arange(tokens)[None]
    kinds = ("main", "compress")
    rotary = {kind: lm.rotary_emb(hidden, position_ids=positions, layer_type=kind) for kind in kinds}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = lm.layers[layer].self_attn(hidden, rotary, positions, None)[0]
    out.sum().backward()
    seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return seconds, sum(kept.values()) / 2**20, peak / 2**10


def attention() -> None:
    """Print a line for each kind of attention and number of tokens."""
    context = multiprocessing.get_context("spawn")
    for kind, layer in KINDS.items():
        for tokens in (4096, 16384, 65536):
            with context.Pool(1) as pool:
                seconds, kept, peak = pool.apply(attend, (layer, tokens))
            say(f"{kind:>9} {tokens:6d} tokens: {seconds:7.2f} s, {kept:7.0f} MiB kept, {peak:7.0f} MiB at most")


def speed() -> None:
    """Print tokens a second of a packed row of 2,048 tokens, of each of its documents by itself, and of all padded."""
    context = multiprocessing.get_context("spawn")
    for documents in (DOCUMENTS, (sum(DOCUMENTS),)):
        found = {}
        for way in WAYS:
            # Memory that another way has freed would make a way faster.
            with context.Pool(1) as pool:
                found[way] = sum(documents) / pool.apply(seconds_of, (documents, way))
            times = found["packed row"] / found[way]
            say(f"{len(documents)} documents, {way:>36}: {found[way]:8.0f} tokens/s, packed {times:5.2f} times as fast")


def seconds_of(documents: tuple[int, ...], way: str) -> float:
    """Seconds of processor time of a forward and backward of these documents, the median of seven after one."""
    torch.set_num_threads(1)
    lm: Any = model(max(documents))
    if way != "packed row":
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**V4), attn_implementation="eager").float()
        plain.load_state_dict(lm.lm.state_dict())
        lm = plain.train().model
    parts = torch.randint(3, 90000, (1, sum(documents))).split(documents, dim=1)
    padded = torch.zeros(len(parts), max(documents), dtype=torch.int64)
    for row, part in zip(padded, parts, strict=True):
        row[: part.shape[1]] = part[0]
    found = []
    for _ in range(8):
        began = time.process_time()
        WAYS[way](lm, parts, padded).backward()
        found.append(time.process_time() - began)
    return statistics.median(found[1:])


def packed(lm: TrainedModel, parts: Parts, _: torch.Tensor) -> torch.Tensor:
    """The sum of the hidden states of all documents in a row."""
    documents = tuple(part.shape[1] for part in parts)
    positions = torch.cat([torch.arange(size) for size in documents])[None]
    return lm.hidden(torch.cat(parts, dim=1), positions, (documents,)).sum()


def alone(lm: nn.Module, parts: Parts, _: torch.Tensor) -> torch.Tensor:
    """The sum of the hidden states of transformers' model, each document in a forward of its own."""
    return torch.stack([lm(part, use_cache=False).last_hidden_state.sum() for part in parts]).sum()


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "packed row": packed,
    "transformers, one document a forward": alone,
    "transformers, documents padded": lambda lm, _, padded: alone(lm, (padded,), padded),
}


def gsm8k(folder: Path, rows: Path, tokenizer: Path, steps: int) -> None:
    """Train both models, print their losses, and answer with V4's export."""
    for name, config in (("v4", V4), ("v3", V3)):
        path = folder / name
        (path / "model").mkdir(parents=True, exist_ok=True)
        (path / "model" / "config.json").write_text(json.dumps(config))
        for file in tokenizer.glob("token*"):
            shutil.copy(file, path / "model" / file.name)
        tree = {
            "model": {"path": str(path / "model"), "weights": "random"},
            "data": {"train": str(rows), "columns": {"prompt": "question", "completion": "answer"}, "packing": True},
            "train": {"for": f"{steps} steps", "global_batch_size": 2, "max_seq_len": 1024, "precision": "bf16"},
            "optim": {"lr": 3e-3, "warmup": "5%"},
            "deepspeed": {"zero_optimization": {"stage": 3}},
            "checkpoint": {"every": "never"},
            "output_dir": str(path / "run"),
        }
        (path / "run.yaml").write_text(yaml.safe_dump(tree))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29735"]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, str(ROOT / "ds_finetune/train.py"), str(path / "run.yaml")], check=True, env=environ)
        records = [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]
        losses = [record["train/loss"] for record in records if "train/loss" in record]
        say(f"{name}: loss {losses[0]:.3f}, mean of the last ten steps {statistics.mean(losses[-10:]):.3f}")
    export = folder / "v4" / "run" / "export"
    plain, tokens = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    prompt = tokens("How many apples are left?", return_tensors="pt")
    say(tokens.decode(plain.generate(**prompt, max_new_tokens=20, do_sample=False)[0]))


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attention", "speed", "gsm8k"))
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    if given.what == "gsm8k":
        gsm8k(given.folder, given.rows, given.tokenizer, given.steps)
    else:
        {"attention": attention, "speed": speed}[given.what]()


if __name__ == "__main__":
    main()
