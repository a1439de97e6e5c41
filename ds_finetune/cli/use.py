"""The commands for a model that is trained: score it, serve it, talk to it."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ds_finetune.api import evaluate
from ds_finetune.cli.arguments import from_two, port, positive
from ds_finetune.console import OUT, show_line, show_piece
from ds_finetune.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from ds_finetune.evaluation.compare import Metric
    from ds_finetune.evaluation.run import Scored

_EXTRACTORS = ("gsm8k", "choice", "json", "text")


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `eval`, `serve` and `chat` to the program's commands."""
    _eval_command(
        commands.add_parser(
            "eval", help="score an exported folder on held-out rows, beside its base", allow_abbrev=False
        )
    )
    _serve_command(
        commands.add_parser("serve", help="an OpenAI-compatible endpoint over an exported folder", allow_abbrev=False)
    )
    chat = commands.add_parser("chat", help="talk to an exported folder", allow_abbrev=False)
    chat.add_argument("folder", metavar="OUT")
    chat.add_argument("--max-new-tokens", type=positive, default=512, help="tokens of an answer at most (default 512)")
    chat.set_defaults(command=_chat)


def _eval_command(scoring: argparse.ArgumentParser) -> None:
    scoring.add_argument("model", metavar="OUT", help="an exported folder, or any model's")
    scoring.add_argument(
        "--baseline", metavar="BASE", help="the model it was trained from: scored on the same token ids"
    )
    scoring.add_argument(
        "--data", nargs="+", default=[], metavar="FILE", help="held-out rows, in any layout that a run reads"
    )
    scoring.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="NAME=COLUMN",
        help="another name of a layout's column: prompt=question",
    )
    scoring.add_argument(
        "--template",
        default="auto",
        help="auto: OUT's chat template where it has one; plain; or a Jinja file (default auto)",
    )
    scoring.add_argument(
        "--train-on",
        choices=("assistant", "last_assistant", "all"),
        default="assistant",
        help="tokens scored (default assistant)",
    )
    scoring.add_argument(
        "--extract",
        choices=_EXTRACTORS,
        help="generate answers and compare what this finds in them with what it finds in the rows",
    )
    scoring.add_argument(
        "--max-new-tokens", type=positive, default=256, help="tokens of an answer at most (default 256)"
    )
    scoring.add_argument("--max-seq-len", type=from_two, default=2048, help="tokens of a row at most (default 2048)")
    long_rows = scoring.add_argument("--long-rows", choices=("auto", "truncate", "drop", "split"), default="auto")
    long_rows.help = "rows that are longer (default auto: plain text is split, dialogue truncated)"
    scoring.add_argument(
        "--batch-tokens", type=positive, default=4096, help="tokens of a forward, with padding (default 4096)"
    )
    scoring.add_argument("--limit", type=positive, help="rows scored at most")
    scoring.add_argument("--tasks", help="tasks of lm-evaluation-harness, separated by commas, where it is installed")
    scoring.add_argument("--json", metavar="FILE", help="write the numbers to a file as well")
    scoring.set_defaults(command=_eval)


def _serve_command(serving: argparse.ArgumentParser) -> None:
    serving.add_argument("folder", metavar="OUT", help="an exported folder")
    serving.add_argument(
        "--engine", choices=("auto", "vllm", "transformers", "onnx"), default="auto", help="auto: by the folder and GPU"
    )
    serving.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine alone)"
    )
    serving.add_argument("--port", type=port, default=8000, help="port to listen on (default 8000)")
    serving.add_argument(
        "--queue", type=positive, help="transformers and onnx: requests that wait at most (default 16)"
    )
    serving.add_argument(
        "--request-seconds", type=float, help="transformers and onnx: longest time of a request (default 600)"
    )
    serving.add_argument("--ready-seconds", type=float, default=1800, help="how long loading may take (default 1800)")
    serving.set_defaults(command=_serve)


def _serve(arguments: argparse.Namespace) -> None:
    from ds_finetune.inference.serve import Address, Service, serve

    address = Address(arguments.host, arguments.port)
    service = Service(arguments.engine, arguments.ready_seconds, arguments.queue, arguments.request_seconds)
    serve(Path(arguments.folder), address, service, say=show_line)


def _chat(arguments: argparse.Namespace) -> None:
    from ds_finetune.inference.chat import END, Conversation, converse

    conversation = Conversation(Path(arguments.folder), max_new_tokens=arguments.max_new_tokens)
    show_line(f"`{END}` ends it")
    converse(conversation, ask=lambda: OUT.input("> "), say=show_piece)


def _eval(arguments: argparse.Namespace) -> None:
    if not arguments.data and not arguments.tasks:
        raise ConfigError(
            f"eval of `{arguments.model}` has nothing to score on", hint="give --data test.jsonl, or --tasks"
        )
    if arguments.json:
        _write_text(arguments.json, "", mode="a")
    tasks = arguments.tasks.split(",") if arguments.tasks else []
    written = {}
    if tasks:
        from ds_finetune.evaluation import harness

        found = harness.run_tasks(arguments.model, arguments.baseline, tasks, limit=arguments.limit)
        OUT.print(_table(found, arguments, harness.METHOD))
        written["tasks"] = {"method": harness.METHOD, "metrics": {name: vars(metric) for name, metric in found.items()}}
    if arguments.data:
        scored = _scored(arguments)
        for note in scored.notes:
            show_line(note)
        OUT.print(
            _table(
                scored.metrics,
                arguments,
                f"{scored.tokens:,} supervised tokens of {scored.documents:,} documents; {scored.method}",
            )
        )
        written["data"] = scored.as_json()
    if arguments.json:
        _write_text(arguments.json, json.dumps(written, indent=2) + "\n", mode="w")


def _write_text(file: str, text: str, *, mode: str) -> None:
    """Write `text`, or append nothing before anything is scored, so that a name that cannot be written costs no
    time.
    """
    try:
        with Path(file).open(mode, encoding="utf-8") as out:
            out.write(text)
    except OSError as refused:
        raise OutputError(f"--json `{file}` cannot be written: {refused.strerror}", hint="name another file") from None


def _scored(arguments: argparse.Namespace) -> "Scored":
    wrong = [column for column in arguments.column if "=" not in column]
    if wrong:
        raise ConfigError(
            f"--column is `{wrong[0]}`", hint="write e.g. --column prompt=question --column completion=answer"
        )
    return evaluate(
        arguments.model,
        arguments.data,
        baseline=arguments.baseline,
        extract=arguments.extract,
        columns=dict(column.split("=", 1) for column in arguments.column),
        template=arguments.template,
        train_on=arguments.train_on,
        long_rows=arguments.long_rows,
        max_seq_len=arguments.max_seq_len,
        max_new_tokens=arguments.max_new_tokens,
        batch_tokens=arguments.batch_tokens,
        limit=arguments.limit,
    )


def _table(metrics: Mapping[str, "Metric"], arguments: argparse.Namespace, caption: str) -> Table:
    """Metrics as rows: the model, the baseline, the difference and its interval, or the model and its interval."""
    compared = ["baseline", "difference"] if arguments.baseline else []
    table = Table(
        title=f"{arguments.model}" + (f" beside {arguments.baseline}" if compared else ""),
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
