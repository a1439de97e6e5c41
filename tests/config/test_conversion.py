"""Files of other trainers become run files: what they mean here, written by hand, and an outcome for every key."""

import dataclasses
import re
from pathlib import Path

import pytest
import transformers
import yaml

from ds_finetune.cli.main import main
from ds_finetune.config.other_programs import HUGGING_FACE_TRAINER, PROGRAMS
from ds_finetune.config.schema import RunConfig, read_config

AXOLOTL = """\
base_model: some/model
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: true
datasets:
  - {path: org/dialogues, type: chat_template, field_messages: conversation, split: train}
dataset_prepared_path:
val_set_size: 0
sequence_len: 4096
sample_packing: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
saves_per_epoch: 2
deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json
wandb_project: mine
use_galore: true
default_system: "on two\nlines: yes"
unheard_of: 3
output_dir: ./out
"""
AXOLOTL_HERE = """\
model: {path: some/model, attention: flash_attention_2}
data: {train: ["org/dialogues:train"], columns: {messages: conversation}, packing: true, long_rows: drop}
train: {for: 4 epochs, global_batch_size: 16, micro_batch_size: 2, max_seq_len: 4096, seed: 42,
        activation_checkpointing: full}
optim: {lr: 2.0e-4, betas: [0.9, 0.999], warmup: 10 steps, min_lr_ratio: 0}
lora: {rank: 32, alpha: 16, target_modules: [q_proj, v_proj], quantize: nf4}
checkpoint: {every: 0.5 epochs}
deepspeed: zero3_offload
log: {trackers: [wandb]}
output_dir: ./out
"""
AXOLOTL_TEXT = """\
{"base_model": "m", "datasets": [{"path": "rows.jsonl", "type": "completion", "field": "chapter"}],
 "learning_rate": "1e-5", "max_steps": 100, "num_epochs": 2, "lr_scheduler": "constant"}
"""
AXOLOTL_TEXT_HERE = """\
model: m
objective: pretrain
data: {train: [rows.jsonl], columns: {text: chapter}, packing: false, long_rows: drop}
train: {for: 100 steps, global_batch_size: 2, max_seq_len: 512, seed: 42}
optim: {lr: 1.0e-5, betas: [0.9, 0.999], lr_scheduler: constant}
output_dir: model-out
"""
LLAMA_FACTORY = """\
### model
model_name_or_path: some/model
trust_remote_code: true
stage: dpo
pref_beta: 0.2
pref_loss: orpo
do_train: true
lora_rank: 4
lora_target: q_proj,v_proj
dataset: pairs.json
dataset_dir: lists
template: llama3
cutoff_len: 1024
output_dir: saves
overwrite_output_dir: true
plot_loss: true
logging_steps: 10
save_strategy: epoch
save_total_limit: 3
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 3.0
warmup_ratio: 0.1
bf16: true
val_size:
use_unsloth: false
"""
LLAMA_FACTORY_HERE = """\
model: some/model
objective: {name: orpo, beta: 0.2}
data: {train: [pairs.json], template: llama3, packing: false}
train: {for: 3 epochs, global_batch_size: 8, max_seq_len: 1024, seed: 42, precision: bf16}
optim: {lr: 5.0e-5, betas: [0.9, 0.999], lr_scheduler: linear, warmup: 10%, min_lr_ratio: 0}
lora: {rank: 4, alpha: 8, target_modules: [q_proj, v_proj]}
checkpoint: {every: 1 epoch, keep: 3}
log: {every: 10, trackers: []}
output_dir: saves
"""
SWIFT = """\
#!/bin/bash
# 2 * 20GiB
MODEL=some/model
NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 \\
swift sft \\
    --model $MODEL \\
    --dataset 'org/first#500' \\
              org/second:chat \\
    --num_train_epochs 1 \\
    --torch_dtype bfloat16 \\
    --loss_scale last_round \\
    --max_length 512 \\
    --model_name me 'myself and I' \\
    --lr_scheduler_kwargs '{"min_lr": 1e-5}' \\
    --attn_impl flash_attn \\
    --deepspeed zero2 \\
    --save_steps 50 \\
    --report_to tensorboard wandb > log.txt 2>&1
"""
SWIFT_HERE = """\
model: {path: some/model, attention: flash_attention_2}
data: {train: [org/first, "org/second:chat"], train_on: last_assistant, packing: false, long_rows: drop}
train: {for: 1 epochs, global_batch_size: 16, max_seq_len: 512, seed: 42, precision: bf16}
optim: {lr: 1.0e-4, weight_decay: 0.1, warmup: 0 steps, min_lr_ratio: 0.1}
lora: {rank: 8, alpha: 32, target_modules: [all-linear], dropout: 0.05}
checkpoint: {every: 50 steps}
deepspeed: zero2
log: {trackers: [tensorboard, wandb]}
output_dir: output
"""
LLAMA_FACTORY_V1 = """\
model: some/model
peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: all, use_rslora: true}
dist_config: {name: fsdp2, dcp_path: null, ep_dispatcher: eager}
train_dataset: org/rows
micro_batch_size: 1
learning_rate: 1.0e-4
max_steps: 10
"""
LLAMA_FACTORY_V1_HERE = """\
model: some/model
data: {train: [org/rows], packing: false}
train: {for: 10 steps, global_batch_size: 2, micro_batch_size: 1, max_seq_len: 2048, seed: 42}
optim: {lr: 1.0e-4, betas: [0.9, 0.999], lr_scheduler: linear, warmup: 0 steps, min_lr_ratio: 0}
lora: {rank: 16, alpha: 32, target_modules: [all-linear], rslora: true}
deepspeed: zero3
output_dir: saves
"""
TRL = """\
accelerate launch --config_file configs/deepspeed_zero3.yaml --num_processes 2 trl/scripts/sft.py \\
    --model_name_or_path some/model --dataset_name org/rows --dataset_config math --learning_rate 3.0e-6 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --eval_strategy steps --eval_steps 100 \\
    --use_peft --gradient_checkpointing --no_remove_unused_columns --max_steps 50
"""
TRL_HERE = """\
model: some/model
data: {train: ["org/rows:math:train"], eval: ["org/rows:math:test"], train_on: all, packing: false, long_rows: truncate}
train: {for: 50 steps, global_batch_size: 64, micro_batch_size: 4, max_seq_len: 1024, seed: 42,
        activation_checkpointing: full}
optim: {lr: 3.0e-6, betas: [0.9, 0.999], lr_scheduler: linear, warmup: 0 steps, min_lr_ratio: 0}
eval: {every: 100 steps}
lora: {rank: 16, alpha: 32, target_modules: [q_proj, v_proj], dropout: 0.05}
deepspeed: zero3
output_dir: trainer_output
"""
TRL_GRPO = """\
trl grpo --model_name_or_path m --dataset_name org/prompts --num_generations 4 --per_device_train_batch_size 8 \\
  --beta 0.001 --loss_type dr_grpo --epsilon 0.3 --steps_per_generation 2 --max_completion_length 64 --reward_funcs r
"""
TRL_GRPO_HERE = """\
model: m
objective: {name: grpo, group_size: 4, kl_weight: 0.001, aggregation: fixed, clip_low: 0.3, clip_high: 0.3,
            advantage: mean_std}
rollout: {prompts_per_step: 4, max_new_tokens: 64}
data: {train: [org/prompts]}
train: {for: 3 epochs, micro_batch_size: 8, seed: 42}
optim: {lr: 1.0e-6, betas: [0.9, 0.999], lr_scheduler: linear, warmup: 0 steps, min_lr_ratio: 0}
output_dir: trainer_output
"""
CASES = {
    "axolotl.yaml": (AXOLOTL, AXOLOTL_HERE, ["--ranks", "2"]),
    "axolotl.json": (AXOLOTL_TEXT, AXOLOTL_TEXT_HERE, ["--ranks", "2"]),
    "llama_factory.yaml": (LLAMA_FACTORY, LLAMA_FACTORY_HERE, []),
    "llama_factory_v1.yaml": (LLAMA_FACTORY_V1, LLAMA_FACTORY_V1_HERE, ["--ranks", "2"]),
    "swift.sh": (SWIFT, SWIFT_HERE, []),
    "trl.sh": (TRL, TRL_HERE, []),
    "trl_grpo.sh": (TRL_GRPO, TRL_GRPO_HERE, ["--ranks", "2"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_becomes_the_run_file_written_by_hand(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text, here, options = CASES[name]
    Path("pairs.json").write_text("[]")
    Path(name).write_text(text)
    Path("here.yaml").write_text(here)
    assert main(["init", "--from", name, *options]) == 0
    assert read_config("run.yaml") == read_config("here.yaml")
    printed, written = capsys.readouterr().out, Path("run.yaml").read_text()
    assert "not available" in printed
    words = [word.removeprefix("--") for word in text.split() if word.startswith("--")]
    words = words if name.endswith(".sh") else list(yaml.safe_load(text))
    assert not [
        word for word in words if f"{word}:" not in written and f"{word}." not in written and word != "num_processes"
    ]


def test_reasons_and_defaults_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(AXOLOTL)
    assert main(["init", "--from", "a.yaml", "--ranks", "2"]) == 0
    lines = Path("run.yaml").read_text().splitlines()
    for line in (
        "  global_batch_size: 16  # 2 of a forward x accumulation 4 x 2 data parallel ranks",
        "  betas: [0.9, 0.999]  # default of axolotl",
        "  rank: 32  # lora_r: 32",
        "# not available: use_galore: true (optim.name has no such optimizer)",
        "# not available: unheard_of: 3 (this program does not know the key; the documentation of axolotl says what it does)",
        "# default: dataset_prepared_path: null (it has no value)",
    ):
        assert line in lines


def test_a_key_that_cannot_be_converted_is_not_replaced_by_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.yaml").write_text("model_name_or_path: m\ndataset_name: a/b\nlr_scheduler_type: polynomial\noptim: lomo\n")
    assert main(["init", "--from", "t.yaml"]) == 0
    said = capsys.readouterr().out
    assert "not available: lr_scheduler_type: polynomial (`optim.lr_scheduler` keeps its default" in said
    assert "not available: optim: lomo (`optim.name` keeps its default" in said


@pytest.mark.parametrize(
    ("path", "expected"), [("~/out", "/home/me/out"), ("./out", "./out"), ("$HOME/out", "FILL_IN")]
)
def test_a_path_below_the_home_folder_is_expanded(
    path: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    Path("t.yaml").write_text(f"model_name_or_path: m\ndataset_name: a/b\noutput_dir: {path}\n")
    assert main(["init", "--from", "t.yaml"]) == 0
    assert read_config("run.yaml").output_dir == expected
    said = capsys.readouterr().out
    assert ("fill in: output_dir: output_dir is not converted" in said) == (expected == "FILL_IN")
    assert "output_dir: the file of" not in said


def test_what_a_file_does_not_say_is_to_be_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lf.yaml").write_text("stage: sft\ndataset: identity\n")
    Path("grpo.sh").write_text("trl grpo --model_name_or_path m --per_device_train_batch_size 2 --num_generations 8\n")
    assert main(["init", "--from", "lf.yaml"]) == 0
    assert main(["init", "--from", "grpo.sh", "--out", "grpo.yaml"]) == 0
    said = capsys.readouterr().out
    assert "fill in: model.path: the file of LLaMA-Factory names none" in said
    assert "fill in: `identity` of data: only LLaMA-Factory knows this name; write the file or hub id" in said
    assert "fill in: rollout.prompts_per_step: a step has 2 answers" in said
    assert read_config("run.yaml").model.path == "FILL_IN"


@pytest.mark.parametrize("is_vllm", ["true", "false"])
def test_an_address_is_asked_for_only_with_a_vllm_server(is_vllm: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"base_model: m\nrl: grpo\ntrl: {{num_generations: 2, use_vllm: {is_vllm}}}\n")
    assert main(["init", "--from", str(tmp_path / "a.yaml"), "--out", str(tmp_path / "run.yaml"), "--ranks", "2"]) == 0
    assert ("FILL IN rollout.address" in (tmp_path / "run.yaml").read_text()) == (is_vllm == "true")


WRONG = {
    "model: m\ndata: {train: a}\n": "is not the file of a known trainer; its keys are model, data",
    "just words\n": "has 0 training commands of known trainers instead of one",
    "swift sft --model a\nswift pt --model b\n": "has 2 training commands of known trainers instead of one",
    "swift sft --model 'a\n": "the command `--model 'a` cannot be read: No closing quotation",
    "llamafactory-cli train missing.yaml\n": "names `missing.yaml`, which is not a file with keys",
    "base_model: m\nrl: ebft\n": "`rl` is 'ebft', which is no objective",
    "stage: ppo\nmodel_name_or_path: m\n": "`stage` is 'ppo', which trains on sampled answers",
    "\x00\x01": "has 0 training commands",
    "model_name_or_path: m\nlora_r: 8\nlearning_rate: 3,14\n": "`learning_rate` is `3,14`, which is not a number\n  hint: write 3.14\n",
    "model_name_or_path: m\nlora_r: 8\nmax_steps: 5k\n": "`max_steps` is `5k`, which is not a number\n  hint: write 5000\n",
    "model_name_or_path: m\nlora_r: 8\nmax_length: 1,024\n": "hint: write 1.024, or 1024 for thousands\n",
    "model_name_or_path: m\nlora_r: 8\nwarmup_ratio: 3:30\n": "`warmup_ratio` is `3:30`, which is not a number",
    "trl sft --model_name_or_path m --learning_rate 1 --learning_rate 2\n": "the training command gives `--learning_rate` twice",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_file_that_is_none_gets_one_error(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text(text)
    assert main(["init", "--from", str(tmp_path / "file"), "--out", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert WRONG[text] in said
    assert "hint: " in said
    assert not (tmp_path / "run.yaml").exists()


def test_texts_that_look_like_numbers_and_options_before_the_command_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "base_model: m\nadapter: lora\nlora_r: 8\nwandb_project: 100m\nlora_target_modules: '0,1'\n"
        "lora_model_dir: 10k\nunfrozen_parameters: '1,2'\ndatasets: [{path: a.jsonl}]\n"
    )
    command = "llamafactory-cli train --model_name_or_path m --stage sft --dataset a\n"
    (tmp_path / "b.sh").write_text(f"docker run --volume a:b --volume c:d image mpirun --mca a b --mca c d {command}")
    for name in ("a.yaml", "b.sh"):
        assert main(["init", "--from", str(tmp_path / name), "--out", str(tmp_path / f"{name}.yaml")]) == 0


def test_rows_or_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 2
    assert main(["init", "rows.jsonl", "--from", "a.yaml"]) == 2
    assert main(["init", "--from", "nowhere.yaml"]) == 2
    said = capsys.readouterr().err
    assert "init needs either ROWS or --from, and has neither" in said
    assert "init needs either ROWS or --from, and has `rows.jsonl` and --from a.yaml" in said
    assert "file `nowhere.yaml` does not exist" in said


def test_the_defaults_of_the_hugging_face_trainer_are_those_of_its_code() -> None:
    """`packing` is TRL's, and the last rate of its schedules, which end at 0, has no key."""
    fields = {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}
    ours = {
        word: value
        for word, value in HUGGING_FACE_TRAINER.items()
        if word not in ("packing", "min_lr_rate", "output_dir")
    }
    ours["warmup_steps"] = ours.pop("warmup_ratio")
    assert ours == {word: fields[word] for word in ours}


def test_the_words_of_programs_are_known() -> None:
    """A default that no key stands for would be dropped."""
    from ds_finetune.config.invalid_keys import meant_key
    from ds_finetune.config.objectives import GrpoObjective
    from ds_finetune.config.other_programs import NO_KEY
    from ds_finetune.config.schema import RunConfig

    for program in PROGRAMS:
        words = {*program.defaults, *program.of_lora, *(w for more in program.of_objective.values() for w in more)}
        assert all(word in NO_KEY or meant_key(word, GrpoObjective, RunConfig) for word in words)


ODD = """\
model_name_or_path: m
dataset_name: a/b
use_peft: {use_peft}
per_device_train_batch_size: 0
tensor_parallel_size: 0.5
pipeline_parallel_size: nan
learning_rate: 0
lr_scheduler_kwargs: '{{"min_lr": 1.0}}'
chat_template: "{{% x"
lora_target_modules: [null]
num_train_epochs: "two\\nlines"
"""


def test_odd_values_are_said_and_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.yaml").write_text(ODD.format(use_peft="true"))
    assert main(["init", "--from", "odd.yaml"]) == 0
    run = read_config("run.yaml")
    assert (run.parallel.tp, run.optim.lr, run.train.duration) == (1, 2e-5, "1 epochs")
    assert "# not available: tensor_parallel_size: 0.5" in Path("run.yaml").read_text()


def test_lengths_beside_sampled_answers_are_those_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ms-swift `max_length` bounds the prompt and `max_completion_length` the answer; a row here holds both."""
    monkeypatch.chdir(tmp_path)
    Path("g.sh").write_text(
        "swift rlhf --rlhf_type grpo --model m --dataset a/b --max_length 512 --max_completion_length 64 "
        "--per_device_train_batch_size 8\n"
    )
    assert main(["init", "--from", "g.sh"]) == 0
    run = read_config("run.yaml")
    assert (run.train.max_seq_len, run.rollout.max_new_tokens, run.rollout.prompts_per_step) == (576, 64, 1)
    assert run.optim.lr == 1e-4  # ms-swift trains adapters by default


def converted(text: str, folder: Path, *options: str) -> tuple[RunConfig, str]:
    """The run file of another trainer's file, and its text."""
    path, out = folder / ("file.yaml" if ":" in text.split("\n")[0] else "file.sh"), folder / "run.yaml"
    path.write_text(text)
    out.unlink(missing_ok=True)
    assert main(["init", "--from", str(path), "--out", str(out), *options]) == 0
    return read_config(out), out.read_text()


COMPUTED = """\
if [ $1 = long ]; then
EPOCHS=3
else
EPOCHS=1
fi
LR=1e-5
MODEL=${1:-org/model}
accelerate launch --num_processes $(nproc) trl/scripts/sft.py "${ARGS[@]}" --model_name_or_path $MODEL \\
  --dataset_name $DATA --learning_rate $LR --num_train_epochs $EPOCHS --per_device_train_batch_size $((2 + 2)) \\
  --gradient_accumulation_steps $((64 / N)) --max_length `expr 4 + 1` --output_dir out-$(date +%F) --logging_steps 5 \\
  --lora_target_modules $MODULES --use_peft --report_to ${TRACKER} --seed $RANDOM --logging_dir "3 in f()" "$@"
"""
"""Of its variables only LR has one value that bash knows without the time, the machine and arguments."""


def test_what_a_shell_computes_is_left_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of an expression gets into the run file, and each is reported with what it is."""
    monkeypatch.chdir(tmp_path)
    run, text = converted(COMPUTED, tmp_path)
    assert (run.model.path, run.data.train, run.output_dir) == ("FILL_IN", ("FILL_IN",), "FILL_IN")
    assert (run.optim.lr, run.log.every, run.lora is not None) == (1e-5, 5, True)
    assert not re.search("[$`(]", str(yaml.safe_load(text)))
    said = " ".join(capsys.readouterr().out.split())
    for word, given in {
        "model_name_or_path": "'${1:-org/model}'",
        "dataset_name": "$DATA",
        "num_train_epochs": "$EPOCHS",
        "output_dir": "[out-$(date, +%F)]",
        "lora_target_modules": "$MODULES",
        "report_to": "'${TRACKER}'",
        "seed": "$RANDOM",
        "num_processes": "$(nproc)",
        "${ARGS[@]}": "'${ARGS[@]}'",
    }.items():
        assert f"not available: {word}: {given} (" in said, word
    assert "give the number by --ranks" in said
    for key in ("model.path", "data.train", "output_dir", "train.global_batch_size"):
        assert f"fill in: {key}: " in said


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("llamafactory-cli train $EXTRA c.yaml", "stage: sft\nmodel_name_or_path: m\ndataset: a/b\n"),
        ("axolotl train ${1:-} c.yaml", "base_model: m\nsequence_len: 8\ndatasets: [{path: a/b}]\n"),
    ],
)
def test_a_file_after_an_expression_is_read(
    command: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(file)
    run, _ = converted(f"{command}\n", tmp_path)
    assert (run.model.path, run.data.train) == ("m", ("a/b",))
    expression = command.split()[2]
    assert f"not available: {expression}: " in capsys.readouterr().out


TRL_SFT = "trl sft --model_name_or_path m --dataset_name a/b"
NO_NUMBER = "the number of ranks is not known; give the number by --ranks"


@pytest.mark.parametrize(
    ("options", "word", "batch"),
    [
        ("--nnodes=1:4 --nproc_per_node=8", "nnodes: '1:4'", 8),
        ("--nnodes=2 --nproc_per_node=gpu", "nproc_per_node: gpu", 8),
        ("--nnodes=2 --nproc_per_node=$N", "nproc_per_node: $N", 8),
        ("--nnodes=2 --nproc_per_node=4", "", 64),
    ],
)
def test_a_number_of_ranks_that_is_not_known_is_said(
    options: str, word: str, batch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A forward of TRL has 8 rows. With --ranks nothing asks for it."""
    script = f"torchrun {options} trl/scripts/sft.py --model_name_or_path m --dataset_name a/b\n"
    run, text = converted(script, tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert run.train.global_batch_size == batch
    assert (NO_NUMBER in said, f"# FILL IN train.global_batch_size: 1 rank is assumed: {NO_NUMBER}" in text) == (
        bool(word),
        bool(word),
    )
    assert f"not available: {word}" in said or not word
    run, text = converted(script, tmp_path, "--ranks", "16")
    said = " ".join(capsys.readouterr().out.split())
    assert run.train.global_batch_size == 128
    assert f"not available: {word}" in said or not word
    assert "--ranks" not in said + text
    assert "FILL IN" not in text


@pytest.mark.parametrize(
    "options",
    [
        "--dataset_config $SUB --dataset_train_split train",
        "--dataset_config main --dataset_train_split $SPLIT",
        "--dataset_config $SUB --eval_strategy steps",
    ],
)
def test_rows_of_a_split_that_a_shell_computes_are_left_open(
    options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, text = converted(f"{TRL_SFT} {options}\n", tmp_path)
    assert (run.data.train, run.data.eval) == (("FILL_IN",), ())
    assert "# FILL IN data.train: dataset_name is not converted" in text
    said = capsys.readouterr().out
    for word in ("dataset_name: a/b", *re.findall(r"dataset_\w+ \$\w+", options)):
        assert f"not available: {word.replace(' $', ': $')} (" in said


def test_held_out_rows_of_a_split_that_a_shell_computes_are_left_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = converted(f"{TRL_SFT} --eval_strategy steps --dataset_test_split $SPLIT\n", tmp_path)
    assert (run.data.train, run.data.eval) == (("a/b",), ())
    assert "not available: dataset_test_split: $SPLIT (" in capsys.readouterr().out
    run, _ = converted(f"{TRL_SFT} --eval_strategy steps --dataset_test_split held\n", tmp_path)
    assert run.data.eval == ("a/b:held",)


def test_data_sets_that_a_loader_computes_are_left_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = "[{path: c/d}, {path: '${DATA}', type: completion}]"
    run, text = converted(f"base_model: m\nsequence_len: 8\ndatasets: {sets}\n", tmp_path)
    assert run.data.train == ("FILL_IN",)
    assert "# FILL IN data.train: datasets is not converted" in text
    assert "not available: datasets: " in capsys.readouterr().out
    run, _ = converted("base_model: m\nsequence_len: 8\ndatasets: [{path: c/d, type: {format: 'Use `x`'}}]\n", tmp_path)
    assert run.data.train == ("c/d",)


def test_an_objective_that_a_shell_computes_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, text = converted("swift rlhf --rlhf_type $T --model m --dataset a/b\n", tmp_path)
    assert run.objective.name == "sft"
    assert "# FILL IN objective: rlhf_type is not converted: sft is assumed" in text
    assert "not available: rlhf_type: $T (" in capsys.readouterr().out


@pytest.mark.parametrize("more", ["${@:2}", "$(more args)", "$A ${B[@]}"])
def test_expressions_after_a_value_are_no_part_of_it(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = converted(f"{TRL_SFT} --output_dir o {more} --seed 3\n", tmp_path)
    assert (run.output_dir, run.train.seed) == ("o", 3)
    assert f"not available: {more}: " in " ".join(capsys.readouterr().out.split())


def test_a_list_with_an_expression_is_left_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its other parts alone are another list."""
    run, _ = converted("swift sft --model m --dataset a/b $MORE --target_modules q_proj ${MORE}\n", tmp_path)
    assert run.data.train == ("FILL_IN",)
    said = capsys.readouterr().out
    assert "not available: dataset: [a/b, $MORE] (" in said
    assert "not available: target_modules: [q_proj, " in said


def test_rows_of_several_data_sets_are_counted_otherwise_and_not_taken(tmp_path: Path) -> None:
    """LLaMA-Factory's max_samples and ms-swift's #N count rows of each data set (LLaMA-Factory data/loader.py:157)."""
    lines = "stage: sft\nmodel_name_or_path: m\nmax_samples: 50\ndataset: "
    run, text = converted(f"{lines}a/b\n", tmp_path)
    assert run.data.rows == 50
    run, text = converted(f"{lines}a/b,c/d\n", tmp_path)
    assert run.data.rows is None
    assert "# not available: max_samples: 50 (it counts rows of each data set" in text
    run, text = converted("swift sft --model m --dataset a/b#500\n", tmp_path)
    assert (run.data.train, run.data.rows) == (("a/b",), 500)
    run, text = converted("swift sft --model m --dataset a/b#500 c/d#20\n", tmp_path)
    assert (run.data.train, run.data.rows) == (("a/b", "c/d"), None)
    assert "# not available: dataset c/d#20 (all rows are used" in text
    for streamed in (
        "swift sft --model m --dataset a/b#500",
        "llamafactory-cli train --stage sft --model_name_or_path m --dataset a/b --max_samples 500",
    ):
        run, text = converted(f"{streamed} --streaming true --max_steps 9\n", tmp_path)
        assert (run.data.streaming, run.data.rows) == (True, None)
        assert re.search(r"^# not available: .*500", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "objective", "is_asked"),
    [
        ("model_name_or_path: m\ndataset_name: a/b\nlora_r: 8\n", "sft", True),
        ("model: m\ntuner_type: lora\ndataset: a/b\n", "sft", True),
        ("model: m\ntuner_type: lora\nrlhf_type: kto\n", "kto", False),
        ("base_model: m\nsequence_len: 8\n", "sft", False),
        ("cutoff_len: 8\nmodel_name_or_path: m\n", "sft", False),
        ("trl dpo --model_name_or_path m\n", "dpo", False),
        ("swift pt --model m --task_type causal_lm\n", "pretrain", False),
        ("trl dpo --model_name_or_path m --dataset_name a/b --task_type CAUSAL_LM\n", "dpo", False),
    ],
)
def test_an_objective_that_only_a_command_names_is_asked_for(
    text: str, objective: str, is_asked: bool, tmp_path: Path
) -> None:
    """axolotl and LLaMA-Factory have a default, sft; `trl` and `swift` have a command for each method."""
    run, written = converted(text, tmp_path)
    assert run.objective.name == objective
    assert ("# FILL IN objective: a file of" in written) == is_asked


@pytest.mark.parametrize(
    ("accumulation", "batch"),
    [
        ("$(expr 16 / 4)", 8),
        ("$(expr 32 / $GPUS / 2)", 8),
        ("$((2 * $GPUS))", 16),
        ("$(expr 16 / 0)", None),
        ("$STEPS", None),
    ],
)
def test_products_and_quotients_of_a_script_are_computed(accumulation: str, batch: int | None, tmp_path: Path) -> None:
    text = f"GPUS=4\nswift sft --model m --dataset a/b --per_device_train_batch_size 2 --gradient_accumulation_steps {accumulation}\n"
    run, written = converted(text, tmp_path)
    if batch:
        assert run.train.global_batch_size == batch
    else:
        assert "# FILL IN train.global_batch_size" in written
        assert "# not available: per_device_train_batch_size: 2 (" in written
        assert "# not available: gradient_accumulation_steps: " in written


def test_a_command_by_its_address_and_the_section_of_ray(tmp_path: Path) -> None:
    address = "https://raw.githubusercontent.com/huggingface/trl/main/trl/scripts/dpo.py"
    run, _ = converted(
        f'hf jobs uv run --timeout 8h "{address}" --model_name_or_path m --lora_r 4 --use_peft\n', tmp_path
    )
    assert (run.objective.name, run.lora and run.lora.rank) == ("dpo", 4)
    run, _ = converted(
        "rlhf_type: kto\nmodel: m\ntrain:\n  tuner_type: lora\n  lora_rank: 4\n  output_dir: here\n", tmp_path
    )
    assert (run.lora and run.lora.rank, run.output_dir) == (4, "here")


def test_a_key_that_no_table_knows_is_told_from_one_without_a_counterpart(tmp_path: Path) -> None:
    _, text = converted("base_model: m\nsequence_len: 8\nlearning_rat: 1\nbrand_new: 2\nuse_unsloth: true\n", tmp_path)
    unknown = "this program does not know the key"
    assert f"# not available: learning_rat: 1 ({unknown}; did you mean `learning_rate`?)" in text
    assert f"# not available: brand_new: 2 ({unknown}; the documentation of axolotl says what it does)" in text
    assert "# not available: use_unsloth: true (Unsloth and KTransformers are not supported)" in text
