"""The example files of axolotl, LLaMA-Factory, ms-swift and TRL become run files, or are refused with one error.

The files are read in clones of these repositories, which `DS_FINETUNE_PEERS` names; none is copied into this one. Keys
and values are read from an example by yaml or shlex and compared by the table `MEANING`, not by the converter's tables.
"""

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_finetune.cli.main import main
from ds_finetune.config.schema import RunConfig, read_config

FOLDER = os.environ.get("DS_FINETUNE_PEERS", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="DS_FINETUNE_PEERS names no folder with clones of other trainers")
REPOSITORIES = ("axolotl", "LLaMA-Factory", "ms-swift", "trl")
LEAST = 20
RANKS = 2
SECTIONS = ("trl", "lr_scheduler_kwargs", "peft_config", "optim_config", "dist_config", "quant_config")
COMMAND = re.compile(
    r"\bswift (sft|pt|rlhf)\b|swift/cli/(sft|pt|rlhf)\.py|\b(?:llamafactory-cli|lmf) train\b|\bsrc/train\.py\b"
    r"|\baxolotl train\b|\btrl (sft|dpo|grpo|kto|reward|rloo)\b|\b(?:trl|examples)/scripts/(?:\w+/)*(\w+)\.py"
)
"""The training commands of the four trainers, as their documentation writes them."""
NOT_TRAINING = ("is not the file of a known trainer", "0 training commands of known trainers")
REFUSALS = (
    *NOT_TRAINING,
    "training commands of known trainers instead of one",
    "which is no objective",
    "which trains on sampled answers",
    "which is not a file with keys",
    "twice",
)
"""The reasons for which an example may be refused."""
MEANING = {
    "optim.lr": ("learning_rate", "lr"),
    "lora.rank": ("lora_r", "lora_rank", "peft_config.r"),
    "train.max_seq_len": ("sequence_len", "cutoff_len", "max_length"),
    "train.micro_batch_size": ("per_device_train_batch_size", "micro_batch_size"),
    "optim.weight_decay": ("weight_decay",),
}
"""A key of the run file, and its names in the four trainers; the number is the same."""
SHIPPED_TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "alpaca": "alpaca", "mistral": "mistral"}
OBJECTIVES = {
    **{"pt": "pretrain", "rm": "reward", "ipo": "dpo", "rloo": "grpo", "seq_cls": "classification"},
    **{"gkd": "distill", "reward_modeling": "reward", "gdpo": "grpo", "gspo": "grpo", "bco": "kto"},
}
"""Objectives whose name in a run file differs from that in another trainer."""


@dataclass
class Example:
    """An example file: its keys with their values, and the training commands of a script."""

    path: Path
    words: dict[str, object] = field(default_factory=dict)
    commands: int = 0
    method: str = ""


def test_examples_are_found() -> None:
    assert [name for name in REPOSITORIES if not (Path(FOLDER) / name).is_dir()] == []


