"""`ds-finetune init`: writes a run file for given rows, or converts the file of another trainer."""

import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ds_finetune.cli.arguments import Arguments, Commands, add_command, positive
from ds_finetune.console.tables import show_line
from ds_finetune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ds_finetune.data.sources import Record

_MODEL = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
_RUN = """\
# Written by `ds-finetune init`. Keys that are left out have defaults: docs/reference/run-file.md describes all of them,
# and `ds-finetune config show` prints them with this file's values.
model: {model}  # folder or hub id
data:
  train: [{rows}]{columns}
  # eval: held_out.jsonl    # rows that are not trained: they show when more training no longer helps
objective: {objective}
train:
  for: 3 epochs             # or e.g. 500 steps
  global_batch_size: 32     # rows of one optimizer step over all GPUs
  micro_batch_size: 1       # rows of one forward on one GPU; `auto` tries how many fit into its memory
  max_seq_len: {length:<13}# tokens; longer rows are cut, and a run that would lose much text is refused
optim: {{lr: {lr}}}
# lora: {{rank: 16}}          # trains small adapters instead of all weights; set optim.lr to about {lora_lr} with it
# deepspeed: zero3          # shards the weights over the GPUs, where zero2 does not fit
output_dir: {output_dir}  # checkpoints, metrics and the exported model; the same command resumes a run
"""
_RATES = {"dpo": ("5.0e-7", "5.0e-6"), "kto": ("1.0e-6", "1.0e-5"), "classification": ("2.0e-5", "2.0e-4")}
"""Learning rates by objective: for training all weights, and for adapters (docs/how-to/preferences.md)."""
_LENGTH = 2048


def add_commands(commands: Commands) -> None:
    """Add the command `init` to the program."""
    text = "write a commented run file: for your own rows, or converted from a file of another trainer"
    parser = add_command(commands, "init", text, _init)
    parser.add_argument("rows", nargs="*", metavar="ROWS", help="files, folders or hub ids with training rows")
    text = "file of axolotl, LLaMA-Factory, ms-swift or TRL: YAML, JSON, or a shell script with its command"
    parser.add_argument("--from", dest="other", metavar="FILE", help=text)
    text = "number of ranks of the run of --from, for its rows of a step (default: as its script says, else 1)"
    parser.add_argument("--ranks", type=positive, metavar="RANKS", help=text)
    parser.add_argument("--model", metavar="MODEL", help=f"folder or hub id (default {_MODEL}, or as --from says)")
    parser.add_argument("--out", default="run.yaml", metavar="RUN.yaml", help="file to write (default run.yaml)")


def _init(arguments: Arguments) -> None:
    if bool(arguments.rows) == bool(arguments.other):
        given = f"`{arguments.rows[0]}` and --from {arguments.other}" if arguments.rows else "neither"
        raise ConfigError(f"init needs either ROWS or --from, and has {given}", hint="give files for one of the two")
    if arguments.other:
        _convert(Path(arguments.other), arguments)
    else:
        _from_rows(arguments)


def _convert(path: Path, arguments: Arguments) -> None:
    from ds_finetune.config.conversion import ConvertedRun, read_other_file
    from ds_finetune.config.run_file import write_run_file

    file, out = read_other_file(path), Path(arguments.out)
    options = {**({"model": arguments.model} if arguments.model else {}), **file.words}
    done = ConvertedRun(file.program, options, arguments.ranks or file.ranks)
    write_run_file(out, done.text(str(path)))
    counts = Counter(outcome for outcome, _ in done.outcomes.values())
    texts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("taken", "default", "not available"))
    show_line(f"wrote {out} from a file of {file.program.name}: {texts}")
    for option, (outcome, reason) in done.outcomes.items():
        if outcome == "not available":
            show_line(f"not available: {done.text_of(option)} ({reason})")
    for key, reason in done.to_fill.items():
        show_line(f"fill in: {key}: {reason}")
    show_line(f"next: ds-finetune data show {shlex.quote(str(out))}")


