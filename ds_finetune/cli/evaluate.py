"""`ds-finetune eval`: scores an exported folder on held-out rows or on tasks."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ds_finetune import api
from ds_finetune.cli.arguments import Arguments, Commands, add_command, export_of, positive, two_or_more
from ds_finetune.config.run_file import parse_yaml
from ds_finetune.console.tables import OUT, show_line
from ds_finetune.errors import ConfigError, DataError, OutputError
from ds_finetune.objectives.rewards.extractors import EXTRACTORS
from ds_finetune.plan.config_json import check_model_path

if TYPE_CHECKING:
    from ds_finetune.evaluation.compare import Metric
    from ds_finetune.evaluation.evaluate import EvalReport


def add_commands(commands: Commands) -> None:
    """Add the command `eval` to the program."""
    text = "score an exported folder on held-out rows, beside its base model"
    parser = add_command(commands, "eval", text, _evaluate)
    _add_data_options(parser)
    _add_scoring_options(parser)


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="OUT", help="an exported folder, a run, or the folder of any model")
    text = "folder of the base model, to be scored on the same token ids"
    parser.add_argument("--baseline", metavar="BASE", help=text)
    text = "held-out rows, in any layout that a run reads; NAME=FILE gives each NAME metrics of its own"
    parser.add_argument("--data", nargs="+", default=[], metavar="FILE", help=text)
    text = "rename a column of the rows, e.g. prompt=question; may be repeated"
    parser.add_argument("--column", action="append", default=[], metavar="NAME=COLUMN", help=text)
    parser.add_argument(
        "--objective",
        type=_objective,
        default="sft",
        help="sft, or another as a run file has it, e.g. '{name: pretrain, eos: false}'; dpo, simpo, cpo and orpo "
        "score pairs of answers and kto labelled answers, dpo and kto with BASE as their reference (default sft)",
    )
    text = "auto (as OUT was trained), plain, a name such as chatml, or a Jinja file (default auto)"
    parser.add_argument("--template", default="auto", help=text)
    text = "text behind a prompt without a chat template (default: that of OUT's training, else a line feed)"
    parser.add_argument("--separator", help=text)
    text = "tokens that are scored (default assistant)"
    parser.add_argument("--train-on", choices=("assistant", "last_assistant", "all"), default="assistant", help=text)
    parser.add_argument("--max-seq-len", type=two_or_more, default=2048, help="maximum tokens of a row (default 2048)")
    text = "treatment of longer rows (default auto: plain text is split, dialogues are truncated)"
    parser.add_argument("--long-rows", choices=("auto", "truncate", "drop", "split"), default="auto", help=text)
    parser.add_argument("--limit", type=positive, help="maximum rows to score of each set")


def _objective(text: str) -> object:
    import yaml

    try:
        return parse_yaml(text)
    except yaml.YAMLError as broken:
        raise argparse.ArgumentTypeError(f"`{text}` is not YAML: {broken}") from None


def _add_scoring_options(parser: argparse.ArgumentParser) -> None:
    text = "generate answers, and compare the result that this function extracts from each with that of the row"
    parser.add_argument("--extract", choices=tuple(EXTRACTORS), help=text)
    text = "number of answers to each row that are also sampled at temperature 1, for pass@k; needs --extract"
    parser.add_argument("--samples", type=positive, default=0, help=text)
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="maximum tokens per answer (default 256)")
    text = "tokens of one forward pass, with padding (default 4096)"
    parser.add_argument("--batch-tokens", type=positive, default=4096, help=text)
    parser.add_argument("--tasks", help="tasks of lm-evaluation-harness, separated by commas; needs lm_eval")
    parser.add_argument("--json", metavar="FILE", help="also write the metrics to this file")


def _evaluate(arguments: Arguments) -> None:
    if not arguments.data and not arguments.tasks:
        raise ConfigError(
            f"`{arguments.model}` has nothing to score on: neither --data nor --tasks is given",
            hint="give held-out rows, such as --data test.jsonl, or tasks",
        )
    arguments.model = export_of(arguments.model)
    # Paths are checked first, because the imports of model code take seconds.
    for path in (arguments.model, *([arguments.baseline] if arguments.baseline else [])):
        check_model_path(path)
    if arguments.json:
        _write_text(arguments.json, "", mode="a")
    tasks = arguments.tasks.split(",") if arguments.tasks else []
    results = {}
    if tasks:
        from ds_finetune.evaluation import lm_eval_tasks

        metrics = lm_eval_tasks.run_tasks(arguments.model, arguments.baseline, tasks, limit=arguments.limit)
        OUT.print(_table(metrics, arguments, lm_eval_tasks.METHOD))
        results["tasks"] = {
            "method": lm_eval_tasks.METHOD,
            "metrics": {name: vars(metric) for name, metric in metrics.items()},
        }
    if arguments.data:
        scored = _scored(arguments)
        for note in scored.notes:
            show_line(note)
        of_sets = {
            f"{name}/{metric}": value for name, metrics in scored.sets.items() for metric, value in metrics.items()
        }
        OUT.print(_table({**scored.metrics, **of_sets}, arguments, f"{scored.counted}; {scored.method}"))
        results["data"] = scored.as_json()
    if arguments.json:
        _write_text(arguments.json, json.dumps(results, indent=2) + "\n", mode="w")


def _write_text(file: str, text: str, *, mode: str) -> None:
    """Write `text` to a file, or append it with mode `a`. OutputError if the file cannot be written.

    The command first appends an empty text, so that a file that cannot be written is reported before the evaluation.
    """
    try:
        with Path(file).open(mode, encoding="utf-8") as out:
            out.write(text)
    except OSError as refused:
        raise OutputError(f"--json `{file}` cannot be written: {refused.strerror}", hint="name another file") from None


def _scored(arguments: Arguments) -> "EvalReport":
    wrong = [column for column in arguments.column if "=" not in column]
    if wrong:
        raise ConfigError(
            f"--column has `{wrong[0]}` instead of NAME=COLUMN",
            hint="write e.g. --column prompt=question --column completion=answer",
        )
    try:
        return api.evaluate(
            arguments.model,
            _sets_of(arguments.data),
            baseline=arguments.baseline,
            objective=arguments.objective,
            extract=arguments.extract,
            samples=arguments.samples,
            columns=dict(column.split("=", 1) for column in arguments.column),
            template=arguments.template,
            separator=arguments.separator,
            train_on=arguments.train_on,
            long_rows=arguments.long_rows,
            max_seq_len=arguments.max_seq_len,
            max_new_tokens=arguments.max_new_tokens,
            batch_tokens=arguments.batch_tokens,
            limit=arguments.limit,
        )
    except (ConfigError, DataError) as error:
        # Errors about rows name run-file keys, but this command has options instead.
        raise type(error)(_with_flags(error.message), hint=_with_flags(error.hint)) from error


def _with_flags(text: str) -> str:
    text = re.sub(r"(?:data\.)?columns:? \{(.+?)\}", lambda match: _column_flags(match[1]), text)
    text = text.replace("under data.columns", "as `--column NAME=COLUMN`").replace("data.columns", "--column")
    return re.sub(r"data\.(template|train_on|long_rows)", lambda match: f"--{match[1].replace('_', '-')}", text)


def _column_flags(pairs: str) -> str:
    return " ".join("--column " + re.sub(r"\s*:\s*", "=", pair.strip()) for pair in pairs.split(","))


def _sets_of(files: Sequence[str]) -> Sequence[str] | Mapping[str, list[str]]:
    named = [file for file in files if "=" in file and not Path(file).exists()]
    if not named:
        return files
    if len(named) < len(files):
        without = next(file for file in files if file not in named)
        raise ConfigError(f"--data `{named[0]}` has a name, but `{without}` has none", hint="write each as NAME=FILE")
    sets: dict[str, list[str]] = {}
    for name, _, file in (text.partition("=") for text in named):
        sets.setdefault(name, []).append(file)
    return sets


def _table(metrics: Mapping[str, "Metric"], arguments: Arguments, caption: str) -> Table:
    is_compared = any(metric.baseline is not None for metric in metrics.values())
    compared = ["baseline", "difference"] if is_compared else []
    table = Table(
        title=f"{arguments.model}" + (f" beside {arguments.baseline}" if arguments.baseline else ""),
        title_justify="left",
        caption=caption,
    )
    for column in ("", "model", *compared, "95% interval" + (" of the difference" if compared else "")):
        table.add_column(column, justify="left" if not column else "right")
    for name, metric in metrics.items():
        values = [metric.value, *([metric.baseline, metric.difference] if compared else [])]
        low, high = metric.interval
        table.add_row(
            name,
            *(f"{value:.4f}" for value in values if value is not None),
            f"[{low:.4f}, {high:.4f}]".replace("[", r"\["),
        )
    return table
