"""transformers' Trainer with DeepSpeed to the end of its first step, for `first_step.py`.

`first_step_peer.py MODEL FOLDER ROWS OUT` trains one step on the rows in FOLDER; with `--save RUN.yaml` it writes the
packed rows of that run file to FOLDER instead.
"""

import os
import sys
from pathlib import Path
from typing import Any


def save_rows(run_file: str, folder: str) -> None:
    """Write the packed rows of a run to `folder`, padded to one length; this fills the run's own cache too."""
    from datasets import Dataset

    from ds_finetune.config.schema import read_config
    from ds_finetune.system.world import World
    from ds_finetune.trainer.prepare import read_run
    from ds_finetune.trainer.resolve import resolve

    config = read_config(run_file)
    run = read_run(resolve(config, world=World(0, 1, 0, 1, "python"), device="cpu"))
    rows, size = run.inputs.train, config.train.max_seq_len
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for number in range(len(rows)):
        row = rows[number]
        pad = size - len(row.input_ids)
        # The Trainer's model shifts labels by itself.
        columns["input_ids"].append([*row.input_ids.tolist(), *[0] * pad])
        columns["labels"].append([-100, *row.labels.tolist()[:-1], *[-100] * pad])
        columns["attention_mask"].append([1] * len(row.input_ids) + [0] * pad)
    Dataset.from_dict(columns).save_to_disk(folder)


def train(model: str, folder: str, rows: int, out: str) -> None:
    """One step of the Trainer."""
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    os.environ.update(given)
    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, default_data_collator

    class SayDone(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            sys.stdout.write("first step done\n")
            sys.stdout.flush()

    deepspeed: dict[str, Any] = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    deepspeed |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    deepspeed |= {"train_batch_size": "auto", "gradient_clipping": "auto"}
    arguments = TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=rows,
        max_steps=1,
        bf16=True,
        use_cpu=True,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        deepspeed=deepspeed,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model),
        arguments,
        train_dataset=load_from_disk(folder),
        data_collator=default_data_collator,
        callbacks=[SayDone()],
    )
    trainer.train()


if __name__ == "__main__":
    Path(sys.argv[4]).mkdir(exist_ok=True)
    if "--save" in sys.argv:
        save_rows(sys.argv[sys.argv.index("--save") + 1], sys.argv[2])
    else:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
