"""The command line: turns arguments into a config, calls one stage after another, prints an error once."""

import argparse
import atexit
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ds_finetune import __version__
from ds_finetune.api import export, refuse_unverified, train, verified
from ds_finetune.cli import doctor, launch, use
from ds_finetune.cli.arguments import from_two, positive
from ds_finetune.config.schema import RunConfig, dump_config, read_config
from ds_finetune.console import OUT, pairs, show_error, show_line, show_verdicts
from ds_finetune.errors import INTERRUPTED_EXIT_CODE, RUN_ERROR_EXIT_CODE, ConfigError, FinetuneError
from ds_finetune.launch.process_tags import SUPERVISOR_VARIABLE

_QUIET_SECONDS = 5.0
"""How long other ranks of a machine wait with the same error, so that a launcher does not end the one that prints."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 1 a run failed, 2 the user's mistake); 3, saved after a signal,
    is raised.
    """
    arguments = _parsed(sys.argv[1:] if argv is None else list(argv))
    try:
        arguments.command(arguments)
    except FinetuneError as error:
        _say_once(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _say_once("interrupted")
        return RUN_ERROR_EXIT_CODE
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        show_error(f"rank {os.environ.get('RANK', '0')}: {''.join(traceback.format_exception(error))}")
        return RUN_ERROR_EXIT_CODE
    return 0


def run(argv: Sequence[str]) -> NoReturn:
    """`main` as the whole of a process that a launcher started."""
    try:
        code = main(argv)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    leave(code)


def leave(code: int = 0) -> NoReturn:
    """End this process with its output written and what was registered for its end done, and without Python's own end.

    DeepSpeed 0.19.8 keeps process groups and engines (utils/groups.py:37), and a thread of gloo that lets go of its
    last tensor while Python ends aborts a process whose work is done ("terminate called without an active
    exception", exit code -6).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parsed(argv: list[str]) -> argparse.Namespace:
    """Overrides may stand on both sides of options, which argparse takes on one alone (Python 3.11, argparse.py,
    `_match_arguments_partial`).
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if not hasattr(arguments, "overrides") or any(word.startswith("-") or "=" not in word for word in rest):
        return parser.parse_args(argv)
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _say_once(text: str) -> None:
    """Print on local rank zero; a user's mistake looks the same from every rank of a machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0" or SUPERVISOR_VARIABLE in os.environ:
        # A guard keeps the output of each rank apart, and takes the one that ends first for the cause.
        show_error(f"error: {text}")
        return
    time.sleep(_QUIET_SECONDS)
    show_error(f"rank {os.environ.get('RANK')}: {text.splitlines()[0]}")


def _train(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    report = train(config)
    if report.interrupted:
        raise SystemExit(INTERRUPTED_EXIT_CODE)


def _config_show(arguments: argparse.Namespace) -> None:
    OUT.print(dump_config(_config(arguments)), markup=False, end="")


def _config_schema(arguments: argparse.Namespace) -> None:
    OUT.print(json.dumps(RunConfig.model_json_schema(by_alias=True), indent=2), markup=False)


def _data_show(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from ds_finetune.trainer.preview import preview_of

    OUT.print(preview_of(config, samples=arguments.samples))


def _plan(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from ds_finetune.trainer.dry_run import plan_run

    OUT.print(plan_run(config, gpus=arguments.gpus, gpus_per_node=arguments.gpus_per_node))


def _ask(arguments: argparse.Namespace) -> None:
    from ds_finetune.inference.ask import answers

    for prompt, answer in zip(
        arguments.prompts,
        answers(Path(arguments.folder), arguments.prompts, max_new_tokens=arguments.max_new_tokens),
        strict=True,
    ):
        OUT.print(f"> {prompt}\n{answer}", markup=False)


def _bench(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from ds_finetune.bench import step_contest

    contest = step_contest(config, steps=arguments.steps, say=show_line)
    OUT.print(pairs("one optimizer step, supervised tokens a second", contest.lines()))


def _selftest(arguments: argparse.Namespace) -> None:
    config = _config(arguments) if arguments.run else None
    from ds_finetune.selftest.run import Extent, selftest, start_world

    extent = Extent(arguments.steps, tuple(arguments.families.split(",")))
    if "RANK" in os.environ or (arguments.hostfile is None and arguments.nproc == 1):
        selftest(config, extent, say=show_line)
        return
    given = [*([arguments.run] if arguments.run else []), *arguments.overrides, *extent.arguments]
    raise SystemExit(start_world(given, config, nproc=arguments.nproc, hostfile=arguments.hostfile))


def _export(arguments: argparse.Namespace) -> None:
    if arguments.check:
        _check(Path(arguments.check), arguments.base)
        return
    if arguments.out is None:
        raise ConfigError(
            f"export has SOURCE `{arguments.source}` and no OUT",
            hint="write `ds-finetune export SOURCE OUT`, or `--check OUT`",
        )
    export(
        arguments.source,
        arguments.out,
        format=arguments.format,
        dtype=arguments.dtype,
        base=arguments.base,
        max_shard_size=arguments.max_shard_size,
        with_cache=not arguments.no_cache,
        verify=arguments.verify,
    )


def _check(folder: Path, base: str | None) -> None:
    from ds_finetune.export.onnx.folder import check_packages
    from ds_finetune.export.verify.record import is_onnx
    from ds_finetune.model.folder_check import check_folder

    for place in (folder, *([Path(base)] if base else [])):
        if place.is_dir():
            check_folder(place)
    if not is_onnx(folder):
        verified(folder, Path(base) if base else None)
        return
    check_packages()
    if base:
        raise ConfigError(
            f"--base {base} is not valid with the ONNX folder {folder}",
            hint="leave it out: the folder's record is enough",
        )
    from ds_finetune.export.onnx.record import check_onnx

    verdict = check_onnx(folder)
    show_verdicts([verdict])
    refuse_unverified([verdict])


def _checkpoint_list(arguments: argparse.Namespace) -> None:
    from ds_finetune.checkpoint.tools import listed

    OUT.print(pairs("checkpoints", listed(Path(arguments.run))))


def _checkpoint_show(arguments: argparse.Namespace) -> None:
    from ds_finetune.checkpoint.tools import shown

    OUT.print(pairs("checkpoint", shown(Path(arguments.folder))))


def _checkpoint_verify(arguments: argparse.Namespace) -> None:
    from ds_finetune.checkpoint.tools import verify

    OUT.print(verify(Path(arguments.folder), workers=os.cpu_count() or 1), markup=False)


def _checkpoint_gather(arguments: argparse.Namespace) -> None:
    from ds_finetune.checkpoint.tools import gather

    OUT.print(gather([Path(folder) for folder in arguments.folders], Path(arguments.out)), markup=False)


def _demo(arguments: argparse.Namespace) -> None:
    from ds_finetune.demo import write_demo

    run_file = write_demo(Path(arguments.folder), ranks=arguments.ranks or _visible_gpus() or 2)
    OUT.print(f"wrote {run_file}", markup=False)


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _config(arguments: argparse.Namespace) -> RunConfig:
    return read_config(arguments.run, arguments.overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-finetune", description="Fine-tune DeepSeek-style causal LMs with DeepSpeed.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"ds-finetune {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _run_command(commands, "train", "fine-tune as RUN.yaml says", _train)
    config = commands.add_parser("config", help="show or describe a configuration").add_subparsers(
        required=True, metavar="WHAT"
    )
    _run_command(config, "show", "print the resolved run", _config_show)
    config.add_parser("schema", help="print the JSON schema of a run file").set_defaults(command=_config_schema)
    data = commands.add_parser("data", help="look at the data of a run").add_subparsers(required=True, metavar="WHAT")
    show = _run_command(data, "show", "print samples with the trained tokens tagged_processes, and counts", _data_show)
    show.add_argument("--samples", type=positive, default=3, help="rows to print (default 3)")
    _plan_command(_run_command(commands, "plan", "show the layout of a run on machines that are not here", _plan))
    ask = commands.add_parser("ask", help="ask an exported folder questions, with plain transformers")
    ask.add_argument("folder")
    ask.add_argument("prompts", nargs="+")
    ask.add_argument("--max-new-tokens", type=positive, default=128)
    ask.set_defaults(command=_ask)
    bench = _run_command(commands, "bench", "time the step against a plain PyTorch loop on the same documents", _bench)
    bench.add_argument("--steps", type=positive, default=5, help="timed steps of each (default 5)")
    _selftest_command(
        commands.add_parser(
            "selftest", help="hold layouts against a plain loop on the machines at hand", allow_abbrev=False
        )
    )
    _export_command(
        commands.add_parser(
            "export",
            help="convert a run, a checkpoint, an adapter or a model to a folder for others",
            allow_abbrev=False,
        )
    )
    _checkpoint_commands(
        commands.add_parser("checkpoint", help="look at checkpoints").add_subparsers(required=True, metavar="WHAT")
    )
    for module in (use, launch, doctor):
        module.add_commands(commands)
    demo = commands.add_parser(
        "demo", help="write the embedded example (model config, tokenizer, data, run file) to a folder"
    )
    demo.add_argument("folder")
    demo.add_argument("--ranks", type=int, help="ranks that will train it (default: every GPU here, or two CPU ranks)")
    demo.set_defaults(command=_demo)
    return parser


def _export_command(export: argparse.ArgumentParser) -> None:
    which = export.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?",
        help="folder of a run, a checkpoint (ours or DeepSpeed's), an adapter or a model",
    )
    which.add_argument("--check", metavar="OUT", help="hold an exported folder against its record again")
    export.add_argument("out", metavar="OUT", nargs="?", help="folder to write, new or empty")
    export.add_argument(
        "--format", choices=("safetensors", "onnx"), default="safetensors", help="what OUT is for (default safetensors)"
    )
    export.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32", "fp8"), help="dtype of the weights (default bf16, for onnx fp32)"
    )
    export.add_argument("--max-shard-size", help="largest safetensors file (default 5GB)")
    export.add_argument(
        "--base",
        metavar="FOLDER",
        help="folder of the model that was trained: config.json, tokenizer, untouched weights",
    )
    export.add_argument("--no-cache", action="store_true", help="onnx: a graph without past keys and values")
    export.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not load OUT in a fresh process; it stays tagged_processes UNVERIFIED",
    )
    export.set_defaults(command=_export)


def _selftest_command(selftest: argparse.ArgumentParser) -> None:
    selftest.add_argument(
        "run",
        metavar="RUN.yaml",
        nargs="?",
        help="the layout to check, with a tiny model of its family; else a standard set",
    )
    selftest.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values that replace those of the file"
    )
    where = selftest.add_mutually_exclusive_group()
    where.add_argument("--nproc", type=positive, default=1, help="processes on this machine (default 1)")
    where.add_argument("--hostfile", help="hosts to start on, which share the working directory")
    selftest.add_argument(
        "--steps", type=from_two, default=3, help="optimizer steps of each layout, 2 at least (default 3)"
    )
    selftest.add_argument(
        "--families", default="deepseek_v3,llama", help="of the standard set (default deepseek_v3,llama)"
    )
    selftest.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    selftest.set_defaults(command=_selftest)


def _plan_command(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--gpus", type=positive, required=True, help="GPUs of the run")
    plan.add_argument("--gpus-per-node", type=positive, default=8, help="GPUs of a machine (default 8)")
    plan.add_argument(
        "--dry-run",
        action="store_true",
        required=True,
        help="build the layout alone: from config.json, without weights or data",
    )


def _checkpoint_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    listing = commands.add_parser("list", help="list the checkpoints of a run")
    listing.add_argument("run", metavar="RUN")
    listing.set_defaults(command=_checkpoint_list)
    for name, text, command in (
        ("show", "print what a checkpoint holds", _checkpoint_show),
        ("verify", "sum every file again and compare", _checkpoint_verify),
    ):
        parser = commands.add_parser(name, help=text)
        parser.add_argument("folder", metavar="RUN_OR_CHECKPOINT")
        parser.set_defaults(command=command)
    gathering = commands.add_parser("gather", help="make one whole checkpoint of those that several nodes kept")
    gathering.add_argument("out", metavar="OUT")
    gathering.add_argument("folders", nargs="+", metavar="CHECKPOINT")
    gathering.set_defaults(command=_checkpoint_gather)


def _run_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    command: Callable[[argparse.Namespace], None],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, allow_abbrev=False)
    # `deepspeed` puts --local_rank=N before the program's own arguments; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument("run", metavar="RUN.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values that replace those of the file"
    )
    parser.set_defaults(command=command)
    return parser