def _from_rows(arguments: Arguments) -> None:
    from ds_finetune.config.run_file import one_line_yaml, write_run_file
    from ds_finetune.data.sources import find_sources, read_records
    from ds_finetune.families.text_part import text_tree
    from ds_finetune.plan.config_json import max_positions, read_config_json

    out = Path(arguments.out)
    where, record = next(read_records(find_sources(arguments.rows)[0]), ("", {}))
    if not record:
        raise DataError(f"the training data `{arguments.rows[0]}` has no rows", hint="write at least one row")
    objective, columns = _recognised(record, where)
    lr, lora_lr = next((rates for name, rates in _RATES.items() if name in objective), ("1.0e-5", "2.0e-4"))
    model = arguments.model or _MODEL
    is_here = (Path(model) / "config.json").is_file()
    positions = max_positions(text_tree(read_config_json(model))) if is_here else None
    names = ", ".join(f"{key}: {one_line_yaml(name)}" for key, name in columns.items())
    text = _RUN.format(
        model=one_line_yaml(model),
        rows=", ".join(map(one_line_yaml, arguments.rows)),
        columns=f"\n  columns: {{{names}}}    # guessed from the names of your columns" if names else "",
        objective=objective,
        lr=lr,
        lora_lr=lora_lr,
        length=min(_LENGTH, positions or _LENGTH),
        output_dir=one_line_yaml(f"runs/{out.stem}"),
    )
    write_run_file(out, text)
    show_line(f"wrote {out}: objective {objective}, from the columns {', '.join(record)}")
    if objective == "grpo":
        show_line(
            "grpo samples its own answers: if a column has answers, set objective: sft and name it in data.columns"
        )
    show_line(f"next: ds-finetune data show {shlex.quote(str(out))}")


def _recognised(record: "Record", where: str) -> tuple[str, Mapping[str, str]]:
    """Find the objective that a row of data fits, and a value for `data.columns`, which is empty if the columns have
    known names. DataError if no objective fits, or a column of a known layout has a wrong value.

    Objective grpo reads every row that has a prompt, so it is the last that is tried.
    """
    from ds_finetune.data.record_layouts import PlainText, columns_line, find_layout
    from ds_finetune.data.row_kind import DIALOGUE, RowKind, objectives_of
    from ds_finetune.data.samples import LAYOUTS_OF, read_row

    label = record.get("label")
    kinds = {
        # The classes of a classifier are unknown until all rows are read; the label of this row is one of them.
        name: RowKind(
            name,
            objectives_of(name)[0],
            labels=(str(label),),
            num_labels=1 if name == "labelled" and isinstance(label, float) else None,
            has_known_classes=True,
        )
        for name in LAYOUTS_OF
    }
    prompts = kinds.pop("prompts")
    # Each row of a Parquet file has the columns of all; but a prompt with an empty completion is not meant for grpo.
    filled = {name: value for name, value in record.items() if value is not None or name == "completion"}
    layouts = (("prompt", "chosen", "rejected"), ("prompt", "completion"))
    lines = [line for layout in layouts if (line := columns_line(record, *layout))]
    guesses = [yaml.safe_load(line.partition(": ")[2]) for line in lines]
    choices = [(kind, columns) for columns in ({}, *guesses) for kind in kinds.values()]
    for kind, columns in [*choices, (prompts, {})]:
        if kind == prompts and (
            wrong := next((name for name in kinds if find_layout(filled, {}, LAYOUTS_OF[name])), None)
        ):
            read_row(record, kinds[wrong], layout="auto", columns={}, where=where)
        with suppress(DataError):
            sample, _ = read_row(record, kind, layout="auto", columns=columns, where=where)
            objective = "{name: classification, num_labels: 1}" if kind.num_labels else kind.objective
            return "pretrain" if isinstance(sample, PlainText) else objective, columns
    read_row(record, DIALOGUE, layout="auto", columns={}, where=where)
    raise AssertionError("the row was refused before")
