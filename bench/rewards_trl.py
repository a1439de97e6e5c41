"""Compares training by rewards with TRL's: tokens per second of the same model, prompts, rewards and cores.

    OMP_NUM_THREADS=2 python -m bench.rewards_trl FOLDER --trl PYTHON [--gsm8k ROWS.jsonl --steps 2] [--rounds 1]
        [--ranks 1]

PYTHON is that of an environment with TRL 1.16 and the packages of this one. Without `--gsm8k` both train the tiny
DeepSeek-V3 of bench/rewards_dates.py, after its short fine-tuning: steps of 32 prompts, whose answers of 10 to 24
tokens are nearly equally long; such a step takes under a second, so fewer than 30 say little. ROWS are those of GSM8K:
a DeepSeek-V3 of 10.5 million parameters is fine-tuned on them for 150 steps first, and its answers have 2 to 256
tokens, 90 on average; steps have 8 prompts. Both train by exact match, with 8 answers to each prompt, in fp32, at
temperature 1, without a reference, all answers of a step generated at a time. With `--ranks 2` and OMP_NUM_THREADS=1
each has two data parallel ranks instead of two threads. TRL's forwards have 64 padded answers, or 16 of GSM8K; this
program packs its rows. Runs take turns. What a step takes is the difference of runs of one step and of more; CPU
seconds are those of all processes of a run, and tell more where others use the cores. All answers of a step are
generated and trained, so tokens are those of answers.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.rewards_dates import make_start, on_ranks, run_file, scores, train
from bench.small_v3 import SMALL_V3
from ds_finetune.foreign.auto_configs import AutoConfig

GROUP = 8
LR = 1e-6
"""So low that answers stay as long as they are."""


class Task(NamedTuple):
    """What is trained."""

    start: Path
    """Folder of the model."""
    rows: Path
    """JSON lines with `prompt` and `completion`; eval.jsonl beside them has others."""
    prompts: int
    max_new_tokens: int
    row_tokens: int
    """Of this program's packed rows, four in a forward."""
    forward_rows: int
    """Answers in a forward of TRL."""


