"""`ds-finetune demo`: writes an example, in which a tiny DeepSeek-V3 learns to spell out dates."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from datetime import date, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from ds_finetune.cli.arguments import Arguments, Commands, add_command, positive
from ds_finetune.console.tables import OUT
from ds_finetune.errors import OutputError
from ds_finetune.export.output_folder import as_output_errors

DAYS = 36_500
FIRST_DAY = date(1950, 1, 1)
HELD_OUT = 200
MODEL: dict[str, Any] = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
MODEL |= {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}
MODEL |= {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
MODEL |= {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 24}
MODEL |= {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
MODEL |= {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
MODEL |= {"hidden_act": "silu", "initializer_range": 0.05, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
MODEL |= {"rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False}
MODEL |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + "
    "message['content'] }}"
    "{% else %}{{ '<|assistant|>' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
RUN = """\
model: {{path: {model}, weights: random}}
data: {{train: {train}, eval: {eval}}}
deepspeed: {{zero_optimization: {{stage: 3}}}}
train:
  {{for: 160 steps, global_batch_size: {batch}, micro_batch_size: {micro}, max_seq_len: 512, precision: fp32,
   activation_checkpointing: none}}
optim: {{lr: 3.0e-3, warmup: 5%, min_lr_ratio: 0.05}}
eval: {{every: 40 steps, generate: {{prompts: 40, max_new_tokens: 24}}}}
log: {{every: 20}}
output_dir: {run}
"""
_BATCH, _MICRO = 8, 4
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>")


def add_commands(commands: Commands) -> None:
    """Add the command `demo` to the program."""
    text = "write an example (model config, tokenizer, data, run file) to a folder"
    demo = add_command(commands, "demo", text, _write_demo)
    demo.add_argument("folder", metavar="FOLDER", help="folder to write; files with other content are never replaced")
    text = "number of ranks that will train it (default: one per GPU here, or two on the CPU)"
    demo.add_argument("--ranks", type=positive, help=text)


def _write_demo(arguments: Arguments) -> None:
    ranks = arguments.ranks
    if ranks is None:
        import torch

        ranks = torch.cuda.device_count() or 2
    run_file = write_demo(Path(arguments.folder), ranks=ranks)
    OUT.print(f"wrote {run_file}", markup=False)


def questions(seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield questions and answers: each day of a hundred years (`2024-03-17`, `17 March 2024`), shuffled by `seed`."""
    days = list(range(DAYS))
    random.Random(seed).shuffle(days)
    for offset in days:
        day = FIRST_DAY + timedelta(days=offset)
        yield day.isoformat(), f"{day.day} {day:%B} {day.year}"


def write_demo(folder: Path, *, ranks: int = 2, days: int = DAYS) -> Path:
    """Write the files of the example: `model/` (config and tokenizer, no weights), `train.jsonl`, `eval.jsonl` and
    `run.yaml`. Returns the path of the run file.

    A training step has 8 rows, rounded up to a multiple of `ranks`. 200 of the `days` rows are held out. OutputError if
    one of these files exists with other content, since it may be the user's.
    """
    from ds_finetune.config.run_file import one_line_yaml

    with tempfile.TemporaryDirectory() as scratch:
        new = Path(scratch)
        model = new / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL, indent=2) + "\n", encoding="utf-8")
        write_tokenizer(model)
        rows = [{"prompt": question, "completion": answer} for question, answer in islice(questions(), days)]
        _write_lines(new / "eval.jsonl", rows[:HELD_OUT])
        _write_lines(new / "train.jsonl", rows[HELD_OUT:])
        on_each = -(-_BATCH // ranks)
        paths = {Path(name).stem: folder / name for name in ("model", "train.jsonl", "eval.jsonl", "run")}
        quoted = {key: one_line_yaml(str(path)) for key, path in paths.items()}
        text = RUN.format(**quoted, batch=on_each * ranks, micro=min(on_each, _MICRO))
        (new / "run.yaml").write_text(text, encoding="utf-8")
        names = [str(path.relative_to(new)) for path in sorted(new.rglob("*")) if path.is_file()]
        existing = [name for name in names if not _may_write(folder / name, (new / name).read_bytes())]
        if existing:
            raise OutputError(
                f"the example cannot be written: `{folder}` has other files with its names: {', '.join(existing)}",
                hint="name a new folder, or move these files away",
            )
        with as_output_errors(folder):
            (folder / "model").mkdir(parents=True, exist_ok=True)
            for name in names:
                shutil.copyfile(new / name, folder / name)
    return folder / "run.yaml"


def _may_write(path: Path, content: bytes) -> bool:
    return not os.path.lexists(path) or (path.is_file() and path.read_bytes() == content)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token for each printable ASCII character, and the chat template of the example."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, "<|unk|>", *characters))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[2],
        unk_token="<|unk|>",
        additional_special_tokens=list(SPECIAL[3:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def _write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
