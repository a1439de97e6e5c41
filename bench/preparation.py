"""Prepares the same prompt/completion rows with ds_finetune and with TRL's functions over `datasets.map`.

    python bench/preparation.py ROWS.jsonl TOKENIZER --peer-python PYTHON [--rounds 3] [--processes 1] [--chat]

ROWS.jsonl has a prompt and a completion in each line, by the names `prompt` and `completion`; with --chat they are
lists of messages, which get the tokenizer's chat template; PYTHON is that of an
environment with trl 1.16.0. Timed is what lies between a raw file and packed rows that can be trained: reading,
tokenising, the mask of supervised tokens, packing to --tokens, and writing the cache, but no import. Candidates take
turns in fresh processes, each with an empty cache. Printed are MB of the raw file per second of CPU and of time, by
round, and the ratio of their medians.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Measured = dict[str, float]
Candidate = tuple[Callable[[], Any], Callable[[Any], Measured]]
_OURS, _PEER = "ds_finetune", "datasets.map with TRL"


def main() -> None:
    """Compare the candidates, or prepare once where this is a candidate's process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chat", action="store_true", help="the rows hold lists of messages")
    parser.add_argument("--worker", choices=("ours", "peer"))
    asked = parser.parse_args()
    if asked.worker is None:
        compare(asked)
        return
    prepare = {"ours": prepare_ours, "peer": prepare_peer}[asked.worker]
    with tempfile.TemporaryDirectory() as cache:
        json.dump(timed(*prepare(asked, cache)), sys.stdout)


def compare(asked: argparse.Namespace) -> None:
    """Run the candidates by turns and print what they took."""
    megabytes = asked.rows.stat().st_size / 1e6
    found: dict[str, list[Measured]] = {_OURS: [], _PEER: []}
    for _ in range(asked.rounds):
        found[_OURS].append(_run(sys.executable, "ours", asked))
        found[_PEER].append(_run(asked.peer_python, "peer", asked))
    for kind in ("cpu_seconds", "seconds"):
        rates = {name: [megabytes / each[kind] for each in rounds] for name, rounds in found.items()}
        for name, values in rates.items():
            say(f"{name}, MB per {kind[:-1]}: {'  '.join(f'{value:.3f}' for value in values)}")
        ours, peer = (statistics.median(values) for values in rates.values())
        say(f"ratio of medians by {kind}: {ours / peer:.2f}")
    say(
        str({name: {key: rounds[0][key] for key in ("rows", "tokens", "supervised")} for name, rounds in found.items()})
    )


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


def _run(python: str, worker: str, asked: argparse.Namespace) -> Measured:
    command = [python, __file__, str(asked.rows), str(asked.tokenizer), "--worker", worker]
    command += ["--processes", str(asked.processes), "--tokens", str(asked.tokens)]
    command += ["--chat"] * asked.chat
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: Measured = json.loads(done.stdout.splitlines()[-1])
    return found


def timed(prepare: Callable[[], Any], count: Callable[[Any], Measured]) -> Measured:
    """What `count` says of the result of `prepare`, with the seconds and CPU seconds of `prepare` and its processes."""
    cpu, began = _cpu_seconds(), time.perf_counter()
    rows = prepare()
    took = {"seconds": time.perf_counter() - began, "cpu_seconds": _cpu_seconds() - cpu}
    return count(rows) | took


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def prepare_ours(asked: argparse.Namespace, cache: str) -> Candidate:
    """ds_finetune's preparation of a run's training rows."""
    from ds_finetune.config.sections import DataConfig
    from ds_finetune.data.prepare import TokenLimits, prepare_rows
    from ds_finetune.data.prepared_rows import PreparedRows
    from ds_finetune.data.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(str(asked.tokenizer))
    limits = TokenLimits(asked.tokens, len(tokenizer))
    template = "auto" if asked.chat else "plain"
    config = DataConfig(
        train=(str(asked.rows),), template=template, separator="", cache_dir=cache, workers=asked.processes
    )

    def prepare() -> PreparedRows:
        return prepare_rows(config, "train", tokenizer=tokenizer, limits=limits)

    def count(rows: PreparedRows) -> Measured:
        return {"rows": len(rows), "tokens": rows.counts.tokens, "supervised": rows.counts.supervised}

    return prepare, count


def prepare_peer(asked: argparse.Namespace, cache: str) -> Candidate:
    """What TRL's SFTTrainer does with a dataset before it trains (trl 1.16, trainer/sft_trainer.py:1228)."""
    from datasets import Dataset, load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(asked.tokenizer)
    processes = asked.processes if asked.processes > 1 else None
    settings = SFTConfig(
        output_dir=cache, max_length=asked.tokens, dataset_num_proc=processes, use_cpu=True, bf16=False
    )
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)

    def prepare() -> Dataset:
        raw = load_dataset("json", data_files=str(asked.rows), split="train", cache_dir=cache)
        return SFTTrainer._prepare_dataset(trainer, raw, tokenizer, settings, True, None, "train")

    def count(rows: Dataset) -> Measured:
        labels = [label for each in rows["labels"] for label in each]
        return {"rows": len(rows), "tokens": len(labels), "supervised": sum(label != -100 for label in labels)}

    return prepare, count


if __name__ == "__main__":
    main()
