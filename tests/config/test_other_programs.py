"""Settings of people who come from TRL, LLaMA-Factory, axolotl or ms-swift: what they type, and what is printed."""

import re
from pathlib import Path

import pytest
import yaml

from ds_finetune.cli.main import main
from ds_finetune.config.invalid_keys import meant_key, written
from ds_finetune.config.other_programs import KEY_OF, NOT_AVAILABLE
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.data.sources import find_sources
from ds_finetune.errors import ConfigError, DataError

MINIMAL = "model: m\ndata: {train: a.jsonl}\noutput_dir: o\n"
OPTIONS = {
    "--learning_rate 1e-4": "`--learning_rate`: values are overridden as `optim.lr=1e-4`",
    "--learning-rate=1e-4": "`--learning-rate=1e-4`: values are overridden as `optim.lr=1e-4`",
    "--optim.lr=1e-4": "`--optim.lr=1e-4`: values are overridden as `optim.lr=1e-4`",
    "--config run.yaml": "`--config`: the run file is given without an option: `ds-finetune train run.yaml`",
    "--deepspeed ds.json": "`--deepspeed`: values are overridden as `deepspeed=ds.json`",
    "--num_train_epochs 3": "`--num_train_epochs`: values are overridden as `'train.for=3 epochs'`",
    "--per_device_train_batch_size 4": "values are overridden as `train.micro_batch_size=4`",
    "--warmup_ratio 0.05": "values are overridden as `optim.warmup=5%`",
    "--max_steps 500": "values are overridden as `'train.for=500 steps'`",
    "--max_steps -1": "the key is `train.for`: `3 epochs` or `500 steps`",
    "--bf16": "values are overridden as `train.precision=bf16`",
    "--load_in_4bit true": "values are overridden as `lora.quantize=nf4`",
    "--rlhf_type dpo": "values are overridden as `objective=dpo`",
    "--train_type lora": "values are overridden as `'lora={rank: 16}'`",
    "--optim adamw_torch": "values are overridden as `optim.name=AdamW`",
    "--freeze_router true": "values are overridden as `router.train=false`",
    "--gradient_accumulation_steps 8": "the key is `train.global_batch_size`: rows of one optimizer step over all ranks",
    "--target_modules all-linear": "values are overridden as `lora.target_modules=all-linear`",
    "--lora_target all": "values are overridden as `lora.target_modules=all-linear`",
    "--lora_target q_proj,v_proj": "the key is `lora.target_modules`: `all-linear`, or a list of names; left out, all",
    "--resume": "values are overridden as `checkpoint.resume=VALUE`",
    "--template mistral_v1": "values are overridden as `data.template=mistral`",
    "--chat_template tokenizer_default": "values are overridden as `data.template=auto`",
    "--template qwen3_nothink": "the key is `data.template`: `auto` for the tokenizer's own, `plain` for none, a name such",
    "--save_strategy epoch": "values are overridden as `'checkpoint.every=1 epoch'`",
    "--eval_strategy epoch": "values are overridden as `'eval.every=1 epoch'`",
    "--save_strategy no": "values are overridden as `checkpoint.every=never`",
    "--val_set_size 0.05": "values are overridden as `data.eval=5%`",
    "--val_size 100": "the key is `data.eval`: a file, folder or data set of rows that are not trained, or a share",
    "--max_samples 1000": "values are overridden as `data.rows=1000`",
    "--optim adamw_bnb_8bit": "the key is `optim.name`: `AdamW`; with ZeRO-0 and without LoRA also `AdamW8bit`",
    "--fsdp full_shard": "`--fsdp`: the key is `deepspeed`: docs/reference/run-file.md describes it",
    "--lora_dropout 0.05": "values are overridden as `lora.dropout=0.05`",
    "--use_dora true": "`--use_dora`: not available here",
    "-lr 3": "`-lr`: values are overridden as `optim.lr=3`",
    "-c run.yaml": "`-c`: no option of this command",
    "--foo 1": "`--foo`: no option of this command; values are overridden as `section.key=value`",
}


