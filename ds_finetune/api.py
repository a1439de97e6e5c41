"""Functions for Python programs, notebooks and the command line: train, plan, export, verify and evaluate."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from pydantic import ValidationError

from ds_finetune.config.invalid_keys import explain
from ds_finetune.config.objectives import read_objective
from ds_finetune.config.schema import ConfigSource, read_config
from ds_finetune.config.sections import DataConfig
from ds_finetune.config.value_types import SET_NAME, check_whole_number
from ds_finetune.console.quiet import quiet_packages
from ds_finetune.console.tables import show_line
from ds_finetune.errors import ConfigError, LaunchError, VerificationError
from ds_finetune.system.versions import check_versions
from ds_finetune.system.world import World
from ds_finetune.trainer.show import show_next, show_plan, show_report, show_verifications

if TYPE_CHECKING:
    from ds_finetune.data.row_kind import RowKind
    from ds_finetune.evaluation.evaluate import EvalReport
    from ds_finetune.export.formats import ExportResult
    from ds_finetune.export.verify.verify import VerificationResult
    from ds_finetune.objectives.objective import DocumentObjective
    from ds_finetune.observers.record import Observer
    from ds_finetune.trainer.dry_run import PlannedRun
    from ds_finetune.trainer.run_dir import Rows
    from ds_finetune.trainer.run_records import Report

PathLike = str | Path
EvalRows: TypeAlias = "PathLike | Sequence[PathLike] | Rows"
"""Held-out rows: the path of a file, a list of paths, or the rows themselves."""


def train(
    config: ConfigSource,
    overrides: Sequence[str] = (),
    *,
    rows: "Rows | None" = None,
    eval_rows: "Rows | None" = None,
    observers: "Sequence[Observer]" = (),
) -> "Report":
    """Fine-tune by `config`, print what `ds-finetune train` prints, and return a report of the run.

    `config` is the path of a run file, its nested dictionary, or a RunConfig. `overrides` are written as on the command
    line. `rows` replace `data.train`, and `eval_rows` replace `data.eval`. They are dictionaries in any layout that a
    file may have, as a list or a `datasets.Dataset`. They are written into `output_dir`, so that its config.yaml
    repeats the run. `observers` get the record of each step on every rank, and may add values or end the run.

    Without a launcher this function trains on one device of this machine. With a launcher, every rank has to call it. A
    process may call it again after it has returned. SIGINT (Ctrl-C), SIGHUP, SIGTERM and SIGUSR1 save a checkpoint and
    end the run: `Report.interrupted` names the signal. LaunchError outside the main thread. VerificationError if an
    export differs from the record of the run.
    """
    name = threading.current_thread().name
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError(
            f"train is called in thread `{name}`", hint="call it in the main thread: Python handles signals only there"
        )
    check_versions()
    quiet_packages()
    world = World.from_environment(os.environ)
    from ds_finetune.trainer.run_dir import begun_with_rows
    from ds_finetune.trainer.train import train as train_run

    sets = {name: value for name, value in (("train", rows), ("eval", eval_rows)) if value is not None}
    named = [f"data.{name}=rows" for name in sets]
    run = read_config(config, [*overrides, *named] if isinstance(overrides, list | tuple) else overrides)
    with _unchanged_environment(world), begun_with_rows(Path(run.output_dir), sets, is_first=world.rank == 0) as files:
        if files:
            run = run.model_copy(update={"data": run.data.model_copy(update=files)})
        report = train_run(run, announce=show_plan, say=show_line, observers=observers)
    if world.rank == 0:
        show_report(report)
        show_verifications(report.verdicts, is_short=not run.log.verbose)
        check_verified(report.verdicts)
        show_next(report)
    return report


def plan_run(config: ConfigSource, *, gpus: int, gpus_per_node: int = 8) -> "PlannedRun":
    """Plan a run on `gpus` GPUs, without weights or data. ConfigError if the run itself would raise it.

    `config` is the path of a run file, its nested dictionary, or a RunConfig.
    """
    check_versions()
    check_whole_number("gpus", gpus, least=1)
    check_whole_number("gpus_per_node", gpus_per_node, least=1)
    if gpus % min(gpus, gpus_per_node):
        raise ConfigError(
            f"{gpus} GPUs do not fill nodes of {gpus_per_node} GPUs", hint=f"give a multiple of {gpus_per_node}"
        )
    from ds_finetune.trainer.dry_run import planned_run
    from ds_finetune.trainer.resolve import resolve

    world = World(0, gpus, 0, min(gpus, gpus_per_node), "a dry run")
    return planned_run(resolve(config, world=world, device="cuda", is_config_only=True))


def export_model(  # noqa: PLR0913 - each is an option of the command
    source: PathLike,
    out: PathLike,
    *,
    format: str = "safetensors",
    dtype: str | None = None,
    base: PathLike | None = None,
    max_shard_size: str | None = None,
    with_cache: bool = True,
    verify: bool = True,
) -> "ExportResult":
    """Convert the run, checkpoint, adapter or model in `source` to the new folder `out`. Prints and returns what was
    written.

    `format` is the name of a row of `export/formats.py`. Its dtypes, with the default first: safetensors bf16, fp16,
    fp32, fp8; onnx fp32, fp16, int8, int4; gguf bf16, f16, f32, q8_0; compressed-tensors w8a16, w4a16, fp8; adapter (of
    a run, for servers) fp32, bf16, fp16. `base` is the folder of the model that was trained.
    `max_shard_size` (5GB) applies to safetensors. `with_cache=False` applies to onnx and writes a graph without past
    keys and values. With `verify` a new process loads `out` and compares it with the record of the run;
    VerificationError names the difference. Without `verify` the folder stays marked UNVERIFIED.
    """
    check_versions()
    from ds_finetune.data.tokenizer_files import has_vocabulary
    from ds_finetune.export.formats import ExportOptions, format_named
    from ds_finetune.export.verify.record import UNVERIFIED

    for name, path in (("source", source), ("out", out)):
        if not isinstance(path, str | Path):
            raise ConfigError(f"argument {name} is {path!r}, not a path", hint="give the path of a folder")
    row, trained = format_named(format), None if base is None else Path(base)
    options = row.resolved(
        ExportOptions(
            dtype=dtype or "", base=trained, max_shard_size=max_shard_size, with_cache=with_cache, verify=verify
        )
    )
    written = row.load().write(Path(source), Path(out), options)
    if row.has_card:
        from ds_finetune.runs.report.model_card import write_card_of_source

        write_card_of_source(Path(source), written.folder, written.verdict.lines if written.verdict else ())
    show_line("\n".join(written.lines()))
    if row.is_of_model and row.engines and not has_vocabulary(written.folder):
        show_line(f"{written.folder} has no tokenizer, as {source} has none: copy its files there, or name --base")
    if (Path(source) / UNVERIFIED).is_file():
        check = f"ds-finetune export --check {source}"
        show_line(
            f"{source} is marked {UNVERIFIED}, so {written.folder} may not be what was trained: `{check}` compares it"
        )
    if written.verdict is not None or not verify:
        return written
    return replace(written, verdict=verify_folder(written.folder, trained))


def verify_folder(folder: Path, base: Path | None) -> "VerificationResult":
    """Verify an exported folder and print the result; VerificationError where it differs from its record."""
    from ds_finetune.export.formats import format_of

    result = format_of(folder).load().verify(folder, base)
    show_verifications([result])
    check_verified([result])
    return result


def check_verified(results: "Sequence[VerificationResult]") -> None:
    """Raise a VerificationError that names the exported folders which differ from their records."""
    failed = [result for result in results if result.problems]
    if failed:
        raise VerificationError(
            "; ".join(f"{result.folder} is not what was exported: {'; '.join(result.problems)}" for result in failed),
            hint="do not serve it; export it again, and please report this if it stays",
        )


def evaluate(  # noqa: PLR0913 - each is an option of the command
    model: PathLike,
    data: "EvalRows | Mapping[str, EvalRows]",
    *,
    baseline: PathLike | None = None,
    objective: str | Mapping[str, object] = "sft",
    extract: str | None = None,
    samples: int = 0,
    columns: Mapping[str, str] | None = None,
    template: str = "auto",
    separator: str | None = None,
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant",
    long_rows: Literal["auto", "truncate", "drop", "split"] = "auto",
    max_seq_len: int = 2048,
    max_new_tokens: int = 256,
    batch_tokens: int = 4096,
    limit: int | None = None,
) -> "EvalReport":
    """Score the exported folder `model`, and `baseline` on the same token ids, over the rows of `data`; prints nothing.

    `data` is a path, a list of paths, or rows as `train` takes them: dictionaries as a list or a `datasets.Dataset`.
    `EvalReport.metrics` holds each metric by name, with its confidence interval. With a mapping of names to such data,
    `EvalReport.sets` also has the metrics of each of these sets. `objective` is a name or a section of a run file, such
    as `{"name": "pretrain", "eos": False}`. With sft, distill and pretrain tokens are scored, with dpo, simpo, cpo and
    orpo pairs of answers; dpo needs its reference model as `baseline`. With `extract` (gsm8k, choice, json or text) the
    model generates answers, and the value extracted from an answer is compared with that of its row. One answer is
    greedy, and pass@k uses `samples` answers at temperature 1. `columns`, `template`, `separator`, `train_on` and
    `long_rows` are as in a run file; without `template` and `separator` prompts are written as in the model's training.
    `limit` is the maximum number of scored rows of each set. DataError or ExportError where the model cannot be scored.
    """
    check_versions()
    minima = {
        "max_seq_len": (max_seq_len, 2),
        "max_new_tokens": (max_new_tokens, 1),
        "batch_tokens": (batch_tokens, 1),
        "limit": (limit, 1),
        "samples": (samples, 0),
    }
    for name, (value, bound) in minima.items():
        if value is not None:
            check_whole_number(name, value, least=bound)
    from ds_finetune.evaluation.evaluate import EvalRequest, evaluate_model
    from ds_finetune.objectives.rewards.extractors import EXTRACTORS

    if extract is not None and extract not in EXTRACTORS:
        raise ConfigError(
            f"argument extract is `{extract}`, which is unknown", hint=f"name one of {', '.join(EXTRACTORS)}"
        )
    if samples and extract is None:
        raise ConfigError(f"samples is {samples}, and extract is not given", hint="give extract, or leave samples out")
    if not isinstance(data, str | Path) and not data:
        raise ConfigError(f"eval of `{model}` has nothing to score on", hint="give at least one file of rows")
    settings = {"columns": columns or {}, "template": template, "train_on": train_on, "long_rows": long_rows}
    settings |= {} if separator is None else {"separator": separator}
    base, (kind, preference) = None if baseline is None else str(baseline), _eval_objective(objective)
    limits = (max_seq_len, max_new_tokens, batch_tokens, limit)
    with TemporaryDirectory() as folder:
        paths = _held_out_paths(data, Path(folder))
        section = {"train": (), "eval": paths, **settings, "max_truncated_ratio": 1.0, "packing": False}
        try:
            rows = DataConfig.model_validate(section)
        except ValidationError as invalid:
            raise explain(invalid, DataConfig, "evaluate", {}) from None
        if rows.held_out_share:
            raise ConfigError(f"argument data is {data!r}, a share of training rows", hint="name the files to score")
        return evaluate_model(EvalRequest(str(model), base, rows, extract, *limits, kind, preference, samples))


def _eval_objective(objective: str | Mapping[str, object]) -> tuple["RowKind", "DocumentObjective | None"]:
    from ds_finetune.data.row_kind import RowKind
    from ds_finetune.objectives.objective import DocumentObjective, make_objective

    section = read_objective(objective)
    kind, scored = RowKind.of(section), make_objective(section)
    preference = scored if isinstance(scored, DocumentObjective) else None
    if kind.documents_per_unit and preference is None:
        raise ConfigError(
            f"objective {kind.objective} has neither a mean loss of tokens nor answers of a language model to score",
            hint="leave `objective` out for a classifier or a reward model; read other metrics on held-out rows in "
            "the run's metrics.jsonl",
        )
    return kind, preference


def _held_out_paths(
    data: "EvalRows | Mapping[str, EvalRows]", folder: Path
) -> tuple[str, ...] | dict[str, tuple[str, ...]]:
    """Value of the run-file key `data.eval` for `data`. Rows are written to files below `folder`. ConfigError if `data`
    or the name of a set is invalid.
    """
    from ds_finetune.trainer.run_dir import write_rows

    sets = data if isinstance(data, Mapping) else {"": data}
    texts: dict[str, tuple[str, ...]] = {}
    for name, files in sets.items():
        if not isinstance(files, str | Path | Iterable):
            raise ConfigError(
                f"argument data is {data!r}, neither a path nor rows",
                hint="give the path of a file, a list of paths, or rows",
            )
        paths = [files] if isinstance(files, str | Path) else files
        is_paths = isinstance(paths, Sequence) and all(isinstance(path, str | Path) for path in paths)
        texts[name] = tuple(map(str, paths)) if is_paths else write_rows(folder, {"eval": cast("Rows", paths)})["eval"]
    if not isinstance(data, Mapping):
        return texts[""]
    for name in texts:
        if not SET_NAME.fullmatch(name):
            raise ConfigError(
                f"the name `{name}` of a held-out set may have only letters, digits, `_`, `-` and `.`",
                hint="write e.g. old=a.txt new=b.txt",
            )
    return texts


@contextmanager
def _unchanged_environment(world: World) -> Iterator[None]:
    """Context that at its end removes the environment variables that a run without a launcher has set (RANK, ...).
    Child processes of later calls would otherwise take these variables for those of a launcher.
    """
    names: dict[str, str] = {}
    if world.launcher == "python":
        world.set_environment(names)
    added = names.keys() - os.environ.keys()
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