class Taken(NamedTuple):
    """What a run took, and the tokens of its answers."""

    wall: float
    cpu: float
    tokens: float


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trl", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, metavar="ROWS.jsonl")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    asked = parser.parse_args()
    task = gsm8k(asked.folder, asked.gsm8k) if asked.gsm8k else dates(asked.folder)
    sides = {"this program": partial(ours, asked.ranks), "TRL": partial(trls, asked.trl, asked.ranks)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for side in sides.values():
        # The first run of each prepares the data, which others read.
        side(asked.folder, task, 1)
    for _ in range(asked.rounds):
        for name, side in sides.items():
            one, more = (side(asked.folder, task, 1 + steps) for steps in (0, asked.steps))
            tokens = more.tokens - one.tokens
            found[name].append((tokens / (more.wall - one.wall), tokens / (more.cpu - one.cpu)))
            wall, cpu = found[name][-1]
            say(f"{name:12s} {tokens:7,.0f} tokens: {wall:7,.0f} tokens/s, {cpu:7,.0f} per CPU second")
    for kind, place in (("second", 0), ("CPU second", 1)):
        ratios = [a[place] / b[place] for a, b in zip(*found.values(), strict=True)]
        each = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        say(f"tokens per {kind}, times TRL's: {each}; median {statistics.median(ratios):.1f}")


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def dates(folder: Path) -> Task:
    """Dates into words, by the model that bench/rewards_dates.py starts from."""
    return Task(make_start(folder), folder / "demo/train.jsonl", 32, 24, 512, 64)


def gsm8k(folder: Path, rows: Path) -> Task:
    """GSM8K, by a model that has its own tokenizer, and whose short fine-tuning is done once."""
    task = Task(folder / "gsm8k/start/export", folder / "gsm8k/train.jsonl", 8, 256, 640, 16)
    if task.start.is_dir():
        return task
    read = [json.loads(line) for line in rows.read_text().splitlines()]
    task.rows.parent.mkdir(parents=True, exist_ok=True)
    pairs = [{"prompt": row["question"], "completion": row["answer"]} for row in read]
    for path, some in ((task.rows, pairs[:-100]), (task.rows.with_name("eval.jsonl"), pairs[-100:])):
        path.write_text("".join(json.dumps(pair) + "\n" for pair in some))
    model = folder / "gsm8k/model"
    make_model(model, [text for pair in pairs for text in pair.values()])
    tree = {
        "model": {"path": str(model), "weights": "random"},
        "data": {"train": str(task.rows), "packing": True},
        "deepspeed": {"zero_optimization": {"stage": 0}},
        "train": {"for": "150 steps", "global_batch_size": 4, "micro_batch_size": 4, "max_seq_len": 512}
        | {"precision": "fp32", "activation_checkpointing": "none"},
        "optim": {"lr": 3e-3, "warmup": "5%", "min_lr_ratio": 0.05},
        "checkpoint": {"every": "never"},
        "output_dir": str(task.start.parent),
    }
    path = folder / "gsm8k/start.yaml"
    path.write_text(yaml.safe_dump(tree))
    train(path)
    return task


def make_model(folder: Path, texts: Sequence[str]) -> None:
    """Write the configuration of a model, and a tokenizer that is trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, alphabet = ["<bos>", "<eos>", "<pad>"], pre_tokenizers.ByteLevel.alphabet()
    size = SMALL_V3["vocab_size"]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    )
    whole.chat_template = (
        "{% for turn in messages %}{% if turn['role'] == 'assistant' %}"
        "{% generation %}{{ turn['content'] }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ turn['content'] }}\n{% endif %}{% endfor %}"
    )
    whole.save_pretrained(folder)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 1024}
    AutoConfig.for_model("deepseek_v3", **SMALL_V3, **ids).save_pretrained(folder)


def ours(ranks: int, folder: Path, task: Task, steps: int) -> Taken:
    """A run of this program."""
    run = folder / f"full-{steps}-steps"
    # A run folder that is there would be resumed.
    shutil.rmtree(run, ignore_errors=True)
    asked = argparse.Namespace(lr=LR, steps=steps)
    path, off = run_file(run, task.start, 0, asked), ["checkpoint.every=never", "export.at_end=false", "log.every=1"]
    off += ["optim.warmup=0 steps", "eval.limit=8", f"data.train={task.rows}"]
    off += [f"data.eval={task.rows.with_name('eval.jsonl')}"]
    off += [f"rollout.prompts_per_step={task.prompts}", f"rollout.max_new_tokens={task.max_new_tokens}"]
    wall, cpu = timed(lambda: train(path, *off, f"train.max_seq_len={task.row_tokens}", ranks=ranks))
    return Taken(wall, cpu, task.prompts * GROUP * sum(scores(run, "rollout/answer_tokens")))


def trls(python: Path, ranks: int, folder: Path, task: Task, steps: int) -> Taken:
    """A run of TRL."""
    out = folder / f"trl-{steps}-steps.json"
    command = [*on_ranks(python, ranks), __file__, *map(str, task), str(out), str(steps)]
    with out.with_suffix(".log").open("w") as log:
        wall, cpu = timed(lambda: subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT))
    return Taken(wall, cpu, task.prompts * GROUP * sum(json.loads(out.read_text())))


def timed(call: Any) -> tuple[float, float]:  # noqa: ANN401 - a function without arguments
    """Seconds of a call that starts processes, and CPU seconds of these."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def train_by_trl(task: Task, out: str, steps: str) -> None:
    """Train with TRL, and write the mean tokens of an answer in each step."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def exact_match(completions: list[Any], answer: list[str], **_: object) -> list[float]:
        return [float(turn[0]["content"].strip() == wanted) for turn, wanted in zip(completions, answer, strict=True)]

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    # The JSON loader of `datasets` would make times of the dates.
    read = [json.loads(line) for line in Path(task.rows).read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["completion"]} for row in read]
    )
    config = GRPOConfig(
        output_dir=f"{out}.run",
        per_device_train_batch_size=task.forward_rows,
        gradient_accumulation_steps=task.prompts * GROUP // task.forward_rows // int(os.environ["WORLD_SIZE"]),
        num_generations=GROUP,
        max_completion_length=task.max_new_tokens,
        max_steps=int(steps),
        learning_rate=LR,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(str(task.start), exact_match, config, data)
    trainer.train()
    lengths = [log["completions/mean_length"] for log in trainer.state.log_history if "loss" in log]
    if trainer.accelerator.is_main_process:
        Path(out).write_text(json.dumps(lengths))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].endswith("export"):
        start, rows, *sizes = sys.argv[1:7]
        train_by_trl(Task(Path(start), Path(rows), *map(int, sizes)), *sys.argv[7:])
    else:
        main()