@pytest.mark.parametrize("words", OPTIONS)
def test_an_option_of_another_program_gets_the_override(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["train", "run.yaml", *words.split()])
    printed = capsys.readouterr().err
    assert refused.value.code == 2
    assert printed.startswith("usage: ds-finetune train ")
    assert OPTIONS[words] in printed


def test_other_commands_name_their_own_option(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("launch run.yaml --npro 2", "ask folder hi --temperature 1"):
        with pytest.raises(SystemExit):
            main(command.split())
    printed = capsys.readouterr().err
    assert "ds-finetune launch: error: `--npro`: did you mean `--nproc`?" in printed
    assert "ds-finetune ask: error: `--temperature`: no option of this command\n" in printed


LLAMA_FACTORY = """\
model_name_or_path: some/model
trust_remote_code: true
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_dropout: 0.05
dataset: pairs.jsonl
cutoff_len: 2048
output_dir: saves
report_to: none
logging_steps: 10
save_steps: 500
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3
lr_scheduler_type: cosine
warmup_ratio: 0.1
gradient_checkpointing: true
bf16: true
unfrozen_parameters: [a]
optim: adamw_torch
"""
LINES = """\
 has 21 keys that a run file does not have:
  line 1  model_name_or_path -> model.path
  line 2  trust_remote_code: not available here
  line 3  stage -> objective
  line 4  do_train: not available here
  line 5  finetuning_type -> lora: {rank: 16}
  line 6  lora_rank -> lora.rank
  line 7  lora_dropout -> lora.dropout
  line 8  dataset -> data.train
  line 9  cutoff_len -> train.max_seq_len
  line 11  report_to -> log.trackers: []
  line 12  logging_steps -> log.every
  line 13  save_steps -> checkpoint.every: 500 steps
  line 14  gradient_accumulation_steps -> train.global_batch_size (rows of one optimizer step over all ranks, from \
which accumulation is derived)
  line 15  learning_rate -> optim.lr
  line 16  num_train_epochs -> train.for: 3 epochs
  line 17  lr_scheduler_type -> optim.lr_scheduler
  line 18  warmup_ratio -> optim.warmup: 10%
  line 19  gradient_checkpointing -> train.activation_checkpointing: full
  line 20  bf16 -> train.precision: bf16
  line 21  unfrozen_parameters -> train.only (names or regular expressions of the parameters that are trained)
  line 22  optim -> optim.name: AdamW"""


def test_a_pasted_file_gets_a_line_for_each_key(tmp_path: Path) -> None:
    file = tmp_path / "lf.yaml"
    file.write_text(LLAMA_FACTORY)
    with pytest.raises(ConfigError) as refused:
        read_config(file)
    assert refused.value.message == f"{file}{LINES}"


def test_the_lines_make_the_run_file_that_is_written_by_hand(tmp_path: Path) -> None:
    """What is right of the arrows is valid as it is, and means what the other program's key means."""
    by_hand = tmp_path / "run.yaml"
    by_hand.write_text(
        "model: some/model\ndata: {train: pairs.jsonl}\nobjective: dpo\nlora: {rank: 8, dropout: 0.05}\noutput_dir: saves\n"
        "log: {trackers: [], every: 10}\ncheckpoint: {every: 500 steps}\ntrain: {for: 3 epochs, max_seq_len: 2048, "
        "activation_checkpointing: full, precision: bf16, only: [a]}\noptim: {lr: 1.0e-4, name: AdamW, lr_scheduler: cosine, warmup: 10%}\n"
    )
    overrides, lines = [], yaml.safe_load(LLAMA_FACTORY)
    for word, value in lines.items():
        key = meant_key(word, RunConfig, RunConfig)
        if word in NOT_AVAILABLE or key is None or word == "gradient_accumulation_steps":
            continue
        line = written(word, value, key)
        overrides.append(line.replace(": ", "=", 1) if ": " in line else f"{key}={value}")
    base = tmp_path / "minimal.yaml"
    base.write_text(MINIMAL)
    assert read_config(base, overrides) == read_config(by_hand)


def test_several_misspelt_keys_keep_their_section_and_objective(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{MINIMAL}train: {{micro_batchsize: 2}}\noptim: {{lrr: 2}}\nobjective: {{name: dpo, gamma: 1}}\n")
    with pytest.raises(ConfigError) as refused:
        read_config(file)
    assert refused.value.message.splitlines()[1:] == [
        "  line 4  train.micro_batchsize -> train.micro_batch_size?",
        "  line 5  optim.lrr -> optim.lr?",
        "  line 6  objective.gamma: a key of simpo",
    ]


@pytest.mark.parametrize("word", ["use_dora", "do_train", "freeze_trainable_layers"])
def test_what_is_not_available_is_no_misspelling(word: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{MINIMAL}{word}: 1\n")
    with pytest.raises(ConfigError) as refused:
        read_config(file)
    assert refused.value.hint == f"leave it out: `{word}` is not available here"
    assert not NOT_AVAILABLE & KEY_OF.keys()


SHORT = {
    "lora: true": "lora: {}",
    "lora: false": "",
    "lora: 16": "lora: {rank: 16}",
    "lora: {target_modules: all-linear}": "lora: {target_modules: [all-linear]}",
    "log: {trackers: wandb}": "log: {trackers: [wandb]}",
    "deepspeed: 3": "deepspeed: zero3",
}


@pytest.mark.parametrize("short", SHORT)
def test_plain_short_forms_are_the_run_file_written_by_hand(short: str, tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text(f"{MINIMAL}{short}\n")
    (tmp_path / "long.yaml").write_text(f"{MINIMAL}{SHORT[short]}\n")
    assert read_config(tmp_path / "short.yaml") == read_config(tmp_path / "long.yaml")


def test_overrides_reach_into_short_forms(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{MINIMAL}lora: 8\n")
    lora = read_config(tmp_path / "run.yaml", ["lora.alpha=4"]).lora
    assert lora is not None
    assert (lora.rank, lora.alpha) == (8, 4)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("optim: adamw_torch", "write `optim: {name: AdamW}`"),
        ("eval: 0.05", "write `data: {eval: 5%}`"),
        (
            "num_train_epochs: 3",
            "did you mean `train.for`? It is `3 epochs` or `500 steps`; write `train: {for: 3 epochs}`",
        ),
        ("freeze_router: true", "did you mean `router.train`? write `router: {train: false}`"),
    ],
)
def test_other_values_get_the_line_to_write(given: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{MINIMAL}{given}\n")
    with pytest.raises(ConfigError) as refused:
        read_config(tmp_path / "run.yaml")
    assert line in str(refused.value)


def test_a_hint_has_the_whole_description(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{MINIMAL}log: {{trackers: 5}}\n")
    with pytest.raises(ConfigError) as refused:
        read_config(tmp_path / "run.yaml")
    assert refused.value.hint.endswith(
        "Experiment trackers by their names in accelerate: tensorboard, wandb, mlflow, ..."
    )


def test_patterns_of_files_and_slices_of_splits(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    assert [Path(source.path).name for source in find_sources([f"{tmp_path}/*.jsonl"])] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(DataError, match=r"`org/name:train\[:20%\]` is a slice of a split") as refused:
        find_sources(["org/name:train[:20%]"])
    assert "load_dataset('org/name', split='train[:20%]').to_json('rows.jsonl')" in refused.value.hint


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("train[:20%]", "data.eval: 20%"),
        ("rows.jsonl[:100]", "data.rows: N"),
        ("https://host/rows.jsonl", "download the file"),
        ("a.jsonl, b.jsonl", "`train: [a.jsonl, b.jsonl]`"),
        ("~/rows.jsonl", "write the whole path"),
    ],
)
def test_what_is_no_path_is_named_whole_with_what_to_write(path: str, hint: str) -> None:
    with pytest.raises(DataError, match=f"data file `{re.escape(path)}` does not exist") as refused:
        find_sources([path])
    assert hint in refused.value.hint