@pytest.mark.parametrize("repository", REPOSITORIES)
def test_all_examples_are_converted_or_refused(
    repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples name files from the root of their repository, which is the current folder."""
    monkeypatch.chdir(Path(FOLDER) / repository)
    counts, faults = Counter[int](), list[str]()
    for number, path in enumerate(example_files(repository, tmp_path)):
        run = tmp_path / f"{number}.yaml"
        code = main(["init", "--from", str(path), "--out", str(run), "--ranks", str(RANKS)])
        printed = capsys.readouterr()
        example = read_example(path)
        counts[code] += 1
        found = wrong_run_file(example, run, printed.out) if code == 0 else wrong_refusal(example, code, printed.err)
        faults += [f"{path}: {fault}" for fault in found]
    assert not faults, "\n".join(faults)
    assert counts[0] >= LEAST, counts


def example_files(repository: str, tmp_path: Path) -> Iterator[Path]:
    """Files below `examples/`; those of TRL are mostly commands in its documentation, which become scripts."""
    for path in sorted(Path("examples").rglob("*")):
        if path.suffix in (".yaml", ".yml", ".json", ".sh") and path.is_file():
            yield path.absolute()
    for page in [*sorted(Path("docs").rglob("*.md")), *sorted(Path().rglob("*.py"))] if repository == "trl" else ():
        for number, block in enumerate(re.findall(r"```(?:bash|shell|sh)\n(.*?)```", page.read_text(), re.DOTALL)):
            script = tmp_path / f"{'_'.join(page.parts)}_{number}.sh"
            script.write_text(block)
            yield script


def read_example(path: Path) -> Example:
    text = path.read_text()
    example = Example(path)
    tree = yaml.safe_load(text) if path.suffix != ".sh" else None
    if isinstance(tree, dict):
        example.words = dict(flat(tree))
        return example
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for name, value in re.findall(r"^\s*(?:export )?(\w+)=(\S+)$", text, re.MULTILINE):
        text = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", value, text)
    text = re.sub(r"\$\(expr ([\d /]+)\)", lambda match: str(quotient(match[1])), re.sub(r"\\\s*(\n|\Z)", " ", text))
    commands = [(line, match) for line in text.splitlines() for match in COMMAND.finditer(line)]
    example.commands = len(commands)
    if len(commands) == 1:
        line, match = commands[0]
        example.method = next(filter(None, match.groups()), "")
        rest = line[match.end() :].removeprefix("'").removeprefix('"')
        read_options(example, shlex.split(re.split(r"\s(?:[>&|;#]|2>)", rest)[0]))
    return example


def quotient(text: str) -> int:
    first, *others = map(int, text.split("/"))
    for other in others:
        first //= other
    return first


def read_options(example: Example, tokens: list[str]) -> None:
    options = dict[str, list[str]]()
    for token in tokens:
        name, equals, value = token.partition("=")
        if token.startswith("--") or (equals and name.isidentifier()):
            last = options.setdefault(name.removeprefix("--").replace("-", "_"), [value] if equals else [])
        elif options:
            last.append(token)
        elif Path(token).is_file():
            example.words |= dict(flat(yaml.safe_load(Path(token).read_text())))
    if file := options.pop("config", None):
        example.words |= dict(flat(yaml.safe_load(Path(file[0]).read_text()))) if Path(file[0]).is_file() else {}
    example.words |= {key: values[0] if len(values) == 1 else values or True for key, values in options.items()}


def flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if key == "train" and isinstance(value, Mapping):
            yield from value.items()
        elif key in SECTIONS and isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", part) for inner, part in value.items())
        else:
            yield key, value


def number_of(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def wrong_run_file(example: Example, run: Path, printed: str) -> Iterator[str]:
    text, config = run.read_text(), read_config(str(run))
    comments = [line[line.index("# ") :] for line in text.splitlines() if "# " in line]
    for word in example.words:
        if not any(re.search(rf"(# |: |, |; ){re.escape(word)}[:. ]", line) for line in comments):
            yield f"`{word}` is not reported"
    for line in comments:
        if line.startswith("# not available: ") and line.removeprefix("# ") not in printed:
            yield f"not printed: {line}"
    yield from wrong_values(example, config, text)


def wrong_values(example: Example, config: RunConfig, text: str) -> Iterator[str]:
    words, is_grpo = example.words, config.objective.name == "grpo"
    for key, names in MEANING.items():
        numbers = [number for name in names if (number := number_of(words.get(name))) is not None]
        here = value_at(config, key)
        if key == "train.max_seq_len" and is_grpo:
            numbers = [sum(numbers) + float(config.rollout.max_new_tokens)] if numbers else []
        if key == "lora.rank" and config.lora is None:
            continue
        if numbers and here not in numbers and not is_said(text, names):
            yield f"{key} is {here} instead of {numbers}"
    yield from wrong_length(words, config)
    yield from wrong_batch(words, config, text)
    yield from wrong_template(words, config, text)
    method = method_of(example)
    if method and config.objective.name != OBJECTIVES.get(method, method):
        yield f"objective is {config.objective.name} instead of {method}"


def is_said(text: str, names: tuple[str, ...]) -> bool:
    return any(f"# not available: {name}:" in text for name in names)


def value_at(config: RunConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def wrong_length(words: Mapping[str, object], config: RunConfig) -> Iterator[str]:
    """A number of steps counts before a number of epochs in all four trainers."""
    steps, epochs = (
        next((n for name in names if (n := number_of(words.get(name)))), None)
        for names in (("max_steps", "train_iters"), ("num_epochs", "num_train_epochs"))
    )
    expected = (steps, "steps") if steps and steps > 0 else (epochs, "epochs")
    value, unit = config.train.duration.split()
    if expected[0] and (float(value), unit) != expected:
        yield f"train.for is {config.train.duration} instead of {expected}"


def wrong_batch(words: Mapping[str, object], config: RunConfig, text: str) -> Iterator[str]:
    micro = next((number_of(words.get(name)) for name in MEANING["train.micro_batch_size"] if name in words), None)
    accumulation = number_of(words.get("gradient_accumulation_steps"))
    is_split = any("parallel" in word or word in ("tp_size", "cp_size", "pp_size") for word in words)
    if not micro or not accumulation or is_split or config.objective.name == "grpo" or "global_batch_size" in words:
        return
    if config.train.global_batch_size != micro * accumulation * RANKS:
        yield f"global_batch_size is {config.train.global_batch_size}, {micro} x {accumulation} x {RANKS} are meant"


def wrong_template(words: Mapping[str, object], config: RunConfig, text: str) -> Iterator[str]:
    for word in ("template", "chat_template"):
        name = words.get(word)
        if not isinstance(name, str) or name in ("tokenizer_default", "default"):
            expected = "auto"
        elif name in SHIPPED_TEMPLATES:
            expected = SHIPPED_TEMPLATES[name]
        else:
            expected = config.data.template if "/" in name else "auto"
            if expected == "auto" and not is_said(text, (word,)):
                yield f"template {name} is dropped in silence"
        if name and config.data.template != expected:
            yield f"data.template is {config.data.template} instead of {expected}"


def method_of(example: Example) -> str:
    """The method that an example trains, by its own keys; empty where another key decides."""
    words, method = example.words, example.method
    if words.get("pref_loss") in ("orpo", "simpo") or words.get("reward_model") is True:
        return str(words["pref_loss"]) if "pref_loss" in words else "reward"
    for word in ("rl", "stage", "rlhf_type", "task_type"):
        if words.get(word) and words[word] != "causal_lm":
            return str(words[word]).lower()
    if method == "rlhf":
        return "dpo"
    return method if method in ("sft", "pt", "dpo", "grpo", "kto", "reward", "rloo") else ""


def wrong_refusal(example: Example, code: int, printed: str) -> Iterator[str]:
    if code != 2 or printed.count("error: ") != 1 or printed.count("hint: ") != 1:
        yield f"exit code {code}: {printed}"
    if not any(reason in printed for reason in REFUSALS):
        yield f"refused for no known reason: {printed}"
    is_training = example.commands or {"learning_rate", "num_train_epochs", "num_epochs"} & example.words.keys()
    if any(reason in printed for reason in NOT_TRAINING) and is_training:
        yield f"a training is not recognised: {printed}"
