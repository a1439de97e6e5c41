"""`ds-finetune export`: converts a run, checkpoint, adapter or model to a folder for other programs."""

from pathlib import Path

from ds_finetune import api
from ds_finetune.cli.arguments import Arguments, Commands, add_command
from ds_finetune.console.tables import show_line
from ds_finetune.errors import ConfigError, ExportError
from ds_finetune.export.formats import FORMATS
from ds_finetune.export.output_folder import check_out_empty


def add_commands(commands: Commands) -> None:
    """Add the command `export` to the program."""
    text = "convert a run, a checkpoint, an adapter or a model to a folder that other programs load"
    export = add_command(commands, "export", text, _export)
    what = export.add_mutually_exclusive_group(required=True)
    text = "folder of a run, a checkpoint (ours or DeepSpeed's), an adapter or a model"
    what.add_argument("source", metavar="SOURCE", nargs="?", help=text)
    what.add_argument("--check", metavar="OUT", help="verify an exported folder against its record")
    export.add_argument("out", metavar="OUT", nargs="?", help="folder to write, new or empty")
    default, *other_formats = FORMATS
    text = (
        f"format of OUT: {', '.join(row.name for row in FORMATS)}, or one that a package adds (default {default.name})"
    )
    export.add_argument("--format", metavar="FORMAT", help=text)
    text = f"dtype of the weights (default {default.dtypes[0]}"
    text += f"{''.join(f', for {row.name} {row.dtypes[0]}' for row in other_formats)})"
    text += ": " + "; ".join(f"{row.name} {', '.join(row.dtypes)}" for row in FORMATS)
    export.add_argument("--dtype", "--quantise", metavar="DTYPE", help=text)
    export.add_argument("--max-shard-size", help="largest safetensors file (default 5GB)")
    text = "folder of the base model, with config.json, tokenizer and the weights that were not trained"
    export.add_argument("--base", metavar="FOLDER", help=text)
    export.add_argument("--no-cache", action="store_true", help="onnx: write a graph without past keys and values")
    text = "upload OUT, once it is verified, to this new and private repository of the Hugging Face Hub"
    export.add_argument("--push-to-hub", metavar="OWNER/NAME", help=text)
    text = "do not load OUT in a fresh process; it stays marked UNVERIFIED"
    export.add_argument("--no-verify", dest="verify", action="store_false", help=text)


def _export(arguments: Arguments) -> None:
    if arguments.push_to_hub:
        from ds_finetune.export.publish import check_repository

        check_repository(arguments.push_to_hub)
    if arguments.check:
        _check(arguments)
        _push(Path(arguments.check), arguments.push_to_hub)
        return
    if arguments.out is None:
        raise ConfigError(
            f"export has the argument SOURCE `{arguments.source}`, but no OUT",
            hint="write `ds-finetune export SOURCE OUT`, or `ds-finetune export --check OUT`",
        )
    # Paths are checked first, because the imports of model code take seconds.
    check_out_empty(Path(arguments.out))
    if not Path(arguments.source).is_dir():
        raise ExportError(
            f"SOURCE `{arguments.source}` is not a folder", hint="name the folder of a run, a checkpoint or a model"
        )
    source, out = Path(arguments.source).resolve(), Path(arguments.out).resolve()
    if source in out.parents and any((source / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(
            f"OUT `{arguments.out}` lies inside SOURCE `{arguments.source}`, so programs would take both for one model",
            hint="name a folder outside SOURCE",
        )
    api.export_model(
        arguments.source,
        arguments.out,
        format=arguments.format or FORMATS[0].name,
        dtype=arguments.dtype,
        base=arguments.base,
        max_shard_size=arguments.max_shard_size,
        with_cache=not arguments.no_cache,
        verify=arguments.verify,
    )
    _push(Path(arguments.out), arguments.push_to_hub)


def _push(folder: Path, repository: str | None) -> None:
    if repository is None:
        return
    from ds_finetune.export.publish import push_to_hub

    show_line(f"pushed: {push_to_hub(folder, repository)}, private")


def _check(arguments: Arguments) -> None:
    options = {"--format": arguments.format, "--dtype": arguments.dtype, "--max-shard-size": arguments.max_shard_size}
    options |= {"--no-cache": arguments.no_cache, "--no-verify": not arguments.verify}
    options_given = [name for name, value in options.items() if value]
    if options_given:
        raise ConfigError(
            f"--check {arguments.check} cannot be combined with {' and '.join(options_given)}",
            hint=f"leave {' and '.join(options_given)} out: the exported folder records how it was written",
        )
    folder, base = Path(arguments.check), arguments.base
    if not folder.is_dir():
        raise ExportError(f"--check `{folder}` is not a folder", hint="name a folder that `ds-finetune export` wrote")
    from ds_finetune.model.build.hub_folder import check_folder

    for model in (folder, *([Path(base)] if base else [])):
        if model.is_dir():
            check_folder(model)
    api.verify_folder(folder, Path(base) if base else None)
